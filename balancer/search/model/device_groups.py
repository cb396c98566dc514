"""Groups of indistinguishable devices: they share one curve fitted to the points of all, hence equal shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .evidence import DeviceEvidence
from .step_time import SAME_BATCH, Point

MEAN_ERRORS = 3.0  # standard errors by which the mean ratio of two devices' times may differ from 1 (equal, identical)
BATCH_ERRORS = 4.0  # the same for a single batch, of which there are several (equal, identical)
FEWEST_COMMON = 2  # batches in common: at one, a fixed cost and a slope can't be told apart


def group_devices(devices: Sequence[DeviceEvidence], limits: Sequence[int] = ()) -> list[list[int]]:
    """Positions grouped so that each is as fast as the first of its group; lost devices are groups of their own.

    Devices of which the training has different parts are never one group, however noisy their points are.
    """
    pace = [device.alone[0].seconds if device.alone else math.inf for device in devices]
    order = sorted(range(len(devices)), key=lambda i: (pace[i], i))
    part = limits or (0,) * len(devices)
    return group_by(order, lambda one, other: part[one] == part[other] and same_speed(devices[one], devices[other]))


def group_by(order: Iterable[int], same: Callable[[int, int], bool]) -> list[list[int]]:
    """Each in the last group whose first is the `same`, or in one of its own."""
    groups: list[list[int]] = []
    for position in order:
        group = next((group for group in reversed(groups) if same(group[0], position)), [])
        if not group:
            groups.append(group)
        group.append(position)
    return [sorted(group) for group in groups]


def same_speed(one: DeviceEvidence, other: DeviceEvidence) -> bool:
    """True if noise alone explains how two devices differ, in time at every common batch."""
    if one.lost or other.lost:
        return False
    pairs = [*_common(one.alone, other.alone), *_common(one.in_splits, other.in_splits)]
    if len(pairs) < FEWEST_COMMON:
        return False
    gaps = [math.log(a.seconds / b.seconds * (b.batch / a.batch) ** 0.5) for a, b in pairs]
    errors = [math.hypot(a.sure_error, b.sure_error) for a, b in pairs]
    return is_noise(gaps, errors)


def is_noise(gaps: Sequence[float], errors: Sequence[float]) -> bool:
    """True if the logarithms of time ratios differ from 0 by no more than their errors explain."""
    if any(abs(gap) > BATCH_ERRORS * error for gap, error in zip(gaps, errors, strict=True)):
        return False
    weights = [1 / error**2 for error in errors]
    mean = math.fsum(w * gap for w, gap in zip(weights, gaps, strict=True)) / math.fsum(weights)
    return abs(mean) <= MEAN_ERRORS / math.sqrt(math.fsum(weights))


def _common(points: Sequence[Point], others: Sequence[Point]) -> list[tuple[Point, Point]]:
    return [(a, b) for a in points for b in others if abs(a.batch - b.batch) <= SAME_BATCH * a.batch]
