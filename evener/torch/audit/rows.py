"""Choose the few rows that an audit computes, and divide them into parts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import msgspec
import torch
from torch.utils.data import Dataset

from ...errors import RequestError
from ..rows.structure import cut_rows, tensors_in
from .randomness import SEED, seed_all
from .state import kept_state

ROWS = 8  # maximum rows that an audit computes
FEWER = 4  # maximum rows after step 64, if nothing has changed since an audit of ROWS rows
TIMES = 4  # number of candidates for each row that is chosen
CANDIDATES = TIMES * ROWS
_IGNORED = -100


class FewRows(msgspec.Struct, frozen=True, eq=False):
    """A few rows of a batch for an audit: as one batch, and divided between two devices."""

    whole: Any  # the batch
    parts: tuple[Any, ...]  # one part for each of two devices
    sizes: tuple[int, ...]  # the parts' numbers of rows
    # the parts cut from the whole batch, with its padding; None if that isn't possible
    cut: tuple[Any, ...] | None
    even: tuple[Any, ...]  # two parts of equal size, as the program's own launcher would make
    even_sizes: tuple[int, ...]
    even_cut: tuple[Any, ...] | None = None  # the even parts, cut from the whole batch
    digest: int = 0  # digest of the numbers in the whole batch

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.sizes)

    @property
    def pads(self) -> bool:
        """Whether the parts are padded differently if each is collated on its own."""
        if self.cut is None or self.cut is self.parts:
            return False
        shapes = [
            [tensor.shape for tensor in tensors_in(parts)] for parts in (self.cut, self.parts)
        ]
        return shapes[0] != shapes[1]


def fetch_rows(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    indices: Sequence[int],
    max_rows: int = ROWS,
) -> FewRows | None:
    """Fetch up to `max_rows` different rows for an audit.

    They are chosen from the rows at `indices` in the data set. They are collated both together and
    in two parts. The result is None for fewer than two indices.
    """

    def collated(items: Sequence[Any], seed: int = SEED) -> Any:
        seed_all(seed)
        return collate(list(items))

    with kept_state():
        seed_all(SEED)
        copied = copy_dataset(dataset)
        items = [copied[index] for index in indices[: TIMES * max_rows]]
        if len(items) < 2:
            return None
        chosen = _choose(items, [_describe_item(item, collated) for item in items], max_rows)
        whole = collated(chosen)
        first, half = _rows_of_first_part(len(chosen)), len(chosen) // 2
        sizes = (first, len(chosen) - first)
        cut = _cut(whole, first, len(chosen))
        halves = (collated(chosen[:half]), collated(chosen[half:]))
        made = FewRows(
            whole,
            (collated(chosen[:first]), collated(chosen[first:])),
            sizes,
            cut,
            halves,
            (half, len(chosen) - half),
            _cut(whole, half, len(chosen)),
            digest_rows(whole),
        )
        if cut is None or _are_equal(whole, collated(chosen, SEED + 1)):
            return made
        # a collator that masks at random masks different values in separately collated parts
        even = _cut(whole, half, len(chosen)) or halves
        return msgspec.structs.replace(made, parts=cut, even=even)


def copy_dataset(dataset: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy of a data set, so that reading rows from it doesn't change the original.

    Nested data sets and their random generators are copied too, but not the rows. `copies` has the
    copies made so far, by the id of the original.
    """
    # their own generators are copied so that reading rows doesn't advance those of the user's data
    # sets
    if not hasattr(dataset, "__dict__") or isinstance(dataset, torch.Tensor):
        return dataset
    copies = {} if copies is None else copies
    if id(dataset) in copies:
        return copies[id(dataset)]
    try:
        copied = copy.copy(dataset)
    except Exception:  # an error of the program's own code
        return dataset
    copies[id(dataset)] = copied
    for name, value in list(getattr(copied, "__dict__", {}).items()):
        own = _copy_member(name, value, copies)
        if own is not value:
            setattr(copied, name, own)
    return copied


def _copy_member(name: str, value: Any, copies: dict[int, Any]) -> Any:
    """Return a data set's attribute, copied if reading rows may change it."""
    if name == "dataset" or isinstance(value, Dataset):
        # a file that is opened for the first row must not be inherited by worker processes
        return copy_dataset(value, copies)
    if name == "datasets" and isinstance(value, list | tuple):
        return [copy_dataset(each, copies) for each in value]
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        return copy.deepcopy(value)
    return value


def choose_few_rows(
    batch: Any, rows: int, in_order: bool = False, max_rows: int = ROWS
) -> FewRows | None:
    """Choose up to `max_rows` different rows of a batch for an audit.

    `rows` is the row count of the batch. With `in_order`, the chosen rows keep the order of the
    batch. The result is None if the batch has fewer than two rows or can't be divided.
    """
    # the rows are chosen from the first TIMES * `max_rows`, and sorted so that the two parts
    # differ, too
    if rows < 2:
        return None
    try:
        whole = _pick_rows(batch, rows, in_order, max_rows)
        count = min(rows, max_rows) // 2 * 2
        first_of_unequal, half_of_rows = _rows_of_first_part(count), count // 2
        parts = _cut(whole, first_of_unequal, count)
        even = _cut(whole, half_of_rows, count)
    except RequestError:
        return None
    if parts is None or even is None:
        return None
    sizes, even_sizes = (
        (first_of_unequal, count - first_of_unequal),
        (half_of_rows, count - half_of_rows),
    )
    digest = digest_rows(whole)
    return FewRows(whole, parts, sizes, parts, even, even_sizes, digest=digest)


