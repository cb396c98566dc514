"""Hears of each loss that a loop calls backward on, and of what it is made.

A loss that another function computes than before, as a term that begins in a later epoch, shows in
the kinds of the operations that made it.
"""

from __future__ import annotations

import weakref
from functools import cache, wraps
from typing import Any, Protocol

import torch

DEPTH, MOST = 8, 32  # operations before the loss that are looked at


class HearsLosses(Protocol):
    """Hears of a loss before its backward pass."""

    def note_loss(self, made_of: tuple[Any, ...]) -> None:
        """The loss is made of these operations."""


_LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: HearsLosses) -> None:
    """Tell a listener of each loss from now on, as long as it is there."""
    _LISTENERS.add(listener)
    _replace_backward()


@cache
def _replace_backward() -> None:
    own = torch.Tensor.backward

    @wraps(own)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for each in list(_LISTENERS):
            each.note_loss(list_operations(self))
        return own(self, *arguments, **keywords)

    torch.Tensor.backward = backward


def list_operations(loss: Any) -> tuple[Any, ...]:
    """The kinds of the last operations that made a loss, with how each reduces its rows."""
    found: list[Any] = []
    level = [loss.grad_fn]
    for _ in range(DEPTH):
        following = []
        for node in level:
            if node is None or len(found) >= MOST:
                continue
            found.append((type(node).__name__, getattr(node, "_saved_reduction", None)))
            following += [each for each, _ in node.next_functions]
        level = following
    return tuple(found)
