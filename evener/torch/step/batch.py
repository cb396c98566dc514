"""The batches that loaders have given, and which one a forward pass computes.

A loop may take its next batch early, or draw from two loaders: a forward pass computes the batch
whose tensors, or views of them, it gets. If it gets others, and the batches in use weigh
differently, it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...errors import RequestError
from ..rows.loader import Epoch, StepListener
from ..rows.structure import address, tensors_in
from ..sums.collectives import is_equal_everywhere


class TakenBatch:
    """A batch that a loader yielded: the rows of each rank, and weak references to its tensors."""

    __slots__ = ("number", "origin", "sizes", "tensors", "used")

    def __init__(self, origin: Epoch, sizes: tuple[int, ...], data: Any, number: int = 0) -> None:
        self.origin = origin
        self.number = number  # in its epoch
        self.sizes = sizes
        self.tensors = [weakref.ref(tensor) for tensor in tensors_in(data)]
        self.used = False  # a wrapped model has computed it

    def is_alive(self) -> bool:
        """True if the loop still holds one of the batch's tensors."""
        return any(tensor() is not None for tensor in self.tensors)

    def count_among(self, inputs: Sequence[torch.Tensor]) -> tuple[int, int]:
        """How many of these tensors share their memory with one of the batch, and of them those
        that begin where it does.

        Rows that a data set keeps are in a batch of each epoch, so one of them alone doesn't tell.
        """
        every = [reference() for reference in self.tensors]
        alive = [tensor for tensor in every if tensor is not None]
        memory = {address(tensor) for tensor in alive} - {0}
        places = {_place(tensor) for tensor in alive}
        shared = [tensor for tensor in inputs if address(tensor) in memory]
        return len(shared), sum(_place(tensor) in places for tensor in shared)

    def weighs_as(self, other: TakenBatch) -> bool:
        """True if every rank has the same part of both batches."""
        total, others = sum(self.sizes), sum(other.sizes)
        return self.sizes == other.sizes or all(
            mine * others == its * total for mine, its in zip(self.sizes, other.sizes, strict=True)
        )

    def mixes_with(self, other: TakenBatch) -> bool:
        """True if both batches can be in one backward pass: they weigh the same, now and at the end
        of their epochs.
        """
        return self.weighs_as(other) and (
            self.origin is other.origin or self.origin.tail == other.origin.tail
        )


