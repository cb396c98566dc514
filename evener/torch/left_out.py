"""Detect steps in which only some ranks skip their rows, for example because of a NaN.

On one device, the user's script would skip the whole batch or none of it. It skips a batch by
training with a loss of 0, such as `loss * 0`. Audits, which compute a few rows again to check
gradients, don't notice this, because most steps compute the loss as usual. So each rank records the
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
    """Records the steps in which this rank's loss was 0, and compares them with other ranks.

    `place` is the prefix of keys in the process group's store, the same on every rank.
    """

    def __init__(self, place: str, rank: int) -> None:
        self._place = place
        self._rank = rank
        self._usual: set[Hashable] = set()  # operations whose loss has been other than 0
        # True if a loss of this step isn't 0; None before the first loss
        self._learns: bool | None = None
        self._left: list[int] = []  # steps that this rank hasn't written to the store yet

    def note(self, loss: torch.Tensor, made_of: Hashable) -> None:
        """Record, before a backward pass, if the loss is 0.

        A step is left out only if all its losses are 0. `made_of` identifies the operations that
        computed the loss. Once they have given a loss other than 0, they aren't checked again.
        """
        # Reading a loss makes the host wait for the device. So operations whose loss was once other
        # than 0 aren't checked again.
        self._learns = not self._is_left_out(loss, made_of) or bool(self._learns)

    def _is_left_out(self, loss: torch.Tensor, made_of: Hashable) -> bool:
        if made_of in self._usual or len(self._usual) >= MOST_KINDS:
            return False
        with without_functions():  # unlike the program's calls, this one isn't recorded
            value = float(loss.detach().double().sum())
        if value != 0.0:
            self._usual.add(made_of)
            return False
        return bool(self._usual)

    def begin(self, step: int, shares: Sequence[int]) -> tuple[int, list[int]] | None:
        """Begin a step; return an earlier step that only some ranks skipped, and these ranks.

        The result is None if there was none. Ranks without rows don't count. All ranks have to call
        this for the same steps, and get the same result.
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
    """Return the first step that only some ranks skipped, with these ranks, or None."""
    # `ranks` has the ranks that left out each step, and `every` has the ranks with rows.
    for step in sorted(ranks):
        if not set(every) <= set(ranks[step]):
            return step, ranks[step]
    return None
