"""Hooks and replaced functions, which are removed once no training run needs them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch

from .private import leave_modules_uncompiled, leave_uncompiled

# Packages and modules whose functions PyTorch calls in a step, from hooks or replaced functions. A
# program that compiles its whole step, or its optimizer's step, would compile them, too.
UNCOMPILED = (
    *("evener.live", "evener.plan", "evener.program", "evener.shares", "evener.system"),
    *("evener.training", "evener.torch.audit", "evener.torch.hooks", "evener.torch.planned"),
    *("evener.torch.private", "evener.torch.ranks", "evener.torch.rebalancing"),
    *("evener.torch.rows", "evener.torch.split", "evener.torch.step.batches"),
    *("evener.torch.step.checks", "evener.torch.step.memory", "evener.torch.step.recovery"),
    *("evener.torch.step.step", "evener.torch.step.unowned", "evener.torch.training_audits"),
    "wrapt",
)

# Removing a hook while PyTorch iterates over its hooks would raise an error there.
_CALLERS = {
    each.__code__.co_filename for each in (torch.optim.Optimizer.__init__, torch.nn.Module.__init__)
}


@cache
def leave_hooks_uncompiled() -> None:
    """Make torch.compile leave out evener's hooks."""
    leave_modules_uncompiled(UNCOMPILED)


class ProcessHooks:
    """Hooks of the whole process, which stay registered while any object holds them.

    `register` registers the hooks, and returns handles with a `remove` method.
    """

    def __init__(self, register: Callable[[], Sequence[Any]]) -> None:
        self._register = register
        self._handles: list[Any] = []
        self._holders = 0
        _EVERY.append(self)

    @leave_uncompiled
    def hold(self, holder: Any) -> Callable[[], Any]:
        """Register the hooks on behalf of `holder`, and return a function that releases them.

        They are also released when `holder` is garbage-collected.
        """
        for each in _EVERY:
            each._remove_unneeded()
        self._holders += 1
        if not self._handles:
            leave_hooks_uncompiled()
            self._handles = list(self._register())
        released = weakref.finalize(holder, self._release)
        released.atexit = False
        return released

    def _release(self) -> None:
        self._holders -= 1
        self._remove_unneeded()

    def _remove_unneeded(self) -> None:
        """Remove the hooks if no object holds them any more."""
        # while PyTorch is calling hooks, nothing is removed; a later call does it
        if self._holders or not self._handles or _is_calling():
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []


_EVERY: list[ProcessHooks] = []


class Replacement:
    """Replaces an attribute of a class or module until `remove` is called.

    `make` is called with the original attribute and returns its replacement.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name = owner, name
        self._own = getattr(owner, name)
        self._made = make(self._own)
        setattr(owner, name, self._made)

    def remove(self) -> None:
        """Restore the original attribute, unless someone else has replaced it since."""
        if getattr(self._owner, self._name) is self._made:
            setattr(self._owner, self._name, self._own)


def _is_calling() -> bool:
    """Return whether PyTorch is running hooks in any thread; then none may be removed."""
    return any(code.co_filename in _CALLERS for code in _running_code())


def _running_code() -> Iterator[CodeType]:
    for frame in sys._current_frames().values():
        seen = frame
        while seen is not None:
            yield seen.f_code
            seen = seen.f_back  # type: ignore[assignment]
