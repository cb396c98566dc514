"""The comparison: a problem and the wanted layouts in, probes out, observations back, a ranking at every moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evener.balancer.search.candidates import Entrants
from evener.balancer.search.comparison_purse import GROWN_BY, Part, Purse
from evener.balancer.search.comparison_scout import Scout
from evener.balancer.search.comparison_told import FIRST, Told
from evener.balancer.search.layouts import Candidate, Knob, PackMode, Wanted
from evener.balancer.search.pack_stage import Packing
from evener.balancer.search.ranking import ENOUGH_TURNS, MOST_TURNS, Standing, contenders, ranked
from evener.balancer.types import Belief, Layout, Observation, Probe, Problem, Result, Stage, Timed

BEFORE = -1  # the turn of what was measured before the race
KNOB_TURNS = 1000  # turns of the race from here on are about knobs

SETTLED = "Every layout is told from the winner, or ties with it."
TIED = "The leading layouts can't be told apart: every turn was taken."
BUDGET = "The budget is spent."
LONE = "There is one layout, and it was measured."
NOTHING = "No layout could be measured."


class Comparison:
    """Ranks layouts; see `balancer.compare` for the stages. Time comes in by observations alone."""

    def __init__(self, problem: Problem, wanted: Wanted) -> None:
        self.problem = problem
        self.wanted = wanted
        self._scout = Scout(problem, wanted)
        self._told = Told()

    def ask(self) -> tuple[Probe, ...]:
        """What to measure now, at the same time; empty when the comparison is over. Asking changes nothing."""
        if probes := self._scout.ask():
            return probes
        for stage in (self._measure_once, self._grow, self._measure_copies, self._race, self._try_knobs):
            probe = stage()
            if probe is not None:
                return (probe,)
        return ()

    def tell(self, seen: Observation) -> None:
        """Take what was seen: in any order, asked for or not, more than once."""
        probe = seen.probe
        if len(probe.layout.shares) != self.problem.devices or not probe.layout.active:
            return
        self._told.add(seen)
        if probe.stage in ("solo", "split"):
            self._scout.tell(seen)  # its own ledger tells what is new

    def best(self) -> Result | None:
        """The winner so far; before the race, the best that the scout has seen."""
        found = self.standings()
        return _result(found[0]) if found else self._scout.best()

    def results(self) -> tuple[Result, ...]:
        """Every layout of the race, the winner first; before it, what the scout has seen."""
        return tuple(map(_result, self.standings())) or self._scout.results()

    def belief(self) -> Belief:
        """The scout's curves, and what is going on now."""
        return msgspec.structs.replace(self._scout.belief(), doing=self._doing())

    def why_stopped(self) -> str | None:
        """Why nothing more is asked, in words; None while something is."""
        if self.ask():
            return None
        found = self.standings()
        if not found:
            return NOTHING
        turns = self._race_turns()
        if any(not turns[one.layout] for one in self._runners()):
            return BUDGET
        if contenders(self._runners(), turns):
            return TIED if found[0].turns >= MOST_TURNS else BUDGET
        return SETTLED if len(found) > 1 else LONE

    def standings(self) -> tuple[Standing, ...]:
        """The ranking, the winner first; with the winner's knobs, once they were tried."""
        main = ranked(self._runners(), self._with_earlier(self._race_turns()))
        if not main or not self.wanted.knobs:
            return main
        tried = ranked(self._knob_candidates(main[0].candidate), self._knob_turns(main[0].candidate))
        if len(tried) < 2:
            return main
        rest = [one for one in main if one.candidate.layout != main[0].candidate.layout]
        return (*tried, *rest)

    def candidates(self) -> tuple[Candidate, ...]:
        """Every layout that takes part in the race, in the order of a turn; the same layout never twice."""
        return self._entrants.all()

    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        return self._entrants.retreats()

    def solos(self) -> tuple[Result | None, ...]:
        """Each device alone at its fastest, as the scout saw it; None for one that never ran."""
        return self._scout.solos()

    def common_batch(self) -> int | None:
        """The batch of the layouts that have none of their own; None if nothing ran yet."""
        return self._scout.common_batch()

    def unmeasured(self) -> tuple[Candidate, ...]:
        """The layouts that the budget left without a measurement."""
        turns = self._with_earlier(self._race_turns())
        return tuple(one for one in self._runners() if not turns[one.layout] and not one.extra)

    def ungrown(self) -> tuple[Candidate, ...]:
        """The next packs in each mode that still gained with its last one, when its part of the budget was spent."""
        found = [packing.next_layout() for _, packing in self._packings() if packing.still_gains]
        return tuple(Candidate("pack", layout) for layout in found if layout is not None)

    def enough_seconds(self) -> float:
        """A budget that should have sufficed to measure every layout once, and another pack of each mode."""
        costs, spent = self._purse().costs, self._told.spent_seconds()
        once = spent + costs.total(one.layout for one in self.unmeasured())
        grown = costs.total(one.layout for one in self.ungrown())
        return max(once, (self._told.spent_seconds(until=FIRST) + grown) / GROWN_BY) if grown else once

    def broken(self) -> tuple[tuple[Candidate, Observation], ...]:
        """The layouts of the race that did not run, and what came instead."""
        pairs = [(candidate, self._told.broken(candidate.layout)) for candidate in self.candidates()]
        packs = [(Candidate("pack", seen.probe.layout), seen) for _, one in self._packings() if (seen := one.refused())]
        return (*((candidate, seen) for candidate, seen in pairs if seen is not None), *packs)

    def packs(self) -> dict[PackMode, tuple[Observation, ...]]:
        """What growing the number of trainings saw, by mode: the table of N against throughput."""
        return {mode: packing.seen for mode, packing in self._packings()}

    def timed(self, layout: Layout) -> tuple[Timed, ...]:
        """Every turn that a layout took in the race, to say where its time went."""
        return tuple(self._told.turns(layout).values())

    # ------------------------------------------------------------------ first and grow

    def _measure_once(self) -> Probe | None:
        """The first turn: of those without one, the cheapest; what a short budget can't pay is left out last."""
        return self._first_turn([one for one in self._left() if not _copies(one)])

    def _measure_copies(self) -> Probe | None:
        """The first turn of what has as many trainings as packs ended with."""
        return self._first_turn([one for one in self._left() if _copies(one)])

    def _left(self) -> list[Candidate]:
        """The layouts that had no turn."""
        turns = self._race_turns()
        return [one for one in self._runners() if not turns[one.layout]]

    def _first_turn(self, wanted: Sequence[Candidate]) -> Probe | None:
        if not wanted:
            return None
        purse = self._purse(self._knobs_to_come())
        layout = min(wanted, key=lambda one: (one.extra, purse.costs.least(one.layout))).layout
        if not purse.affords("first", layout):
            return None
        stage: Stage = "pack" if layout.kind == "pack" and layout.placement != "logical" else "race"
        left = self._left()
        probes = len(left) + (ENOUGH_TURNS - 1) * len(self._race_turns())
        others = purse.costs.total(other.layout for other in left if other.layout != layout and not other.extra)
        seconds = self._purse(self._knobs_to_come() + others).seconds("first", layout, probes)
        return Probe(layout, stage, seconds, FIRST)

    def _grow(self) -> Probe | None:
        """Larger packs, the smallest of all modes first, while another turn of every layout can be paid as well."""
        wanted = [layout for _, packing in self._packings() if (layout := packing.next_layout()) is not None]
        if not wanted or self._raced():
            return None
        costs = self._purse().costs
        turn = costs.total(one.layout for one in self._runners())
        purse = self._purse(turn + self._knobs_to_come())
        for layout in sorted(wanted, key=lambda one: one.processes):
            if purse.affords("grow", layout):
                return Probe(layout, "pack", purse.seconds("grow", layout, 6))
        return None

    def _packings(self) -> list[tuple[PackMode, Packing]]:
        return self._entrants.packings()

    def _raced(self) -> bool:
        """Whether the turns after the first have begun: under a budget that is not left again for a larger pack."""
        later = (turn for taken in self._race_turns().values() for turn in taken if turn > FIRST)
        return self.problem.budget_seconds is not None and any(later)

    # ------------------------------------------------------------------ race

    def _race(self) -> Probe | None:
        """Another turn of those whose place is not settled; what could not be paid once is out of it."""
        turns = self._race_turns()
        return self._next_turn("race", [one for one in self._runners() if turns[one.layout]], turns, FIRST)

    def _try_knobs(self) -> Probe | None:
        main = ranked(self._runners(), self._race_turns())
        if not main or not self.wanted.knobs:
            return None
        rivals = self._unbroken(self._knob_candidates(main[0].candidate))
        return self._next_turn("knobs", rivals, self._knob_turns(main[0].candidate), KNOB_TURNS)

    def _next_turn(
        self, part: Part, rivals: Sequence[Candidate], turns: dict[Layout, dict[int, Timed]], first: int
    ) -> Probe | None:
        """The next of those who take part in the turn that is open, or in a new one."""
        now = max((turn for taken in turns.values() for turn in taken), default=first)
        running = [one for one in _running(rivals, turns, now, first) if now not in turns[one.layout]]
        if not running:
            now += 1
            running = list(_running(rivals, turns, now, first))
        purse = self._purse(self._knobs_to_come() if part == "race" else 0.0)
        for candidate in running:
            if purse.affords(part, candidate.layout):
                left = len(running) + max(0, ENOUGH_TURNS - 1 - (now - first)) * len(rivals)
                return Probe(candidate.layout, "race", purse.seconds(part, candidate.layout, left), now)
            break
        return None

    def _runners(self) -> tuple[Candidate, ...]:
        return self._unbroken(self.candidates())

    def _unbroken(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        return tuple(one for one in candidates if self._told.broken(one.layout) is None)

    def _race_turns(self) -> dict[Layout, dict[int, Timed]]:
        return self._turns(self.candidates(), lambda turn: turn < KNOB_TURNS)

    def _with_earlier(self, turns: dict[Layout, dict[int, Timed]]) -> dict[Layout, dict[int, Timed]]:
        """For a layout that the race has not come to, what was measured of it before, once the race has begun."""
        if not any(turns.values()):
            return turns
        earlier = {layout: self._told.before(layout) for layout, taken in turns.items() if not taken}
        return {**turns, **{layout: {BEFORE: seen} for layout, seen in earlier.items() if seen is not None}}

    def _knob_turns(self, winner: Candidate) -> dict[Layout, dict[int, Timed]]:
        return self._turns(self._knob_candidates(winner), lambda turn: turn >= KNOB_TURNS)

    def _turns(self, candidates: Sequence[Candidate], wanted: Callable[[int], bool]) -> dict[Layout, dict[int, Timed]]:
        return {one.layout: self._told.turns(one.layout, wanted) for one in candidates}

    def _knob_candidates(self, winner: Candidate) -> tuple[Candidate, ...]:
        """The winner as it is, and with each knob turned."""

        def turned(knob: Knob) -> Candidate:
            return Candidate(winner.family, msgspec.structs.replace(winner.layout, knobs=(knob,)))

        return (winner, *(turned(knob) for knob in self.wanted.knobs))

    def _knobs_to_come(self) -> float:
        """What one turn of the winner with each knob should cost at the least."""
        main = self._leader()
        if main is None or not self.wanted.knobs:
            return 0.0
        rivals = self._unbroken(self._knob_candidates(main))
        return self._purse().costs.total(one.layout for one in rivals)

    def _leader(self) -> Candidate | None:
        main = ranked(self._runners(), self._race_turns())
        return main[0].candidate if main else None

    def _purse(self, reserved_seconds: float = 0.0) -> Purse:
        return Purse(self.problem.budget_seconds, self._told, reserved_seconds)

    @property
    def _entrants(self) -> Entrants:
        def affords(layout: Layout) -> bool:
            return self._purse().affords("first", layout)

        return Entrants(self.problem, self.wanted, self._scout, self._told, affords)

    def _doing(self) -> str:
        probes = self.ask()
        if not probes:
            return "Done."
        probe = probes[0]
        if probe.stage == "pack":
            return f"Packs {probe.layout.processes} trainings on one device."
        if probe.stage != "race":
            return self._scout.belief().doing
        if probe.turn >= KNOB_TURNS:
            return "Measures the winner with other knobs, in turns."
        return f"Races the layouts, turn {probe.turn + 1}."


def _copies(one: Candidate) -> bool:
    """Whether a layout takes its number of trainings from another mode of packing, and so waits for it."""
    return one.layout.placement == "logical"


def _running(
    rivals: Sequence[Candidate], turns: dict[Layout, dict[int, Timed]], turn: int, first: int
) -> Sequence[Candidate]:
    """Who takes part in a turn: everybody in the first, then those that the turns before have not told apart."""
    if turn == first:
        return rivals
    if turn - first >= MOST_TURNS:
        return ()
    before = {layout: {t: seen for t, seen in taken.items() if t < turn} for layout, taken in turns.items()}
    return contenders(rivals, before)


def _result(one: Standing) -> Result:
    return Result(one.candidate.layout, one.throughput, one.turns)
