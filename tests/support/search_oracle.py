"""The exact best throughput of a machine, computed without any of the search's code.

It tries every time at which a device can finish some number of samples. Until each such time, every
device does as much as it can, in passes of any size; for each set of hosts and each number k of
their devices, the k that do most are taken. At a given moment, lost devices are gone, memory that
other processes use is missing, and a throttled device's own part takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from evener.devices.machine import Machine, SimulatedDevice
from evener.devices.types import Limit
from tests.support.machine_families import largest
from tests.support.machines import samples_per_second

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
MOST_TIMES = 300_000  # finish times; of more than that, every n-th is tried
NEAR = 1e-9  # times are equal within this fraction


class Best(msgspec.Struct, frozen=True):
    """The highest throughput, and the smallest global batch within a tolerance of it."""

    samples_per_second: float
    smallest_batch: int


class Tables(msgspec.Struct, frozen=True):
    """Times of each device alone: the seconds of 1, 2, ... samples.

    For several devices, `done` has the samples that each has done at each of the `finish` times.
    """

    alone: tuple[Floats, ...]
    finish: Floats
    done: Whole
    # for each set of hosts: the samples of the best k devices by finish time, and the sync cost of
    # k
    teams: tuple[tuple[Floats, Floats], ...]


def free(
    machine: Machine, tolerance: float, quantum: int = 1, most: int | None = None, at: float = -1.0
) -> Best:
    """Return the best result of all global batches whose shares fit at once.

    `at` is the moment; by default it is before any event. If `most` limits the global batch and
    times fall as shares grow, the result is an upper bound.
    """
    now, kept = moment(machine, at)
    if not kept:
        return Best(0.0, 0)
    return _free(now, tolerance, quantum, most)


def fixed(
    machine: Machine, batch: int, micro: bool = True, quantum: int = 1, at: float = -1.0
) -> Best:
    """Return the best result for one global batch."""
    now, kept = moment(machine, at)
    if not kept:
        return Best(0.0, batch)
    return Best(_fixed(now, batch, micro, quantum), batch)


def true_rate(
    machine: Machine, shares: Sequence[int], micro: Sequence[int] = (), at: float = -1.0
) -> float:
    """Return the samples/s of a layout at a moment.

    It is 0 if one of its devices is lost or has too little memory then.
    """
    now, kept = moment(machine, at)
    left = [shares[i] for i in kept]
    if sum(left) < sum(shares):
        return 0.0
    rows = [(micro or shares)[i] for i in kept]
    for i, most in enumerate(rows):
        if most and now.memory_bytes(i, most) > now.usable_memory_bytes(i):
            return 0.0
    return samples_per_second(now, left, rows)


def moment(machine: Machine, at: float) -> tuple[Machine, list[int]]:
    """Return the machine at a moment, without events and lost devices.

    The list has the original positions of the remaining devices.
    """
    kept = [i for i in range(len(machine.devices)) if not machine.lost(i, at)]
    devices = []
    limits = []
    for i in kept:
        room = machine.usable_memory_bytes(i) - machine.short_bytes(i, at)
        devices.append(_slower(machine.devices[i], machine.slowed(i, at)))
        limits.append(Limit(machine.limit(i).percent, max(1, room)))
    return Machine(tuple(devices), machine.sync, tuple(limits)), kept


def _slower(device: SimulatedDevice, slowed: float) -> SimulatedDevice:
    by = 1 / (1 - slowed)
    again = device.pass_overhead_ms
    return msgspec.structs.replace(
        device,
        curve=tuple((batch, by * ms) for batch, ms in device.curve),
        stall_ms=by * device.stall_ms,
        pass_overhead_ms=None if again is None else by * again,
    )


def step_times(device: SimulatedDevice, pass_limit: int, most: int, micro: bool = True) -> Floats:
    """Return the shortest times of a step on one device, for 1 to `most` samples.

    Passes have at most `pass_limit` rows. Time is linear in the number of passes while the rows of
    a pass stay between two points of the curve, so the best number is the smallest that fits, or
    one whose passes end at a point. Without `micro` there is only one pass.
    """
    batch = np.arange(1, most + 1)
    fewest = -(-batch // pass_limit)
    counts: list[Whole] = [np.clip(1, fewest, 1)]
    if micro:
        counts = []
        for size in _pass_sizes(device, pass_limit):
            near = -(-batch // size)
            counts += [np.clip(near + more, fewest, batch) for more in (-1, 0, 1)]
    milliseconds = np.full(most, np.inf)
    for count in counts:
        milliseconds = np.minimum(milliseconds, _in_passes(device, batch, count))
    if device.stall_ms > 0:
        milliseconds = np.ceil(milliseconds / device.stall_ms - 1e-9) * device.stall_ms
    return np.asarray(milliseconds / 1000)


def _pass_sizes(device: SimulatedDevice, pass_limit: int) -> list[int]:
    """Return the numbers of rows at which the slope of a pass's time may change."""
    (left, low), (right, high) = device.curve[:2]
    # where the curve's first line, extended, reaches zero
    free_rows = int(left - low * (right - left) / (high - low)) if high > low else 0
    bends = [free_rows, free_rows + 1, *(batch for batch, _ in device.curve)]
    return list(dict.fromkeys([pass_limit, 1, *(rows for rows in bends if 0 < rows <= pass_limit)]))


