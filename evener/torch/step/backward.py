"""Hears of each loss that a loop calls backward on, and of what it is made.

A loss that another function computes than before, as a term that begins in a later epoch, shows in
the kinds of the operations that made it.
"""

from __future__ import annotations

import sys
import weakref
from functools import cache, wraps
from typing import Any, Protocol

import torch

from ..audit.closures import is_foreign
from ..audit.settings import Code

CALLERS = 6  # functions between the program's own and backward
DEPTH, MOST = 8, 32  # operations before the loss that are looked at


class HearsLosses(Protocol):
    """Hears of a loss before its backward pass."""

    def note_loss(self, made_of: tuple[Any, ...], code: Code | None) -> None:
        """The loss is made of these operations, by this code of the program's."""


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
        listeners = list(_LISTENERS)
        if listeners:
            made_of, code = list_operations(self), _find_code()
            for each in listeners:
                each.note_loss(made_of, code)
        return own(self, *arguments, **keywords)

    torch.Tensor.backward = backward


def _find_code() -> Code | None:
    """The program's own code that calls backward now, if it is near."""
    frame = sys._getframe(2)
    for _ in range(CALLERS):
        if not is_foreign(frame.f_globals.get("__name__", "")):
            return frame.f_code, frame.f_globals
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


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
