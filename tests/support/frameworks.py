"""Frameworks aren't imported to skip or collect tests: TensorFlow takes 5 s, transformers 4 s."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

# each takes 2 to 5 s of CPU to import, in every worker, if a test file imports it at its top
SLOW_FRAMEWORKS = ("tensorflow", "keras", "transformers", "lightning", "datasets", "ray")
IMPORTED = pytest.StashKey[
    list[str]
]()  # those that test files had imported once all were collected


def skip_without(*names: str) -> None:
    """Skip the test, or the file that is being imported, without these packages."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed", allow_module_level=True)


class LazyModule:
    """A module that is imported when an attribute is first used, not while tests are collected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest reads attributes of everything in a test file
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
