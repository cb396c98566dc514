"""The last stage: the candidates in turns A B C A B C, until nothing left to measure is expected to
change the plan.

In the first turn (0) every candidate is measured once, those of most expected samples/s for each
second of the probe first. A split or rest measurement from exploration counts as turn 0. Packs then
grow while they gain, later turns settle which layout is fastest, and the winner is measured with
other knobs, if any were asked for. Last comes a check of the winner: the highest of several noisy
figures is too high, so its own is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from ..families import PACK, Family, PackMode, family_of, pack_on
from ..objectives import find_objective
from ..statistics import relative_half_width
from ..types import Layout, Observation, OutOfMemory, Probe, Result, Stage, Timed
from .budget import Budget
from .layouts import RETREATS, Candidate, LayoutOptions, divide, same_measurement, shrink
from .observations import FIRST_TURN, MOST_TURNS, Turns
from .packing import Packing
from .ranking import ENOUGH_TURNS, LEAST_RATE, ROUGH, Standing, rank, throughput, unsettled
from .rows import RowDevices
from .texts import TextDevices


class Race:
    """The race between the layouts that exploration and families offer, by one set of
    observations.
    """

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
        self.devices = self._problem.devices

    def next_probes(self) -> tuple[Probe, ...]:
        """The next measurement; empty when the race is over."""
        first = [one for one in self._unmeasured if one.layout.placement != "logical"]
        probes = self._first_turn(first) or self._grow() or self._first_turn(self._unmeasured)
        return (
            probes
            or self._next_turn(self.running, "race")
            or self._next_turn(self._knob_rivals, "knobs")
        )

    def repeat_best(self, chosen: Layout) -> tuple[Probe, ...]:
        """Another turn of the chosen layout and of the best other one, while the budget has time
        for one.
        """
        if self._problem.budget_seconds is None:
            return ()
        others = [one.candidate for one in self._without_knobs if one.candidate.layout != chosen]
        best = [Candidate(family_of(chosen), chosen), *others[: not chosen.knobs]]
        whole = [one for one in best if self.seen.broken(one.layout) is None]
        return self._next_turn(whole, "knobs" if chosen.knobs else "race", settled=True)

    def check(self, best: Result) -> tuple[Probe, ...]:
        """The chosen layout once more, and while turns may make it certain; None where nothing else
        was measured.
        """
        layout, width = best.layout, relative_half_width(best.throughput)
        checks = [seen for seen in self.seen.in_stage("check") if seen.probe.layout == layout]
        held = len(checks) == 1 and isinstance(checks[0], Timed) and checks[0].held_back()
        rough = ROUGH < width <= ROUGH * math.sqrt(MOST_TURNS / best.turns)
        wanted = not checks or held or rough
        alone = all(seen.probe.layout == layout for seen in self.seen.timed())
        turns = (*self.seen.turns(layout), *(seen.probe.turn for seen in checks))
        next_turn = max(turns, default=FIRST_TURN) + 1
        return self._budget.probes(layout, "check", next_turn) if wanted and not alone else ()

    @cached_property
    def turns(self) -> dict[Layout, Turns]:
        """The turns of each candidate that is still running."""
        return {one.layout: self.seen.turns(one.layout) for one in self.running}

    @cached_property
    def ranking(self) -> tuple[Standing, ...]:
        """The winner first; with the winner's knobs, once they were tried."""
        rivals = self._knob_rivals
        tried = rank(
            rivals,
            {one.layout: self.seen.turns(one.layout, "knobs") for one in rivals},
            self._problem,
        )
        return (*tried, *self._without_knobs[1:]) if len(tried) > 1 else self._without_knobs

    @cached_property
    def _without_knobs(self) -> tuple[Standing, ...]:
        return rank(self.running, self.turns, self._problem)

    @cached_property
    def _unmeasured(self) -> list[Candidate]:
        return [one for one in self.running if not self.turns[one.layout]]

    @property
    def unmeasured(self) -> tuple[Candidate, ...]:
        """The first candidates of their families that the budget left without a measurement."""
        return tuple(one for one in self._unmeasured if not one.extra)

    @cached_property
    def waiting(self) -> tuple[list[Candidate], bool]:
        """The candidates that wait for their first turn or another; whether there is a tie that no
        turn would end.
        """
        rivals, tied = self._unsettled(self.running, "race")
        return [*self._unmeasured, *rivals], tied

    # ------------------------------------------------------------------ first turn

    def _first_turn(self, wanted: Sequence[Candidate]) -> tuple[Probe, ...]:
        if not wanted:
            return ()
        layout = min(wanted, key=self._priority).layout
        knobs = self._knobs_seconds
        if not self._budget.affords(layout, "race", reserved=knobs):
            return ()
        stage: Stage = (
            "pack" if layout.traits.side_by_side and layout.placement != "logical" else "race"
        )
        others = sum(
            self._budget.least_seconds(one.layout)
            for one in self.unmeasured
            if one.layout != layout
        )
        probes = len(self._unmeasured) + (ENOUGH_TURNS - 1) * len(self.turns)
        reserved = knobs + others if self.options.needs_more_children else 0.0
        seconds = self._budget.probe_seconds(layout, "race", probes, reserved=reserved)
        return (Probe(layout, stage, seconds, FIRST_TURN),)

    def _priority(self, one: Candidate) -> tuple[bool, float]:
        """The most expected samples/s for each second of the probe come first; a family's extra
        candidates last.

        Of packs and placements as much is expected as of the best of the others.
        """
        alike = [one] if one.synchronous else [other for other in self.all if other.synchronous]
        expected = max([LEAST_RATE, *(self._devices.predicted_rate(each.layout) for each in alike)])
        return (
            one.extra and self.options.needs_more_children,
            self._budget.least_seconds(one.layout) / expected,
        )

    # ------------------------------------------------------------------ packs

    def _grow(self) -> tuple[Probe, ...]:
        """The next pack, the smallest of all modes first, if the budget also suffices for a turn of
        every candidate.
        """
        wanted = [
            layout for _, packing in self.packings if (layout := packing.next_layout()) is not None
        ]
        wanted.sort(key=lambda one: one.processes)
        probes = (
            self._budget.probes(one, "pack", FIRST_TURN, ENOUGH_TURNS, self.turn_seconds)
            for one in wanted
        )
        return next(filter(None, probes), ())

    # ------------------------------------------------------------------ later turns

    def _next_turn(
        self, rivals: Sequence[Candidate], stage: Stage, settled: bool = False
    ) -> tuple[Probe, ...]:
        """The next rival of the open turn, or of a new one; all of them take part if it is
        `settled` who won.
        """
        taken = {one.layout: set(self.seen.turns(one.layout, stage)) for one in rivals}
        for layout, turns in taken.items():  # in some of them a device was held back
            turns.update(seen.probe.turn for seen in self.seen.timed_in(layout, stage))
        now = max((turn for turns in taken.values() for turn in turns), default=FIRST_TURN)
        for turn in (now, now + 1):
            running = rivals if settled else self._running_in(rivals, stage, turn)
            due = [one.layout for one in running if turn not in taken[one.layout]]
            if due:
                break
        else:
            return ()
        reserved = self._budget.least_seconds(due[0]) + (
            self._knobs_seconds if stage == "race" else 0.0
        )
        reserved = 0.0 if settled else reserved  # for what else is to be raced
        left = len(due) + max(0, ENOUGH_TURNS - 1 - turn) * len(rivals)
        return self._budget.probes(due[0], stage, turn, left, reserved)

    def _running_in(self, rivals: Sequence[Candidate], stage: Stage, turn: int) -> list[Candidate]:
        """The rivals of a turn: all in the first, then those that the turns before have not
        settled.
        """
        if turn == FIRST_TURN and stage == "knobs":  # `_first_turn` orders the race's own
            return list(rivals)
        return [] if turn >= MOST_TURNS else self._unsettled(rivals, stage, turn)[0]

    def _unsettled(
        self, rivals: Sequence[Candidate], stage: Stage, before: int = MOST_TURNS
    ) -> tuple[list[Candidate], bool]:
        turns = {
            one.layout: {
                turn: seen
                for turn, seen in self.seen.turns(one.layout, stage).items()
                if turn < before
            }
            for one in rivals
        }
        ran = [one for one in rivals if turns[one.layout]]
        once = (one for one in ran if len(turns[one.layout]) == 1)
        if held := [
            one for one in once if all(seen.held_back() for seen in turns[one.layout].values())
        ]:
            return held, False
        ran.sort(key=lambda one: -throughput(turns[one.layout]).value)
        left = self._budget.turns_left(one.layout for one in ran[:2])
        return unsettled(ran, turns, left, MOST_TURNS)

    # ------------------------------------------------------------------ knobs

    @cached_property
    def _knob_rivals(self) -> list[Candidate]:
        """The winner as it is, and with each knob; without those that failed. Empty if no knobs
        were asked for.
        """
        if not self._without_knobs or not self.options.knobs:
            return []
        winner = self._without_knobs[0].candidate
        layouts = [
            msgspec.structs.replace(winner.layout, knobs=(knob,)) for knob in self.options.knobs
        ]
        rivals = [winner, *(Candidate(winner.family, layout) for layout in layouts)]
        return [one for one in rivals if self.seen.broken(one.layout) is None]

    @property
    def turn_seconds(self) -> float:
        """The least seconds that a turn of every candidate, with knobs, should take; packs leave as
        many.
        """
        return (
            sum(self._budget.least_seconds(one.layout) for one in self.running)
            + self._knobs_seconds
        )

    @cached_property
    def _knobs_seconds(self) -> float:
        """The least seconds that one turn of the winner with each knob should take."""
        return sum(self._budget.least_seconds(one.layout) for one in self._knob_rivals)

    # ------------------------------------------------------------------ candidates

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
        here = (one for one in self.all if not self.seen.gone.keys() & one.layout.active)
        return tuple(one for one in here if self.seen.broken(one.layout) is None)

    @cached_property
    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        pairs = [(candidate, self._in_its_place(candidate)) for candidate in self._wished]
        return tuple((wished, instead) for wished, instead in pairs if instead != wished)

    def list_broken(self) -> list[tuple[Candidate, Observation]]:
        """The layouts of the race that failed, with the failure; the smallest pack of a mode of
        which none ever ran.
        """
        found = [(one, self.seen.broken(one.layout)) for one in self.all]
        for _, packing in self.packings:
            if not any(isinstance(one, Timed) for one in packing.seen):
                found += [(Candidate(PACK, one.probe.layout), one) for one in packing.seen[:1]]
        return [(one, seen) for one, seen in found if seen is not None]

    @cached_property
    def _wished(self) -> tuple[Candidate, ...]:
        found = [one for family in self.options.wanted for one in self._of(family)]
        if (
            isinstance(self._devices, RowDevices)
            and find_objective(self._problem.objective).trades_speed
        ):
            found += [
                Candidate(family_of(layout), layout, True) for layout in self._devices.efficient()
            ]
        allowed = [
            one for one in found if one.family in self.options.wanted
        ]  # one of the splits may be one device
        return tuple(self._distinct(allowed))

    def _of(self, family: Family) -> Iterator[Candidate]:
        """A family's candidates; those of another kind are of the family of that kind."""
        for i, layout in enumerate(family.layouts(self)):
            own = layout.kind == family.kind
            extra = i > 0 and layout.traits.by_shares and not family.equal_shares
            yield Candidate(family if own else family_of(layout), layout, extra)

    def _distinct(self, found: list[Candidate]) -> list[Candidate]:
        """The candidates without splits that no measurement could distinguish from one listed
        before them.
        """
        kept: list[Candidate] = []
        for one in found:
            splits = [
                other.layout
                for other in kept
                if other.layout.traits.together and other.layout.by_rows
            ]
            if not (
                one.layout.by_rows and any(same_measurement(one.layout, split) for split in splits)
            ):
                kept.append(one)
        return kept

    # ------------------------------------------------------------------ what families choose by

    @cached_property
    def singles(self) -> Sequence[Layout]:
        """The best single device, and others that may beat it."""
        return self._devices.singles()

    @cached_property
    def splits(self) -> Sequence[Layout]:
        """The preferred split, and others that are worth a race; none unless splits were asked
        for.
        """
        return self._devices.best_splits() if self.options.with_splits else []

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Even splits; none while splits that were asked for are not explored."""
        unclear = self.options.with_splits and not self._devices.splits
        return [] if unclear else self._devices.even_splits(self.splits, self.options.scaling)

    @cached_property
    def common_batch(self) -> int | None:
        """The batch for layouts that have none of their own: the fixed one, the best single
        device's, else one that no single device could hold; None before one is known, and where
        rows are assigned by what they cost.
        """
        if not self._devices.by_rows:
            return None
        if self._problem.global_batch is not None:
            return self._problem.global_batch
        if self.singles:
            return self.singles[0].global_batch
        full = [
            one.probe.layout.global_batch
            for one in self.seen.in_stage("solo")
            if isinstance(one, OutOfMemory)
        ]
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
        tried = [
            one.probe.layout for one in self.seen.timed() if one.probe.layout.placement == "logical"
        ]
        if wanted in tried or not tried or self._budget.affords(wanted, "race"):
            return wanted
        return max(tried, key=lambda layout: layout.processes)

    def _in_its_place(self, candidate: Candidate) -> Candidate:
        """The candidate, or, if it ran out of memory, a smaller batch instead; a fixed batch in
        more passes.
        """
        fixed, layout = self._problem.global_batch is not None, candidate.layout
        for _ in range(
            RETREATS if not fixed or (self._problem.micro and candidate.synchronous) else 0
        ):
            full = self.seen.broken(layout)
            if not isinstance(full, OutOfMemory):
                break
            smaller = (
                divide(layout, full.devices) if fixed else shrink(layout, self._problem.multiple_of)
            )
            if smaller is None:
                break
            layout = smaller
        return msgspec.structs.replace(candidate, layout=layout)
