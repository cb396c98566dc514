"""The layouts that are worth a race: what exploration found, as families choose from it, and each
family's candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from ..families import PACK, Family, PackMode, family_of, pack_on
from ..objectives import find_objective
from ..types import Layout, Observation, OutOfMemory, Timed
from .budget import Budget
from .layouts import RETREATS, Candidate, LayoutOptions, divide, same_measurement, shrink
from .packing import Packing
from .rows import RowPolicy
from .texts import TextPolicy


class Offers:
    """The view that families choose their layouts by (`families.View`), and the candidates that
    they offer.
    """

    def __init__(
        self,
        options: LayoutOptions,
        policy: RowPolicy | TextPolicy,
        budget: Budget,
        shards: Sequence[Layout] = (),
    ) -> None:
        self.options = options
        self.shards = shards
        self.devices = policy.problem.devices
        self._policy = policy
        self._budget = budget
        self._problem = policy.problem
        self._seen = policy.seen

    # ------------------------------------------------------------------ what families choose by

    @cached_property
    def singles(self) -> Sequence[Layout]:
        """The best single device, and others that may beat it."""
        return self._policy.singles()

    @cached_property
    def splits(self) -> Sequence[Layout]:
        """The preferred split, and others that are worth a race; none unless splits were asked
        for.
        """
        return self._policy.best_splits() if self.options.with_splits else []

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Even splits; none while splits that were asked for are not explored."""
        if self.options.with_splits and not self._policy.machine.splits:
            return []
        return self._policy.even_splits(self.splits, self.options.scaling)

    @cached_property
    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own: the fixed one, the best single
        device's, else one that no single device could hold; None before one is known, and where
        rows are assigned by what they cost.
        """
        if not self._policy.machine.by_rows:
            return None
        if self._problem.global_batch is not None:
            return self._problem.global_batch
        if self.singles:
            return self.singles[0].global_batch
        alone = self._seen.in_stage("solo")
        full = [one.probe.layout.global_batch for one in alone if isinstance(one, OutOfMemory)]
        return min(full, default=None)

    @cached_property
    def packings(self) -> tuple[tuple[PackMode, Packing], ...]:
        """Packing in each mode whose number of trainings is searched for."""
        if not any(family.traits.side_by_side for family in self.options.wanted):
            return ()
        at_once = [layout for layout in self.singles if not layout.in_passes]
        if not at_once or not isinstance(self._policy, RowPolicy):
            return ()
        modes = [mode for mode in self.options.pack_modes if mode != "logical"]
        return tuple((mode, Packing(self._policy, at_once[0], mode)) for mode in modes)

    @property
    def packs(self) -> list[Layout]:
        """The best number of trainings in each mode, or the fewest if none was measured yet."""
        best = {mode: packing.best_layout() for mode, packing in self.packings}
        plain = best.get("")
        if "logical" in self.options.pack_modes and plain is not None:
            best["logical"] = self._logical(plain)
        return [layout for layout in best.values() if layout is not None]

    def _logical(self, plain: Layout) -> Layout:
        """The pack on logical devices of as many trainings as run best as plain processes, or of
        the most measured.
        """
        wanted = pack_on(plain, plain.processes, "logical")
        layouts = (one.probe.layout for one in self._seen.timed())
        tried = [layout for layout in layouts if layout.placement == "logical"]
        if wanted in tried or not tried or self._budget.affords(wanted, "race"):
            return wanted
        return max(tried, key=lambda layout: layout.processes)

    # ------------------------------------------------------------------ candidates

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The layouts of the race, without duplicates; what ran out of memory has a smaller one in
        its place.
        """
        kept: dict[Layout, Candidate] = {}
        for candidate in self._wished:
            instead = self._in_its_place(candidate)
            kept.setdefault(instead.layout, instead)
        return tuple(kept.values())

    @cached_property
    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        pairs = [(candidate, self._in_its_place(candidate)) for candidate in self._wished]
        return tuple((wished, instead) for wished, instead in pairs if instead != wished)

    def list_broken(self) -> list[tuple[Candidate, Observation]]:
        """The layouts of the race that failed, with the failure; the smallest pack of a mode of
        which none ever ran.
        """
        found = []
        for one in self.candidates:
            failure = self._seen.broken(one.layout)
            if failure is not None:
                found.append((one, failure))
        for _, packing in self.packings:
            if packing.seen and not any(isinstance(one, Timed) for one in packing.seen):
                smallest = packing.seen[0]
                found.append((Candidate(PACK, smallest.probe.layout), smallest))
        return found

    @cached_property
    def _wished(self) -> tuple[Candidate, ...]:
        """The families' candidates, before any retreat, without those that no measurement could
        tell apart.
        """
        found = [one for family in self.options.wanted for one in self._of(family)]
        trades_speed = find_objective(self._problem.objective).trades_speed
        if trades_speed and isinstance(self._policy, RowPolicy):
            efficient = self._policy.efficient()
            found += [Candidate(family_of(layout), layout, extra=True) for layout in efficient]
        # one of the splits may be one device, of a family that isn't asked for
        return tuple(_distinct([one for one in found if one.family in self.options.wanted]))

    def _of(self, family: Family) -> Iterator[Candidate]:
        """A family's candidates; those of another kind are of the family of that kind."""
        for i, layout in enumerate(family.layouts(self)):
            own = layout.kind == family.kind
            extra = i > 0 and layout.traits.by_shares and not family.equal_shares
            yield Candidate(family if own else family_of(layout), layout, extra)

    def _in_its_place(self, candidate: Candidate) -> Candidate:
        """The candidate, or, if it ran out of memory, a smaller batch instead; a fixed batch in
        more passes.
        """
        fixed = self._problem.global_batch is not None
        if fixed and not (self._problem.micro and candidate.synchronous):
            return candidate
        layout = candidate.layout
        for _ in range(RETREATS):
            failure = self._seen.broken(layout)
            if not isinstance(failure, OutOfMemory):
                break
            if fixed:
                smaller = divide(layout, failure.devices)
            else:
                smaller = shrink(layout, self._problem.multiple_of)
            if smaller is None:
                break
            layout = smaller
        return msgspec.structs.replace(candidate, layout=layout)


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without splits that no measurement could distinguish from one listed before
    them.
    """
    kept: list[Candidate] = []
    splits: list[Layout] = []
    for one in found:
        layout = one.layout
        if layout.by_rows and any(same_measurement(layout, split) for split in splits):
            continue
        kept.append(one)
        if layout.traits.together and layout.by_rows:
            splits.append(layout)
    return kept
