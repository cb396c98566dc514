"""Temporary replacement of an object's attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that sets an attribute on the instance and restores it afterwards."""
    attributes = vars(instance)
    had = name in attributes
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            del attributes[name]
