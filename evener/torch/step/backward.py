"""Detect each call of `Tensor.backward`, and find the function that computed the loss."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, Protocol

import torch

from ..audit.closures import is_foreign
from ..audit.settings import Code
from ..hooks import ProcessHooks, Replacement
from ..weak_list import WeakList

_REDUCTION = "_saved_reduction"  # attribute that tells how an operation reduces its rows
CALLERS = 6  # maximum number of calls between the program's own function and backward
DEPTH, MOST = 8, 32  # maximum depth and number of operations to list before the loss


class LossListener(Protocol):
    """Interface of objects that are called with each loss right before its backward pass."""

    def note_loss(self, loss: Any, operations: tuple[Any, ...], caller: FrameType) -> None:
        """Called right before the backward pass of a loss.

        `operations` are the last operations that computed the loss, and `caller` is the frame that
        called `backward`.
        """


_LISTENERS: WeakList[Any] = WeakList()


def listen(listener: LossListener) -> Callable[[], Any]:
    """Call `listener.note_loss` before each backward pass; return a function that stops this."""
    # without listeners, `Tensor.backward` is PyTorch's original method
    _LISTENERS.add(listener)
    release = _HOOKS.hold(listener)
    listening = weakref.ref(listener)

    def stop() -> None:
        _LISTENERS.discard(listening())
        release()

    return stop


def _make_backward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `Tensor.backward` that calls the listeners first.

    `own` is PyTorch's `Tensor.backward`, which is called afterwards.
    """

    @wraps(own)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        listeners = list(_LISTENERS)
        if listeners:
            operations, caller = list_operations(self), sys._getframe(1)
            for listener in listeners:
                listener.note_loss(self, operations, caller)
        return own(self, *arguments, **keywords)

    return backward


_HOOKS = ProcessHooks(lambda: [Replacement(torch.Tensor, "backward", _make_backward)])


def find_code(caller: FrameType) -> Code | None:
    """Return the code and globals of the user's function that called `backward`.

    The result is None if the nearest callers are all library functions.
    """
    frame = caller
    for _ in range(CALLERS):
        if not is_foreign(frame.f_globals.get("__name__", "")):
            return frame.f_code, frame.f_globals
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def list_operations(loss: Any) -> tuple[Any, ...]:
    """Return the last operations that computed a loss, as (name, reduction) pairs.

    The reduction is None for operations without such an argument.
    """
    found: list[Any] = []
    level = [] if loss.grad_fn is None else [loss.grad_fn]
    for _ in range(DEPTH):
        following = []
        for node in level[: MOST - len(found)]:
            kind = type(node)
            reduction = node._saved_reduction if _REDUCTION in kind.__dict__ else None
            found.append((kind.__name__, reduction))
            following += [each for each, _ in node.next_functions if each is not None]
        level = following
    return tuple(found)
