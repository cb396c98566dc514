"""Attributes of one object that have another value for a while: no class is changed, so what other
threads train isn't touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object's attribute, or method, another value; Keras doesn't track it."""
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
