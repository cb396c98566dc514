"""A docstring stands alone: a hover shows its first line without the names and lines around it.

`python -m tests.arch.test_docstrings` prints those that don't.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import parsed

REPO = Path(__file__).resolve().parents[2]
CLEAN = ("balancer", "devices", "evener", "tui", "workloads")
WITHOUT_A_NOUN = re.compile(
    r"(Of|The "
    r"same|Its?|As|Also|And|Those|These|That|What|Whether|How|They|Which|Who|Whose|Where|When"
    r"|With|Without|Then|There|Before|After|Again|Likewise|Does|If)\b"
)
FRAGMENTS = re.compile(
    r"\b(so\s+many|in\s+hand|as\s+they\s+come|who(m|so)?ever)\b|\b[Tt]his one\.$", re.IGNORECASE
)
Named = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def files(folder: str) -> list[Path]:
    """The Python files of a folder; those behind its links belong to another folder."""
    root = (REPO / folder).resolve()
    return sorted(path for path in root.rglob("*.py") if path.resolve().is_relative_to(root))


def named(tree: ast.Module) -> Iterator[tuple[str, Named]]:
    """The module, its public classes and functions, and their public methods."""
    yield "", tree
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop(0)
        if isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and not node.name.startswith("_"):
            yield node.name, node
            left += node.body if isinstance(node, ast.ClassDef) else []


def dependent(path: Path) -> list[str]:
    """Docstrings of a file that can't be understood without what is around them."""
    found = []
    for name, node in named(parsed(path)):
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        if WITHOUT_A_NOUN.match(first) or FRAGMENTS.search(first):
            found.append(f"{path.relative_to(REPO)} {name}: {first}")
    return found


@pytest.mark.parametrize("folder", CLEAN)
def test_docstrings_of_public_names_name_their_nouns(folder: str) -> None:
    """Neither "The same." nor "Of each pass." says anything in a hover."""
    paths = files(folder)
    assert paths
    assert [each for path in paths for each in dependent(path)] == []


def test_a_dependent_docstring_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself, on a file with one good docstring and three that need what is above
    them.
    """
    monkeypatch.setitem(globals(), "REPO", tmp_path)
    file = tmp_path / "example.py"
    file.write_text(
        'class Run:\n    """A run."""\n    def seconds(self):\n        """Of all passes."""\n'
        '    def _own(self):\n        """The same."""\n\ndef more():\n    """Rows as they '
        'come."""\n'
        'def other():\n    """As without."""\n'
    )
    assert [each.split()[1] for each in dependent(file)] == ["more:", "other:", "seconds:"]


def report() -> int:
    """Print what is left, by folder."""
    left = [each for folder in CLEAN for path in files(folder) for each in dependent(path)]
    print(*left, f"{len(left)} docstrings", sep="\n")
    return len(left)


if __name__ == "__main__":
    sys.exit(1 if report() else 0)
