"""The steps of a split's loader: each batch is weighed and timed, and reported to the monitor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import RequestError
from .batch_tracker import Epoch
from .batch_weights import BatchWeights
from .gather import is_equal_everywhere
from .loader import StepListener
from .step_reporter import StepReporter


class Steps(StepListener):
    """Hears of one loader's steps; `reporter` times and reports each step of a training, None for a validation."""

    def __init__(self, weights: BatchWeights, reporter: StepReporter | None, device: torch.device) -> None:
        self._weights = weights
        self._reporter = reporter
        self._device = device

    def compare(self, digest: int) -> None:
        """RequestError if the ranks would take rows twice, or wait for each other forever."""
        if dist.is_initialized() and not is_equal_everywhere(digest, self._device):
            raise RequestError(
                "The ranks drew different orders of rows from order=, or were given different lengths=.",
                "Draw from PyTorch's random numbers, or give a function of the epoch that seeds its own.",
            )

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """Begin a batch that the loop gets."""
        if self._reporter is not None:
            self._reporter.timer.begin(sizes)
        self._weights.take(origin, sizes, batch)

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """Report a batch that the loop is done with."""
        if self._reporter is not None:
            self._reporter.report(sizes[self._reporter.shares.rank], tokens)
            self._reporter.finish()

    def end(self, origin: Epoch) -> None:
        """An epoch is over, or left."""
        if self._reporter is not None:
            self._reporter.timer.pause()
        self._weights.end(origin)
