"""The steps of a training's own loop, as its loader hands them over."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import RequestError
from ..torch_rows.loader import Epoch, StepListener
from .checks import REMEDY
from .collectives import is_equal_everywhere
from .guard import SINGLE, Guard
from .planned import PlannedTraining


class Steps(StepListener):
    """Hears of the steps of one loader of a training's own loop; those of a validation aren't timed or reported."""

    def __init__(self, training: PlannedTraining, trains: bool) -> None:
        self._training, self._trains = training, trains
        self._guard: Guard | None = None

    def compare(self, digest: int) -> None:
        """RequestError if the ranks would take rows twice, or wait for each other forever."""
        if dist.is_initialized() and not is_equal_everywhere(digest, self._training.device):
            raise RequestError(
                "The ranks drew different orders of rows from order=, or were given different lengths=.",
                "Draw from PyTorch's random numbers, or give a function of the epoch that seeds its own.",
            )

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """Begin a batch that the loop gets."""
        if self._trains:
            self._training.timer.begin(sizes)
        weights = self._training.weights
        self._training.watch_optimizers()
        weights.take(origin, sizes, batch)
        if self._trains and self._training.guards:
            self._guard = Guard(weights.models, batch, self._refuse_together)

    def _refuse_together(self, fault: str) -> None:
        """RequestError on every rank where any has found a fault."""
        self._training.guards = False
        every = [fault] * self._training.world
        dist.all_gather_object(every, fault)
        looked = "" in every  # at rows enough, on some rank
        if fault := next((each for each in every if each and not (looked and each == SINGLE)), ""):
            raise RequestError(f"Shares would change what is learned: {fault.rstrip('.')}.", REMEDY)

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """Report a batch that the loop is done with."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._trains:
            self._training.report(sizes[self._training.rank], tokens)
            self._training.end()

    def end(self, origin: Epoch) -> None:
        """An epoch is over, or left."""
        if self._trains:
            self._training.timer.pause()
        self._training.weights.end(origin)
