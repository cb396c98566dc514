"""A device's times in a live record, from its last steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple


class DeviceTimes(NamedTuple):
    """A device's times in a step; fields are those of LiveDevice."""

    own_work_s: float = 0.0
    waiting_s: float = 0.0
    least_waiting_s: float = 0.0
    own_spread: float = 0.0


def sum_up(own: Sequence[float], waiting: Sequence[float]) -> DeviceTimes:
    """Sum up steps with these seconds of own work and waiting."""
    return DeviceTimes(middle(own), middle(waiting), max(0.0, _lowest_tenth(waiting)), spread(own))


def middle(values: Sequence[float]) -> float:
    """The median, 0 for none."""
    return max(0.0, median(values)) if values else 0.0


def spread(values: Sequence[float]) -> float:
    """The interquartile range over the median."""
    low, half, high = quantiles(values) if len(values) > 1 else (0.0, 0.0, 0.0)
    return (high - low) / half if half > 0 else 0.0


def _lowest_tenth(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10] if values else 0.0
