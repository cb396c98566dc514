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
from collections.abc import Sequence
from functools import cached_property

import msgspec

from ..families import family_of
from ..statistics import relative_half_width
from ..types import Layout, Probe, Result, Stage, Timed
from .budget import Budget
from .layouts import Candidate
from .machine_model import MachineModel
from .observations import FIRST_TURN, MOST_TURNS, Turns
from .offers import Offers
from .ranking import ENOUGH_TURNS, LEAST_RATE, ROUGH, Standing, rank, throughput, unsettled


class Race:
    """The race between the layouts that are offered, by one set of observations."""

    def __init__(self, offers: Offers, machine: MachineModel, budget: Budget) -> None:
        self.offers = offers
        self.options = offers.options
        self._machine = machine
        self._budget = budget
        self._problem = machine.problem
        self._seen = machine.seen

    def next_probes(self) -> tuple[Probe, ...]:
        """The next measurement; empty when the race is over."""
        # packs on logical devices have as many trainings as run best as plain processes
        first = [one for one in self._unmeasured if one.layout.placement != "logical"]
        return (
            self._first_turn(first)
            or self._grow()
            or self._first_turn(self._unmeasured)
            or self._next_turn(self.running, "race")
            or self._next_turn(self._knob_rivals, "knobs")
        )

    @cached_property
    def running(self) -> tuple[Candidate, ...]:
        """The candidates that did not fail in the race and whose devices are all still there."""
        candidates = self.offers.candidates
        here = (one for one in candidates if not self._seen.gone.keys() & one.layout.active)
        return tuple(one for one in here if self._seen.broken(one.layout) is None)

    def repeat_best(self, chosen: Layout) -> tuple[Probe, ...]:
        """Another turn of the chosen layout and of the best other one, while the budget has time
        for one.
        """
        if self._problem.budget_seconds is None:
            return ()
        others = [one.candidate for one in self._without_knobs if one.candidate.layout != chosen]
        best = [Candidate(family_of(chosen), chosen), *others[: not chosen.knobs]]
        whole = [one for one in best if self._seen.broken(one.layout) is None]
        return self._next_turn(whole, "knobs" if chosen.knobs else "race", settled=True)

    def check(self, best: Result) -> tuple[Probe, ...]:
        """The chosen layout once more, and while turns may make it certain; None where nothing else
        was measured.
        """
        layout = best.layout
        if all(seen.probe.layout == layout for seen in self._seen.timed()):
            return ()
        checks = [seen for seen in self._seen.in_stage("check") if seen.probe.layout == layout]
        held = len(checks) == 1 and isinstance(checks[0], Timed) and checks[0].held_back()
        width = relative_half_width(best.throughput)
        rough = ROUGH < width <= ROUGH * math.sqrt(MOST_TURNS / best.turns)
        if checks and not held and not rough:
            return ()
        turns = (*self._seen.turns(layout), *(seen.probe.turn for seen in checks))
        return self._budget.probes(layout, "check", max(turns, default=FIRST_TURN) + 1)

    @cached_property
    def turns(self) -> dict[Layout, Turns]:
        """The turns of each candidate that is still running."""
        return {one.layout: self._seen.turns(one.layout) for one in self.running}

    @cached_property
    def ranking(self) -> tuple[Standing, ...]:
        """The winner first; with the winner's knobs, once they were tried."""
        rivals = self._knob_rivals
        turns = {one.layout: self._seen.turns(one.layout, "knobs") for one in rivals}
        tried = rank(rivals, turns, self._problem)
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
        """The first probe of the most promising of these candidates, if there is time for it."""
        if not wanted:
            return ()
        layout = min(wanted, key=self._priority).layout
        knobs = self._knobs_seconds
        if not self._budget.affords(layout, "race", reserved=knobs):
            return ()
        grows = layout.traits.side_by_side and layout.placement != "logical"
        stage: Stage = "pack" if grows else "race"
        reserved = 0.0
        if self.options.needs_more_children:
            others = [one.layout for one in self.unmeasured if one.layout != layout]
            reserved = knobs + sum(map(self._budget.least_seconds, others))
        probes = len(self._unmeasured) + (ENOUGH_TURNS - 1) * len(self.turns)
        seconds = self._budget.probe_seconds(layout, "race", probes, reserved=reserved)
        return (Probe(layout, stage, seconds, FIRST_TURN),)

    def _priority(self, one: Candidate) -> tuple[bool, float]:
        """The most expected samples/s for each second of the probe come first; a family's extra
        candidates last.

        Of packs and placements as much is expected as of the best of the others.
        """
        comparable = [one]
        if not one.synchronous:
            comparable = [other for other in self.offers.candidates if other.synchronous]
        rates = [self._machine.predicted_rate(each.layout) for each in comparable]
        seconds = self._budget.least_seconds(one.layout)
        return one.extra and self.options.needs_more_children, seconds / max([LEAST_RATE, *rates])

    # ------------------------------------------------------------------ packs

    def _grow(self) -> tuple[Probe, ...]:
        """The next pack, the smallest of all modes first, if the budget also suffices for a turn of
        every candidate.
        """
        found = [packing.next_layout() for _, packing in self.offers.view.packings]
        wanted = sorted((one for one in found if one is not None), key=lambda one: one.processes)
        for layout in wanted:
            reserved = self.turn_seconds
            probes = self._budget.probes(layout, "pack", FIRST_TURN, ENOUGH_TURNS, reserved)
            if probes:
                return probes
        return ()

    # ------------------------------------------------------------------ later turns

    def _next_turn(
        self, rivals: Sequence[Candidate], stage: Stage, settled: bool = False
    ) -> tuple[Probe, ...]:
        """The next rival of the open turn, or of a new one; all of them take part if it is
        `settled` who won.
        """
        taken = {one.layout: set(self._seen.turns(one.layout, stage)) for one in rivals}
        for layout, turns in taken.items():  # in some of them a device was held back
            turns.update(seen.probe.turn for seen in self._seen.timed_in(layout, stage))
        now = max((turn for turns in taken.values() for turn in turns), default=FIRST_TURN)
        for turn in (now, now + 1):
            running = rivals if settled else self._running_in(rivals, stage, turn)
            due = [one.layout for one in running if turn not in taken[one.layout]]
            if due:
                left = len(due) + max(0, ENOUGH_TURNS - 1 - turn) * len(rivals)
                reserved = 0.0 if settled else self._reserved(due[0], stage)
                return self._budget.probes(due[0], stage, turn, left, reserved)
        return ()

    def _reserved(self, layout: Layout, stage: Stage) -> float:
        """The seconds that a turn leaves for what else is to be raced."""
        knobs = self._knobs_seconds if stage == "race" else 0.0
        return self._budget.least_seconds(layout) + knobs

    def _running_in(self, rivals: Sequence[Candidate], stage: Stage, turn: int) -> list[Candidate]:
        """The rivals of a turn: all in the first, then those that the turns before have not
        settled.
        """
        if turn == FIRST_TURN and stage == "knobs":  # `_first_turn` orders the race's own
            return list(rivals)
        if turn >= MOST_TURNS:
            return []
        found, _ = self._unsettled(rivals, stage, turn)
        return found

    def _unsettled(
        self, rivals: Sequence[Candidate], stage: Stage, before: int = MOST_TURNS
    ) -> tuple[list[Candidate], bool]:
        """The rivals that deserve another turn by the turns `before` one; whether there is a tie
        that no turn would end.
        """
        turns = {}
        for one in rivals:
            taken = self._seen.turns(one.layout, stage)
            turns[one.layout] = {turn: seen for turn, seen in taken.items() if turn < before}
        ran = [one for one in rivals if turns[one.layout]]
        held = [one for one in ran if _was_held_back_in_its_only(turns[one.layout])]
        if held:
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
        rivals = [winner]
        for knob in self.options.knobs:
            layout = msgspec.structs.replace(winner.layout, knobs=(knob,))
            rivals.append(Candidate(winner.family, layout))
        return [one for one in rivals if self._seen.broken(one.layout) is None]

    @property
    def turn_seconds(self) -> float:
        """The least seconds that a turn of every candidate, with knobs, should take; packs leave as
        many.
        """
        candidates = sum(self._budget.least_seconds(one.layout) for one in self.running)
        return candidates + self._knobs_seconds

    @cached_property
    def _knobs_seconds(self) -> float:
        """The least seconds that one turn of the winner with each knob should take."""
        return sum(self._budget.least_seconds(one.layout) for one in self._knob_rivals)


def _was_held_back_in_its_only(turns: Turns) -> bool:
    """True if there is one turn, and a device was held back in it."""
    return len(turns) == 1 and all(seen.held_back() for seen in turns.values())
