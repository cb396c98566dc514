"""Check that all ranks have the same data set, because a plan divides rows by index.

An index has to mean the same row on every rank. It doesn't if each rank draws its own data set, for
example with torch.randn, random_split or a shuffle without a common seed. Nor does it if the user's
script has already divided its data set by rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from ..rows.structure import tensors_in
from .objects import unfold
from .randomness import SEED, RandomState, seed_all
from .rows import copy_dataset
from .state import kept_state

NEXT, SPREAD = 2, 6  # compared rows: the next ones of the epoch, and evenly spaced ones
LONGEST_SECONDS = 0.5  # no further row is read after this time
# maximum relative difference between equal rows, as different kinds of GPUs round differently
NEAR = 1e-4
ROUNDING = 1e-10  # the same for integers, as sums in float64 depend on the number of threads
FEW = 4  # of this many rows, one may differ: a transform may draw its own random numbers
AT_ONCE = 1 << 20  # elements that are converted to float64 at a time
REMEDY = (
    "A plan shares rows out by their numbers, so give every rank the same data set: draw rows,"
    " random_split and shuffles with a fixed seed (generator=torch.Generator().manual_seed(0)), and"
    " don't divide the data set by rank, as the plan divides it."
)


class TensorSums(msgspec.Struct, frozen=True):
    """Sums of a tensor's elements, which ranks compare instead of sending the whole row."""

    plain: float
    # each element is multiplied by a number from 1 to 2 that grows with its position
    by_place: float
    allowed: float  # the difference that rounding may cause

    def is_near(self, other: TensorSums) -> bool:
        """Return whether the sums differ by no more than rounding."""
        allowed = max(self.allowed, other.allowed)
        differences = (self.plain - other.plain, self.by_place - other.by_place)
        return not any(abs(difference) > allowed for difference in differences)


class RankData(msgspec.Struct, frozen=True):
    """Summary of a rank's data set, which ranks compare: its length, its order and a few rows."""

    length: int  # number of rows in an epoch
    # digest of the program's own order of these rows; None if there is none
    order: int | None = None
    # The sums of a few rows, by the rows' indices in the data set. Rows that can't be read are left
    # out. The dict is empty if the data set isn't reproducible.
    rows: dict[str, list[TensorSums]] = {}


def summarize(dataset: Any, collate: Callable[[list[Any]], Any], sampler: Any) -> RankData:
    """Return a summary of this rank's data set, to compare it with other ranks.

    The summary has no rows if the data set can't be copied or read, or if reading a row twice gives
    different results.
    """
    # rows are read from a copy of the data set, with the same random numbers on every rank
    try:
        with kept_state():
            numbers = sampler.sample_rows(NEXT, SPREAD)
            found = _sum_rows(copy_dataset(dataset), copy_dataset(collate), numbers)
    except Exception:  # an error of the program's own code
        found = {}
    return RankData(sampler.length, sampler.digest(sampler.epoch), found)


def _sum_rows(
    dataset: Any, collate: Callable[[list[Any]], Any], indices: Sequence[int]
) -> dict[str, list[TensorSums]]:
    """Return sums of the tensors in the rows at `indices`, by index, to compare them between ranks.

    The result is {} if reading a row twice gives different results.
    """
    # If a row isn't the same again, the data set has a transform with its own generator, or keeps
    # rows that this rank drew at random. Whether reading draws random numbers is compared, too.
    found: dict[str, list[TensorSums]] = {}
    ends = time.monotonic() + LONGEST_SECONDS
    for index in indices:
        try:
            first, again = (_read(dataset, collate, index) for _ in range(2))
        except Exception:  # an error of the program's own code
            continue
        if first != again:
            return {}
        found[str(index)] = first.sums
        if time.monotonic() > ends:
            break
    return found


def find_difference(every: Sequence[RankData]) -> str:
    """Return a sentence about how the ranks' data sets differ, or "" if they don't."""
    if not every:
        return ""
    first = every[0]
    for rank, other in enumerate(every[1:], 1):
        if other.length != first.length:
            return (
                f"Rank {rank} has {other.length} rows in an epoch, and rank 0 has {first.length}."
            )
        if other.order != first.order:
            return f"Rank {rank} draws its rows in another order than rank 0."
        compared = [number for number in first.rows if number in other.rows]
        different = [
            number for number in compared if not _are_near(first.rows[number], other.rows[number])
        ]
        if len(different) > len(compared) // FEW:
            return (
                f"The data sets of the ranks differ: row {different[0]} has other values on rank"
                f" {rank} than on rank 0."
            )
    return ""


class RowRead(NamedTuple):
    """Sums of one row's tensors, and whether reading the row drew random numbers.

    Ranks compare these sums.
    """

    sums: list[TensorSums]
    is_drawn: bool


def _read(dataset: Any, collate: Any, index: int) -> RowRead:
    """Read and collate one row with seeded random generators.

    Return sums of the row's tensors, and whether random numbers were drawn.
    """
    seed_all(SEED)
    seeded = RandomState()
    batch = collate([dataset[index]])
    is_drawn = seeded.has_changed()
    return RowRead([_sum(tensor) for tensor in tensors_in(unfold(batch))], is_drawn)


def _sum(tensor: torch.Tensor) -> TensorSums:
    """Return the sums of a tensor's elements, with infinities and NaN as 0."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    elements = plain.detach().flatten()
    last = max(len(elements) - 1, 1)
    total = by_place = absolute = 0.0
    for start in range(0, len(elements), AT_ONCE):
        values = elements[start : start + AT_ONCE].double()
        values = torch.where(torch.isfinite(values), values, 0.0)
        places = torch.arange(start, start + len(values), dtype=torch.float64, device=values.device)
        total += float(values.sum())
        by_place += float(values @ (1 + places / last))
        absolute += float(values.abs().sum())
    relative = NEAR if plain.is_floating_point() else ROUNDING
    return TensorSums(total, by_place, relative * absolute)


def _are_near(one: Sequence[TensorSums], other: Sequence[TensorSums]) -> bool:
    if len(one) != len(other):
        return False
    return all(a.is_near(b) for a, b in zip(one, other, strict=True))
