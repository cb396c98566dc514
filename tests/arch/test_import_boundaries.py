"""Imports are relative within a top-level folder and absolute between folders.

So an import block shows what comes from another folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import PACKAGES, REPO, files, nodes, parsed, place

INSIDE = ("tui", "balancer", "workloads", "devices")  # under evener/ they are symlinks


def sources() -> Iterator[tuple[Path, str]]:
    """Yield each file of the product, with the import name of its folder."""
    for folder in PACKAGES:
        yield from (
            (path, f"evener.{folder}" if folder in INSIDE else folder) for path in files(folder)
        )


def folder_of(module: str) -> str:
    """Return the top-level folder of a module of evener."""
    parts = module.split(".")
    return f"evener.{parts[1]}" if len(parts) > 1 and parts[1] in INSIDE else parts[0]


def test_imports_within_a_folder_are_relative() -> None:
    """Imports within a top-level folder are relative.

    `from evener.balancer.types import Probe` inside balancer/ would look like another folder's.
    """
    wrong = []
    for path, folder in sources():
        for node in nodes(parsed(path)):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = {folder_of(f"{node.module}.{each.name}") for each in node.names}
                if folder_of(node.module) == folder and names == {folder}:
                    wrong.append(f"{place(path, node.lineno)}: {node.module}")
    assert not wrong


def test_no_relative_import_leaves_its_folder() -> None:
    """No relative import leaves its folder, so an import between folders names the folder."""
    wrong = []
    for path, folder in sources():
        base = REPO / (folder.partition(".")[2] or "evener")
        depth = len(path.relative_to(base).parts)
        for node in nodes(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                into = (node.module or node.names[0].name).split(".")[0]
                if node.level > depth or (
                    folder == "evener" and node.level == depth and into in INSIDE
                ):
                    wrong.append(place(path, node.lineno))
    assert not wrong
