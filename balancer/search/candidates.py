"""Who takes part in the race: each wanted way to lay the job, at batches that the scout and the growth found. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from evener.balancer.search.comparison_scout import Scout
from evener.balancer.search.comparison_told import Told
from evener.balancer.search.layouts import Candidate, PackMode, Wanted, placed, smaller
from evener.balancer.search.pack_stage import Packing
from evener.balancer.types import Layout, OutOfMemory, Problem

RETREATS = 4  # of a layout that ran out of memory, each to a smaller batch
Affords = Callable[[Layout], bool]


class Entrants:
    """A reading of what was told so far; `affords` says whether a layout that was not measured still can be."""

    def __init__(self, problem: Problem, wanted: Wanted, scout: Scout, told: Told, affords: Affords) -> None:
        self._problem, self._wanted, self._scout, self._told = problem, wanted, scout, told
        self._affords = affords

    def all(self) -> tuple[Candidate, ...]:
        """Every layout of the race, in the order of a turn, the same never twice."""
        kept: dict[Layout, Candidate] = {}
        for candidate in map(self._in_its_place, self._wished()):
            kept.setdefault(candidate.layout, candidate)
        return tuple(kept.values())

    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        pairs = [(candidate, self._in_its_place(candidate)) for candidate in self._wished()]
        return tuple((wished, instead) for wished, instead in pairs if instead != wished)

    def packings(self) -> list[tuple[PackMode, Packing]]:
        """Packing in each mode that has a growth of its own."""
        single = self._scout.single()
        if single is None or "pack" not in self._wanted.families:
            return []
        (position,) = single.layout.active
        alone = (self._scout.rate(position), partial(self._scout.rate_at, position))
        modes = [mode for mode in self._wanted.pack_modes if mode != "logical"]
        return [(mode, Packing(self._problem, single.layout, alone, mode, self._told)) for mode in modes]

    def _wished(self) -> list[Candidate]:
        families, scout = self._wanted.families, self._scout
        single = scout.single()
        found: list[Candidate] = []
        if "solo" in families and single:
            singles = scout.singles()
            found.append(next((one for one in singles if not self._told.broken(one.layout)), single))
            found += [better] if (better := scout.better_single()) else []
        if "even" in families:
            found += scout.evens()
        if "split" in families:
            found += scout.splits()
        if "place" in families:
            found += self._placed()
        return found + self._packed()

    def _in_its_place(self, candidate: Candidate) -> Candidate:
        """The candidate, or after it ran out of memory a smaller one; never smaller than a batch that is given."""
        for _ in range(RETREATS):
            full = isinstance(self._told.broken(candidate.layout), OutOfMemory)
            layout = smaller(candidate.layout, self._problem.multiple_of)
            if not full or layout is None or self._problem.global_batch is not None:
                break
            candidate = msgspec.structs.replace(candidate, layout=layout)
        return candidate

    def _placed(self) -> list[Candidate]:
        batch = self._scout.common_batch()
        if batch is None:
            return []
        found = [placed(self._problem.devices, placement, batch) for placement in self._wanted.placements]
        return [one for one in found if one is not None]

    def _packed(self) -> list[Candidate]:
        """The best number of trainings in each mode, or the fewest where none was measured yet."""
        best = {mode: packing.best_layout() or packing.first_layout() for mode, packing in self.packings()}
        plain = best.get("")
        if "logical" in self._wanted.pack_modes and plain is not None:
            best["logical"] = self._logical(plain)
        return [Candidate("pack", layout) for layout in best.values() if layout is not None]

    def _logical(self, plain: Layout) -> Layout:
        """Equal parts of the memory for as many as run best as plain processes, or as are measured if time is short."""
        at_best = msgspec.structs.replace(plain, placement="logical")
        known = [seen.probe.layout for seen in self._told.timed() if seen.probe.layout.placement == "logical"]
        if at_best in known or not known or self._affords(at_best):
            return at_best
        return max(known, key=lambda layout: layout.processes)
