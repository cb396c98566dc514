"""Ratios to whole samples: who computes which slice of a batch, and what its gradient weighs.

Pure integer arithmetic, shared by the search, the Keras and the PyTorch adapters, so that what is measured is what trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from evener.errors import RequestError


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise RequestError unless every ratio is finite and not negative, and at least one is above 0."""
    if not ratios:
        raise RequestError("The list of ratios is empty.", "Give one ratio for each device.")
    for ratio in ratios:
        if isinstance(ratio, bool) or not math.isfinite(ratio) or ratio < 0:
            raise RequestError(
                f"A ratio of {ratio} is not a share of a batch.", "Ratios are finite numbers, 0 or above."
            )
    if not any(ratios):
        raise RequestError("Every ratio is 0.", "At least one device needs a ratio above 0.")


def apportion(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Split `batch` samples by `ratios`, by largest remainder; the result sums to `batch`.

    A device with a ratio above 0 gets at least one sample when the batch has one for each of them: an empty
    replica can abort a TensorFlow process. With fewer samples than such devices, the first ones get one each.
    A device with ratio 0 gets none. Ties go to the earlier device.
    """
    check_ratios(ratios)
    if batch < 0:
        raise RequestError(f"A batch of {batch} samples can't be split.", "Give a batch of 1 or more.")
    active = [i for i, ratio in enumerate(ratios) if ratio > 0]
    sizes = [0] * len(ratios)
    if batch <= len(active):
        for i in active[:batch]:
            sizes[i] = 1
        return tuple(sizes)
    total = math.fsum(ratios)
    quotas = {i: batch * (ratios[i] / total) for i in active}
    for i in active:
        sizes[i] = max(1, math.floor(quotas[i]))
    _settle(sizes, quotas, batch)
    return tuple(sizes)


def _settle(sizes: list[int], quotas: dict[int, float], batch: int) -> None:
    """Move single samples until the sizes sum to `batch`, always where the quota is missed most."""
    while (missing := batch - sum(sizes)) != 0:
        if missing > 0:
            i = max(quotas, key=lambda k: (quotas[k] - sizes[k], -k))
            sizes[i] += 1
        else:
            above_one = [k for k in quotas if sizes[k] > 1]
            i = max(above_one, key=lambda k: (sizes[k] - quotas[k], k))
            sizes[i] -= 1


def even(batch: int, devices: int) -> tuple[int, ...]:
    """Split `batch` as evenly as whole samples allow; the first devices take the rest."""
    return apportion(batch, [1.0] * devices)


def keras_split(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Split as `multi_gpu_model(..., ratios=...)` did: each gets the floor of its part, the last takes the rest.

    Source: jinkos/multi-gpus, ratio_training_utils.py, and keras.utils.multi_gpu_model.
    """
    check_ratios(ratios)
    total = math.fsum(ratios)
    sizes = [math.floor(ratio * batch / total) for ratio in ratios[:-1]]
    return (*sizes, batch - sum(sizes))


def bounds(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The half-open range of rows that each device computes: `batch[start:stop]`."""
    stops = list(accumulate(sizes))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def gradient_weight(sizes: Sequence[int], rank: int) -> float:
    """What multiplies a mean-over-own-rows gradient so that the sum over devices is the mean over the batch.

    With n_i rows on device i and N in all, mean over the batch = sum_i (n_i / N) * mean_i.
    """
    return sizes[rank] / sum(sizes)