def _in_passes(device: SimulatedDevice, batch: Whole, passes: Whole) -> Floats:
    """Return the milliseconds for this many passes, without stalls."""
    rows, larger = np.divmod(batch, passes)
    total = (passes - larger) * _along(device, rows) + larger * _along(device, rows + 1)
    again = 0.0 if device.pass_overhead_ms is None else device.fixed_ms - device.pass_overhead_ms
    return np.asarray(total - (passes - 1) * again)


def _along(device: SimulatedDevice, batch: Whole) -> Floats:
    known = np.array([b for b, _ in device.curve], dtype=np.float64)
    times = np.array([t for _, t in device.curve], dtype=np.float64)
    right = np.clip(np.searchsorted(known, batch), 1, len(known) - 1)
    slope = (times[right] - times[right - 1]) / (known[right] - known[right - 1])
    # beyond a falling line, the time stays the same
    inside = np.where(slope < 0, np.clip(batch, known[right - 1], known[right]), batch)
    return np.asarray(np.maximum(0.0, times[right - 1] + slope * (inside - known[right - 1])))


def _free(machine: Machine, tolerance: float, quantum: int, most: int | None) -> Best:
    tables = _tables(machine, None, False, quantum)
    limit = math.inf if most is None else most // quantum * quantum

    def rate(times: Floats, done: Floats) -> float:
        return float(np.max(np.minimum(done, limit) / times, initial=0.0))

    top = max((rate(t, _sizes(t, quantum, limit)) for t in tables.alone), default=0.0)
    for totals, costs in tables.teams:
        top = max(top, rate(tables.finish + costs[1:, None], totals[1:]))
    return Best(top, _smallest(tables, top * (1 - tolerance), quantum, limit))


def _sizes(times: Floats, quantum: int, limit: float) -> Floats:
    """Return the batches of a table that are allowed; 0 for the others."""
    batch = np.arange(1, len(times) + 1, dtype=np.float64)
    return np.where((batch % quantum == 0) & (batch <= limit), batch, 0.0)


def _smallest(tables: Tables, rate: float, quantum: int, limit: float) -> int:
    """Return the smallest global batch that reaches a throughput."""
    found = [math.inf]
    for times in tables.alone:
        batch = _sizes(times, quantum, limit)
        enough = batch[(batch > 0) & (batch / times >= rate * (1 - 1e-12))]
        found.append(float(enough[0]) if len(enough) else math.inf)
    for totals, costs in tables.teams:
        for k in range(1, len(totals)):
            needed = np.maximum(np.ceil(rate * (tables.finish + costs[k]) * (1 - 1e-12)), k + 1)
            needed = np.ceil(needed / quantum) * quantum
            enough = needed[(needed <= totals[k]) & (needed <= limit)]
            found.append(float(enough.min()) if len(enough) else math.inf)
    return int(min(found)) if math.isfinite(min(found)) else 0


