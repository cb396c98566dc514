"""What a search has seen, and what that says: the best layout, the ranking, each device alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean

import msgspec

from evener.balancer.search.budget import Budget
from evener.balancer.search.candidates import Candidates
from evener.balancer.search.layouts import BALANCE, Candidate, LayoutOptions, PackMode, find_family, same_measurement
from evener.balancer.search.machine_model import MachineModel
from evener.balancer.search.observations import Observations
from evener.balancer.search.plan_curves import describe_curves
from evener.balancer.search.predictions import Predictions
from evener.balancer.search.problem import check_problem
from evener.balancer.search.race import Race
from evener.balancer.search.ranking import ENOUGH_TURNS, Standing, center, choose_winner, mean_power, throughput, widen
from evener.balancer.search.solo_stage import SMALL
from evener.balancer.search.text_candidates import TextCandidates
from evener.balancer.search.text_model import TextModel
from evener.balancer.types import (
    Layout,
    Observation,
    Power,
    Problem,
    Result,
    Timed,
    layout_of,
)
from evener.plan.layout import Knots

READINGS = ("_budget", "_candidates", "_race", "_decision")  # cached until the next observation; the last by `Search`
LEAST_STEPS = 20  # of an epoch, that a free global batch leaves


class Findings:
    """The observations of a search and every answer that follows from them; it decides nothing to measure.

    Time comes in by observations alone: what is spent is the sum of their `elapsed_seconds`. Solo probes of one turn
    run at the same time, so only the longest counts.
    """

    def __init__(self, problem: Problem, options: LayoutOptions = BALANCE) -> None:
        check_problem(problem)
        self.problem, self.options = problem, options
        self._seen = Observations(problem)
        self._predicted: tuple[int, Predictions] | None = None  # with the version of exploration it was read from
        self._priced: tuple[int, TextModel] | None = None  # the same

    def tell(self, seen: Observation) -> None:
        """Take an observation: in any order, asked for or not, more than once."""
        self._seen.add(seen)
        self._forget_readings()

    def _forget_readings(self) -> None:
        for reading in READINGS:
            self.__dict__.pop(reading, None)

    def learn_data(self, rows: int, lengths: tuple[int, ...] = (), longest_row: int = -1) -> None:
        """Note the rows of the data, 0 if unknown. A free global batch leaves 20 steps, unless a largest one is given.

        `lengths` are an even sample of the rows' lengths, rising; with them, rows are dealt by what they cost. The
        number of the longest row is for a sentence.
        """
        problem, quantum = self.problem, self.problem.multiple_of
        if rows and problem.global_batch is None and problem.max_global_batch is None:
            most = min(rows, max(rows // LEAST_STEPS, problem.devices * quantum, SMALL)) // quantum * quantum
            problem = msgspec.structs.replace(problem, max_global_batch=max(quantum, most))
        if lengths:
            problem = msgspec.structs.replace(problem, lengths=lengths, longest_row=longest_row)
        if problem != self.problem:
            self.problem, self._predicted, self._priced = problem, None, None
            self._forget_readings()

    # ------------------------------------------------------------------ answers

    def best(self) -> Result | None:
        """The layout to take, of everything that was measured and may still run; None before anything was.

        Its figure is that of the turns since it was chosen, if there are any: of noisy figures the highest is too high.
        """
        chosen = self._chosen()
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
        own = {seen.probe for seen in (*self._turns(one.layout).values(), *fresh)}
        others = [seen for seen in self._seen.timed_in(one.layout) if seen.probe not in own]
        return msgspec.structs.replace(one, throughput=widen(one.throughput, others, self.problem.devices > 1))

    def _chosen(self) -> Result | None:
        """The best layout, by the turns that chose it.

        A layout that the race has not measured yet counts with what exploration measured. If no layout may run any
        more, the best of those that ran.
        """
        found = self._race.ranking
        pool = {one.candidate.layout: one.candidate for one in found}
        if not all(candidate.synchronous for candidate in pool.values()):
            return _result(found[0])
        ran = self._ran()
        eligible = self._seen.still_fit(ran) or ran
        batch = self.problem.global_batch
        repeats = {
            layout for layout in ran if layout not in pool and any(same_measurement(layout, one) for one in pool)
        }
        fit = [layout for layout in eligible if batch is None or layout.global_batch == batch]
        layouts = [layout for layout in fit if layout not in repeats] or fit
        candidates = [pool.get(layout, Candidate(find_family(layout), layout)) for layout in layouts]
        if not candidates:
            return None
        turns = {layout: self._turns(layout) for layout in layouts}
        return self._result_for(choose_winner(candidates, turns, self.problem).layout)

    def ranking(self) -> tuple[Standing, ...]:
        """Every layout of the race, the winner first, each with the one figure that is said of it."""
        best, found = self.best(), self._race.ranking
        results = (self._widened(_result(one)) for one in found)
        said = (best if best and best.layout == one.layout else one for one in results)
        return tuple(one.with_figure(result.throughput) for one, result in zip(found, said, strict=True))

    def results(self) -> tuple[Result, ...]:
        """Every layout that ran and may run again, the fastest first; all that ran, if none may."""
        ran = self._ran()
        found = [self._widened(self._result_for(layout)) for layout in self._seen.still_fit(ran) or ran]
        return tuple(sorted(found, key=lambda one: (-one.throughput.value, one.layout.global_batch, one.layout.shares)))

    def solos(self) -> tuple[Result | None, ...]:
        """Each device's highest throughput alone, as measured; None for one that never ran."""
        best: dict[int, Result] = {}
        for result in self.results():
            if result.layout.kind == "solo" and not result.layout.knobs:
                best.setdefault(result.layout.active[0], result)
        return tuple(best.get(i) for i in range(self.problem.devices))

    def best_single(self) -> Result | None:
        """The best single device: as raced, else the fastest measured at the global batch asked for."""
        standing = next((one for one in self.ranking() if one.candidate.family == "solo"), None)
        if standing is not None:
            return _result(standing)
        batch = self.problem.global_batch
        alone = [one for one in self.solos() if one and (batch is None or one.layout.global_batch == batch)]
        return max(alone, key=lambda one: one.throughput.value, default=None)

    def turns(self, layout: Layout) -> tuple[Timed, ...]:
        """Every turn that a layout took, to say where its time went."""
        return tuple(self._raced(layout).values())

    def _raced(self, layout: Layout) -> dict[int, Timed]:
        return self._seen.turns(layout, "knobs" if layout.knobs else "race")

    def spent_seconds(self) -> float:
        """Seconds of the budget that the probes took."""
        return self._seen.spent_seconds()

    def network_seconds(self, hosts: int) -> float:
        """How much longer synchronization takes over so many hosts than on one; 0 where that isn't known."""
        return 0.0 if self._text else self._predictions.model.exchange.across[hosts]

    def sync_seconds(self) -> float | None:
        """The cost of keeping as many devices in step as the widest split has; None before any was measured."""
        if self._text:
            splits = self._text.splits
            return self._text.sync_seconds(splits[-1].probe.layout.active) if splits else None
        return self._predictions.model.sync_seconds

    @property
    def mean_length(self) -> float:
        """Tokens of a row, without padding; 0 where rows have no lengths."""
        return fmean(self.problem.lengths) if self.problem.lengths else 0.0

    def padding(self, layout: Layout) -> float:
        """The part of the computed tokens that is padding, as measured."""
        return fmean([one.padding for one in self._turns(layout).values()] or [0.0])

    def power(self, layout: Layout) -> Power | None:
        """What the devices of the request draw while it trains; None where one doesn't report that."""
        return mean_power(self._turns(layout))

    def apart_seconds(self, layout: Layout) -> float | None:
        """The longest that a device would take alone for its share of a layout; None if none of them ran alone."""
        curves = [(self._predictions.model.alone[i], layout.shares[i]) for i in layout.active if not self._text]
        return max((curve.seconds(share) for curve, share in curves if curve), default=None)

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Each device's curve in a split of rows, and the rows of a pass that surely fit; nothing for other layouts."""
        if self._text or layout.kind != "split":
            return (((), 0),) * self.problem.devices
        return describe_curves(self._predictions.model, layout)

    # ------------------------------------------------------------------ what a comparison reports beside its ranking

    def unmeasured(self) -> tuple[Candidate, ...]:
        """The layouts that the budget left without a measurement."""
        return self._race.unmeasured_firsts

    def ungrown(self) -> tuple[Candidate, ...]:
        """The next pack in each mode whose throughput still grew when packing's part of the budget was spent."""
        found = [packing.next_layout() for _, packing in self._candidates.packings if packing.still_gains]
        return tuple(Candidate("pack", layout) for layout in found if layout is not None)

    def enough_seconds(self) -> float:
        """A budget that should have sufficed to measure every layout once, and another pack of each mode."""
        budget = self._budget
        missing = [one.layout for one in self.unmeasured()]
        live = self._predictions.model.live
        if self._with_splits and len(live) > 1 and not self._seen.in_stage("split"):
            missing.append(layout_of(tuple(int(i in live) for i in range(self.problem.devices))))
        once = budget.enough_for(budget.total_seconds(missing))
        grown = budget.total_seconds(one.layout for one in self.ungrown())
        return max(once, budget.enough_to_grow(grown + self._race.turn_seconds)) if grown else once

    def retreats(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Each layout that ran out of memory in the race, with the smaller one in its place."""
        return self._candidates.retreats

    def broken(self) -> tuple[tuple[Candidate, Observation], ...]:
        """The layouts of the race that failed, with the failure."""
        pairs = [(one, self._seen.broken(one.layout)) for one in self._candidates.all]
        refused = [failure for _, packing in self._candidates.packings if (failure := packing.refused())]
        packs = [(Candidate("pack", failure.probe.layout), failure) for failure in refused]
        return (*((one, seen) for one, seen in pairs if seen is not None), *packs)

    def packs(self) -> dict[PackMode, tuple[Observation, ...]]:
        """What growing the number of trainings showed, by mode."""
        return {mode: packing.seen for mode, packing in self._candidates.packings}

    @property
    def _with_splits(self) -> bool:
        return "split" in self.options.families

    # ------------------------------------------------------------------ one reading of the observations

    @property
    def _predictions(self) -> Predictions:
        """Computed anew only after exploration has seen more."""
        version = self._seen.explored_version
        if self._predicted is None or self._predicted[0] != version:
            self._predicted = version, Predictions(MachineModel(self.problem, self._seen, self._longest_step))
        return self._predicted[1]

    @cached_property
    def _budget(self) -> Budget:
        return Budget(self.problem, self.options, self._seen)

    @property
    def _text(self) -> TextModel | None:
        """What rows of unequal length cost; None where they are all of one length, as far as is known."""
        if not self.problem.lengths:
            return None
        version = self._seen.explored_version
        if self._priced is None or self._priced[0] != version:
            live = self._predictions.model.live
            self._priced = version, TextModel(self.problem, self._seen, live, self._longest_step)
        return self._priced[1]

    @property
    def _longest_step(self) -> float | None:
        return self._budget.longest_step(solo=False) if self._budget.limits_steps else None

    @cached_property
    def _candidates(self) -> Candidates:
        if self._text:
            return TextCandidates(self.problem, self.options, self._predictions, self._budget, self._text)
        return Candidates(self.problem, self.options, self._predictions, self._budget)

    @cached_property
    def _race(self) -> Race:
        return Race(self.problem, self.options, self._candidates, self._budget)

    def _ran(self) -> dict[Layout, list[Timed]]:
        """Every layout that ran as one training; of a free batch, without a device alone in passes.

        That would be no gain over fewer passes of a smaller batch.
        """
        found = self._seen.timed(("solo", "rest", "split", "race"))
        free = self.problem.global_batch is None
        allowed = {layout: turns for layout, turns in found.items() if layout.kind in ("solo", "split")}
        if self._text:  # a device alone with a few rows is no training
            return {one: turns for one, turns in allowed.items() if one.costs or (one.by_rows and one.kind == "split")}
        return {one: turns for one, turns in allowed.items() if one.kind == "split" or not (free and one.in_passes)}

    def _turns(self, layout: Layout) -> dict[int, Timed]:
        """Its turns. A layout that was never measured uncontended uses its solo-stage measurements."""
        return self._raced(layout) or dict(enumerate(self._seen.timed_in(layout, "solo")))

    def _result_for(self, layout: Layout) -> Result:
        turns = self._turns(layout)
        return Result(layout, throughput(turns), len(turns))


def _result(one: Standing) -> Result:
    return Result(one.candidate.layout, one.throughput, one.turns)
