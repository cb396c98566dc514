"""Simulates ranks of a training without a plan, to test the rule that rebalances them.

Own work, host, input and memory of each rank are simulated, and so is time. As with PyTorch, the
rule gets the medians of windows of steps, two windows at a time, and a change takes effect after
the batches that were fetched ahead.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from evener.plan.solver import proportional_curves
from evener.training.bottleneck import RankTimes, fewest_windows, find_bottleneck
from evener.training.memory_growth import LEFT_AT_RISK, MemoryPeaks
from evener.training.rebalance import Rebalancer

GIB = 2.0**30
WINDOW_SECONDS, FEWEST_STEPS, MOST_STEPS, WINDOWS = 0.05, 5, 25, 2  # the values of rebalancing.py

Slowdown = Callable[[float], float]  # by time in seconds: 2.0 takes twice as long


def steady(_at: float) -> float:
    """Return 1: nothing changes."""
    return 1.0


class Device(NamedTuple):
    """A rank's device; a step's own work takes as long as the slower of device and host."""

    row_s: float
    fixed_s: float = 0.0
    host_s: float = 0.0  # to launch the kernels of a pass, whatever its rows
    slowdown: Slowdown = steady
    fixed_bytes: float = 2 * GIB
    row_bytes: float = 0.05 * GIB
    capacity_bytes: float = 139 * GIB
    on_gpu: bool = True

    def device_seconds(self, rows: int, at: float) -> float:
        """Return the seconds for which the device computes."""
        return (self.fixed_s + self.row_s * rows) * self.slowdown(at)

    def seconds(self, rows: int, at: float) -> float:
        """Return the seconds of own work."""
        return max(self.device_seconds(rows, at), self.host_s)

    def bytes(self, rows: int) -> float:
        """Return the memory that a pass needs."""
        return self.fixed_bytes + self.row_bytes * rows


class Noise(NamedTuple):
    """Relative deviations of own work: of single steps, and a drift that lasts several steps."""

    step: float = 0.01
    drift: float = 0.0
    drift_steps: float = 30.0
    rare: float = 0.0  # fraction of steps that take three times as long


class Training(NamedTuple):
    """The shares and the seconds of each step."""

    devices: tuple[Device, ...]
    shares: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    @property
    def changes(self) -> int:
        """How often shares changed."""
        return sum(a != b for a, b in zip(self.shares, self.shares[1:], strict=False))

    def rate_of_best(self, step: int) -> float:
        """Return the throughput with the shares of a step, relative to that with the
        best shares.
        """
        here, best = self.shares[step], best_seconds(self.devices, sum(self.shares[0]))
        return best / _slowest(self.devices, here)

    @property
    def memory_part(self) -> float:
        """The largest fraction of a device's memory that was used."""
        return max(
            device.bytes(rows) / device.capacity_bytes
            for shares in set(self.shares)
            for device, rows in zip(self.devices, shares, strict=True)
        )


def best_seconds(devices: Sequence[Device], rows: int) -> float:
    """Return the shortest time for these rows, if they can be divided into fractions."""
    low, high = 0.0, max(each.seconds(rows, 0.0) for each in devices)
    for _ in range(60):
        middle = (low + high) / 2
        fast = [each for each in devices if middle >= max(each.host_s, each.fixed_s)]
        if sum((middle - each.fixed_s) / each.row_s for each in fast) >= rows:
            high = middle
        else:
            low = middle
    return high


def train(
    devices: Sequence[Device],
    rows: Sequence[int],
    steps: int,
    seed: int,
    noise: Noise = Noise(),  # noqa: B008 - a tuple
    input_s: float = 0.0,
    ahead: int = 0,
    exchange_s: float = 0.01,
) -> Training:
    """Train with the rule that rebalances.

    Loader workers fetch a batch in `input_s`, `ahead` batches early; with 0 the loop fetches it.
    """
    numbers = random.Random(seed)
    world, shares, at = len(devices), tuple(rows), 0.0
    rule = Rebalancer(shares, proportional_curves(shares), (0,) * world, False)
    peaks, largest = [MemoryPeaks() for _ in devices], list(shares)
    drifts = [0.0] * world
    keeps = math.exp(-1 / noise.drift_steps)
    window: list[list[RankTimes]] = []
    windows: list[tuple[int, list[float]]] = []
    window_steps, coming = FEWEST_STEPS, (-1, shares)
    seen, seconds = [], []
    for step in range(steps):
        if step == coming[0]:
            shares = coming[1]
            window.clear()
            windows.clear()
        largest = list(map(max, largest, shares))
        figures = []
        for rank, device in enumerate(devices):
            fresh = numbers.gauss(0.0, noise.drift * math.sqrt(1 - keeps**2))
            drifts[rank] = drifts[rank] * keeps + fresh
            factor = math.exp(numbers.gauss(0.0, noise.step) + drifts[rank])
            factor *= 3.0 if numbers.random() < noise.rare else 1.0
            own = device.seconds(shares[rank], at) * factor
            behind = device.device_seconds(shares[rank], at) > device.host_s
            figures.append((own, behind, device.on_gpu))
        slowest = max(own for own, _, _ in figures)
        late = max(0.0, input_s - slowest - exchange_s) if ahead else input_s
        step_s = slowest + exchange_s + late
        at += step_s
        seen.append(shares)
        seconds.append(step_s)
        window.append(
            [
                RankTimes(
                    own,
                    late if ahead else 0.0,
                    step_s,
                    float(behind) if on_gpu else math.nan,
                    math.nan if on_gpu else 1.0,
                )
                for own, behind, on_gpu in figures
            ]
        )
        if step < coming[0] or len(window) < window_steps:
            continue
        medians = [_middle(each) for each in zip(*window, strict=True)]
        window.clear()
        windows.append((step, [each.own_work_s for each in medians]))
        if len(windows) < WINDOWS:
            continue
        fits = []
        for peak, device, most in zip(peaks, devices, largest, strict=True):
            peak.record(most, device.bytes(most), device.fixed_bytes)
            fits.append(peak.most_rows(device.capacity_bytes, LEFT_AT_RISK))
        middle_s = max(each.step_s for each in medians)
        fewest = fewest_windows(find_bottleneck(medians), window_steps * middle_s)
        window_steps = int(min(max(FEWEST_STEPS, WINDOW_SECONDS / middle_s), MOST_STEPS))
        for end, own_work_s in windows:
            change = rule.observe(
                end, own_work_s, shares, fits=fits, step_s=middle_s, min_windows=fewest
            )
            if change is not None:
                coming = step + 2 + ahead, change.shares
                break
        windows.clear()
    return Training(tuple(devices), tuple(seen), tuple(seconds))


def _middle(figures: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(*(median(each) for each in zip(*figures, strict=True)))


def _slowest(devices: Sequence[Device], shares: Sequence[int]) -> float:
    return max(each.seconds(rows, 0.0) for each, rows in zip(devices, shares, strict=True))
