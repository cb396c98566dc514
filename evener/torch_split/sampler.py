"""Which rows of a data set each rank computes: unequal slices of one global order, each row once per epoch.

Every rank draws the same order and takes its own slice of each global batch, so nothing is exchanged. A rank that has
no row in a short last batch gets one to keep step with; that row has weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from evener.errors import RequestError
from evener.shares import apportion, bounds

_STATE_KEYS = ("epoch", "position", "length", "shuffle", "seed")


class UnevenBatchSampler:
    """Batches of row numbers for one rank, for `DataLoader(batch_sampler=...)`; a batch is never empty.

    `shares` are the samples of every rank in a full global batch. RequestError for a share, length or rank that's none.
    """

    def __init__(
        self,
        length: int,
        shares: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        _check(length, shares, rank, drop_last)
        self.length = length
        self.shares = tuple(shares)
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0  # rows of this epoch that were computed before

    @property
    def global_batch(self) -> int:
        """Rows of a full step, over all ranks."""
        return sum(self.shares)

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first row, in its own order."""
        self.epoch = epoch
        self.position = 0

    def __len__(self) -> int:
        """Steps from the position to the end of the epoch."""
        rows = self.length - self.position
        return rows // self.global_batch if self.drop_last else -(-rows // self.global_batch)

    def sizes(self, step: int) -> tuple[int, ...]:
        """The rows of each rank in a step, counted from the position; 0 for one that only keeps step."""
        rows = min(self.global_batch, self.length - self.position - step * self.global_batch)
        return self.shares if rows == self.global_batch else apportion(rows, self.shares)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self.batches())

    def batches(self) -> Iterator[torch.Tensor]:
        """The same as tensors (rows,) of int64, from the epoch and position of now."""
        return self._slices(self._order(), self.position, len(self))

    def _slices(self, order: torch.Tensor, position: int, steps: int) -> Iterator[torch.Tensor]:
        full = bounds(self.shares)[self.rank]
        for step in range(steps):
            first = position + step * self.global_batch
            short = first + self.global_batch > self.length
            start, stop = bounds(self.sizes(step))[self.rank] if short else full
            if start == stop:
                start, stop = 0, 1
            yield order[first + start : first + stop]

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
        return torch.randperm(self.length, generator=generator)

    def state_dict(self, steps: int = 0) -> dict[str, Any]:
        """Where the training is once `steps` steps from the position are done; the same on every rank."""
        position = min(self.length, self.position + steps * self.global_batch)
        values = (self.epoch, position, self.length, self.shuffle, self.seed)
        return dict(zip(_STATE_KEYS, values, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, also with other shares or ranks; RequestError if the order of rows differs."""
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise RequestError(
                f"The state of the loader has no {missing[0]!r}.", "Give what its state_dict() returned."
            )
        for key in ("length", "shuffle", "seed"):
            if state[key] != getattr(self, key):
                raise RequestError(
                    f"The state was taken with {key} {state[key]!r}, but this loader has {getattr(self, key)!r}.",
                    "Rows would be missed or seen twice: make the loader as it was, or start the epoch anew.",
                )
        self.epoch = int(state["epoch"])
        self.position = min(max(0, int(state["position"])), self.length)


def _check(length: int, shares: Sequence[int], rank: int, drop_last: bool) -> None:
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int) or share < 1:
            raise RequestError(
                f"A share of {share!r} samples leaves a rank without work.",
                "Give each rank 1 or more, and start no process for a device that is left out.",
            )
    if not 0 <= rank < len(shares):
        raise RequestError(f"There is no rank {rank} among {len(shares)}.", "Ranks count from 0.")
    if length < 1:
        raise RequestError(f"The data set has {length} rows.", "Give one with 1 row or more.")
    if drop_last and length < sum(shares):
        raise RequestError(
            f"With drop_last, {length} rows are no full batch of {sum(shares)}.",
            "Give a smaller global batch, or drop_last=False.",
        )
