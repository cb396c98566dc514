"""An import block says what leaves the room: relative within a top-level folder, absolute between folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import evener

ROOT = Path(evener.__file__).resolve().parent.parent
INSIDE = ("tui", "balancer", "workloads", "devices")  # under evener/ they are links


def sources() -> Iterator[tuple[Path, str]]:
    """Each file of the product, and the name under which its folder is imported."""
    for folder in INSIDE:
        yield from ((path, f"evener.{folder}") for path in (ROOT / folder).rglob("*.py"))
    for path in (ROOT / "evener").rglob("*.py"):
        if path.relative_to(ROOT / "evener").parts[0] not in INSIDE:
            yield path, "evener"


def room_of(module: str) -> str:
    """The top-level folder that holds a module of evener's."""
    parts = module.split(".")
    return f"evener.{parts[1]}" if len(parts) > 1 and parts[1] in INSIDE else parts[0]


def test_imports_within_a_folder_are_relative() -> None:
    """`from evener.balancer.types import Probe` inside balancer/ would look like another folder's."""
    wrong = []
    for path, room in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = {room_of(f"{node.module}.{each.name}") for each in node.names}
                if room_of(node.module) == room and names == {room}:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}")
    assert not wrong


def test_no_relative_import_leaves_its_folder() -> None:
    """Between folders an import is absolute, so that it names the folder."""
    wrong = []
    for path, room in sources():
        base = ROOT / (room.partition(".")[2] or "evener")
        depth = len(path.relative_to(base).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                into = (node.module or node.names[0].name).split(".")[0]
                if node.level > depth or (room == "evener" and node.level == depth and into in INSIDE):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
