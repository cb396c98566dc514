"""Temporarily replaces attributes of a single object.

Classes stay as they are, so models in other threads aren't affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that sets `name` on the object to `value`, and restores it at the end."""
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
