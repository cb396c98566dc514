"""A share as passes: the rows of each forward and backward pass where a device can't compute its share at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RequestError
from .whole_rows import even, whole_number


def count_passes(batch: int, micro: int) -> int:
    """The passes that `batch` rows take at up to `micro` rows each; RequestError unless `micro` is 1 or more."""
    whole = whole_number(micro)
    if whole is None or whole < 1:
        raise RequestError(f"A pass can't have {micro!r} rows.", "Give a whole number, 1 or above, as micro.")
    return -(-batch // whole)


def split_passes(batch: int, micro: int) -> tuple[int, ...]:
    """The rows of each pass, spread evenly: 820 rows at up to 300 are 273, 273 and 274; none for 0 rows."""
    passes = count_passes(batch, micro)
    return even(batch, passes)[::-1] if passes > 0 else ()


def batch_in_one_pass(shares: Sequence[int], micros: Sequence[int]) -> int:
    """The largest batch in the proportions of `shares` that gives no device more rows than one pass holds."""
    return min(micro * sum(shares) // share for share, micro in zip(shares, micros, strict=True) if share)


def largest_pass(shares: Sequence[int], micros: Sequence[int]) -> int | None:
    """The rows of the largest pass among the shares that need several; None where each is one pass."""
    several = [split_passes(share, micro) for share, micro in zip(shares, micros, strict=True) if micro < share]
    return max((passes[-1] for passes in several), default=None)


def smallest_pass(shares: Sequence[int], micros: Sequence[int]) -> int:
    """The rows of the smallest pass of a full batch, on any device that has some."""
    return min(split_passes(share, micro)[0] for share, micro in zip(shares, micros, strict=True) if share)
