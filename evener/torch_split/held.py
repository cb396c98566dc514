"""The gradients of a pass that failed: those that can be undone are, and those that can't are final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Held:
    """Gradients of earlier passes while a pass is computed that may have to be computed again.

    If rows depend on random draws or on one another (`late`), nothing of a pass may stay if it fails. Otherwise each
    gradient that is there is the whole pass's, and is final: a second try leaves it as it is.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self._final: bytearray | None = None  # of the failed pass
        self._kept: list[Any] | None = None  # gradients from before the pass
        self.opened = self.late = self.apart = False

    @property
    def is_final(self) -> bool:
        """True while the rows of a failed pass are computed again, except for gradients that are already there."""
        return self._final is not None

    def open(self, dependent: bool) -> None:
        """Prepare for the backward pass; `dependent`: rows depend on random draws, or on one another."""
        self.opened, self.late = True, dependent or self._final is not None
        self.apart = self.late and (self._final is not None or any(each.grad is not None for each in self._parameters))
        if self.apart:
            self._kept = [each.grad for each in self._parameters]
            for each in self._parameters:
                each.grad = None

    def merge(self, fired: bytearray) -> None:
        """Add the pass's gradients to those that were kept, except for final ones."""
        if self._kept is None:
            return
        sums: list[Any] = []
        added: list[Any] = []
        final = self._final or bytes(len(fired))
        for place, (parameter, kept) in enumerate(zip(self._parameters, self._kept, strict=True)):
            if parameter.grad is not None and kept is not None and not final[place]:
                sums.append(kept)
                added.append(parameter.grad)
            if kept is not None:
                parameter.grad = kept
        self._kept = None
        if sums:
            with torch.no_grad():
                torch._foreach_add_(sums, added)

    def close(self) -> None:
        """Finish a complete pass."""
        self.opened = self.late = self.apart = False

    def settle(self) -> None:
        """Forget a failed pass whose rows are now all computed."""
        self._final = None

    def fail(self, fired: bytearray) -> None:
        """Undo the pass, or remember what of it is final."""
        if self._kept is not None:
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                parameter.grad = kept
            self._kept = None
        elif self.late:
            for parameter, done in zip(self._parameters, fired, strict=True):
                if done:
                    parameter.grad = None
        elif self.opened:
            self._final = bytearray(fired)
        self.close()
