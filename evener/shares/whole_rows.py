"""Ratios to whole samples: who computes which slice of a batch, and what its gradient weighs.

Pure integer arithmetic, shared by the search and by both adapters, so that what is measured is what
trains.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import RequestError


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise RequestError unless every ratio is finite and not negative, and at least one is above
    0.
    """
    if not ratios:
        raise RequestError("The list of ratios is empty.", "Give one ratio for each device.")
    for ratio in ratios:
        if not is_ratio(ratio):
            raise RequestError(
                f"A ratio of {ratio!r} is not a share of a batch.",
                "Ratios are finite numbers, 0 or above.",
            )
    if not any(ratios):
        raise RequestError("Every ratio is 0.", "At least one device needs a ratio above 0.")


def check_rank_shares(shares: Sequence[int], rank: int) -> None:
    """Raise RequestError unless each rank has a row or more, and this is one of them."""
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int) or share < 1:
            raise RequestError(
                f"A share of {share!r} samples leaves a rank without work.",
                "Give each rank 1 or more, and start no process for a device that is left out.",
            )
    if not 0 <= rank < len(shares):
        raise RequestError(f"There is no rank {rank} among {len(shares)}.", "Ranks count from 0.")


def is_ratio(ratio: object) -> bool:
    """True for a finite number, 0 or above."""
    try:
        return not isinstance(ratio, bool) and math.isfinite(ratio) and ratio >= 0  # type: ignore[arg-type, operator]
    except (TypeError, OverflowError):
        return False


def apportion(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Split `batch` samples by `ratios`, by largest remainder; the result sums to `batch`.

    A device with a ratio above 0 gets at least one sample when the batch has one for each of them:
    an empty replica can abort a TensorFlow process. With fewer samples than such devices, the first
    ones get one each. A device with ratio 0 gets none. Ties go to the earlier device.
    """
    check_ratios(ratios)
    batch = _check_batch(batch)
    active = [i for i, ratio in enumerate(ratios) if ratio > 0]
    sizes = [0] * len(ratios)
    if batch <= len(active):
        for i in active[:batch]:
            sizes[i] = 1
        return tuple(sizes)
    parts = _whole_parts(ratios)
    total = sum(parts)
    for i in active:
        sizes[i] = max(1, batch * parts[i] // total)
    _correct_sum(sizes, {i: batch * parts[i] for i in active}, total, batch)
    return tuple(sizes)


def whole_number(value: object) -> int | None:
    """The value as an int, NumPy's and PyTorch's integers too; None for anything else, bools
    included.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _check_batch(batch: int) -> int:
    whole = whole_number(batch)
    if whole is None or whole < 0:
        raise RequestError(
            f"A batch of {batch!r} samples can't be split.", "Give a whole number of samples."
        )
    return whole


def _whole_parts(ratios: Sequence[float]) -> list[int]:
    """The ratios as integers in exactly the same proportion."""
    pairs = [float(ratio).as_integer_ratio() for ratio in ratios]
    common = max(below for _, below in pairs)  # each is a power of two
    return [above * (common // below) for above, below in pairs]


def _correct_sum(sizes: list[int], quotas: dict[int, int], unit: int, batch: int) -> None:
    """Move single samples until they sum to `batch`, always where the quota, in 1 / unit samples,
    is missed by most.
    """
    while sum(sizes) != batch:
        if sum(sizes) < batch:
            i = max(quotas, key=lambda k: (quotas[k] - sizes[k] * unit, -k))
            sizes[i] += 1
        else:
            above_one = [k for k in quotas if sizes[k] > 1]
            i = max(above_one, key=lambda k: (sizes[k] * unit - quotas[k], k))
            sizes[i] -= 1


def even(batch: int, devices: int) -> tuple[int, ...]:
    """Split `batch` as evenly as whole samples allow; the first devices take the rest."""
    if devices < 1:
        raise RequestError(f"A batch can't be split over {devices} devices.", "Name at least one.")
    each, rest = divmod(_check_batch(batch), devices)
    return tuple(each + (i < rest) for i in range(devices))


def bounds(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The half-open range of rows that each device computes: `batch[start:stop]`."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def gradient_weight(sizes: Sequence[int], rank: int) -> float:
    """The factor of a mean-over-own-rows gradient with which the sum over devices is the mean over
    the batch.

    With n_i rows on device i and N in all, mean over the batch = sum_i (n_i / N) * mean_i.
    """
    total = sum(sizes)
    if total < 1 or min(sizes) < 0:
        raise RequestError(
            f"Shares of {tuple(sizes)} samples don't make a batch.",
            "Give 0 or more to each, 1 or more in all.",
        )
    return sizes[rank] / total


def count_passes(batch: int, micro: int) -> int:
    """The passes that `batch` rows take at up to `micro` rows each; RequestError unless `micro` is
    1 or more.
    """
    whole = whole_number(micro)
    if whole is None or whole < 1:
        raise RequestError(
            f"A pass can't have {micro!r} rows.", "Give a whole number, 1 or above, as micro."
        )
    return -(-batch // whole)


def split_passes(batch: int, micro: int) -> tuple[int, ...]:
    """The rows of each pass, spread evenly: 820 rows at up to 300 are 273, 273 and 274; none for 0
    rows.
    """
    passes = count_passes(batch, micro)
    return even(batch, passes)[::-1] if passes > 0 else ()


def batch_in_one_pass(shares: Sequence[int], micros: Sequence[int]) -> int:
    """The largest batch in the proportions of `shares` that gives no device more rows than one pass
    holds.
    """
    return min(
        micro * sum(shares) // share for share, micro in zip(shares, micros, strict=True) if share
    )


def largest_pass(shares: Sequence[int], micros: Sequence[int]) -> int | None:
    """The rows of the largest pass among the shares that need several; None where each is one
    pass.
    """
    several = [
        split_passes(share, micro)
        for share, micro in zip(shares, micros, strict=True)
        if micro < share
    ]
    return max((passes[-1] for passes in several), default=None)


def shares_to_evaluate(shares: Sequence[int], micros: Sequence[int]) -> tuple[int, ...]:
    """The shares of a batch that each rank computes in one pass: validation isn't cut into
    passes.
    """
    if tuple(shares) == tuple(micros):
        return tuple(shares)
    return apportion(max(len(shares), batch_in_one_pass(shares, micros)), shares)