def _rows_of_first_part(rows: int) -> int:
    """Return how many of `rows` rows are in the first of two unequal parts, about 3/8 of them."""
    return max(1, rows * 3 // 8)


def _choose(
    items: Sequence[Any], features: Sequence[tuple[float, ...]], max_rows: int
) -> list[Any]:
    """Return up to `max_rows` items whose features differ as much as possible."""
    indices = choose_spread(features, max_rows)
    return [items[index] for index in indices]


def choose_spread(features: Sequence[tuple[float, ...]], max_rows: int = ROWS) -> list[int]:
    """Return the indices of up to `max_rows` rows that differ as much as possible.

    `features` has numbers that describe each row, such as its class and length. The number of
    indices is even.
    """
    # The indices are sorted by the features, so that the first and the second half differ, too. The
    # first rows are enough if all of their features vary.
    first_features = features[:max_rows]
    first_ones_differ = len(first_features[0]) > 0 and all(
        len(set(values)) > 1 for values in zip(*first_features, strict=True)
    )
    candidates = first_features if first_ones_differ or not features[0] else features
    ranked = sorted(range(len(candidates)), key=lambda place: (candidates[place], place))
    count = min(max_rows, len(candidates))
    count -= count % 2  # so that halves are equal
    return [ranked[place * (len(ranked) - 1) // max(1, count - 1)] for place in range(count)]


def _pick_rows(batch: Any, rows: int, in_order: bool, max_rows: int) -> Any:
    """Return a smaller batch of up to `max_rows` rows that differ as much as possible.

    With `in_order`, the rows keep the order of the batch. If the batch's tensors don't all have one
    entry per row, the first rows are returned.
    """
    tensors = [each for each in tensors_in(batch) if each.ndim]
    if not tensors or any(len(tensor) != rows for tensor in tensors):
        return cut_rows(batch, 0, min(max_rows, rows) // 2 * 2, rows)
    few = min(TIMES * max_rows, rows)
    features = list(zip(*(_describe_rows(tensor[:few]) for tensor in tensors), strict=True))
    indices = choose_spread(features, max_rows)
    if in_order:
        indices.sort()
    picked = [cut_rows(batch, index, index + 1, rows) for index in indices]
    return _join(picked)


def _join(rows: Sequence[Any]) -> Any:
    """Join batches of one row each into a single batch."""
    first = rows[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(rows)) if first.ndim else first
    if isinstance(first, tuple | list) and not isinstance(first, torch.Size):
        return _join_sequences(rows)
    if hasattr(first, "keys"):
        made = first.copy()
        for key in first.keys():  # noqa: SIM118 - mappings of libraries iterate otherwise
            made[key] = _join([row[key] for row in rows])
        return made
    return first


def _join_sequences(rows: Sequence[Any]) -> Any:
    """Join tuples or lists item by item if they contain tensors; otherwise concatenate them."""
    first = rows[0]
    kind = type(first)
    nested = any(isinstance(each, torch.Tensor | tuple | list | dict) for each in first)
    if first and not nested:
        return kind(item for row in rows for item in row)
    items = [_join([row[place] for row in rows]) for place in range(len(first))]
    return kind(*items) if hasattr(first, "_fields") else kind(items)


def _cut(batch: Any, size: int, rows: int) -> tuple[Any, Any] | None:
    """Divide a batch of `rows` rows after its first `size` rows.

    Return both parts, or None if the batch can't be divided.
    """
    try:
        return cut_rows(batch, 0, size, rows), cut_rows(batch, size, rows, rows)
    except RequestError:
        return None


def _describe_item(item: Any, collated: Callable[[Sequence[Any]], Any]) -> tuple[float, ...]:
    """Return numbers that describe one row of a data set, such as its class and length.

    `collated` turns a list of rows into a batch. The result is () if it fails for a single row.
    """
    # collating one row fails, for example, if rows come in pairs
    try:
        return tuple(_describe_rows(tensor[None])[0] for tensor in tensors_in(collated([item])))
    except Exception:
        return ()


def _describe_rows(tensor: torch.Tensor) -> list[float]:
    """Return one number for each row of a tensor.

    If a row is a single integer, such as a class, it is that integer; otherwise it is the row's
    length without padding.
    """
    # an integer per row is taken for a class; padding is 0 or -100 in integers, infinite or NaN in
    # others
    exact = not tensor.is_floating_point() and not tensor.is_complex()
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    if exact and rows.shape[1] == 1:
        return list(map(float, rows[:, 0].tolist()))
    meant = (rows != _IGNORED) & (rows != 0) if exact else torch.isfinite(rows)
    return list(map(float, meant.sum(1).tolist()))


def digest_rows(batch: Any) -> int:
    """Return a CRC-32 checksum of all values in a batch."""
    found = 0
    for tensor in tensors_in(batch):
        if not tensor.is_sparse:
            plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            values = plain.detach().to("cpu", torch.float64).numpy().tobytes()
            found = crc32(values, found)
    return found


def _are_equal(one: Any, other: Any) -> bool:
    first, second = tensors_in(one), tensors_in(other)
    if len(first) != len(second):
        return False
    return all(
        a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(first, second, strict=True)
    )
