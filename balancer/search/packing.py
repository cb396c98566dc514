"""Packing one device with several trainings: which number and batch to measure next, and which was best.

Trainings side by side share the memory. A batch that is given stays; a free one is, for each number of trainings, the
largest that fits so many times by the device's memory points, at most that of the single device. A little memory is
left free, for contexts and for allocators that don't use all of it; in the end the best number is tried without that,
where the curve of the single device says that it would gain.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from evener.balancer.search.layouts import PackMode, pack_on
from evener.balancer.search.machine_model import MachineModel
from evener.balancer.search.model.memory import Memory
from evener.balancer.search.pack_sizes import MOST_PROCESSES, best_size, next_size
from evener.balancer.types import Layout, Observation, OutOfMemory, Timed

MEMORY_SHARE = 0.98  # of a device's memory, for all trainings packed on it
WHOLE_MEMORY = 0.998  # of it, in the end
WORTH = 0.004  # relative: what the last samples must promise to gain
TRIES = 3  # of a number of trainings with a free batch that ran out of memory, each with a smaller one
PACK_RETREAT = 0.85  # of a batch that ran out of memory


class Packing:
    """Trainings side by side in one mode, on the device of the layout `single`, whose samples/s alone are `rate`."""

    def __init__(self, model: MachineModel, single: Layout, rate: float, mode: PackMode) -> None:
        self._model, self._problem, self._single, self._mode = model, model.problem, single, mode
        self._rate = rate
        (self._position,) = single.active

    def next_layout(self) -> Layout | None:
        """What to measure next; None when the best is certain enough."""
        size = next_size(self._rates, self._most)
        if size is None:
            return self._with_all_memory()
        return None if size < 2 else pack_on(self._single, size, self._mode, self._batch(size))

    def first_layout(self) -> Layout | None:
        """What is to be measured first, while nothing of more than one training ran; None once it did, or can't."""
        layout = None if any(isinstance(seen, Timed) for seen in self.seen) else self.next_layout()
        return layout if layout is not None and layout.global_batch else None

    def best_layout(self) -> Layout | None:
        """The best measured of more than one training; None if none ran."""
        size = best_size({size: rate for size, rate in self._rates.items() if size > 1})
        ran = [seen for seen in self._by_size.get(size or 0, []) if isinstance(seen, Timed)]
        return max(ran, key=lambda seen: seen.samples_per_second).probe.layout if ran else None

    @property
    def still_gains(self) -> bool:
        """Whether the most trainings that were tried are the best so far."""
        return len(self._rates) > 1 and best_size(self._rates) == max(self._rates)

    def refused(self) -> Observation | None:
        """What came of the fewest trainings, if none of more than one ever ran."""
        return None if not self.seen or any(isinstance(seen, Timed) for seen in self.seen) else self.seen[0]

    @cached_property
    def seen(self) -> tuple[Observation, ...]:
        """Every pack measured, by number of trainings and falling batch."""
        found = [one for one in self._model.seen.in_stage("pack") if self._is_ours(one.probe.layout)]
        return tuple(sorted(found, key=lambda one: (one.probe.layout.processes, -one.probe.layout.global_batch)))

    def _is_ours(self, layout: Layout) -> bool:
        return layout.active == (self._position,) and layout.placement == self._mode

    @cached_property
    def _by_size(self) -> dict[int, list[Observation]]:
        by_size: dict[int, list[Observation]] = {}
        for seen in self.seen:
            by_size.setdefault(seen.probe.layout.processes, []).append(seen)
        return by_size

    @cached_property
    def _rates(self) -> dict[int, float | None]:
        """Combined samples/s by number of trainings; None where they don't run, with no batch worth trying."""
        rates: dict[int, float | None] = {1: self._rate}
        for size, tries in self._by_size.items():
            timed = [seen.samples_per_second for seen in tries if isinstance(seen, Timed)]
            if timed:
                rates[size] = max(timed)
            elif not self._may_retreat(size):
                rates[size] = None
        return rates

    def _may_retreat(self, size: int) -> bool:
        tries = self._by_size.get(size, [])
        full = all(isinstance(seen, OutOfMemory) for seen in tries)
        return full and self._problem.global_batch is None and len(tries) < TRIES and bool(self._batch(size))

    def _batch(self, size: int) -> int:
        """The batch of each of so many trainings; 0 if not even the smallest fits."""
        batch = self._batch_within(size, MEMORY_SHARE)
        if self._problem.global_batch is not None:
            return batch
        for seen in self._by_size.get(size, []):
            batch = min(batch, int(seen.probe.layout.global_batch * PACK_RETREAT))
        return max(0, batch // self._problem.multiple_of * self._problem.multiple_of)

    def _batch_within(self, size: int, share: float) -> int:
        """The batch of each of so many trainings in a share of the memory, in whole quanta, at most the single's."""
        batch, quantum = self._single.global_batch, self._problem.multiple_of
        limit = self._problem.memory_bytes[self._position]
        if self._problem.global_batch is not None or limit is None or not self._memory.points:
            return batch
        return min(batch, self._memory.largest_within(share * limit / size)) // quantum * quantum

    @cached_property
    def _most(self) -> int:
        """How many trainings can fit, by the device's memory points."""
        limit = self._problem.memory_bytes[self._position]
        if limit is None or not self._memory.points:
            return MOST_PROCESSES
        fixed = self._problem.global_batch is not None
        held = self._memory.bytes_at(self._single.global_batch if fixed else self._problem.multiple_of)
        share = WHOLE_MEMORY if fixed else MEMORY_SHARE
        return max(1, min(MOST_PROCESSES, int(share * limit / held))) if held > 0 else MOST_PROCESSES

    @cached_property
    def _memory(self) -> Memory:
        """What one training holds by batch, alone or packed: the most that was seen."""
        held = dict(self._model.devices[self._position].memory.points)
        for seen in self.seen:
            used = seen.memory_bytes[self._position] if isinstance(seen, Timed) else None
            if used:
                layout = seen.probe.layout
                held[layout.global_batch] = max(used // layout.processes, held.get(layout.global_batch, 0))
        memory = self._model.devices[self._position].memory
        return msgspec.structs.replace(memory, points=tuple(sorted(held.items())))

    def _with_all_memory(self) -> Layout | None:
        """The number of trainings that should gain most with no memory left free; None if none should.

        One that was tried with more than one batch is as large as it can be, or was tried so.
        """
        curve = self._model.alone[self._position]
        if curve is None:
            return None
        promised: dict[float, Layout] = {}
        for size, tries in self._by_size.items():
            batch, rate = self._batch_within(size, WHOLE_MEMORY), self._rates.get(size)
            tried = tries[0].probe.layout.global_batch
            if rate and len(tries) == 1 and batch > tried:
                gain = batch / curve.seconds(batch) * curve.seconds(tried) / tried
                promised[rate * gain] = pack_on(self._single, size, self._mode, batch)
        top = max((rate for rate in self._rates.values() if rate), default=0.0)
        best = max(promised, default=0.0)
        return promised[best] if best > top * (1 + WORTH) else None
