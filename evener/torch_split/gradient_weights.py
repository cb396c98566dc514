"""What turns the ranks' own mean gradients into the mean over each global batch, in DistributedDataParallel.

With n_i of N rows on rank i, mean over the batch = sum_i (n_i / N) * mean_i: DDP's plain mean over ranks is another
gradient as soon as the n_i differ. Each rank's buckets are multiplied by its weight in a *full* batch, a constant whose
sum over ranks is 1, and summed. A step of other sizes (the short last one) scales its own gradients before they are
accumulated, by its weight over the constant: so each step of an accumulation window counts by its own sizes, with
`no_sync` or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import RequestError
from evener.shares import gradient_weight


class GradientWeights:
    """The weight of one rank's gradients, step by step.

    `shares` are the samples of all ranks of `group` (None: of every process) in a full global batch.
    """

    def __init__(self, shares: Sequence[int], rank: int, group: Any = None) -> None:
        self.group = group
        self.constant = gradient_weight(shares, rank)
        self.current = self.constant
        self._rank = rank
        self._parameters: list[Any] = []
        self._handles: list[Any] = []
        self._factor = 1.0

    def reset(self, shares: Sequence[int]) -> None:
        """Take these for the samples of a full global batch from now on."""
        self.constant = gradient_weight(shares, self._rank)
        self.begin(shares)

    def attach(self, model: Any) -> None:
        """Take the place of DDP's mean over ranks; RequestError if the model has a communication hook already."""
        try:
            model.register_comm_hook(self, _weigh_bucket)
        except RuntimeError as error:
            raise RequestError(
                f"The model can't take a communication hook: {error}.",
                "Wrap each model once, or use weigh='loss' and scale() beside a hook of your own.",
            ) from None
        self._parameters.extend(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._scale_by(self._factor)

    def begin(self, sizes: Sequence[int]) -> None:
        """From now on, gradients come from a step in which each rank has these rows; a rank may have none."""
        self.current = gradient_weight(sizes, self._rank)
        factor = self.current / self.constant
        if factor != self._factor:
            self._scale_by(factor)

    def _scale_by(self, factor: float) -> None:
        for handle in self._handles:
            handle.remove()
        self._factor = factor
        self._handles = []
        if factor != 1.0:
            scale = torch.zeros_like if factor == 0.0 else (lambda gradient: gradient * factor)  # 0 * inf would be NaN
            self._handles = [parameter.register_hook(scale) for parameter in self._parameters]


def _weigh_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    gradients = bucket.buffer().mul_(state.constant)
    return dist.all_reduce(gradients, group=state.group, async_op=True).get_future().then(_first)


def _first(future):  # type: ignore[no-untyped-def]
    return future.value()[0]
