"""Track which batch each forward pass belongs to, so that its gradients get the right weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ...errors import RequestError
from ..rows.loader import Epoch
from ..rows.structure import tensors_in


class TakenBatch:
    """A batch that a loader has yielded, with weak references to its tensors.

    `sizes` has the row count of each rank, and `origin` is the loop over the loader that yielded
    the batch.
    """

    __slots__ = ("number", "origin", "sizes", "tensors", "used")

    def __init__(self, origin: Epoch, sizes: tuple[int, ...], data: Any, number: int = 0) -> None:
        self.origin = origin
        self.number = number  # index in the epoch
        self.sizes = sizes
        self.tensors = [weakref.ref(tensor) for tensor in tensors_in(data)]
        self.used = False  # True once a wrapped model has computed it

    def alive(self) -> list[torch.Tensor]:
        """Return the batch's tensors that still exist."""
        every = [reference() for reference in self.tensors]
        return [tensor for tensor in every if tensor is not None]

    def is_alive(self) -> bool:
        """Return whether any of the tensors still exists."""
        return any(tensor() is not None for tensor in self.tensors)

    def weighs_as(self, other: TakenBatch) -> bool:
        """Return whether both batches give each rank the same fraction of rows."""
        total, others = sum(self.sizes), sum(other.sizes)
        return self.sizes == other.sizes or all(
            mine * others == its * total for mine, its in zip(self.sizes, other.sizes, strict=True)
        )

    def can_share_backward(self, other: TakenBatch) -> bool:
        """Return whether one backward pass may contain losses of both batches.

        Both batches, and the last batches of their epochs, have to give ranks the same weights.
        """
        return self.weighs_as(other) and (
            self.origin is other.origin or self.origin.tail == other.origin.tail
        )


# Returns the batches that the data most likely belong to, or an empty list if that is unclear.
Match = Callable[[Any, Sequence[TakenBatch]], list[TakenBatch]]


def match_objects(data: Any, batches: Sequence[TakenBatch]) -> list[TakenBatch]:
    """Return the batches that share the most tensors with `data`; [] if none shares any."""
    given = set(map(id, tensors_in(data)))
    counts = [sum(id(tensor) in given for tensor in batch.alive()) for batch in batches]
    most = max(counts, default=0)
    if not most:
        return []
    return [batch for batch, count in zip(batches, counts, strict=True) if count == most]


class BatchTracker:
    """Remembers the batches that the user's loop may still compute, to recognize a model's inputs.

    The batch that the inputs come from determines how gradients are weighted.
    """

    # the tracker that received the last batch
    newest: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.current: TakenBatch | None = None  # None after an epoch
        # the current batch, or the last batch of the last epoch
        self.last: TakenBatch | None = None
        self._epochs: list[Epoch] = []  # the epoch of the newest batch is last
        self._manual = Epoch()
        self._only: TakenBatch | None = None  # the current batch, if no other is possible

    def take(self, origin: Epoch, sizes: tuple[int, ...], data: Any) -> None:
        """Record a batch that a loader is about to yield.

        `origin` is the loop over the loader, `sizes` has the row count of each rank, and `data` is
        this rank's rows.
        """
        BatchTracker.newest = weakref.ref(self)
        if not (self._epochs and self._epochs[-1] is origin):
            others = [epoch for epoch in self._epochs if epoch not in (origin, self._manual)]
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
        """Record that a loop that doesn't use evener's loader begins a batch.

        `sizes` has the row count of each rank.
        """
        self._manual.batches.clear()
        self.take(self._manual, tuple(sizes), ())

    def end(self, origin: Epoch) -> None:
        """Record that a loop over a loader has ended."""
        # the loop may still compute a batch that it fetched ahead or stores in a list
        self._only = None
        origin.open = False
        origin.unfinished = not (origin.batches and origin.batches[-1].used)
        self._epochs = [
            epoch for epoch in self._epochs if epoch.open or _might_compute(epoch, origin)
        ]
        if self.current is not None and self.current.origin is origin:
            left = [epoch.batches[-1] for epoch in self._epochs if epoch.open]
            self.current = left[-1] if left else None
            self.last = self.current or self.last

    def is_training(self) -> bool:
        """Return whether the model might still get a batch of a training loop."""
        return any(epoch.training and epoch.may_be_computed() for epoch in self._epochs)

    def find(self, data: Any, training: bool, match: Match) -> TakenBatch | None:
        """Return the batch that a model's inputs belong to, and mark it as used.

        The result is None if no batch is waiting to be computed. `training` is whether the model is
        in training mode, and `match` finds the batches that the inputs come from. Raises
        RequestError if several batches are possible and their weights differ.
        """
        found = self._only
        if found is None:
            epochs = self._list_candidates(training)
            if not epochs:
                return None
            found = None if _weigh_the_same(epochs) else self._choose(data, epochs, match)
            if found is None:
                for epoch in epochs:
                    epoch.batches[-1].used = True
                found = epochs[-1].batches[-1]
        found.used = True
        self.current = self.last = found
        return found

    def _list_candidates(self, training: bool) -> list[Epoch]:
        """Return the loops over loaders that the next forward pass may take its batch from.

        `training` is whether the model is in training mode.
        """
        # Usually the training loops that haven't ended, or all of them if all have ended; without
        # training loops, the newest loop. In evaluation mode, a newest loop for validation is the
        # only one.
        epochs = [epoch for epoch in self._epochs if epoch.may_be_computed()]
        if not epochs:
            return []
        newest = epochs[-1]
        validates = not training and not newest.training
        if validates or newest is self._manual:
            return [newest]
        return _list_training(epochs) or [newest]

    def _choose(self, data: Any, epochs: Sequence[Epoch], match: Match) -> TakenBatch | None:
        """Return the batch that `data` comes from.

        If it can't be identified, but all possible batches have the same weights, return None.
        `match` finds the batches that share tensors with `data`. Raises RequestError if batches
        with different weights are possible.
        """
        every = [batch for epoch in self._epochs for batch in epoch.batches]
        matched = match(data, every)
        matched = [batch for batch in matched if not batch.used] or matched
        if matched and all(batch.weighs_as(matched[-1]) for batch in matched):
            return matched[-1]
        possible = matched or [batch for each in epochs for batch in _list_waiting(each)]
        if not _makes_no_difference(possible, len(epochs)):
            raise RequestError(
                f"It isn't clear which of {len(possible)} fetched batches this forward pass "
                f"computes, and batches weigh differently at the end of an epoch.",
                "Take the next batch after backward(), give the model the loader's own tensors, "
                "or use drop_last=True in each split.loader, and no rebalance=True.",
            )
        return None


