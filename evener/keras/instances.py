"""Temporary replacement of an object's attributes.

Classes stay as they are, so models in other threads aren't affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an object's attribute or method within a `with` block.

    Keras doesn't track `value`. The earlier value is restored on exit.
    """
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
