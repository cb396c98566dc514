"""The last stage of a search: measure the best layouts in turns (A B C A B C) until one wins.

A turn, or round, is one measurement of each layout that may still win. In the first one (turn 0),
every layout is measured once. Layouts with high expected samples/s and a short probe come first. If
a step over several devices, or a device with the others idle, was measured in an earlier stage,
that measurement counts as the layout's turn 0. Then larger numbers of jobs per device are tried as
long as they are faster.

Later turns decide which layout is the fastest. They end when another one isn't worth its time. The
winner is measured with each requested knob (a tuning option such as XLA or mixed precision).
Finally, another measurement checks the winner's samples/s, because the highest of several noisy
values is biased upwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import msgspec

from ..families import family_of
from ..statistics import relative_half_width
from ..types import Failed, Layout, Probe, Result, Stage, Timed
from .budget import BASE_SECONDS, Budget
from .layouts import BALANCE, Candidate
from .machine_model import MachineModel
from .observations import FIRST_TURN, MOST_TURNS, Turns
from .offers import Offers
from .ranking import (
    ENOUGH_TURNS,
    FAR_SLOWER,
    LEAST_RATE,
    ROUGH,
    RankedLayout,
    rank,
    throughput,
    undecided,
)

# fewer steps say little about their noise; if a probe has more, turns differ for other reasons
FEW_STEPS = 24


class Race:
    """The final comparison: the best layouts are measured in turns until one wins.

    In a round (turn), each layout that may still win is measured once.
    """

    def __init__(self, offers: Offers, machine: MachineModel, budget: Budget) -> None:
        self.offers = offers
        self.options = offers.options
        self._machine = machine
        self._budget = budget
        self._problem = machine.problem
        self._seen = machine.seen

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the next probe in a tuple; empty if the comparison is decided or time is up.

        At first, each layout is measured once, and larger numbers of jobs per device are tried.
        Then come more rounds of the layouts that may still win, and finally the winner with tuning
        options.
        """
        # packs on logical devices have as many trainings as the best pack of plain processes
        first = [one for one in self._unmeasured if one.layout.placement != "logical"]
        return (
            self._first_turn(first)
            or self._grow_packs()
            or self._first_turn(self._unmeasured)
            or self._next_turn(self.running, Stage.RACE)
            or self._next_turn(self._knob_rivals, Stage.KNOBS)
        )

    @cached_property
    def running(self) -> tuple[Candidate, ...]:
        """The layouts that haven't failed in this comparison, and whose devices all still work."""
        candidates = self.offers.candidates
        here = (
            candidate
            for candidate in candidates
            if not self._seen.gone.keys() & candidate.layout.active
        )
        whole = [one for one in here if self._seen.first_failure(one.layout) is None]
        return tuple(one for one in whole if not self._is_hopeless(one, whole))

    def _is_hopeless(self, candidate: Candidate, others: Sequence[Candidate]) -> bool:
        """Whether a layout is predicted to be far slower than another, and starts slowly.

        Always False for a layout that was measured already, and if the user asked for certain
        layouts, as `evener compare` does: those are all measured.
        """
        layout = candidate.layout
        if self.options.families != BALANCE.families:
            return False
        if not candidate.synchronous or self._seen.turns(layout):
            return False
        if not self._budget.is_expensive(self._budget.starts.seconds(layout)):
            return False
        turns = [self._seen.turns(other.layout) for other in others if other.synchronous]
        rates = [throughput(each).low for each in turns if each]
        return self._machine.predicted_rate(layout) < FAR_SLOWER * max(rates, default=0.0)

    def repeat_best(self, chosen: Layout) -> tuple[Probe, ...]:
        """Return another probe of the winner or of its closest rival, to use up the budget.

        The result is a tuple of one; empty if the search has no budget, or if there is no time.
        """
        if self._problem.budget_seconds is None:
            return ()
        others = [knob.candidate for knob in self._without_knobs if knob.candidate.layout != chosen]
        best = [Candidate(family_of(chosen), chosen), *others[: not chosen.knobs]]
        whole = [one for one in best if self._seen.first_failure(one.layout) is None]
        return self._next_turn(whole, Stage.KNOBS if chosen.knobs else Stage.RACE, include_all=True)

    def check(self, best: Result) -> tuple[Probe, ...]:
        """Return a probe that measures the winner again, to get its throughput without bias.

        The throughput for which it was chosen is the highest of several noisy values. One probe
        after another is returned, each as a tuple of one, if a device was throttled or if the
        throughput is still uncertain. Empty if no more are needed, or if one failed.
        """
        layout = best.layout
        checks = [seen for seen in self._seen.in_stage(Stage.CHECK) if seen.probe.layout == layout]
        if any(isinstance(seen, Failed) for seen in checks):
            return ()  # another one would only fail too
        held = len(checks) == 1 and isinstance(checks[0], Timed) and checks[0].was_throttled()
        rough = self._needs_more_checks(best, len(checks))
        compared = any(seen.probe.layout != layout for seen in self._seen.timed())
        if not rough and not held and (checks or not compared):
            return ()
        turns = (*self._seen.turns(layout), *(seen.probe.turn for seen in checks))
        return self._budget.probes(layout, Stage.CHECK, max(turns, default=FIRST_TURN) + 1)

    def _needs_more_checks(self, best: Result, check_count: int) -> bool:
        """Whether the winner's throughput is uncertain, and measuring it again may help.

        `check_count` is how often it has been measured again.
        """
        # turns in which a device was throttled don't count, so the checks are limited too
        width = relative_half_width(best.throughput)
        if width <= ROUGH or check_count >= MOST_TURNS:
            return False
        if width <= ROUGH * math.sqrt(MOST_TURNS / best.turns):
            return True
        is_alone = all(one.layout == best.layout for one in self.running)
        # a check has time for few steps
        step_seconds = best.layout.global_batch / best.throughput.value
        slow = FEW_STEPS * step_seconds > BASE_SECONDS[Stage.CHECK]
        return (is_alone or slow) and best.turns < MOST_TURNS

    @cached_property
    def turns(self) -> dict[Layout, Turns]:
        """The measurements of each layout, by round."""
        return {one.layout: self._seen.turns(one.layout) for one in self.running}

    @cached_property
    def ranking(self) -> tuple[RankedLayout, ...]:
        """The measured layouts, best first.

        If tuning options were compared, the winner appears once for each of them.
        """
        rivals = self._knob_rivals
        turns = {rival.layout: self._seen.turns(rival.layout, Stage.KNOBS) for rival in rivals}
        tried = rank(rivals, turns, self._problem)
        return (*tried, *self._without_knobs[1:]) if len(tried) > 1 else self._without_knobs

    @cached_property
    def _without_knobs(self) -> tuple[RankedLayout, ...]:
        return rank(self.running, self.turns, self._problem)

    @cached_property
    def _unmeasured(self) -> list[Candidate]:
        return [one for one in self.running if not self.turns[one.layout]]

    @property
    def unmeasured(self) -> tuple[Candidate, ...]:
        """The layouts that have no measurement yet, without optional candidates."""
        return tuple(one for one in self._unmeasured if not one.extra)

    @cached_property
    def waiting(self) -> tuple[list[Candidate], bool]:
        """The layouts that need another measurement, and whether the fastest ones are tied.

        A tie means that the remaining rounds can't show which one is faster.
        """
        rivals, tied = self._find_undecided(self.running, Stage.RACE)
        return [*self._unmeasured, *rivals], tied

    # ------------------------------------------------------------------ first turn

    def _first_turn(self, candidates: Sequence[Candidate]) -> tuple[Probe, ...]:
        """Return a first probe of the most promising of these candidates, as a tuple of one.

        Empty if there are no candidates, or if there is no time.
        """
        if not candidates:
            return ()
        layout = min(candidates, key=self._first_turn_key).layout
        knobs = self._knobs_seconds
        if not self._budget.affords(layout, Stage.RACE, reserved=knobs):
            return ()
        grows = layout.traits.side_by_side and layout.placement != "logical"
        stage: Stage = Stage.PACK if grows else Stage.RACE
        reserved = 0.0
        if self.options.needs_more_children:
            others = [one.layout for one in self.unmeasured if one.layout != layout]
            reserved = knobs + sum(map(self._budget.least_seconds, others))
        probes = len(self._unmeasured) + (ENOUGH_TURNS - 1) * len(self.turns)
        seconds = self._budget.probe_seconds(layout, Stage.RACE, probes, reserved=reserved)
        return (Probe(layout, stage, seconds, FIRST_TURN),)

    def _first_turn_key(self, candidate: Candidate) -> tuple[bool, float]:
        """Sort key for the first round: fast layouts with short probes come first.

        This matters because the budget may run out before all layouts are measured.
        """
        comparable = [candidate]
        if not candidate.synchronous:
            # a pack or placement is expected to be as fast as the fastest other candidate
            comparable = [other for other in self.offers.candidates if other.synchronous]
        rates = [self._machine.predicted_rate(each.layout) for each in comparable]
        seconds = self._budget.least_seconds(candidate.layout)
        return candidate.extra and self.options.needs_more_children, seconds / max(
            [LEAST_RATE, *rates]
        )

    # ------------------------------------------------------------------ packs

    def _grow_packs(self) -> tuple[Probe, ...]:
        """Return a probe with the next larger number of jobs on one device, if it might be faster.

        The result is a tuple of one; empty if such a probe wouldn't leave enough time for a round
        of all layouts.
        """
        found = [packing.next_layout() for _, packing in self.offers.view.packings]
        wanted = sorted((one for one in found if one is not None), key=lambda one: one.processes)
        for layout in wanted:
            reserved = self.turn_seconds
            probes = self._budget.probes(layout, Stage.PACK, FIRST_TURN, ENOUGH_TURNS, reserved)
            if probes:
                return probes
        return ()

    # ------------------------------------------------------------------ later turns

    def _next_turn(
        self, rivals: Sequence[Candidate], stage: Stage, include_all: bool = False
    ) -> tuple[Probe, ...]:
        """Return the next probe of the current round, or the first one of the next round.

        `stage` is the final comparison, or the comparison of tuning options. With `include_all`,
        all layouts take part, because the winner is known already. Otherwise, only those that may
        still win do.
        """
        taken = {rival.layout: set(self._seen.turns(rival.layout, stage)) for rival in rivals}
        # further turns replace those in which a device was throttled
        for layout, turns in taken.items():
            turns.update(seen.probe.turn for seen in self._seen.timed_in(layout, stage))
        now = max((turn for turns in taken.values() for turn in turns), default=FIRST_TURN)
        for turn in (now, now + 1):
            running = rivals if include_all else self._rivals_in_turn(rivals, stage, turn)
            due = [one.layout for one in running if turn not in taken[one.layout]]
            if due:
                left = len(due) + max(0, ENOUGH_TURNS - 1 - turn) * len(rivals)
                reserved = 0.0 if include_all else self._reserved_seconds(due[0], stage)
                return self._budget.probes(due[0], stage, turn, left, reserved)
        return ()

    def _reserved_seconds(self, layout: Layout, stage: Stage) -> float:
        """Return how many seconds to keep for later probes of the comparison.

        These are another probe of this layout and, in the final comparison, a round of the tuning
        options.
        """
        knobs = self._knobs_seconds if stage == Stage.RACE else 0.0
        # another such probe and, in the race, a turn with each knob
        return self._budget.least_seconds(layout) + knobs

    def _rivals_in_turn(
        self, rivals: Sequence[Candidate], stage: Stage, turn: int
    ) -> list[Candidate]:
        """Return those rivals that are to be measured in a round, because they may still win.

        `stage` is the final comparison, or the comparison of tuning options.
        """
        # the first turn of the race is in `_first_turn`
        if turn == FIRST_TURN and stage == Stage.KNOBS:
            return list(rivals)
        if turn >= MOST_TURNS:
            return []
        found, _ = self._find_undecided(rivals, stage, turn)
        return found

    def _find_undecided(
        self, rivals: Sequence[Candidate], stage: Stage, before_turn: int = MOST_TURNS
    ) -> tuple[list[Candidate], bool]:
        """Return the rivals that need another measurement, and whether some are tied.

        `stage` is the final comparison, or the comparison of tuning options. Only measurements from
        rounds before `before_turn` count.
        """
        turns = {}
        for one in rivals:
            taken = self._seen.turns(one.layout, stage)
            turns[one.layout] = {turn: seen for turn, seen in taken.items() if turn < before_turn}
        ran = [rival for rival in rivals if turns[rival.layout]]
        held = [one for one in ran if _was_throttled_in_only_turn(turns[one.layout])]
        # nothing can be decided before these rivals have another turn
        if held:
            return held, False
        ran.sort(key=lambda one: -throughput(turns[one.layout]).value)
        left = self._budget.turns_left(one.layout for one in ran[:2])
        return undecided(ran, turns, left, MOST_TURNS)

    # ------------------------------------------------------------------ knobs

    @cached_property
    def _knob_rivals(self) -> list[Candidate]:
        """The layouts that show which tuning options help; empty if no option was requested.

        They are the winner without any option, and the winner with each of them. Layouts that have
        failed are left out.
        """
        if not self._without_knobs or not self.options.knobs:
            return []
        winner = self._without_knobs[0].candidate
        rivals = [winner]
        for knob in self.options.knobs:
            layout = msgspec.structs.replace(winner.layout, knobs=(knob,))
            rivals.append(Candidate(winner.family, layout))
        return [rival for rival in rivals if self._seen.first_failure(rival.layout) is None]

    @property
    def turn_seconds(self) -> float:
        """The time to measure each layout and each tuning option once, in seconds."""
        candidates = sum(self._budget.least_seconds(one.layout) for one in self.running)
        return candidates + self._knobs_seconds

    @cached_property
    def _knobs_seconds(self) -> float:
        """The time to measure the winner with each tuning option once, in seconds."""
        return sum(self._budget.least_seconds(rival.layout) for rival in self._knob_rivals)


def _was_throttled_in_only_turn(turns: Turns) -> bool:
    """Whether a layout has only one measurement, in which a device was throttled."""
    return len(turns) == 1 and all(seen.was_throttled() for seen in turns.values())
