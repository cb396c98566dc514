"""Divide batches into whole rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import RequestError


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise RequestError unless all ratios are finite and at least 0, and one is above 0."""
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


def check_rank_shares(shares: Sequence[int], rank: int, without_rows: bool = False) -> None:
    """Raise RequestError if a rank has no rows or `rank` doesn't exist.

    `without_rows` allows ranks with 0 rows, if not all have 0.
    """
    least = 0 if without_rows and any(shares) else 1
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int) or share < least:
            raise RequestError(
                f"A share of {share!r} samples leaves a rank without work.",
                "Give each rank 1 or more, and start no process for a device that is left out.",
            )
    if not 0 <= rank < len(shares):
        raise RequestError(f"There is no rank {rank} among {len(shares)}.", "Ranks count from 0.")


def is_ratio(ratio: object) -> bool:
    """Return True for a finite number of 0 or above; bools don't count."""
    try:
        return not isinstance(ratio, bool) and math.isfinite(ratio) and ratio >= 0  # type: ignore[arg-type, operator]
    except (TypeError, OverflowError):
        return False


def apportion(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Divide a batch in proportion to `ratios` by largest remainders; return each device's rows.

    The rows add up to the batch, and ties go to the earlier device. A ratio of 0 gets no rows.
    Every other device gets at least one if there are enough. Raises RequestError for an invalid
    batch or ratio.
    """
    # an empty replica can abort a TensorFlow process
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
    """Return the value as an int, or None if it is a bool or not an integer.

    Integers of NumPy and PyTorch count.
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
    """Return integers in exactly the same proportion as the ratios."""
    pairs = [float(ratio).as_integer_ratio() for ratio in ratios]
    common = max(below for _, below in pairs)  # each is a power of two
    return [above * (common // below) for above, below in pairs]


def _correct_sum(sizes: list[int], quotas: dict[int, int], unit: int, batch: int) -> None:
    """Change the sizes in place until they sum to the batch."""
    # Samples are added or removed at the device whose size differs most from its quota. The quotas
    # are the exact sizes by device, multiplied by `unit` so that they are whole numbers.
    while sum(sizes) != batch:
        if sum(sizes) < batch:
            i = max(quotas, key=lambda k: (quotas[k] - sizes[k] * unit, -k))
            sizes[i] += 1
        else:
            # each device keeps a sample
            above_one = [k for k in quotas if sizes[k] > 1]
            i = max(above_one, key=lambda k: (sizes[k] * unit - quotas[k], k))
            sizes[i] -= 1


def even(batch: int, devices: int) -> tuple[int, ...]:
    """Divide a batch into equal shares; the first ones may have one row more.

    Raises RequestError for an invalid batch or no devices.
    """
    if devices < 1:
        raise RequestError(f"A batch can't be split over {devices} devices.", "Name at least one.")
    each, rest = divmod(_check_batch(batch), devices)
    return tuple(each + (i < rest) for i in range(devices))


def bounds(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the first row of each share in the batch, and the row after its last."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def gradient_weight(sizes: Sequence[int], rank: int) -> float:
    """Return the weight of a rank's mean gradient in the global batch's gradient.

    Raises RequestError if a share is negative or all are 0.
    """
    # with n_i rows on device i and N rows in total, the batch's mean is sum_i (n_i / N) * mean_i
    total = sum(sizes)
    if total < 1 or min(sizes) < 0:
        raise RequestError(
            f"Shares of {tuple(sizes)} samples don't make a batch.",
            "Give 0 or more to each, 1 or more in all.",
        )
    return sizes[rank] / total


def count_passes(batch: int, micro: int) -> int:
    """Return the number of passes for `batch` rows, with at most `micro` rows in each.

    Raises RequestError if `micro` isn't a whole number of at least 1.
    """
    whole = whole_number(micro)
    if whole is None or whole < 1:
        raise RequestError(
            f"A pass can't have {micro!r} rows.", "Give a whole number, 1 or above, as micro."
        )
    return -(-batch // whole)


def split_passes(batch: int, micro: int) -> tuple[int, ...]:
    """Return the rows of each pass, as equal as possible, with the smaller passes first.

    The result is () for 0 rows. Raises RequestError if `micro` isn't a whole number of at least 1.
    """
    passes = count_passes(batch, micro)
    return even(batch, passes)[::-1] if passes > 0 else ()


def batch_in_one_pass(shares: Sequence[int], micros: Sequence[int]) -> int:
    """Return the largest global batch that, divided in these shares, needs one pass per device."""
    return min(
        micro * sum(shares) // share for share, micro in zip(shares, micros, strict=True) if share
    )


def largest_pass(shares: Sequence[int], micros: Sequence[int]) -> int | None:
    """Return the rows of the largest pass among devices with several passes.

    Returns None if every device needs only one pass.
    """
    several = [
        split_passes(share, micro)
        for share, micro in zip(shares, micros, strict=True)
        if micro < share
    ]
    return max((passes[-1] for passes in several), default=None)


def shares_to_evaluate(shares: Sequence[int], micros: Sequence[int]) -> tuple[int, ...]:
    """Return the shares for validation, each small enough for one pass."""
    # the training shares are scaled down only if one of them needs several passes
    if tuple(shares) == tuple(micros):
        return tuple(shares)
    return apportion(max(len(shares), batch_in_one_pass(shares, micros)), shares)
