"""The rows of a data set that each rank computes: unequal slices of one global order, each row once per epoch.

Every rank draws the same order and takes its own slice of each global batch, so nothing is exchanged. A rank that has
no row in a short last batch gets one to keep step with; that row has weight 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import RequestError
from ..shares.whole_rows import apportion, bounds
from .row_order import RowOrder, mix_seed
from .share_schedule import ShareSchedule

LOOPS = 4  # that may run over one sampler at the same time and change shares
_STATE_KEYS = ("epoch", "position", "length", "shuffle", "seed")


class UnevenBatchSampler:
    """Batches of row numbers for one rank, for `DataLoader(batch_sampler=...)`; a batch is never empty.

    `shares` are the samples of every rank in a full global batch, until `change_shares`. An `order` takes the place of
    `shuffle`. With `join_tail`, a last batch that hasn't a row for each rank is part of the batch before it.
    RequestError for a share, length or rank that's none.
    """

    is_dealt = False  # True if rows are dealt by their length, in passes

    def __init__(
        self,
        length: int,
        shares: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        order: RowOrder | None = None,
        join_tail: bool = False,
    ) -> None:
        length = length if order is None else len(order)
        _check_shares(shares, rank)
        _check_length(length, sum(shares) if drop_last else 1)
        self.length = length
        self.shares = tuple(shares)  # of loops that begin now
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.order = order
        self.join_tail = join_tail
        self.epoch = 0
        self.position = 0  # rows of this epoch that were computed before
        self.changes = False  # True if shares may change
        self._schedules = deque([ShareSchedule(self.shares, 0)], maxlen=LOOPS)

    @property
    def global_batch(self) -> int:
        """Rows of a full step, over all ranks."""
        return sum(self.shares)

    def change_shares(self, shares: tuple[int, ...], ahead: int) -> None:
        """Take these shares; in loops that run, from the batch on that comes `ahead` batches after the next one."""
        self.shares = shares
        for schedule in self._schedules:
            schedule.change(ahead * self.global_batch, shares)

    @property
    def schedule(self) -> ShareSchedule:
        """The shares of the newest loop, by row."""
        return self._schedules[-1]

    def sample_rows(self, first: int, more: int) -> list[int]:
        """The next `first` rows of all ranks, and up to `more` from the whole epoch: the same on every rank."""
        order, most = self._draw(self.epoch), min(more, self.length)
        spread = [self.length * place // most for place in range(most)]
        rows = order[self.position : self.position + first].tolist() + order[spread].tolist()
        return list(dict.fromkeys(rows))

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first row, in its own order."""
        self.epoch = epoch
        self.position = 0

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self._steps(self.length)

    @property
    def steps_left(self) -> int:
        """Steps from the position to the end of the epoch."""
        return self._steps(self.length - self.position)

    def _steps(self, rows: int) -> int:
        whole, rest = divmod(rows, self.global_batch)
        return whole if self.drop_last or not rest or (whole and self._joins(rest)) else whole + 1

    def _joins(self, rest: int) -> bool:
        return self.join_tail and not self.drop_last and 0 < rest < len(self.shares)

    def sizes(self, step: int) -> tuple[int, ...]:
        """The rows of each rank in a step, counted from the position; 0 for one that only keeps step."""
        return self.sizes_at(self.position + step * self.global_batch)

    def sizes_at(self, first: int, epoch: int | None = None, schedule: ShareSchedule | None = None) -> tuple[int, ...]:
        """The rows of each rank in the step that begins with row `first` of `epoch`, in a loop with this schedule.

        Without these, in this epoch and the newest loop.
        """
        rows, full = self.length - first, self.global_batch
        shares = (schedule or self.schedule).at(first)
        if rows >= full and not (rows < 2 * full and self._joins(rows - full)):
            return shares
        return apportion(rows, shares)

    def rows_of_odd_tail(self) -> object:
        """Rows of the epoch's last step if they weigh the ranks differently than the other steps' do; else None."""
        if self.changes:
            return object()  # each step may weigh them differently
        last = self.sizes(max(0, self.steps_left - 1))
        total, rows = self.global_batch, sum(last)
        return None if all(n * total == share * rows for n, share in zip(last, self.shares, strict=True)) else rows

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self.batches())

    def batches(self) -> Iterator[torch.Tensor]:
        """This rank's rows of each step as int64 tensors (rows,), from the current position on, by a new schedule."""
        self._schedules.append(ShareSchedule(self.shares, self.position))
        return self._slices(self._draw(self.epoch), self.position, self.steps_left, self.schedule)

    def _slices(
        self, order: torch.Tensor, position: int, steps: int, schedule: ShareSchedule
    ) -> Iterator[torch.Tensor]:
        for step in range(steps):
            first = position + step * self.global_batch
            start, stop = bounds(self.sizes_at(first, schedule=schedule))[self.rank]
            if start == stop:
                start, stop = 0, 1
            yield order[first + start : first + stop]

    def _draw(self, epoch: int) -> torch.Tensor:
        if self.order is not None:
            return self.order.draw(epoch)
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(mix_seed(self.seed, epoch))
        return torch.randperm(self.length, generator=generator)

    def join_passes(self, fetched: Iterator[Any]) -> Iterator[Any]:
        """The batch of each step from what is fetched for this sampler."""
        return fetched

    def count_tokens(self, first: int, epoch: int) -> tuple[int, int]:
        """The tokens of this rank's rows in a batch, without and with padding; 0 where rows have no lengths."""
        return (0, 0)

    def digest(self, epoch: int) -> int | None:
        """A digest that tells the user's own order of an epoch from another; None without one."""
        return None if self.order is None else self.order.digest(epoch)

    def state_dict(self, steps: int = 0) -> dict[str, Any]:
        """The position of the training `steps` steps on; the same on every rank."""
        position = min(self.length, self.position + steps * self.global_batch)
        values = (self.epoch, position, self.length, self._describe_order(self.epoch), self.seed)
        return dict(zip(_STATE_KEYS, values, strict=True))

    def _describe_order(self, epoch: int) -> bool | str:
        return self.shuffle if self.order is None else f"order {self.order.digest(epoch):08x}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, also with other shares or ranks; RequestError if the order of rows differs."""
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise RequestError(
                f"The state of the loader has no {missing[0]!r}.", "Give what its state_dict() returned."
            )
        epoch = int(state["epoch"])
        own = {"length": self.length, "shuffle": self._describe_order(epoch), "seed": self.seed}
        for key, value in own.items():
            if state[key] != value:
                raise RequestError(
                    f"The state was taken with {key} {state[key]!r}, but this loader has {value!r}.",
                    "Rows would be missed or seen twice: make the loader as it was, or start the epoch anew.",
                )
        self.epoch = epoch
        self.position = min(max(0, int(state["position"])), self.length)


def _check_shares(shares: Sequence[int], rank: int) -> None:
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int) or share < 1:
            raise RequestError(
                f"A share of {share!r} samples leaves a rank without work.",
                "Give each rank 1 or more, and start no process for a device that is left out.",
            )
    if not 0 <= rank < len(shares):
        raise RequestError(f"There is no rank {rank} among {len(shares)}.", "Ranks count from 0.")


def _check_length(length: int, fewest: int) -> None:
    if length < 1:
        raise RequestError(f"The data set has {length} rows.", "Give one with 1 row or more.")
    if length < fewest:
        raise RequestError(
            f"With drop_last, {length} rows are no full batch of {fewest}.",
            "Give a smaller global batch, or drop_last=False.",
        )
