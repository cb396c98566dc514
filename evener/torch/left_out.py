"""Batches that some ranks leave out, as their own rows have a NaN or are easy: their loss is 0.

One device would leave out the whole batch or none of it. No audit computes such a step again, as
the loss is a usual one in other steps. But the operations that make it are others there
(`loss * 0`), and the loss is 0: each rank notes the steps in which that is so, and the ranks
compare their notes through the store of their process group.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress

import msgspec
import torch
import torch.distributed as dist

from ..training.audit import EARLY
from .private import default_store, without_functions

MOST_KINDS = 32  # kinds of losses that are read
MEET_EVERY = 8  # steps, after step 64; until then the ranks meet in each step
READ_AFTER = 2  # steps: no rank gets as far before all have written


class LeftOutBatches:
    """Notes the batches that this rank leaves out, and finds those that not all ranks leave out.

    `place` is the prefix of keys in the store, the same on every rank.
    """

    def __init__(self, place: str, rank: int) -> None:
        self._place = place
        self._rank = rank
        self._usual: set[Hashable] = set()  # operations whose loss wasn't always 0
        self._learns: bool | None = None  # from any loss of this step; None before the first
        self._left: list[int] = []  # steps that the other ranks don't know of

    def note(self, loss: torch.Tensor, made_of: Hashable) -> None:
        """Note a loss before its backward pass, and the operations that made it.

        Its value is read once for each kind of operations, and each time while it is 0.
        """
        self._learns = not self._is_left_out(loss, made_of) or bool(self._learns)

    def _is_left_out(self, loss: torch.Tensor, made_of: Hashable) -> bool:
        if made_of in self._usual or len(self._usual) >= MOST_KINDS:
            return False
        with without_functions():  # the program's calls are recorded, this one isn't
            value = float(loss.detach().double().sum())
        if value != 0.0:
            self._usual.add(made_of)
            return False
        return bool(self._usual)

    def begin(self, step: int, shares: Sequence[int]) -> tuple[int, list[int]] | None:
        """Begin a step; return the first one that only some ranks have left out, and those ranks.

        Return None if there is none. All ranks call this for the same steps and get the same
        result. `shares` are the ranks' rows; ranks without rows leave nothing out.
        """
        if self._learns is False:
            self._left.append(step - 1)
        self._learns = None
        with suppress(dist.DistError):  # the store has gone with the rank that ended first
            if _meets_in(step) and self._left:
                self._write(step)
            if _meets_in(step - READ_AFTER):
                return self._read(step - READ_AFTER, shares)
        return None

    def _write(self, step: int) -> None:
        store = default_store()
        store.set(f"{self._place}/{step}/{self._rank}", msgspec.msgpack.encode(self._left))
        store.add(f"{self._place}/{step}", 1)
        self._left = []

    def _read(self, step: int, shares: Sequence[int]) -> tuple[int, list[int]] | None:
        store = default_store()
        if not store.add(f"{self._place}/{step}", 0):
            return None
        ranks: dict[int, list[int]] = {}
        for rank in range(len(shares)):
            key = f"{self._place}/{step}/{rank}"
            if store.check([key]):
                for left in msgspec.msgpack.decode(store.get(key), type=list[int]):
                    ranks.setdefault(left, []).append(rank)
        return _find_uneven(ranks, {rank for rank, rows in enumerate(shares) if rows})


def _meets_in(step: int) -> bool:
    return 0 < step <= EARLY or (step > 0 and step % MEET_EVERY == 0)


def _find_uneven(
    ranks: dict[int, list[int]], every: Collection[int]
) -> tuple[int, list[int]] | None:
    """Return the first step that not every rank has left out, with the ranks that have."""
    for step in sorted(ranks):
        if not set(every) <= set(ranks[step]):
            return step, ranks[step]
    return None
