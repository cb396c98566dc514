"""Temporarily replace an attribute of an object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give the attribute `name` of `owner` this value within a `with` block.

    The earlier value is restored on exit.
    """
    # if only the class defined the attribute, the instance loses it again
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
