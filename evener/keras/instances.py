"""Temporary replacement of an object's attributes.

No class is changed, so models that other threads train aren't affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an object's attribute or method within the context; Keras doesn't track the value."""
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
