"""The layouts of the race: each family's candidates, by what exploration and growing packs showed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from ..families import Family, PackMode, family_of, pack_on
from ..objectives import find_objective
from ..types import Layout, OutOfMemory
from .budget import Budget
from .layouts import RETREATS, Candidate, LayoutOptions, divide, same_measurement, shrink
from .packing import Packing
from .rows import RowDevices
from .texts import TextDevices


class Candidates:
    """The candidates by one set of observations."""

    def __init__(
        self,
        options: LayoutOptions,
        devices: RowDevices | TextDevices,
        budget: Budget,
        shards: Sequence[Layout] = (),
    ) -> None:
        self.shards = shards
        self.options, self._devices, self._budget = options, devices, budget
        self._problem, self.seen = devices.problem, devices.seen

    @cached_property
    def all(self) -> tuple[Candidate, ...]:
        """The layouts of the race, without duplicates."""
        kept: dict[Layout, Candidate] = {}
        for candidate in map(self._in_its_place, self._wished):
            kept.setdefault(candidate.layout, candidate)
        return tuple(kept.values())

    @cached_property
    def running(self) -> tuple[Candidate, ...]:
        """The candidates that did not fail in the race and whose devices are all still there."""
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
        found = [one for family in self.options.wanted for one in self._of(family)]
        if isinstance(self._devices, RowDevices) and find_objective(self._problem.objective).trades_speed:
            found += [Candidate(family_of(layout), layout, True) for layout in self._devices.efficient()]
        allowed = [one for one in found if one.family in self.options.wanted]  # one of the splits may be one device
        return tuple(self._distinct(allowed))

    def _of(self, family: Family) -> Iterator[Candidate]:
        """A family's candidates; those of another kind are of the family of that kind."""
        for i, layout in enumerate(family.layouts(self)):
            own = layout.kind == family.kind
            extra = i > 0 and layout.traits.by_shares and not family.equal_shares
            yield Candidate(family if own else family_of(layout), layout, extra)

    def _distinct(self, found: list[Candidate]) -> list[Candidate]:
        """The candidates without splits that no measurement could distinguish from one listed before them."""
        kept: list[Candidate] = []
        for one in found:
            splits = [other.layout for other in kept if other.layout.traits.together and one.layout.traits.together]
            by_rows = [layout for layout in splits if layout.by_rows and one.layout.by_rows]
            if not any(same_measurement(one.layout, other) for other in by_rows):
                kept.append(one)
        return kept

    # ------------------------------------------------------------------ what families choose by

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self._problem.devices

    @property
    def by_rows(self) -> bool:
        """True if devices take rows in the order of the data."""
        return self._devices.by_rows

    @cached_property
    def singles(self) -> Sequence[Layout]:
        """The best single device, and others that may beat it."""
        return self._devices.singles()

    @cached_property
    def splits(self) -> Sequence[Layout]:
        """The preferred split, and others that are worth a race; none unless splits were asked for."""
        return self._devices.best_splits() if self.options.with_splits else []

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Even splits; none while splits that were asked for are not explored."""
        unclear = self.options.with_splits and not self._devices.splits
        return [] if unclear else self._devices.even_splits(self.splits, self.options.scaling)

    @property
    def best_single(self) -> Layout | None:
        """The best single device's layout; None if none can train alone."""
        return next(iter(self.singles), None)

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

    @cached_property
    def packings(self) -> tuple[tuple[PackMode, Packing], ...]:
        """Packing in each mode whose number of trainings is searched for."""
        single = next((layout for layout in self.singles if not layout.in_passes), None)
        packs = any(family.traits.side_by_side for family in self.options.wanted)
        if single is None or not isinstance(self._devices, RowDevices) or not packs:
            return ()
        modes = [mode for mode in self.options.pack_modes if mode != "logical"]
        return tuple((mode, Packing(self._devices, single, mode)) for mode in modes)

    @property
    def packs(self) -> list[Layout]:
        """The best number of trainings in each mode, or the fewest if none was measured yet."""
        best = {mode: packing.best_layout() or packing.first_layout() for mode, packing in self.packings}
        plain = best.get("")
        if "logical" in self.options.pack_modes and plain is not None:
            best["logical"] = self._logical(plain)
        return [layout for layout in best.values() if layout is not None]

    def _logical(self, plain: Layout) -> Layout:
        """The pack on logical devices of as many trainings as run best as plain processes, or of the most measured."""
        wanted = pack_on(plain, plain.processes, "logical")
        tried = [one.probe.layout for one in self.seen.all_timed() if one.probe.layout.placement == "logical"]
        if wanted in tried or not tried or self._budget.affords(wanted, "race"):
            return wanted
        return max(tried, key=lambda layout: layout.processes)

    def _in_its_place(self, candidate: Candidate) -> Candidate:
        """The candidate, or, if it ran out of memory, a smaller batch instead; a fixed batch in more passes."""
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
