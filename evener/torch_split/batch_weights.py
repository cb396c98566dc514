"""The gradient weights of the batch that each forward pass computes, from the loader's step to the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from evener.errors import RequestError
from evener.shares import gradient_weight
from evener.torch_split import model_checks
from evener.torch_split.batch_tracker import BatchTracker, Pass, TakenBatch
from evener.torch_split.gradient_weights import GradientWeights, exchanged_parameters
from evener.torch_split.optimizer_check import OPTIMIZER_CHECK, check_weighted


class BatchWeights:
    """Rows and weight of one rank in the batch in hand; with `by_loss`, `scale` applies the weight, not a hook."""

    def __init__(self, shares: Sequence[int], rank: int, by_loss: bool) -> None:
        self.batches = BatchTracker()
        self._shares = tuple(shares)
        self._rank = rank
        self._by_loss = by_loss
        self._weights = GradientWeights(shares, rank)
        self._scaled_pass: int | None = None  # the backward pass in which a scaled loss was seen last
        self._reference = weakref.ref(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of all ranks in the batch in hand, after a pass in its last batch, before the first in a full one."""
        batch = self.batches.current or self.batches.last
        return self._shares if batch is None else batch.sizes

    @property
    def weight(self) -> float:
        """This rank's part of the same batch, 0 to 1."""
        return gradient_weight(self.sizes, self._rank)

    def attach(self, model: Any) -> None:
        """Weigh the gradients of a model in DistributedDataParallel."""
        model_checks.watch_frozen(model)
        if self._by_loss:
            model_checks.check_first_gradient(model, self._check_scaled)
        else:
            self._weights.attach(model)
        self.follow(model)

    def follow(self, model: Any) -> None:
        """Look at each of its forward passes."""
        hook = _forward_hooks.get(model)
        if hook is None:
            hook = _forward_hooks[model] = _ForwardHook()
            model.register_forward_pre_hook(hook, with_kwargs=True)
        hook.weights = self

    def take(self, origin: Pass, sizes: tuple[int, ...], data: Any) -> None:
        """A loader hands out a batch."""
        if len(sizes) > 1:
            OPTIMIZER_CHECK.trainer = self._reference
        self.batches.take(origin, sizes, data)
        if self._weights.waiting is None:
            self._weights.begin(sizes)

    def begin(self, sizes: Sequence[int]) -> None:
        """What follows is a batch of which the ranks have these rows."""
        self.batches.begin(sizes)
        self._weights.waiting = None
        self._weights.begin(sizes)

    def end(self, origin: Pass) -> None:
        """A pass is over: if it ran inside another one's step, as a validation does, that step goes on."""
        self.batches.end(origin)
        waiting = self._weights.waiting
        if waiting is None and self.batches.current is not None:
            self._weights.begin(self.batches.current.sizes)
        elif waiting is None:
            self._weights.end()

    def forward(self, model: Any, inputs: Any) -> None:
        """A wrapped model computes: its gradients count by the sizes of the batch that `inputs` are of."""
        if not torch.is_grad_enabled():
            self.batches.skip()
            return
        model_checks.check_not_inside_ddp()
        self._weights.refusal = None
        try:
            batch = self._identify(inputs, model.training)
        except RequestError as error:
            if model.training:
                raise
            # a model that only predicts has no backward pass to be refused; a traceback would keep the model alive
            self._weights.refusal = error.with_traceback(None)
            return
        if model.training and batch.origin.training and getattr(model, "require_backward_grad_sync", True):
            self._weights.waiting = batch
        self._weights.begin(batch.sizes)

    def _identify(self, inputs: Any, training: bool) -> TakenBatch:
        batch = self.batches.find(inputs, training)
        if batch is None:
            raise RequestError(
                "The model computes gradients, but no batch of split.loader is in hand to weigh them by.",
                "Take batches from split.loader(...), or say split.begin(rows of each rank) before.",
            )
        waiting = self._weights.waiting
        if waiting is not None and waiting is not batch and not waiting.mixes_with(batch):
            raise RequestError(
                "One backward pass mixes two batches that weigh differently, in this step or at the end of an epoch.",
                "Call backward() for each batch by itself, or use drop_last=True in each split.loader.",
            )
        return batch

    def scale(self, loss: Any) -> Any:
        """The mean loss of this rank's rows, weighted so that the mean over ranks is the mean over the batch."""
        batch = self.batches.current
        if batch is not None and not batch.used:
            self.batches.find((), training=True)  # refuses if several are in hand
        self._weights.waiting = None
        scaled = loss * (len(self._shares) * self.weight)
        if getattr(scaled, "requires_grad", False):
            scaled.register_hook(self._note_scaled)
        return scaled

    def is_training(self) -> bool:
        """Whether a batch to train on is in hand."""
        return self.batches.is_training()

    def check_trained(self, parameters: list[Any]) -> None:
        """RequestError if an optimizer is about to apply gradients that nothing weighted."""
        if not self._by_loss:
            check_weighted(parameters, exchanged_parameters())
        elif self._scaled_pass is None:
            raise _scale_forgotten()

    def _note_scaled(self, gradient: Any) -> None:
        self._scaled_pass = torch._C._current_graph_task_id()

    def _check_scaled(self) -> None:
        if self._scaled_pass != torch._C._current_graph_task_id():
            raise _scale_forgotten()


def _scale_forgotten() -> RequestError:
    return RequestError(
        "With weigh='loss' a loss was not scaled, so its gradients would be the plain mean over ranks.",
        "Write split.scale(loss).backward().",
    )


class _ForwardHook:
    """Looks at a wrapped model's forward passes; a copy of the model has a hook that doesn't."""

    weights: BatchWeights | None = None
    _torchdynamo_disable = True  # torch.compile leaves it as it is

    def __call__(self, model: Any, arguments: Any, keywords: Any) -> None:
        if self.weights is not None:
            self.weights.forward(model, (arguments, keywords))

    def __reduce__(self) -> Any:
        return (_ForwardHook, ())


_forward_hooks: weakref.WeakKeyDictionary[Any, _ForwardHook] = weakref.WeakKeyDictionary()
