"""The search: a problem in, probes out, observations back, and at every moment the best layout measured so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from statistics import fmean

import msgspec

from evener.plan.layout import Knots

from ..families import PACK, PackMode
from ..objectives import find_objective
from ..types import Belief, Layout, ModelState, Observation, Power, Probe, Problem, Result, Timed, layout_of
from .budget import Budget
from .decisions import (
    Decision,
    Stop,
    explain_exploring,
    explain_nobody,
    explain_race,
    explain_sharding,
    sketch_curve,
)
from .layouts import BALANCE, Candidate, LayoutOptions
from .machine_model import MachineModel
from .observations import Observations
from .ranking import ENOUGH_TURNS, ROUGH, Standing, center, mean_power, throughput, widen
from .reading import SearchReading, result_of
from .rows import RowDevices
from .solo_stage import SMALL
from .statistics import relative_half_width
from .texts import TextDevices

LEAST_STEPS = 20  # of an epoch, that a free global batch leaves: an optimizer learns nothing in fewer


class Search:
    """Finds the layout that trains fastest; see `evener.balancer.search` for the theory.

    Time comes in by observations alone: what is spent is the sum of their `elapsed_seconds`. Solo probes of one turn
    run at the same time, so only the longest counts.
    """

    def __init__(self, problem: Problem, options: LayoutOptions = BALANCE) -> None:
        self.problem, self.options = problem, options
        self._seen = Observations(problem)
        self._reading = SearchReading(problem, options, self._seen)

    def tell(self, seen: Observation) -> None:
        """Take an observation: in any order, asked for or not, more than once."""
        self._seen.add(seen)
        self._read_again()

    def _read_again(self) -> None:
        self._reading = SearchReading(self.problem, self.options, self._seen, self._reading)
        self.__dict__.pop("_decision", None)

    def learn_data(
        self, rows: int, lengths: tuple[int, ...] = (), longest_row: int = -1, state: ModelState | None = None
    ) -> None:
        """Note the rows of the data, 0 if unknown. A free global batch leaves 20 steps, unless a largest one is given.

        `lengths` are an even sample of the rows' lengths, rising; with them, rows are assigned by what they cost. The
        number of the longest row is named if no device can hold it. `state` is what a sharded training divides.
        """
        problem, quantum = self.problem, self.problem.multiple_of
        if rows and problem.global_batch is None and problem.max_global_batch is None:
            most = min(rows, max(rows // LEAST_STEPS, problem.devices * quantum, SMALL)) // quantum * quantum
            problem = msgspec.structs.replace(problem, max_global_batch=max(quantum, most))
        if lengths:
            problem = msgspec.structs.replace(problem, lengths=lengths, longest_row=longest_row)
        if state is not None:
            problem = msgspec.structs.replace(problem, shards=True, state=state)
        if problem != self.problem:
            self.problem = problem
            self._read_again()

    def ask(self) -> tuple[Probe, ...]:
        """The probes to run now, at the same time; empty when the search is over. Asking changes nothing."""
        return self._decision.probes

    def run(self, measure: Callable[[tuple[Probe, ...]], Iterable[Observation]]) -> Search:
        """Ask, measure, tell, until the search has no more questions."""
        while probes := self.ask():
            for seen in measure(probes):
                self.tell(seen)
        return self

    def why_stopped(self) -> str | None:
        """Why nothing more is asked, in words; None while something is."""
        return None if self._decision.probes else self._decision.ended

    def belief(self) -> Belief:
        """The search's view between two probes, to be drawn."""
        model, sharding = self._reading.model, self._reading.sharding
        if sharding is not None and not model.live:
            model = sharding.devices
        curves = tuple(sketch_curve(model, i) for i in range(self.problem.devices))
        return Belief(curves, self._decision.doing)

    # ------------------------------------------------------------------ the stages in their order

    @cached_property
    def _decision(self) -> Decision:
        """The first stage that wants a probe gets it.

        The race is interrupted whenever exploration wants a probe and its part of the budget isn't spent. When it is
        over, exploration may spend the rest of the budget.
        """
        if again := self._seen.open_failures():
            same = tuple(probe for probe in again if probe.stage == again[0].stage)
            return Decision(same if again[0].stage == "solo" else same[:1], "Tries once more what failed.")
        model, sharding = self._reading.model, self._reading.sharding
        why = explain_nobody(model) if not model.live else self._reading.devices.why_none()
        if not why and (decision := self._explore(self._reading.budget)):
            return decision
        if sharding is not None and (probes := sharding.next_probes()):
            return Decision(probes, explain_sharding(probes[0]))
        if why and not self._reading.candidates.running:
            return Decision((), "Nothing more can be measured.", why)
        if decision := self._repeat(ROUGH):
            return decision
        if probe := self._reading.race.next_probe():
            return Decision((probe,), explain_race(probe, len(self._reading.candidates.running)))
        if not why and self.problem.budget_seconds is not None and (decision := self._explore(self._rest)):
            return decision
        return self._check() or self._repeat() or Decision((), "Done.", self._why_over(model))

    @property
    def _rest(self) -> Budget:
        """The budget that the race left, less the time to check its winner."""
        winner, budget = self._reading.race.ranking[:1], self._reading.budget
        kept = max((budget.least_seconds(one.candidate.layout) for one in winner), default=0.0)
        seconds = (self.problem.budget_seconds or 0.0) - kept
        problem = msgspec.structs.replace(self.problem, budget_seconds=max(0.0, seconds))
        return Budget(problem, self.options, self._seen, race_is_over=True)

    def _check(self) -> Decision | None:
        """The chosen layout once more: the figure reported is one that had no part in choosing it."""
        best = self.best()
        probe = self._reading.race.check(best) if best else None
        return Decision((probe,), explain_race(probe, 1)) if probe else None

    def _repeat(self, rougher_than: float = 0.0) -> Decision | None:
        """Another turn of the best layouts in time that was added, if the figure is rougher than that."""
        chosen = self.best() if self.problem.spend_all else None
        if chosen is None or relative_half_width(chosen.throughput) <= rougher_than:
            return None
        probe = self._reading.race.repeat_best(chosen.layout)
        return Decision((probe,), "Measures the best layouts again, in the time that was added.") if probe else None

    def _explore(self, budget: Budget) -> Decision | None:
        """The next batch of every device alone, else the next split; None when nothing is wanted or affordable."""
        probes = self._reading.devices.next_probes(budget, self.options.with_splits)
        return Decision(probes, explain_exploring(probes[0], bool(self._reading.devices.splits))) if probes else None

    def _why_over(self, model: MachineModel) -> str:
        found = self._reading.race.ranking
        if not found:
            return (Stop.BUDGET if self._seen.in_stage("split") or model.holds_batch else Stop.NO_FIT).value
        problem = msgspec.structs.replace(self.problem, budget_seconds=None)
        endless = Budget(problem, self.options, self._seen, race_is_over=True)
        if self._reading.race.waits_for_budget or (model.live and self._explore(endless)):
            return Stop.BUDGET.value
        if self._reading.race.tied:
            return Stop.TIED.value
        return (Stop.SETTLED if len(found) > 1 else Stop.ONLY_ONE).value

    # ------------------------------------------------------------------ who is best

    def best(self) -> Result | None:
        """The layout to take, of everything that was measured and may still run; None before anything was.

        Its figure is that of the turns since it was chosen, if there are any: of noisy figures the highest is too high.
        """
        chosen = self._reading.chosen
        if chosen is None:
            return None
        fresh = self._seen.turns_once_chosen(chosen.layout)
        if not fresh:
            return self._widened(chosen)
        every = {one.probe: one for one in (*self.turns(chosen.layout), *fresh.values())}.values()
        figure = center(throughput(dict(enumerate(every))), throughput(fresh).value)
        return self._widened(Result(chosen.layout, figure, len(every)), tuple(fresh.values()))

    def _widened(self, one: Result, fresh: Sequence[Timed] = ()) -> Result:
        """The result with an interval that has what other measurements showed, unless many turns say otherwise."""
        if one.turns > ENOUGH_TURNS:
            return one
        own = {seen.probe for seen in (*self._reading.turns(one.layout).values(), *fresh)}
        others = [seen for seen in self._seen.timed_in(one.layout) if seen.probe not in own]
        return msgspec.structs.replace(one, throughput=widen(one.throughput, others, self.problem.devices > 1))

    def ranking(self) -> tuple[Standing, ...]:
        """Every layout of the race, the winner first, each with the one figure that is said of it."""
        best, found = self.best(), self._reading.race.ranking
        results = (self._widened(result_of(one)) for one in found)
        said = (best if best and best.layout == one.layout else one for one in results)
        figures = (result.throughput for result in said)
        return tuple(msgspec.structs.replace(one, throughput=each) for one, each in zip(found, figures, strict=True))

    def results(self) -> tuple[Result, ...]:
        """Every layout that ran and may run again, the fastest first; all that ran, if none may."""
        found = [self._widened(self._reading.result_for(layout)) for layout in self._reading.still_run()]
        return tuple(sorted(found, key=lambda one: (-one.throughput.value, one.layout.global_batch, one.layout.shares)))

    def solos(self) -> tuple[Result | None, ...]:
        """Each device's highest throughput alone, as measured; None for one that never ran."""
        best: dict[int, Result] = {}
        for result in self.results():
            if result.layout.traits.alone and not result.layout.knobs:
                best.setdefault(result.layout.active[0], result)
        return tuple(best.get(i) for i in range(self.problem.devices))

    def best_single(self) -> Result | None:
        """The best single device: as raced, else the fastest measured at the global batch asked for."""
        standing = next((one for one in self.ranking() if one.candidate.layout.traits.alone), None)
        if standing is not None:
            return result_of(standing)
        batch = self.problem.global_batch
        alone = [one for one in self.solos() if one and (batch is None or one.layout.global_batch == batch)]
        return max(alone, key=lambda one: one.throughput.value, default=None)

    def turns(self, layout: Layout) -> tuple[Timed, ...]:
        """The turns that a layout took, to say where its time went."""
        return tuple(self._reading.raced(layout).values())

    # ------------------------------------------------------------------ what is known of the machine

    @property
    def devices(self) -> RowDevices | TextDevices:
        """The model of the devices and of the exchange between them."""
        return self._reading.devices

    @property
    def mean_length(self) -> float:
        """Tokens of a row, without padding; 0 where rows have no lengths."""
        return fmean(self.problem.lengths) if self.problem.lengths else 0.0

    def padding(self, layout: Layout) -> float:
        """The part of the computed tokens that is padding, as measured."""
        return fmean([one.padding for one in self._reading.turns(layout).values()] or [0.0])

    def power(self, layout: Layout) -> Power | None:
        """The power that all devices of the request draw while a layout trains; None if one doesn't report it."""
        return mean_power(self._reading.turns(layout))

    def value(self, one: Result) -> float:
        """The objective's value for a layout at this rate; 0 if it is unknown."""
        turns = self._reading.turns(one.layout).values()
        return find_objective(self.problem.objective).value(one.throughput.value, turns)

    def rate_of(self, batch: int) -> float:
        """The samples/s to expect of another global batch, by the devices' curves; 0 if that isn't known."""
        return self._reading.model.rate_of(batch)

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Each device's curve in a split of rows, and the rows of a pass that surely fit; nothing for other layouts."""
        sharding = self._reading.sharding if layout.traits.sharded else None
        return (sharding or self._reading.devices).curves(layout)

    # ------------------------------------------------------------------ what a comparison reports beside its ranking

    def unmeasured(self) -> tuple[Candidate, ...]:
        """The layouts that the budget left without a measurement."""
        return self._reading.race.unmeasured_firsts

    def ungrown(self) -> tuple[Candidate, ...]:
        """The next pack in each mode whose throughput still grew when packing's part of the budget was spent."""
        found = [packing.next_layout() for _, packing in self._reading.candidates.packings if packing.still_gains]
        return tuple(Candidate(PACK, layout) for layout in found if layout is not None)

    def enough_seconds(self) -> float:
        """A budget that should have sufficed to measure every layout once, and another pack of each mode."""
        budget = self._reading.budget
        missing = [one.layout for one in self.unmeasured()]
        live = self._reading.model.live
        if self.options.with_splits and len(live) > 1 and not self._seen.in_stage("split"):
            missing.append(layout_of(tuple(int(i in live) for i in range(self.problem.devices))))
        once = budget.enough_for(budget.total_seconds(missing))
        grown = budget.total_seconds(one.layout for one in self.ungrown())
        return max(once, budget.enough_to_grow(grown + self._reading.race.turn_seconds)) if grown else once

    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        return self._reading.candidates.retreats

    def broken(self) -> tuple[tuple[Candidate, Observation], ...]:
        """The layouts of the race that failed, with the failure."""
        pairs = [(one, self._seen.broken(one.layout)) for one in self._reading.candidates.all]
        refused = [failure for _, packing in self._reading.candidates.packings if (failure := packing.refused())]
        packs = [(Candidate(PACK, failure.probe.layout), failure) for failure in refused]
        return (*((one, seen) for one, seen in pairs if seen is not None), *packs)

    def packs(self) -> dict[PackMode, tuple[Observation, ...]]:
        """The observations of packs of growing size, by mode."""
        return {mode: packing.seen for mode, packing in self._reading.candidates.packings}
