"""The repository's own files, each parsed once in a process: many rules of tests/arch read all of them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("evener", "devices", "workloads", "balancer", "tui")


def files(folder: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    """The folder's own files, links not followed; "." has those of the repository's root alone."""
    for path, folders, names in os.walk(REPO / folder):
        folders[:] = [] if folder == "." else sorted(name for name in folders if not name.startswith((".", "__pyc")))
        yield from (Path(path, name) for name in sorted(names) if name.endswith(suffixes))


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree, which nobody may change."""
    return ast.parse(path.read_bytes())


def place(path: Path, line: int) -> str:
    """`file:line`, from the top of the repository."""
    return f"{path.relative_to(REPO)}:{line}"