def _list_training(epochs: Sequence[Epoch]) -> list[Epoch]:
    """Return the training loops that the next forward pass may take its batch from."""
    # usually those that haven't ended, or all of them if all have ended
    trained = [epoch for epoch in epochs if epoch.training]
    running = [each for each in trained if each.open]
    if not running:
        return trained
    if any(each.batches[-1].number for each in running):
        return running
    # All open epochs are at their first batch, which a loop may fetch before it computes the last
    # batch of the previous epoch.
    return [each for each in trained if each.open or each.has_pending_batch()]


def _makes_no_difference(possible: Sequence[TakenBatch], epoch_count: int) -> bool:
    """Return whether gradients get the same weights, whichever of the possible batches is computed.

    The batches after them have to give the same weights, too. `epoch_count` is the number of loops
    that the possible batches may be from.
    """
    newest = possible[-1]
    one_each = len(possible) == epoch_count or newest.origin.tail is None
    return one_each and all(batch.can_share_backward(newest) for batch in possible)


def _might_compute(epoch: Epoch, ended: Epoch) -> bool:
    """Return whether the user's script might still compute a batch of `epoch`, a loop that is over.

    The result is False for a validation loop. `ended` is the loop that has just ended; it may be
    `epoch` itself.
    """
    # `epoch` is the loop that has just ended, or its newest batch is still in use
    return epoch.training and (epoch is ended or bool(epoch.batches[-1].is_alive()))


def _drop_computed(batches: list[TakenBatch]) -> None:
    """Remove the batches that the user's loop has already computed or can't compute any more."""
    # These are the batches before a used one. The oldest of more than two batches is also removed
    # if the user's loop no longer holds its tensors.
    if batches and batches[-1].used:
        del batches[:-1]
    while len(batches) > 2 and not batches[0].is_alive():
        del batches[0]


def _list_waiting(epoch: Epoch) -> list[TakenBatch]:
    """Return the batches of a loop that may not have been computed yet."""
    waiting = [batch for batch in epoch.batches[:-1] if not batch.used]
    if len(waiting) > 1:
        waiting = [batch for batch in waiting if batch.is_alive()]
    return [*waiting, *epoch.batches[-1:]]


def _weigh_the_same(epochs: Sequence[Epoch]) -> bool:
    """Return whether all batches of these loops give ranks the same weights."""
    # the current batch may be from any of them
    newest = epochs[-1].batches[-1]
    if not all(batch.can_share_backward(newest) for epoch in epochs for batch in epoch.batches):
        return False
    return newest.origin.tail is None or all(
        batch.used for epoch in epochs for batch in epoch.batches[:-1]
    )
