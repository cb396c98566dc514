"""Import a package's names on first use, so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that imports the names of a package on first use.

    `homes` maps each name of `package` to the module that defines it. The returned function raises
    AttributeError for other names.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
