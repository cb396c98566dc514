"""What turns the ranks' own mean gradients into the mean over each global batch, in DistributedDataParallel.

With n_i of N rows on rank i, mean over the batch = sum_i (n_i / N) * mean_i: DDP's plain mean over ranks is another
gradient as soon as the n_i differ. Each rank's buckets are multiplied by its weight in the batch, a constant whose sum
over ranks is 1, and summed. While gradients are added up that aren't exchanged yet, the constant stays, and a step of
other sizes scales its own gradients before they are added, by its weight over the constant: so each step of a window
counts by its own sizes. So does one in which a rank has no row, as 0 times a gradient may be NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evener.errors import RequestError
from evener.shares.whole_rows import gradient_weight


class GradientWeights:
    """The weight of one rank's gradients, step by step; it keeps no model alive.

    `shares` are the samples of all ranks of `group` (None: of every process) in the first batch. `ready` is called when
    a model's last gradient is there, before it is exchanged.
    """

    def __init__(
        self, shares: Sequence[int], rank: int, group: Any = None, ready: Callable[[], None] = lambda: None
    ) -> None:
        self.group, self.ready = group, ready
        self.constant = gradient_weight(shares, rank)
        self.waiting: Any = None  # the batch of a forward pass whose gradients aren't exchanged yet
        self.refusal: RequestError | None = None  # of the next backward pass
        self._rank = rank
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._factor = 1.0
        self._sizes: Sequence[int] | None = None  # that the factor is for

    def attach(self, model: Any) -> None:
        """Take the place of DDP's mean over ranks; RequestError if the model has a communication hook of another's."""
        if model not in _exchanges:
            _exchanges[model] = _register(model)
        _exchanges[model].weights = self
        self._models.add(model)
        self._scale_by(self._factor)

    def begin(self, sizes: Sequence[int]) -> None:
        """From now on, gradients come from a step in which each rank has these rows; a rank may have none."""
        if sizes is not self._sizes or self._factor != 1.0:
            self._sizes = sizes
            weight = gradient_weight(sizes, self._rank)
            if min(sizes) > 0 and not any(map(_accumulates, self._models)):
                self.constant = weight
            factor = weight / self.constant
            if factor != self._factor:
                self._scale_by(factor)

    def accumulate(self, model: Any) -> None:
        """The model's next gradients are added up and exchanged later."""
        if model in _exchanges:
            _exchanges[model].accumulates = True

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


def make_ddp(module: Any, device: torch.device, options: dict[str, Any]) -> DistributedDataParallel:
    """The module on its device, in DistributedDataParallel with gradients as views of the buckets."""
    devices = [device] if device.type == "cuda" else None
    own = {"device_ids": devices, "gradient_as_bucket_view": True}
    return DistributedDataParallel(module.to(device), **{**own, **options})


def keep_in_buckets(model: Any) -> None:
    """Let gradients be views of the buckets that are exchanged: a copy less makes up for the weighting.

    A model with a communication hook, or with a group of its own, stays as it is.
    """
    if model.gradient_as_bucket_view or model._comm_hooks or model.process_group is not dist.group.WORLD:
        return
    state = {**model.__getstate__(), "gradient_as_bucket_view": True}
    del model.reducer, model.logger
    model.__setstate__(state)  # as if it were unpickled: it makes its reducer anew


class _Exchange:
    """What a model's communication hook knows; `parameters` are the ids of those that it exchanges."""

    weights: GradientWeights

    def __init__(self, parameters: set[int]) -> None:
        self.parameters = parameters
        self.ran = False
        self.accumulates = False  # it has gradients that aren't exchanged yet


_exchanges: weakref.WeakKeyDictionary[Any, _Exchange] = weakref.WeakKeyDictionary()


def _register(model: Any) -> _Exchange:
    """Give a model its communication hook."""
    exchange = _Exchange({id(each) for each in model.parameters() if each.requires_grad})
    try:
        model.register_comm_hook(exchange, _weigh_bucket)
    except RuntimeError as error:
        raise RequestError(
            f"The model can't take a communication hook: {error}.",
            "Use Split(..., weigh='loss') and split.scale(loss) beside a hook of your own.",
        ) from None
    return exchange


def _accumulates(model: Any) -> bool:
    exchange = _exchanges.get(model)
    return exchange is not None and exchange.accumulates


def exchanged_parameters() -> dict[int, bool]:
    """The parameters of this process whose gradients are weighted, by id: whether they were ever exchanged."""
    exchanges = sorted(_exchanges.values(), key=lambda exchange: exchange.ran)
    return {each: exchange.ran for exchange in exchanges for each in exchange.parameters}


def _weigh_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    weights = state.weights
    if weights.refusal is not None:
        raise weights.refusal
    weights.waiting, state.ran, state.accumulates = None, True, False
    if bucket.is_last():
        weights.ready()
    gradients = bucket.buffer().mul_(weights.constant)
    return dist.all_reduce(gradients, group=weights.group, async_op=True).get_future().then(_first)


def _first(future):  # type: ignore[no-untyped-def]
    return future.value()[0]
