"""Temporarily replace an attribute of an object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context in which the attribute `name` of `owner` has this value.

    On exit, the earlier value is restored. If the attribute was defined only on the class of
    `owner`, it is deleted from `owner` again.
    """
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
