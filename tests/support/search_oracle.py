"""The best that a machine can do, exactly, from its physics; shares no code with the search.

Every finish time that any device can have for any whole batch is tried; at each, every device does as much as it can,
in passes of any size, and for each number of devices k the k that do most are taken.
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
Whole = NDArray[np.int64]
MOST_TIMES = 300_000  # finish times; of more, every n-th


class Best(msgspec.Struct, frozen=True):
    """The highest throughput, and the smallest global batch within a tolerance of it."""

    samples_per_second: float
    smallest_batch: int


def step_times(device: SimulatedDevice, wall: int, most: int, micro: bool = True) -> Floats:
    """Seconds of one step alone for 1 ... `most` samples, in the passes of at most `wall` rows that take least time.

    Time is linear in the number of passes as long as the rows of a pass stay between two points of the curve, so the
    best number is the least that fits, or one whose passes end at a point. Without `micro` it is one pass.
    """
    batch = np.arange(1, most + 1)
    (left, low), (right, high) = device.curve[:2]
    free_rows = int(left - low * (right - left) / (high - low)) if high > low else 0  # by the line before the curve
    sizes = [wall, 1, *(b for b in (free_rows, free_rows + 1, *(b for b, _ in device.curve)) if 0 < b <= wall)]
    counts = [-(-batch // size) + more for size in sizes for more in (-1, 0, 1)]
    fits = [np.clip(count, -(-batch // wall), batch if micro else 1) for count in counts]
    milliseconds = np.min([_in_passes(device, batch, count) for count in fits], axis=0)
    if device.stall_ms > 0:
        milliseconds = np.ceil(milliseconds / device.stall_ms - 1e-9) * device.stall_ms
    return np.asarray(milliseconds / 1000)


def _in_passes(device: SimulatedDevice, batch: Whole, passes: Whole) -> Floats:
    """Milliseconds in so many passes, without stalls."""
    rows, larger = np.divmod(batch, passes)
    total = (passes - larger) * _along(device, rows) + larger * _along(device, rows + 1)
    again = 0.0 if device.pass_overhead_ms is None else device.fixed_ms - device.pass_overhead_ms
    return np.asarray(total - (passes - 1) * again)


def _along(device: SimulatedDevice, batch: Whole) -> Floats:
    known = np.array([b for b, _ in device.curve], dtype=np.float64)
    times = np.array([t for _, t in device.curve], dtype=np.float64)
    right = np.clip(np.searchsorted(known, batch), 1, len(known) - 1)
    slope = (times[right] - times[right - 1]) / (known[right] - known[right - 1])
    return np.asarray(np.maximum(0.0, times[right - 1] + slope * (batch - known[right - 1])))


def free(machine: Machine, tolerance: float) -> Best:
    """The best of every global batch whose shares fit at once."""
    alone, finish, totals, costs = _tables(machine, None, micro=False)
    top = max(float(np.max(np.arange(1, len(t) + 1) / t)) for t in alone)
    if len(alone) > 1:
        top = max(top, float(np.max(totals[1:] / (finish + costs[1:, None]))))
    return Best(top, _smallest(machine, top * (1 - tolerance)))


def fixed(machine: Machine, batch: int, micro: bool = True) -> Best:
    """The best of one global batch."""
    alone, finish, totals, costs = _tables(machine, batch, micro)
    least = min((float(t[batch - 1]) for t in alone if len(t) >= batch), default=math.inf)
    for k in range(1, min(len(alone), batch)):
        enough = totals[k] >= batch
        if enough.any():
            least = min(least, float(finish[int(np.argmax(enough))] + costs[k]))
    return Best(batch / least if math.isfinite(least) else 0.0, batch)


def _smallest(machine: Machine, rate: float) -> int:
    """The smallest global batch that reaches a throughput."""
    alone, finish, totals, costs = _tables(machine, None, micro=False)
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
def _tables(machine: Machine, batch: int | None, micro: bool) -> tuple[tuple[Floats, ...], Floats, Floats, Floats]:
    """Alone: seconds by batch. Together: finish times, and [k - 1]: the most samples that k devices do by then."""
    walls = [largest(machine, i) for i in range(len(machine.devices))]
    slower = [1 + device.contention for device in machine.devices]
    most = [wall if batch is None else batch if micro else min(wall, batch) for wall in walls]
    times = [step_times(device, wall, n, micro) for device, wall, n in zip(machine.devices, walls, most, strict=True)]
    together = [t * slow for t, slow in zip(times, slower, strict=True)]
    finish = np.unique(np.concatenate(together))
    if len(finish) > MOST_TIMES:
        finish = finish[:: -(-len(finish) // MOST_TIMES)]
    done = np.stack([np.searchsorted(t, finish * (1 + 1e-12), side="right") for t in together])
    order = np.argsort(-done, axis=0, kind="stable")
    totals = np.cumsum(np.take_along_axis(done, order, axis=0), axis=0).astype(np.float64)
    costs = np.array([machine.sync.seconds(k) for k in range(1, len(walls) + 1)])
    return tuple(times), finish, totals, costs
