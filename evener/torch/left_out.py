"""Detect steps in which only some ranks skip their rows, for example because of a NaN.

On one device, the user's script would skip the whole batch or none of it. It skips a batch by
training with a loss of 0, such as `loss * 0`. Audits, which compute a few rows again to check
gradients, don't detect this, because most steps compute the loss as usual. So each rank records the
steps whose loss is 0, and the ranks compare their records through the store of their process group.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress

import msgspec
import torch
import torch.distributed as dist

from ..training.audit import EARLY
from .private import default_store, without_functions

MOST_KINDS = 32  # maximum number of kinds of losses whose values are read
MEET_EVERY = 8  # in steps, after step 64; until then the ranks compare records in each step
READ_AFTER = 2  # in steps; no rank gets this far before all have written


class LeftOutBatches:
    """Records the steps in which this rank's loss was 0, and compares them between ranks.

    `prefix` is the prefix of the keys in the process group's store, the same on every rank.
    """

    def __init__(self, prefix: str, rank: int) -> None:
        self._prefix = prefix
        self._rank = rank
        self._usual: set[Hashable] = set()  # operations whose loss has been other than 0
        # True if a loss of this step isn't 0; None before the first loss
        self._learns: bool | None = None
        self._left: list[int] = []  # steps that this rank hasn't written to the store yet

    def note(self, loss: torch.Tensor, operations: Hashable) -> None:
        """Record before a backward pass whether the loss is 0.

        A step counts as skipped only if all its losses are 0. `operations` identifies how the loss
        was computed. Once these operations have given a loss other than 0, their losses aren't
        checked again.
        """
        # reading a loss makes the host wait for the device
        self._learns = not self._is_left_out(loss, operations) or bool(self._learns)

    def _is_left_out(self, loss: torch.Tensor, operations: Hashable) -> bool:
        if operations in self._usual or len(self._usual) >= MOST_KINDS:
            return False
        with without_functions():  # unlike the program's calls, this one isn't recorded
            value = float(loss.detach().double().sum())
        if value != 0.0:
            self._usual.add(operations)
            return False
        return bool(self._usual)

    def begin(self, step: int, shares: Sequence[int]) -> tuple[int, list[int]] | None:
        """Begin a step; return an earlier step that only some ranks skipped, and those ranks.

        The result is None if there is no such step. Ranks without rows don't count. All ranks have
        to call this for the same steps, and get the same result.
        """
        if self._learns is False:
            self._left.append(step - 1)
        self._learns = None
        with suppress(dist.DistError):  # the store exited with the rank that hosts it
            if _meets_in(step) and self._left:
                self._write(step)
            if _meets_in(step - READ_AFTER):
                return self._read(step - READ_AFTER, shares)
        return None

    def _write(self, step: int) -> None:
        store = default_store()
        store.set(f"{self._prefix}/{step}/{self._rank}", msgspec.msgpack.encode(self._left))
        store.add(f"{self._prefix}/{step}", 1)
        self._left = []

    def _read(self, step: int, shares: Sequence[int]) -> tuple[int, list[int]] | None:
        store = default_store()
        if not store.add(f"{self._prefix}/{step}", 0):
            return None
        ranks: dict[int, list[int]] = {}
        for rank in range(len(shares)):
            key = f"{self._prefix}/{step}/{rank}"
            if store.check([key]):
                for left in msgspec.msgpack.decode(store.get(key), type=list[int]):
                    ranks.setdefault(left, []).append(rank)
        return _find_first_uneven(ranks, {rank for rank, rows in enumerate(shares) if rows})


def _meets_in(step: int) -> bool:
    return 0 < step <= EARLY or (step > 0 and step % MEET_EVERY == 0)


def _find_first_uneven(
    skipped: dict[int, list[int]], with_rows: Collection[int]
) -> tuple[int, list[int]] | None:
    """Return the first step that only some ranks skipped, and the ranks that skipped it, or None.

    `skipped` lists, for each step, the ranks that skipped it. `with_rows` lists the ranks that have
    rows; the other ranks needn't have skipped the step.
    """
    for step in sorted(skipped):
        if not set(with_rows) <= set(skipped[step]):
            return step, skipped[step]
    return None
