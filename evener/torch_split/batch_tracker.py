"""The search for the batch that a forward pass computes: its rows on each rank are the weights of gradients.

A loop may take its next batch early, or draw from two loaders in one step. A forward pass that gets a batch's own
tensors, or views of them, computes that batch. If it gets others, and the batches in use weigh differently, it is
refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import RequestError
from .dealt_batch import DealtBatch

_SEQUENCES = (tuple, list)


class Epoch:
    """A loop over a loader; `tail` is None if all its batches weigh the same, else what the last one has instead.

    `dealt`: its rows were dealt by length, so a batch is not to be cut into passes.
    """

    __slots__ = ("batches", "dealt", "open", "tail", "training", "unfinished")

    def __init__(self, training: bool = True, tail: object = None, dealt: bool = False) -> None:
        self.training = training
        self.tail = tail
        self.dealt = dealt
        self.open = True
        self.unfinished = False  # it ended before its newest batch was computed
        self.batches: list[TakenBatch] = []  # the newest, and older ones that may still be in use

    def may_be_computed(self) -> bool:
        """True if a loop may still use the epoch's newest batch."""
        return self.open or self.unfinished or self.batches[-1].is_alive()


class TakenBatch:
    """A batch that a loader yielded: the rows of each rank, and weak references to its tensors."""

    __slots__ = ("origin", "sizes", "tensors", "used")

    def __init__(self, origin: Epoch, sizes: tuple[int, ...], data: Any) -> None:
        self.origin = origin
        self.sizes = sizes
        self.tensors = [weakref.ref(tensor) for tensor in tensors_in(data)]
        self.used = False  # a wrapped model has computed it

    def is_alive(self) -> bool:
        """True if the loop still holds one of the batch's tensors."""
        return any(tensor() is not None for tensor in self.tensors)

    def holds(self, addresses: set[int]) -> bool:
        """True if one of the batch's tensors lies at one of the addresses."""
        return any((tensor := each()) is not None and _address(tensor) in addresses for each in self.tensors)

    def weighs_as(self, other: TakenBatch) -> bool:
        """True if every rank has the same part of both batches."""
        total, others = sum(self.sizes), sum(other.sizes)
        return self.sizes == other.sizes or all(
            mine * others == its * total for mine, its in zip(self.sizes, other.sizes, strict=True)
        )

    def mixes_with(self, other: TakenBatch) -> bool:
        """True if both batches can be in one backward pass: they weigh the same, now and at the end of their epochs."""
        return self.weighs_as(other) and (self.origin is other.origin or self.origin.tail == other.origin.tail)


