"""The best that a machine can do, exactly, from its physics; shares no code with the search.

Every finish time that any device can have for any whole batch is tried; at each, every device does as much as it can,
and for each number of devices k the k that do most are taken.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from evener.devices.simulated.machine import Machine, SimulatedDevice
from tests.support.machine_families import largest

Floats = NDArray[np.float64]


class Best(msgspec.Struct, frozen=True):
    """The highest throughput, and the smallest global batch within a tolerance of it."""

    samples_per_second: float
    smallest_batch: int


def step_times(device: SimulatedDevice, most: int) -> Floats:
    """Seconds of one step alone for 1 ... `most` samples: the machine file's curve, rounded up to its stall."""
    batch = np.arange(1, most + 1, dtype=np.float64)
    known = np.array([b for b, _ in device.curve], dtype=np.float64)
    times = np.array([t for _, t in device.curve], dtype=np.float64)
    right = np.clip(np.searchsorted(known, batch), 1, len(known) - 1)
    slope = (times[right] - times[right - 1]) / (known[right] - known[right - 1])
    milliseconds = np.maximum(0.0, times[right - 1] + slope * (batch - known[right - 1]))
    if device.stall_ms > 0:
        milliseconds = np.ceil(milliseconds / device.stall_ms - 1e-9) * device.stall_ms
    return milliseconds / 1000


def free(machine: Machine, tolerance: float) -> Best:
    """The best of every global batch."""
    alone, finish, totals, costs = _tables(machine)
    top = max(float(np.max(np.arange(1, len(t) + 1) / t)) for t in alone)
    if len(alone) > 1:
        top = max(top, float(np.max(totals[1:] / (finish + costs[1:, None]))))
    return Best(top, _smallest(machine, top * (1 - tolerance)))


def fixed(machine: Machine, batch: int) -> Best:
    """The best of one global batch."""
    alone, finish, totals, costs = _tables(machine)
    least = min((float(t[batch - 1]) for t in alone if len(t) >= batch), default=math.inf)
    for k in range(1, min(len(alone), batch)):
        enough = totals[k] >= batch
        if enough.any():
            least = min(least, float(finish[int(np.argmax(enough))] + costs[k]))
    return Best(batch / least if math.isfinite(least) else 0.0, batch)


def _smallest(machine: Machine, rate: float) -> int:
    """The smallest global batch that reaches a throughput."""
    alone, finish, totals, costs = _tables(machine)
    found = [math.inf]
    for times in alone:
        batch = np.arange(1, len(times) + 1)
        enough = batch[batch / times >= rate * (1 - 1e-12)]
        found.append(float(enough[0]) if len(enough) else math.inf)
    for k in range(1, len(alone)):
        needed = np.maximum(np.ceil(rate * (finish + costs[k]) * (1 - 1e-12)), k + 1)
        enough = needed[needed <= totals[k]]
        found.append(float(enough.min()) if len(enough) else math.inf)
    return int(min(found))


@lru_cache(maxsize=4)
def _tables(machine: Machine) -> tuple[tuple[Floats, ...], Floats, Floats, Floats]:
    """Alone: seconds by batch. Together: finish times, and [k - 1]: the most samples that k devices do by then."""
    alone = tuple(step_times(device, largest(machine, i)) for i, device in enumerate(machine.devices))
    together = [t * (1 + d.contention) for t, d in zip(alone, machine.devices, strict=True)]
    finish = np.unique(np.concatenate(together))
    done = np.stack([np.searchsorted(times, finish * (1 + 1e-12), side="right") for times in together])
    totals = np.cumsum(-np.sort(-done, axis=0), axis=0).astype(np.float64)
    costs = np.array([machine.sync.seconds(k) for k in range(1, len(alone) + 1)])
    return alone, finish, totals, costs
