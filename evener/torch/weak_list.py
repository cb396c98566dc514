"""A list of weak references."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from operator import call, is_not
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_IS_THERE: Any = partial(is_not, None)


class WeakList(Generic[T]):
    """List of weak references to objects, with fast iteration."""

    # Iterating over a WeakSet or WeakKeyDictionary takes several times as long.

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, added: T) -> None:
        """Add an object unless it is in the list."""
        alive = list(self)
        if not any(each is added for each in alive):
            self._references = [weakref.ref(each) for each in (*alive, added)]

    def discard(self, removed: T | None) -> None:
        """Remove an object if it is in the list."""
        self._references = [weakref.ref(each) for each in self if each is not removed]

    def __iter__(self) -> Iterator[T]:
        # Called in C, without a Python call per object.
        there: Iterator[T] = filter(_IS_THERE, map(call, self._references))
        return there

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None
