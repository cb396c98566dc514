"""The layouts of the race: each family's candidates, by what exploration and growing packs showed."""

from __future__ import annotations

from functools import cached_property

import msgspec

from evener.balancer.search.budget import Budget
from evener.balancer.search.device_model import DeviceModel
from evener.balancer.search.layouts import (
    Candidate,
    LayoutOptions,
    PackMode,
    divide,
    find_family,
    pack_on,
    place_on,
    same_measurement,
    shrink,
)
from evener.balancer.search.machine_model import MachineModel
from evener.balancer.search.packing import Packing
from evener.balancer.types import Layout, OutOfMemory

RETREATS = 4  # smaller batches tried after a layout ran out of memory in the race


class Candidates:
    """The candidates by one set of observations."""

    def __init__(self, options: LayoutOptions, devices: DeviceModel, machine: MachineModel, budget: Budget) -> None:
        self._options, self._devices, self._machine, self._budget = options, devices, machine, budget
        self._problem, self.seen = machine.problem, machine.seen

    @cached_property
    def all(self) -> tuple[Candidate, ...]:
        """Every layout of the race, the same never twice."""
        kept: dict[Layout, Candidate] = {}
        for candidate in map(self._in_its_place, self._wished):
            kept.setdefault(candidate.layout, candidate)
        return tuple(kept.values())

    @cached_property
    def running(self) -> tuple[Candidate, ...]:
        """Those that did not fail in the race and have all their devices."""
        here = (one for one in self.all if not self.seen.gone.intersection(one.layout.active))
        return tuple(one for one in here if self.seen.broken(one.layout) is None)

    @cached_property
    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        pairs = [(candidate, self._in_its_place(candidate)) for candidate in self._wished]
        return tuple((wished, instead) for wished, instead in pairs if instead != wished)

    def expected_rate(self, one: Candidate) -> float:
        """Samples/s to expect: as measured or predicted; of packs and placements, as much as the best of the others."""
        if one.synchronous:
            return self._devices.predicted_rate(one.layout)
        return max((self._devices.predicted_rate(other.layout) for other in self.all if other.synchronous), default=0.0)

    @cached_property
    def _wished(self) -> tuple[Candidate, ...]:
        families = self._options.families
        splits = self._devices.best_splits() if "split" in families else []
        explored = splits or "split" not in families
        found = [
            *(Candidate("solo", layout, i > 0) for i, layout in enumerate(self._devices.singles())),
            *(self._evens(splits) if "even" in families and explored else ()),
            *(Candidate(find_family(layout), layout, i > 0) for i, layout in enumerate(splits)),
            *(self._efficient() if self._problem.max_slowdown is not None else ()),
            *(self._placed() if "place" in families else ()),
        ]
        allowed = [one for one in found if one.family in families]  # a tolerable "split" may be one device
        return (*self._distinct(allowed), *self._packed())

    def _evens(self, splits: list[Layout]) -> list[Candidate]:
        return [Candidate("even", layout) for layout in self._devices.even_splits(splits, self._options.scaling)]

    def _efficient(self) -> list[Candidate]:
        return [Candidate(find_family(layout), layout, True) for layout in self._devices.efficient()]

    def _distinct(self, found: list[Candidate]) -> list[Candidate]:
        """Without splits that no measurement could distinguish from an even split, or from one before them."""
        kept: list[Candidate] = []
        for one in found:
            splits = [other.layout for other in kept if other.layout.traits.together and one.layout.traits.together]
            by_rows = [layout for layout in splits if layout.by_rows and one.layout.by_rows]
            if not any(same_measurement(one.layout, other) for other in by_rows):
                kept.append(one)
        return kept

    @cached_property
    def best_single(self) -> Layout | None:
        """The best single device's layout; None if none can train alone."""
        return next(iter(self._devices.singles()), None)

    @cached_property
    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own: the fixed one, the best single device's, else one that no
        single device could hold."""
        if self._problem.global_batch is not None:
            return self._problem.global_batch
        if self.best_single is not None:
            return self.best_single.global_batch
        full = [one.probe.layout.global_batch for one in self.seen.in_stage("solo") if isinstance(one, OutOfMemory)]
        return min(full, default=None)

    def _placed(self) -> list[Candidate]:
        if self.common_batch is None or not self._devices.by_rows:
            return []
        found = [place_on(self._problem.devices, one, self.common_batch) for one in self._options.placements]
        return [Candidate("place", layout) for layout in found if layout is not None]

    @cached_property
    def packings(self) -> tuple[tuple[PackMode, Packing], ...]:
        """Packing in each mode whose number of trainings is searched for."""
        single = self.best_single
        if single is None or single.in_passes or not self._devices.by_rows or "pack" not in self._options.families:
            return ()
        rate = self._devices.single_rate(single)
        modes = [mode for mode in self._options.pack_modes if mode != "logical"]
        return tuple((mode, Packing(self._machine, single, rate, mode)) for mode in modes)

    def _packed(self) -> list[Candidate]:
        """The best number of trainings in each mode, or the fewest if none was measured yet."""
        best = {mode: packing.best_layout() or packing.first_layout() for mode, packing in self.packings}
        plain = best.get("")
        if "logical" in self._options.pack_modes and plain is not None:
            best["logical"] = self._logical(plain)
        return [Candidate("pack", layout) for layout in best.values() if layout is not None]

    def _logical(self, plain: Layout) -> Layout:
        """As many trainings on logical devices as run best as plain processes, or the most that were measured so."""
        wanted = pack_on(plain, plain.processes, "logical")
        tried = [one.probe.layout for one in self.seen.all_timed() if one.probe.layout.placement == "logical"]
        if wanted in tried or not tried or self._budget.affords(wanted, "race"):
            return wanted
        return max(tried, key=lambda layout: layout.processes)

    def _in_its_place(self, candidate: Candidate) -> Candidate:
        """The candidate, or after it ran out of memory a smaller batch in its place; a fixed one in more passes."""
        fixed = self._problem.global_batch is not None
        for _ in range(RETREATS):
            full = self.seen.broken(candidate.layout)
            if not isinstance(full, OutOfMemory) or (fixed and not (self._problem.micro and candidate.synchronous)):
                break
            layout = (
                divide(candidate.layout, full.devices) if fixed else shrink(candidate.layout, self._problem.multiple_of)
            )
            if layout is None:
                break
            candidate = msgspec.structs.replace(candidate, layout=layout)
        return candidate