class BatchTracker:
    """The batches that loaders have yielded and loops may still use."""

    def __init__(self) -> None:
        self.current: TakenBatch | None = None  # None after an epoch
        self.last: TakenBatch | None = None  # the current one, or the one with which the last epoch ended
        self._epochs: list[Epoch] = []  # the one that gave a batch last comes last
        self._manual = Epoch()
        self._only: TakenBatch | None = None  # the current one, if no other is possible

    def take(self, origin: Epoch, sizes: tuple[int, ...], data: Any) -> None:
        """Take the next batch of a loader."""
        if not (self._epochs and self._epochs[-1] is origin):
            self._epochs = [each for each in self._epochs if each not in (origin, self._manual)] + [origin]
        batches = origin.batches
        before = batches[-1] if batches else None
        if before is not None and before.used:
            del batches[:-1]
        while len(batches) > 2 and not batches[0].is_alive():
            del batches[0]
        self.current = self.last = taken = TakenBatch(origin, sizes, data)
        batches.append(taken)
        alone = len(self._epochs) == 1 and (before is None or (before.used and before.sizes == sizes))
        self._only = taken if alone else None

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a batch of no loader's, which forward passes compute until a loader yields its next one."""
        self._manual.batches.clear()
        self.take(self._manual, tuple(sizes), ())

    def end(self, origin: Epoch) -> None:
        """An epoch is over or left. A batch of it may be in use still: the only one taken, or a list of them."""
        self._only = None
        origin.open = False
        origin.unfinished = not (origin.batches and origin.batches[-1].used)
        self._epochs = [
            each
            for each in self._epochs
            if each.open or (each.training and (each is origin or each.batches[-1].is_alive()))
        ]
        if self.current is not None and self.current.origin is origin:
            left = [each.batches[-1] for each in self._epochs if each.open]
            self.current = left[-1] if left else None
            self.last = self.current or self.last

    def is_training(self) -> bool:
        """True if a loop may still use a batch of a training loader."""
        return any(each.training and each.may_be_computed() for each in self._epochs)

    def skip(self) -> None:
        """The newest batch is computed without gradients."""
        if self.current is not None:
            self.current.used = True

    def find(self, inputs: Any, training: bool) -> TakenBatch | None:
        """The batch that a model's inputs are of; `training`: the model is in training mode.

        None if no loader has handed one out; RequestError if it could be one of several that weigh differently.
        """
        found = self._only
        if found is None:
            epochs = self._candidates(training)
            if not epochs:
                return None
            found = None if _weigh_the_same(epochs) else self._match(inputs, epochs)
            if found is None:
                for each in epochs:
                    each.batches[-1].used = True
                found = epochs[-1].batches[-1]
        found.used = True
        self.current = self.last = found
        return found

    def _candidates(self, training: bool) -> list[Epoch]:
        """Open epochs of training; a validation's where the model validates; else the epoch that ended last."""
        epochs = [each for each in self._epochs if each.may_be_computed()]
        if not epochs or epochs[-1] is self._manual or not (training or epochs[-1].training):
            return epochs[-1:]
        for wanted in (True, False):
            found = [each for each in epochs if each.open is wanted and each.training]
            if found:
                return found
        return epochs[-1:]

    def _match(self, inputs: Any, epochs: Sequence[Epoch]) -> TakenBatch | None:
        """The batch whose tensors are among the inputs, or None if only each epoch's newest comes into question."""
        addresses = {_address(tensor) for tensor in tensors_in(inputs)} - {0}
        matched = [batch for each in self._epochs for batch in each.batches if batch.holds(addresses)]
        if matched and all(batch.weighs_as(matched[-1]) for batch in matched):
            return matched[-1]
        possible = matched or [batch for each in epochs for batch in _possible(each)]
        if all(batch.mixes_with(possible[-1]) for batch in possible) and (
            len(possible) == len(epochs) or possible[-1].origin.tail is None
        ):
            return None
        raise RequestError(
            f"It isn't clear which of {len(possible)} batches in hand this forward pass computes, and batches weigh"
            " differently at the end of an epoch.",
            "Take the next batch after backward(), give the model the loader's own tensors, or use drop_last=True in"
            " each split.loader, and no rebalance=True.",
        )


def _weigh_the_same(epochs: Sequence[Epoch]) -> bool:
    """True if it makes no difference, now or later in the epoch, which of these epochs' batches is computed."""
    newest = epochs[-1].batches[-1]
    if not all(batch.mixes_with(newest) for each in epochs for batch in each.batches):
        return False
    return newest.origin.tail is None or all(batch.used for each in epochs for batch in each.batches[:-1])


def _possible(origin: Epoch) -> list[TakenBatch]:
    """The newest batch, and those before that no model has computed: taken early, unless the loop skipped them."""
    waiting = [batch for batch in origin.batches[:-1] if not batch.used]
    return [batch for batch in waiting if batch.is_alive() or len(waiting) == 1] + origin.batches[-1:]


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings, and in the passes of a DealtBatch."""
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, _SEQUENCES):
        return [tensor for item in data for tensor in ([item] if isinstance(item, torch.Tensor) else tensors_in(item))]
    if isinstance(data, DealtBatch):
        return tensors_in(data.passes)
    return tensors_in(list(data.values())) if isinstance(data, Mapping) else []


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; the id of a tensor without one (a sparse one)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return id(tensor)