def _fixed(machine: Machine, batch: int, micro: bool, quantum: int) -> float:
    tables = _tables(machine, batch, micro, quantum)
    least = min((float(t[batch - 1]) for t in tables.alone if len(t) >= batch), default=math.inf)
    if any(np.any(t[1:] < t[:-1] * (1 - NEAR)) for t in tables.alone):
        least = min(least, _least_of_falling(machine, tables, batch, quantum))
    else:
        for totals, costs in tables.teams:
            for k in range(1, min(len(totals), batch)):
                enough = totals[k] >= batch
                if enough.any():
                    least = min(least, float(tables.finish[int(np.argmax(enough))] + costs[k]))
    return batch / least if math.isfinite(least) else 0.0


def _least_of_falling(machine: Machine, tables: Tables, batch: int, quantum: int) -> float:
    """Return the shortest step if a larger share may take less time, by bisection for each set of
    devices.
    """
    count = len(tables.alone)
    least = math.inf
    together = [
        alone * (1 + device.contention)
        for alone, device in zip(tables.alone, machine.devices, strict=True)
    ]
    for k in range(2, min(count, batch) + 1):
        for team in combinations(range(count), k):
            times = [together[i] for i in team]
            step = _first(tables.finish, partial(_adds_up, times, batch, quantum))
            least = min(least, step + machine.sync_seconds(team))
    return least


def _first(finish: Floats, holds: Callable[[float], bool]) -> float:
    """Return the earliest finish time for which `holds` is true, as it is for all later ones.

    It is infinite if there is none.
    """
    low = -1
    high = len(finish)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(float(finish[middle])):
            high = middle
        else:
            low = middle
    return float(finish[high]) if high < len(finish) else math.inf


def _adds_up(times: Sequence[Floats], batch: int, quantum: int, finish: float) -> bool:
    """Return whether shares that each finish in time can add up to the batch.

    The possible sums are the bits of an integer.
    """
    keep = (1 << batch + 1) - 1
    sums = 1
    for each in times:
        in_time = each <= finish * (1 + 1e-12)
        whole = np.arange(1, len(each) + 1) % quantum == 0
        fit = np.zeros(len(each) + 2, dtype=bool)
        fit[1:-1] = in_time & whole
        edges = np.flatnonzero(fit[1:] != fit[:-1])
        now = 0
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            now |= _spread(sums << int(first) + 1, int(last - first))
        sums = now & keep
    return bool(sums >> batch & 1)


def _spread(sums: int, width: int) -> int:
    """Return the bits of `sums`, each with the width - 1 bits above it."""
    reach = 1
    while reach < width:
        more = min(reach, width - reach)
        sums |= sums << more
        reach += more
    return sums


@lru_cache(maxsize=4)
def _tables(machine: Machine, batch: int | None, micro: bool, quantum: int) -> Tables:
    times = []
    together = []
    for i, device in enumerate(machine.devices):
        pass_limit = largest(machine, i)
        most = pass_limit
        if batch is not None:
            most = batch if micro and pass_limit else min(pass_limit, batch)
        alone = step_times(device, pass_limit, most, micro)
        times.append(alone)
        together.append(alone * (1 + device.contention))
    finish = np.unique(np.concatenate(together)) if together else np.zeros(0)
    if len(finish) > MOST_TIMES:
        finish = finish[:: -(-len(finish) // MOST_TIMES)]
    allowed = [np.where(np.arange(1, len(t) + 1) % quantum, np.inf, t) for t in together]
    # the least of this batch and all larger ones
    least = [np.minimum.accumulate(t[::-1])[::-1] for t in allowed]
    done = np.stack([np.searchsorted(t, finish * (1 + 1e-12), side="right") for t in least])
    return Tables(tuple(times), finish, done, tuple(_teams(machine, done)))


def _teams(machine: Machine, done: Whole) -> Iterator[tuple[Floats, Floats]]:
    """Yield, for each set of hosts, samples and synchronization costs by number of devices.

    The samples are the most that k of their devices can do by each finish time.
    """
    hosts = sorted({device.host for device in machine.devices})
    for count in range(1, len(hosts) + 1):
        for chosen in combinations(hosts, count):
            own = done[[device.host in chosen for device in machine.devices]]
            largest_first = -np.sort(-own, axis=0)
            totals = np.cumsum(largest_first, axis=0).astype(np.float64)
            costs = [machine.sync.seconds(k, count) for k in range(1, len(own) + 1)]
            yield totals, np.array(costs)
