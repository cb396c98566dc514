"""Search for the best number of training jobs to run side by side on one device (a pack).

The number N grows as 1, 2, 3, 5, 8, 13, ... while the jobs' total throughput rises. Growth ends
once two larger numbers have failed to beat the best one, or one has failed to run. Then the numbers
halfway between the best and its neighbors are tried. More jobs need more memory, and each of them
takes longer. Therefore the smallest N is chosen that is within `ENOUGH` (5 %) of the fastest, or
within the tolerance if that is larger.

A requested batch isn't changed. A free batch is the largest that fits N times according to the
measured memory, and at most the batch of the layout with one job. Some memory is left as headroom
for contexts and allocators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby

import msgspec

from ..families import PackMode, pack_on
from ..types import Layout, Observation, OutOfMemory, Stage, Timed
from .layouts import RETREAT, RETREATS, TIE
from .model.memory import MARGIN, UNBOUNDED, Memory
from .ranking import throughput
from .rows import RowPolicy

# fraction of a device's memory for all trainings packed on it: each has its own context
MEMORY_SHARE = 0.98
# relative gain required of more trainings, because each takes longer (34 instead of 8 gained 4.6 %)
ENOUGH = 0.05
# consecutive sizes without a gain after which growth ends: noise may hide one gain
SIZES_WITHOUT_GAIN = 2
MOST_SIZES = 15  # sizes that are tried: ten while growing, and five to halve a gap of 34
MOST_PROCESSES = 89  # the last number of 1, 2, 3, 5, 8, ... that is tried

Rates = Mapping[int, float]  # trainings -> combined samples/s; 0: did not run


class Packing:
    """The search for the best number of training jobs side by side on one device."""

    def __init__(self, policy: RowPolicy, single: Layout, mode: PackMode) -> None:
        self._policy = policy
        self._problem = policy.problem
        self._single = single
        self._mode = mode
        (self._position,) = single.active

    def next_layout(self) -> Layout | None:
        """Return the layout with the next number of jobs to measure; None if there is none."""
        size = next_size(self._rates, self._most_jobs)
        if size is None or size < 2:
            return None
        return pack_on(self._single, size, self._mode, self._batch_for(size))

    def best_layout(self) -> Layout | None:
        """Return the layout with the best measured number of jobs, which is at least two.

        More jobs count as better only if their total throughput is higher by at least 5 %, or by
        the tolerance if that is larger. If no layout with several jobs has run yet, the next layout
        to measure is returned instead, or None if there is none.
        """
        packs = {size: rate for size, rate in self._rates.items() if size > 1}
        size = best_size(packs, max(ENOUGH, self._problem.tolerance))
        tries = self._by_size.get(size or 0, [])
        ran = [seen.probe.layout for seen in tries if isinstance(seen, Timed)]
        return max(ran, key=self._rate_of) if ran else self.next_layout()

    @property
    def still_gains(self) -> bool:
        """Whether the largest number of jobs so far is the fastest.

        Even more jobs may then be faster still.
        """
        return len(self._rates) > 1 and best_size(self._rates) == max(self._rates)

    @cached_property
    def seen(self) -> tuple[Observation, ...]:
        """All observations of several jobs on this device, ordered by number of jobs."""
        found = []
        for one in self._policy.seen.in_stage(Stage.PACK):
            layout = one.probe.layout
            if layout.active == self._single.active and layout.placement == self._mode:
                found.append(one)

        def order(observation: Observation) -> tuple[int, int]:
            return observation.probe.layout.processes, -observation.probe.layout.global_batch

        return tuple(sorted(found, key=order))

    @cached_property
    def _by_size(self) -> dict[int, list[Observation]]:
        return {
            size: list(tries)
            for size, tries in groupby(self.seen, lambda one: one.probe.layout.processes)
        }

    @cached_property
    def _rates(self) -> dict[int, float]:
        """Total throughput in samples/s, by number of jobs; 0 if that many jobs failed to run."""
        rates = {1: self._policy.single_rate(self._single)}
        for size, tries in self._by_size.items():
            timed = [self._rate_of(seen.probe.layout) for seen in tries if isinstance(seen, Timed)]
            if not self._may_shrink(size, tries):
                rates[size] = max(timed, default=0.0)
        return rates

    def _may_shrink(self, size: int, tries: Sequence[Observation]) -> bool:
        """Whether jobs that ran out of memory should be tried again with a smaller batch.

        `tries` are all observations of that number of jobs (`size`).
        """
        if self._problem.global_batch is not None or len(tries) >= RETREATS:
            return False
        return all(isinstance(seen, OutOfMemory) for seen in tries) and self._batch_for(size) > 0

    def _rate_of(self, layout: Layout) -> float:
        """Return the total throughput of a layout's jobs, as the mean of all measurements."""
        return throughput(self._policy.seen.turns(layout)).value

    def _batch_for(self, size: int) -> int:
        """Return the batch of each of `size` jobs; 0 if they don't fit in memory."""
        batch = self._single.global_batch
        if self._problem.global_batch is not None:
            return batch
        quantum = self._problem.multiple_of
        tries = self._by_size.get(size, [])
        smaller = (int(seen.probe.layout.global_batch * RETREAT) for seen in tries)
        return max(0, min(batch, self._largest_batch_for(size), *smaller)) // quantum * quantum

    @cached_property
    def _most_jobs(self) -> int:
        """The largest number of jobs that fit in the device's memory together."""
        least = self._problem.global_batch or self._problem.multiple_of
        for size in range(MOST_PROCESSES, 1, -1):
            if self._largest_batch_for(size) >= least:
                return size
        return 1

    def _largest_batch_for(self, size: int) -> int:
        """Return the largest batch per job for which `size` jobs still fit in memory."""
        limit = self._policy.seen.memory_limit(self._position)
        if limit is None or not self._memory_per_job.points:
            return UNBOUNDED
        fixed = self._problem.global_batch is not None  # it can't become smaller
        part = 1 - MARGIN if fixed else MEMORY_SHARE
        return self._memory_per_job.largest_within(part * limit / size)

    @cached_property
    def _memory_per_job(self) -> Memory:
        """Memory use of one job by batch, measured on its own or next to other jobs."""
        memory = self._policy.machine.devices[self._position].memory
        held = dict(memory.points)
        for seen in self.seen:
            if not isinstance(seen, Timed):
                continue
            used = seen.memory_bytes[self._position]
            if used:
                layout = seen.probe.layout
                each = used // layout.processes
                held[layout.global_batch] = max(each, held.get(layout.global_batch, 0))
        return msgspec.structs.replace(memory, points=tuple(sorted(held.items())))


