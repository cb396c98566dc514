"""Public classes have unique names, so that a reader of `Device` knows which one it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.support.sources import PACKAGES, files, parsed, place

SAME_NAME = {"Report", "Split"}  # one per framework: a training script imports only one of them


def repeated_classes() -> Iterator[str]:
    """Yield each public name that several classes of the product share, with their modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in files(package):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(place(path, node.lineno))
    for name, places in sorted(found.items()):
        if len(places) > 1 and name not in SAME_NAME:
            yield f"{name}: {', '.join(places)}"


def test_public_classes_have_names_of_their_own() -> None:
    assert list(repeated_classes()) == []
