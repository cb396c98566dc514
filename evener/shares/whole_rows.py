"""Divide batches into whole numbers of rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import RequestError


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise RequestError if a ratio is negative or not finite, or if all of them are 0."""
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
    """Check that each rank has rows, and that `rank` is one of the ranks.

    If `without_rows` is True, ranks may have 0 rows, as long as not all do. Raises RequestError if
    the check fails.
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
    """Return True if the value is a finite number of at least 0, but not a bool."""
    try:
        return not isinstance(ratio, bool) and math.isfinite(ratio) and ratio >= 0  # type: ignore[arg-type, operator]
    except (TypeError, OverflowError):
        return False


def apportion(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Divide a batch in proportion to `ratios`, and return the rows of each device.

    The rows add up to the batch. They are rounded by the method of largest remainders, and ties go
    to the earlier device. A device with ratio 0 gets no rows. Every other device gets at least one
    row if there are enough. Raises RequestError if the batch or a ratio is invalid.
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
    """Return a value as an int, or None if it is a bool or isn't an integer.

    Integers of NumPy and PyTorch are accepted.
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
    """Return integers that are in exactly the same proportion as the ratios."""
    pairs = [float(ratio).as_integer_ratio() for ratio in ratios]
    common = max(below for _, below in pairs)  # each is a power of two
    return [above * (common // below) for above, below in pairs]


def _correct_sum(sizes: list[int], quotas: dict[int, int], unit: int, batch: int) -> None:
    """Change sizes in place so that they add up to the batch.

    `quotas` are the exact sizes by device, multiplied by `unit` so that they are whole numbers.
    """
    # rows are added or removed at the device whose size differs most from its quota
    while sum(sizes) != batch:
        if sum(sizes) < batch:
            i = max(quotas, key=lambda k: (quotas[k] - sizes[k] * unit, -k))
            sizes[i] += 1
        else:
            # each device keeps a row
            above_one = [k for k in quotas if sizes[k] > 1]
            i = max(above_one, key=lambda k: (sizes[k] * unit - quotas[k], k))
            sizes[i] -= 1


def even(batch: int, devices: int) -> tuple[int, ...]:
    """Divide a batch into equal shares. If it isn't divisible, the first shares have one row more.

    Raises RequestError if the batch is invalid or there are no devices.
    """
    if devices < 1:
        raise RequestError(f"A batch can't be split over {devices} devices.", "Name at least one.")
    each, rest = divmod(_check_batch(batch), devices)
    return tuple(each + (i < rest) for i in range(devices))


def bounds(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the index of each share's first row in the batch, and the index after its last."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def gradient_weight(sizes: Sequence[int], rank: int) -> float:
    """Return the weight of a rank's mean gradient in the mean gradient of the global batch.

    `sizes` are the rows of all ranks. Raises RequestError if a size is negative or all are 0.
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
    """Return how many passes are needed for `batch` rows, with at most `micro` rows each.

    Raises RequestError if `micro` isn't a whole number of at least 1.
    """
    whole = whole_number(micro)
    if whole is None or whole < 1:
        raise RequestError(
            f"A pass can't have {micro!r} rows.", "Give a whole number, 1 or above, as micro."
        )
    return -(-batch // whole)


def split_passes(batch: int, micro: int) -> tuple[int, ...]:
    """Divide a batch into passes of at most `micro` rows, and return the rows of each.

    The passes are as equal as possible, with the smaller ones first. Returns () for 0 rows. Raises
    RequestError if `micro` isn't a whole number of at least 1.
    """
    passes = count_passes(batch, micro)
    return even(batch, passes)[::-1] if passes > 0 else ()


def batch_in_one_pass(shares: Sequence[int], micros: Sequence[int]) -> int:
    """Return the largest global batch for which no device needs more than one pass.

    The batch is divided in the same proportions as `shares`. `micros` are the maximum rows per pass
    of each device.
    """
    return min(
        micro * sum(shares) // share for share, micro in zip(shares, micros, strict=True) if share
    )


def largest_pass(shares: Sequence[int], micros: Sequence[int]) -> int | None:
    """Return the rows of the largest pass of any device that takes several passes.

    Returns None if every device takes one pass.
    """
    several = [
        split_passes(share, micro)
        for share, micro in zip(shares, micros, strict=True)
        if micro < share
    ]
    return max((passes[-1] for passes in several), default=None)


def shares_to_evaluate(shares: Sequence[int], micros: Sequence[int]) -> tuple[int, ...]:
    """Return the shares to use for validation, where each device computes its rows in one pass.

    `shares` and `micros` are the devices' rows per step and per pass in training.
    """
    # the training shares are scaled down only if one of them needs several passes
    if tuple(shares) == tuple(micros):
        return tuple(shares)
    return apportion(max(len(shares), batch_in_one_pass(shares, micros)), shares)
