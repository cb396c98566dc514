"""The comparison: a problem and the wanted layouts in, probes out, observations back, a ranking at every moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from balancer.compare.layouts import Candidate, Knob, PackMode, Wanted, placed
from balancer.compare.packing import Packing
from balancer.compare.purse import Part, Purse
from balancer.compare.rank import ENOUGH_TURNS, MOST_TURNS, Standing, contenders, ranked
from balancer.compare.scout import Scout
from balancer.compare.told import Told
from balancer.records import Belief, Layout, Observation, Probe, Problem, Result, Timed

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
        for stage in (self._grow, self._race, self._try_knobs):
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
        families, scout = self.wanted.families, self._scout
        single = scout.single()
        found: list[Candidate] = []
        if "solo" in families and single:
            found.append(single)
        if "even" in families:
            found += scout.evens()
        if "split" in families:
            found += scout.splits()
        if "place" in families:
            found += self._placed()
        if "pack" in families and single:
            found += self._packed()
        kept: dict[Layout, Candidate] = {}
        for candidate in found:
            kept.setdefault(candidate.layout, candidate)
        return tuple(kept.values())

    def solos(self) -> tuple[Result | None, ...]:
        """Each device alone at its fastest, as the scout saw it; None for one that never ran."""
        return self._scout.solos()

    def common_batch(self) -> int | None:
        """The batch of the layouts that have none of their own; None if nothing ran yet."""
        return self._scout.common_batch()

    def unmeasured(self) -> tuple[Candidate, ...]:
        """The layouts that the budget left without a measurement."""
        turns = self._with_earlier(self._race_turns())
        return tuple(one for one in self._runners() if not turns[one.layout])

    def broken(self) -> tuple[tuple[Candidate, Observation], ...]:
        """The layouts of the race that did not run, and what came instead."""
        pairs = [(candidate, self._told.broken(candidate.layout)) for candidate in self.candidates()]
        return tuple((candidate, seen) for candidate, seen in pairs if seen is not None)

    def packs(self) -> dict[PackMode, tuple[Observation, ...]]:
        """What growing the number of trainings saw, by mode: the table of N against throughput."""
        return {mode: packing.seen for mode, packing in self._packings()}

    def timed(self, layout: Layout) -> tuple[Timed, ...]:
        """Every turn that a layout took in the race, to say where its time went."""
        return tuple(self._told.turns(layout).values())

    # ------------------------------------------------------------------ grow

    def _grow(self) -> Probe | None:
        for _, packing in self._packings():
            layout = packing.next_layout()
            reserve = self._purse.turn_seconds(one.layout for one in self.candidates())
            if layout is not None and self._purse.affords("grow", layout, reserve):
                return Probe(layout, "pack", self._purse.seconds("grow", layout, 6))
        return None

    def _packings(self) -> list[tuple[PackMode, Packing]]:
        """Packing in each mode that has a growth of its own."""
        single = self._scout.single()
        if single is None or "pack" not in self.wanted.families:
            return []
        known = [result for result in self._scout.results() if result.layout.active == single.layout.active]
        alone = max((result.throughput.value for result in known), default=0.0)
        modes = [mode for mode in self.wanted.pack_modes if mode != "logical"]
        return [(mode, Packing(self.problem, single.layout, alone, mode, self._told)) for mode in modes]

    def _packed(self) -> list[Candidate]:
        """The best number of trainings in each mode; equal parts of the memory are tried at that of plain processes."""
        best = {mode: packing.best_layout() for mode, packing in self._packings()}
        plain = best.get("")
        if "logical" in self.wanted.pack_modes and plain is not None:
            best["logical"] = msgspec.structs.replace(plain, placement="logical")
        return [Candidate("pack", layout) for layout in best.values() if layout is not None]

    def _placed(self) -> list[Candidate]:
        batch = self._scout.common_batch()
        if batch is None:
            return []
        found = [placed(self.problem.devices, placement, batch) for placement in self.wanted.placements]
        return [one for one in found if one is not None]

    # ------------------------------------------------------------------ race

    def _race(self) -> Probe | None:
        return self._next_turn("race", self._runners(), self._race_turns(), 0)

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
        for candidate in running:
            if self._purse.affords(part, candidate.layout):
                left = len(running) + max(0, ENOUGH_TURNS - 1 - (now - first)) * len(rivals)
                return Probe(candidate.layout, "race", self._purse.seconds(part, candidate.layout, left), now)
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

    @property
    def _purse(self) -> Purse:
        return Purse(self.problem.budget_seconds, self._told, bool(self.wanted.knobs))

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