def next_size(tried: Rates, largest: int = MOST_PROCESSES) -> int | None:
    """Return the next number of jobs to try; None if enough were tried.

    While the total throughput rises, each number is the sum of the two before it (1, 2, 3, 5, 8,
    ...). After that, the numbers halfway between the best and its neighbors follow.

    - `tried`: total throughput in samples/s, by number of jobs.
    - `largest`: the largest number of jobs allowed.
    """
    best = best_size(tried)
    sizes = sorted(tried)
    if best is None:
        return None if tried else 1
    slower = sum(size > best for size in sizes)
    if slower < SIZES_WITHOUT_GAIN and sizes[-1] < largest and tried[sizes[-1]]:
        return min(max(2, sum(sizes[-2:])), largest)
    if len(sizes) >= MOST_SIZES:
        return None
    place = sizes.index(best)
    nearest = sizes[max(0, place - 1) : place + 2]
    gaps = [(abs(best - other), (best + other) // 2) for other in nearest if abs(best - other) > 1]
    return max(gaps)[1] if gaps else None


def best_size(tried: Rates, tolerance: float = TIE) -> int | None:
    """Return the smallest number of jobs that is nearly as fast as the fastest; None if none ran.

    Its total throughput is within `tolerance`, a fraction, of the highest.
    """
    least = max(tried.values(), default=0.0) * (1 - tolerance)
    return min((size for size, rate in tried.items() if rate and rate >= least), default=None)
