"""Compare the data sets of all ranks, because a plan divides rows by their indices.

An index has to mean the same row on every rank. It doesn't if each rank draws its own data set, as
with random_split or a shuffle without a common seed, or if the program has already divided its data
set by rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ..rows.structure import tensors_in
from .objects import unfold
from .randomness import SEED, seed_all
from .rows import copy_dataset
from .state import kept_state

NEXT, SPREAD = 2, 6  # compared rows: the next ones of the epoch, and evenly spaced ones
LONGEST_SECONDS = 0.5  # no further row is read after this time
# maximum relative difference between equal rows, as different kinds of GPUs round differently
NEAR = 1e-4
REMEDY = (
    "A plan shares rows out by their numbers, so give every rank the same data set: draw"
    " random_split and shuffles with a fixed seed (generator=torch.Generator().manual_seed(0)), and"
    " don't divide the data set by rank, as the plan divides it."
)


class TensorSums(msgspec.Struct, frozen=True):
    """Two sums over the elements of a tensor, by which tensors of two ranks are compared.

    In `by_place`, each element is multiplied by a number from 1 to 2 that grows with its position.
    `allowed` is the difference that rounding may cause; it is 0 for integers.
    """

    plain: float
    by_place: float
    allowed: float

    def is_near(self, other: TensorSums) -> bool:
        """True if both tensors are probably equal, except for rounding."""
        allowed = max(self.allowed, other.allowed)
        differences = (self.plain - other.plain, self.by_place - other.by_place)
        return not any(abs(difference) > allowed for difference in differences)


class RankData(msgspec.Struct, frozen=True):
    """A summary of one rank's data set, by which ranks compare their data sets.

    `length` is the number of rows in an epoch. `order` is a digest of the program's own order of
    these rows; None if there is none. `rows` has the sums of a few rows, by the rows' indices in
    the data set. Rows that can't be read, or that differ each time they are read, aren't included.
    """

    length: int
    order: int | None = None
    rows: dict[str, list[TensorSums]] = {}


def summarize(dataset: Any, collate: Callable[[list[Any]], Any], sampler: Any) -> RankData:
    """Return a summary of this rank's data set.

    `sampler` is the UnevenBatchSampler of its rows, and `collate` makes a batch from a list of
    rows. Rows are read from a copy of the data set, with the same random numbers on every rank.
    """
    found: dict[str, list[TensorSums]] = {}
    ends = time.monotonic() + LONGEST_SECONDS
    with kept_state():
        twin = copy_dataset(dataset)
        for number in sampler.sample_rows(NEXT, SPREAD):
            sums = _sum_row(twin, collate, number)
            if sums is not None:
                found[str(number)] = sums
            if time.monotonic() > ends:
                break
    return RankData(sampler.length, sampler.digest(sampler.epoch), found)


def find_difference(every: Sequence[RankData]) -> str:
    """Return a sentence on the first difference between the data sets of two ranks; "" without any.

    `every` has the summaries of all ranks, in rank order.
    """
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
        for number in first.rows.keys() & other.rows.keys():
            if not _are_near(first.rows[number], other.rows[number]):
                return (
                    f"The data sets of the ranks differ: row {number} has other values on rank"
                    f" {rank} than on rank 0."
                )
    return ""


def _sum_row(dataset: Any, collate: Any, number: int) -> list[TensorSums] | None:
    """Return the sums of each tensor of a row, which is collated alone.

    The row is read twice. Return None if it can't be read, or if the two results differ.
    """
    try:
        first, again = (_read(dataset, collate, number) for _ in range(2))
    except Exception:  # an error of the program's own code
        return None
    return first if first == again else None


def _read(dataset: Any, collate: Any, number: int) -> list[TensorSums]:
    seed_all(SEED)
    return [_sum(tensor) for tensor in tensors_in(unfold(collate([dataset[number]])))]


def _sum(tensor: torch.Tensor) -> TensorSums:
    """Return the sums of a tensor; infinite values and NaN count as 0."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = plain.detach().double().flatten()
    values = torch.where(torch.isfinite(values), values, 0.0)
    places = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    allowed = NEAR * float(values.abs().sum()) if plain.is_floating_point() else 0.0
    return TensorSums(float(values.sum()), float(values @ places), allowed)


def _are_near(one: Sequence[TensorSums], other: Sequence[TensorSums]) -> bool:
    if len(one) != len(other):
        return False
    return all(a.is_near(b) for a, b in zip(one, other, strict=True))