def _place(tensor: torch.Tensor) -> Any:
    """Where a tensor's first element lies; its id where it has no storage (a sparse one)."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(tensor)


class BatchTracker:
    """The batches that loaders have yielded and loops may still use."""

    # the tracker that took a batch last
    newest: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.current: TakenBatch | None = None  # None after an epoch
        # the current one, or the one with which the last epoch ended
        self.last: TakenBatch | None = None
        self._epochs: list[Epoch] = []  # the one that gave a batch last comes last
        self._manual = Epoch()
        self._only: TakenBatch | None = None  # the current one, if no other is possible

    def take(self, origin: Epoch, sizes: tuple[int, ...], data: Any) -> None:
        """Take the next batch of a loader."""
        BatchTracker.newest = weakref.ref(self)
        if not (self._epochs and self._epochs[-1] is origin):
            others = [each for each in self._epochs if each not in (origin, self._manual)]
            self._epochs = [*others, origin]
        before = origin.batches[-1] if origin.batches else None
        _drop_computed(origin.batches)
        number = before.number + 1 if before else 0
        taken = TakenBatch(origin, sizes, data, number)
        self.current = self.last = taken
        origin.batches.append(taken)
        follows = before is None or (before.used and before.sizes == sizes)
        self._only = taken if len(self._epochs) == 1 and follows else None

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a batch of no loader's, which forward passes compute until a loader yields its next
        one.
        """
        self._manual.batches.clear()
        self.take(self._manual, tuple(sizes), ())

    def end(self, origin: Epoch) -> None:
        """An epoch is over or left. A batch of it may be in use still: the only one taken, or a
        list of them.
        """
        self._only = None
        origin.open = False
        origin.unfinished = not (origin.batches and origin.batches[-1].used)
        trained = [each for each in self._epochs if each.training]
        kept = [each for each in trained if each is origin or each.batches[-1].is_alive()]
        self._epochs = [each for each in self._epochs if each.open or each in kept]
        if self.current is not None and self.current.origin is origin:
            left = [each.batches[-1] for each in self._epochs if each.open]
            self.current = left[-1] if left else None
            self.last = self.current or self.last

    def is_training(self) -> bool:
        """True if a loop may still use a batch of a training loader."""
        return any(each.training and each.may_be_computed() for each in self._epochs)

    def find(self, inputs: Any, training: bool) -> TakenBatch | None:
        """The batch that a model's inputs are of; `training`: the model is in training mode.

        None if no loader has handed one out; RequestError if it could be one of several that weigh
        differently.
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
        """Open epochs of training; a validation's where the model validates; else the epoch that
        ended last.
        """
        epochs = [each for each in self._epochs if each.may_be_computed()]
        if not epochs or epochs[-1] is self._manual or not (training or epochs[-1].training):
            return epochs[-1:]
        trained = [each for each in epochs if each.training]
        running = [each for each in trained if each.open]
        if not running:
            return trained or epochs[-1:]
        if any(each.batches[-1].number for each in running):
            return running
        return [each for each in trained if each.open or each.leaves_one()]

    def _find_holders(self, inputs: Sequence[torch.Tensor]) -> list[TakenBatch]:
        """The batches that have most of these tensors, without those that were computed already if
        one of them wasn't.
        """
        every = [batch for epoch in self._epochs for batch in epoch.batches]
        counts = [batch.count_among(inputs) for batch in every]
        most = max(counts, default=(0, 0))
        if not most[0]:
            return []
        pairs = zip(every, counts, strict=True)
        found = [batch for batch, count in pairs if count == most]
        return [batch for batch in found if not batch.used] or found

    def _match(self, inputs: Any, epochs: Sequence[Epoch]) -> TakenBatch | None:
        """The batch whose tensors are among the inputs, or None if only each epoch's newest comes
        into question.
        """
        matched = self._find_holders(tensors_in(inputs))
        if matched and all(batch.weighs_as(matched[-1]) for batch in matched):
            return matched[-1]
        possible = matched
        if not matched:
            possible = [batch for each in epochs for batch in _list_waiting(each)]
        newest = possible[-1]
        one_each = len(possible) == len(epochs) or newest.origin.tail is None
        if one_each and all(batch.mixes_with(newest) for batch in possible):
            return None
        raise RequestError(
            f"It isn't clear which of {len(possible)} fetched batches this forward pass "
            f"computes, and batches weigh differently at the end of an epoch.",
            "Take the next batch after backward(), give the model the loader's own tensors, "
            "or use drop_last=True in each split.loader, and no rebalance=True.",
        )


def _drop_computed(batches: list[TakenBatch]) -> None:
    """Forget batches of an epoch that no forward pass will compute any more."""
    if batches and batches[-1].used:
        del batches[:-1]
    while len(batches) > 2 and not batches[0].is_alive():
        del batches[0]


def _list_waiting(epoch: Epoch) -> list[TakenBatch]:
    """The newest batch, and those taken early that a loop may still compute."""
    waiting = [batch for batch in epoch.batches[:-1] if not batch.used]
    if len(waiting) > 1:
        waiting = [batch for batch in waiting if batch.is_alive()]
    return [*waiting, *epoch.batches[-1:]]


def _weigh_the_same(epochs: Sequence[Epoch]) -> bool:
    """True if it makes no difference, now or later in the epoch, which of these epochs' batches is
    computed.
    """
    newest = epochs[-1].batches[-1]
    if not all(batch.mixes_with(newest) for each in epochs for batch in each.batches):
        return False
    return newest.origin.tail is None or all(
        batch.used for each in epochs for batch in each.batches[:-1]
    )


@dataclass
class Steps(StepListener):
    """Hears of the steps of one loader of a training's own loop; those of a validation aren't timed
    or reported.
    """

    training: Any
    trains: bool

    def compare(self, digest: int) -> None:
        """RequestError if the ranks would take rows twice, or wait for each other forever."""
        if dist.is_initialized() and not is_equal_everywhere(digest, self.training.device):
            raise RequestError(
                "The ranks drew different orders of rows from order=, or were given different "
                "lengths=.",
                (
                    "Draw from PyTorch's random numbers, or give a function of the epoch that "
                    "seeds its own."
                ),
            )

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """Begin a batch that the loop gets."""
        training, weights = self.training, self.training.weights
        weights.take(origin, sizes, batch)
        if not self.trains:
            training.timer.note_validation()
            return
        weights.note_lengths(batch)
        weights.is_loops = True
        training.audits.watch_loop(batch)
        training.timer.begin(sizes)
        if training.audits.is_due:
            training.timer.disturb()

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """Report a batch that the loop is done with."""
        if self.trains:
            self.training.report(sizes[self.training.rank], tokens)
            self.training.end()

    def end(self, origin: Epoch) -> None:
        """An epoch is over, or left."""
        if self.trains:
            self.training.audits.close()
            self.training.timer.pause()
        self.training.weights.end(origin)
