"""Packing one device: what was told of it, as the growth of `evener.balancer.search.pack_growth` reads it. Pure.

Trainings side by side share the memory. A batch that is given stays; a free one is, for each number of trainings, the
largest that fits so many times by the device's memory line, at most that of the single device. A little memory is left
free, for contexts and for allocators that don't fill it to the brim; in the end the best number is tried without that,
where the curve of the single device says that it would gain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property

from evener.balancer.search.comparison_told import Told
from evener.balancer.search.layouts import PackMode, packed
from evener.balancer.search.pack_growth import MOST_PROCESSES, best_size, next_size
from evener.balancer.types import Layout, Observation, OutOfMemory, Problem, Timed

MEMORY_SHARE = 0.98  # of a device's memory, for all trainings packed on it
TO_THE_BRIM = 0.998  # of it, in the end
WORTH = 0.004  # relative: what the last samples must promise to gain
Curve = tuple[float, Callable[[int], float]]
TRIES = 3  # of a number of trainings with a free batch that ran out of memory, each with a smaller one
RETREAT = 0.85  # of a batch that ran out of memory


class Packing:
    """Trainings side by side in one mode, on the device of `single`.

    `alone`: the samples/s of that device alone, at its best, and by batch.
    """

    def __init__(self, problem: Problem, single: Layout, alone: Curve, mode: PackMode, told: Told) -> None:
        self._problem, self._single, self._mode, self._told = problem, single, mode, told
        self._alone, self._rate_at = alone
        (self._position,) = single.active

    def next_layout(self) -> Layout | None:
        """What to measure next; None when the best is known well enough."""
        size = next_size(self._rates(), self._most())
        if size is None:
            return self._filled()
        return None if size < 2 else packed(self._single, size, self._mode, self._batch(size)).layout

    def first_layout(self) -> Layout | None:
        """What is to be measured first, while nothing of more than one training ran; None once it did, or can't."""
        layout = None if any(isinstance(seen, Timed) for seen in self.seen) else self.next_layout()
        return layout if layout is not None and layout.global_batch else None

    def best_layout(self) -> Layout | None:
        """The best measured of more than one training; None if none ran."""
        size = best_size({size: rate for size, rate in self._rates().items() if size > 1})
        ran = [seen for seen in self._by_size.get(size or 0, []) if isinstance(seen, Timed)]
        return max(ran, key=lambda seen: seen.samples_per_second).probe.layout if ran else None

    @property
    def still_gains(self) -> bool:
        """Whether the most trainings that were tried are the best so far."""
        rates = self._rates()
        return len(rates) > 1 and best_size(rates) == max(rates)

    def refused(self) -> Observation | None:
        """What came of the fewest trainings, if none of more than one ever ran."""
        return None if not self.seen or any(isinstance(seen, Timed) for seen in self.seen) else self.seen[0]

    @cached_property
    def seen(self) -> tuple[Observation, ...]:
        """Every pack measured, by number of trainings and falling batch."""
        found = [one for one in self._told.of("pack") if self._mine(one.probe.layout)]
        return tuple(sorted(found, key=lambda one: (one.probe.layout.processes, -one.probe.layout.global_batch)))

    def _rates(self) -> dict[int, float | None]:
        """Combined samples/s by number of trainings; None where they don't run, with no batch worth trying."""
        rates: dict[int, float | None] = {1: self._alone}
        for size, tries in self._by_size.items():
            timed = [seen for seen in tries if isinstance(seen, Timed)]
            if timed:
                rates[size] = max(seen.samples_per_second for seen in timed)
            elif not self._may_retreat(size):
                rates[size] = None
        return rates

    def _may_retreat(self, size: int) -> bool:
        tries = self._by_size.get(size, [])
        full = all(isinstance(seen, OutOfMemory) for seen in tries)
        return full and self._problem.global_batch is None and len(tries) < TRIES and bool(self._batch(size))

    def _batch(self, size: int) -> int:
        """The batch of each of so many trainings; 0 if not even the smallest fits."""
        batch = self._within(size, MEMORY_SHARE)
        if self._problem.global_batch is not None:
            return batch
        for seen in self._by_size.get(size, []):
            batch = min(batch, int(seen.probe.layout.global_batch * RETREAT))
        return max(0, batch // self._problem.multiple_of * self._problem.multiple_of)

    def _within(self, size: int, share: float) -> int:
        """The batch of each of so many trainings in a share of the memory, in whole quanta, at most the single's."""
        batch, quantum = self._single.global_batch, self._problem.multiple_of
        room = self._problem.memory_bytes[self._position]
        if self._problem.global_batch is not None or room is None or not self._held:
            return batch
        each = share * room / size
        base, slope = _line(self._held, [held for _, held in self._held], each)
        return max(0, min(batch, int((each - base) / slope)) // quantum * quantum)

    def _filled(self) -> Layout | None:
        """The number of trainings that should gain most with the memory filled to the brim; None if none should.

        One that was tried with more than one batch is as full as it can be, or was tried so.
        """
        promised: dict[float, Layout] = {}
        rates = self._rates()
        for size, tries in self._by_size.items():
            batch, rate = self._within(size, TO_THE_BRIM), rates.get(size)
            known = tries[0].probe.layout.global_batch
            if rate and len(tries) == 1 and batch > known:
                promise = rate * self._rate_at(batch) / self._rate_at(known)
                promised[promise] = packed(self._single, size, self._mode, batch).layout
        top = max((rate for rate in rates.values() if rate), default=0.0)
        best = max(promised, default=0.0)
        return promised[best] if best > top * (1 + WORTH) else None

    def _most(self) -> int:
        """How many trainings can fit, by the device's memory line."""
        room = self._problem.memory_bytes[self._position]
        if room is None or not self._held:
            return MOST_PROCESSES
        least = self._single.global_batch if self._problem.global_batch is not None else self._problem.multiple_of
        base, slope = _line(self._held, [batch for batch, _ in self._held], least)
        held = base + slope * least
        share = TO_THE_BRIM if self._problem.global_batch is not None else MEMORY_SHARE
        return max(1, min(MOST_PROCESSES, int(share * room / held))) if held > 0 else MOST_PROCESSES

    @cached_property
    def _by_size(self) -> dict[int, list[Observation]]:
        by_size: dict[int, list[Observation]] = {}
        for seen in self.seen:
            by_size.setdefault(seen.probe.layout.processes, []).append(seen)
        return by_size

    @cached_property
    def _held(self) -> tuple[tuple[int, float], ...]:
        """(batch, the most bytes that a training held there), in rising batch."""
        held: dict[int, float] = {}
        for seen in self._told.timed():
            layout, size = seen.probe.layout, seen.memory_bytes[self._position]
            if layout.kind in ("solo", "pack") and layout.active == (self._position,) and size:
                each = size / layout.processes
                held[layout.global_batch] = max(each, held.get(layout.global_batch, 0.0))
        return tuple(sorted(held.items()))

    def _mine(self, layout: Layout) -> bool:
        return layout.active == (self._position,) and layout.placement == self._mode


def _line(held: Sequence[tuple[int, float]], along: Sequence[float], at: float) -> tuple[float, float]:
    """(bytes, bytes per sample) of one training, never falling: of the two points around `at`, as memory may bend."""
    points = [(0, 0.0), *held] if len(held) == 1 else held
    right = min(max(1, bisect_left(along, at)), len(points) - 1)
    (batch0, size0), (batch1, size1) = points[right - 1 : right + 1]
    slope = max(0.0, (size1 - size0) / (batch1 - batch0))
    return (size1 - slope * batch1, slope) if slope else (size1, 1e-9)
