"""What turns the ranks' own mean gradients into the mean over each global batch, in DistributedDataParallel.

With n_i of N rows on rank i, mean over the batch = sum_i (n_i / N) * mean_i: DDP's plain mean over ranks is another
gradient as soon as the n_i differ. Each rank's buckets are multiplied by its weight in a *full* batch, a constant whose
sum over ranks is 1, and summed. A step of other sizes (the short last one) scales its own gradients before they are
accumulated, by its weight over the constant: so each step of an accumulation window counts by its own sizes, with
`no_sync` or without.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import RequestError
from evener.shares import gradient_weight


class GradientWeights:
    """The weight of one rank's gradients, step by step; it keeps no model alive.

    `shares` are the samples of all ranks of `group` (None: of every process) in a full global batch.
    """

    def __init__(self, shares: Sequence[int], rank: int, group: Any = None) -> None:
        self.group = group
        self.constant = gradient_weight(shares, rank)
        self.waiting: Any = None  # the batch of a forward pass whose gradients aren't exchanged yet
        self.refusal: RequestError | None = None  # of the next backward pass
        self._rank = rank
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._factor = 1.0
        self._sizes: Sequence[int] | None = None  # that the factor is for

    def reset(self, shares: Sequence[int]) -> None:
        """Take these for the samples of a full global batch from now on."""
        self.constant = gradient_weight(shares, self._rank)
        self._sizes = None
        self.begin(shares)

    def attach(self, model: Any) -> None:
        """Take the place of DDP's mean over ranks; RequestError if the model has a communication hook of another's."""
        exchange = _exchanges.get(model)
        if exchange is None:
            exchange = _Exchange({id(each) for each in model.parameters() if each.requires_grad})
            try:
                model.register_comm_hook(exchange, _weigh_bucket)
            except RuntimeError as error:
                raise RequestError(
                    f"The model can't take a communication hook: {error}.",
                    "Use Split(..., weigh='loss') and split.scale(loss) beside a hook of your own.",
                ) from None
            _exchanges[model] = exchange
        exchange.weights = self
        self._models.add(model)
        self._scale_by(self._factor)

    def begin(self, sizes: Sequence[int]) -> None:
        """From now on, gradients come from a step in which each rank has these rows; a rank may have none."""
        if sizes is not self._sizes:
            self._sizes = sizes
            factor = self.factor(sizes)
            if factor != self._factor:
                self._scale_by(factor)

    def factor(self, sizes: Sequence[int]) -> float:
        """What gradients of such a step are multiplied by, beside the constant."""
        return gradient_weight(sizes, self._rank) / self.constant

    def end(self) -> None:
        """The step is over: leave gradients alone until the next one begins."""
        self._sizes = None
        if self._factor != 1.0:
            self._scale_by(1.0)

    def _scale_by(self, factor: float) -> None:
        for handle in self._handles:
            handle.remove()
        self._factor = factor
        self._handles = []
        if factor != 1.0:
            scale = torch.zeros_like if factor == 0.0 else (lambda gradient: gradient * factor)  # 0 * inf would be NaN
            once = {id(each): each for model in self._models for each in model.parameters() if each.requires_grad}
            self._handles = [parameter.register_hook(scale) for parameter in once.values()]


class _Exchange:
    """What a model's communication hook knows; `parameters` are the ids of those that it exchanges."""

    weights: GradientWeights

    def __init__(self, parameters: set[int]) -> None:
        self.parameters = parameters
        self.ran = False


_exchanges: weakref.WeakKeyDictionary[Any, _Exchange] = weakref.WeakKeyDictionary()


def exchanged_parameters() -> dict[int, bool]:
    """The parameters of this process whose gradients are weighted, by id: whether they were ever exchanged."""
    exchanges = sorted(_exchanges.values(), key=lambda exchange: exchange.ran)
    return {each: exchange.ran for exchange in exchanges for each in exchange.parameters}


def _weigh_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    weights = state.weights
    if weights.refusal is not None:
        raise weights.refusal
    weights.waiting, state.ran = None, True
    gradients = bucket.buffer().mul_(weights.constant)
    return dist.all_reduce(gradients, group=weights.group, async_op=True).get_future().then(_first)


def _first(future):  # type: ignore[no-untyped-def]
    return future.value()[0]
