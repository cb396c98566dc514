"""Notifies listeners of each loss that a loop calls backward on, with the operations that made it.

If the loss is computed by another function than before, for example with a term that begins in a
later epoch, then the kinds of those operations change.
"""

from __future__ import annotations

import sys
import weakref
from functools import cache, wraps
from typing import Any, Protocol

import torch

from ..audit.closures import is_foreign
from ..audit.settings import Code

CALLERS = 6  # most functions between the program's own and backward
DEPTH, MOST = 8, 32  # depth, and number, of operations before the loss to list


class HearsLosses(Protocol):
    """A listener that is called with each loss before its backward pass."""

    def note_loss(self, made_of: tuple[Any, ...], code: Code | None) -> None:
        """Called with the operations that made a loss, and the code that calls backward."""


_LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: HearsLosses) -> None:
    """Notify a listener of each loss from now on, until it is garbage-collected."""
    _LISTENERS.add(listener)
    _replace_backward()


@cache
def _replace_backward() -> None:
    own = torch.Tensor.backward

    @wraps(own)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        listeners = list(_LISTENERS)
        if listeners:
            made_of, code = list_operations(self), _find_code()
            for each in listeners:
                each.note_loss(made_of, code)
        return own(self, *arguments, **keywords)

    torch.Tensor.backward = backward


def _find_code() -> Code | None:
    """Return the program's own code that is calling backward; None if it isn't near."""
    frame = sys._getframe(2)
    for _ in range(CALLERS):
        if not is_foreign(frame.f_globals.get("__name__", "")):
            return frame.f_code, frame.f_globals
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def list_operations(loss: Any) -> tuple[Any, ...]:
    """Return the kinds of the last operations that made a loss, and how each reduces its rows."""
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
