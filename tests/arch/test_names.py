"""One name for one class, and none of the words that only this project's authors would understand.

`python -m tests.arch.test_names` prints what every package has left; CLEAN lists those that have
nothing left.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.sources import PACKAGES, REPO, files, nodes, parsed, place

# packages and folders; "." stands for the files beside them
CLEAN = ("evener", "devices", "workloads", "balancer", "tui", "benchmarks", "docs", "examples", ".")
FORBIDDEN = {"told", "purse", "ration", "scout", "party", "room", "rooms", "trial", "orders"}
FORBIDDEN |= {"alike", "beside", "known", "fill", "peak", "looks", "feed", "measured"}
SAME_NAME = {"Split"}  # one for Keras, one for PyTorch: a training script imports either
JARGON = re.compile(r"\b(told|purses?|rations?|scout(s|ed|ing)?|party|parties)\b", re.IGNORECASE)
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
THIS_FILE = Path(__file__).resolve()


class Hit(NamedTuple):
    """Something to rename or to rewrite."""

    where: str  # file:line
    what: str


def components(name: str) -> set[str]:
    """`GpuReader` has gpu and reader, `_read_all` has read and all."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def forbidden_names(package: str) -> Iterator[Hit]:
    """Modules, classes and functions with a forbidden word in their names."""
    for path in files(package):
        defined = [
            (node.name, node.lineno)
            for node in nodes(parsed(path))
            if isinstance(node, DEFINITIONS)
        ]
        for name, line in [(path.stem, 1), *defined]:
            if words := components(name) & FORBIDDEN:
                yield Hit(place(path, line), f"{name}: {', '.join(sorted(words))}")


def repeated_classes(packages: tuple[str, ...]) -> Iterator[Hit]:
    """Public classes of one name in these packages."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        for path in files(package):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(place(path, node.lineno))
    for name, places in sorted(found.items()):
        if len(places) > 1 and name not in SAME_NAME:
            yield Hit(places[0], f"class {name} is also at {', '.join(places[1:])}")


def jargon(folder: str) -> Iterator[Hit]:
    """Private words in documents, comments, docstrings and messages; a text without a space is no
    prose.
    """
    for path in files(folder, (".py", ".md")):
        for line, text in prose(path) if path != THIS_FILE else ():
            for number, each in enumerate(text.splitlines(), line):
                for found in JARGON.finditer(each):
                    yield Hit(place(path, number), f"{found[0]}: {each.strip()[:100]}")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of all that is written for people."""
    if path.suffix == ".md":
        yield 1, path.read_text()
        return
    for node in nodes(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def folders() -> list[str]:
    """Every folder of the repository with something to read in it, and its root."""
    return [
        ".",
        *sorted(
            each.name for each in REPO.iterdir() if each.is_dir() and not each.name.startswith(".")
        ),
    ]


def lines(hits: Iterator[Hit]) -> list[str]:
    return [f"{hit.where}  {hit.what}" for hit in hits]


def test_public_classes_have_names_of_their_own() -> None:
    """Whoever reads `Device` somewhere knows which one it is."""
    clean = tuple(package for package in PACKAGES if package in CLEAN)
    assert lines(repeated_classes(clean)) == []


@pytest.mark.parametrize("package", [package for package in PACKAGES if package in CLEAN])
def test_names_are_standard_terms(package: str) -> None:
    """No module, class or function has a private word in its name."""
    assert lines(forbidden_names(package)) == []


@pytest.mark.parametrize("folder", CLEAN)
def test_prose_has_no_private_words(folder: str) -> None:
    """Nor do comments, docstrings, messages and documents use them."""
    assert lines(jargon(folder)) == []


def report() -> int:
    """Print what is left, by folder."""
    print("\n".join(["same name:", *lines(repeated_classes(PACKAGES))]))
    left = 0
    for folder in folders():
        names = lines(forbidden_names(folder)) if folder in PACKAGES else []
        words = lines(jargon(folder))
        left += len(names) + len(words)
        if names or words:
            print(f"\n{folder}: {len(names)} names, {len(words)} words", *names, *words, sep="\n")
    return left


if __name__ == "__main__":
    sys.exit(1 if report() else 0)
