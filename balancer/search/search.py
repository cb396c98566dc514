"""The search: a problem in, probes out, observations back, and at every moment the best layout
measured so far.

Everything is computed once after each observation, when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from statistics import fmean

import msgspec

from evener.plan.layout import Knots

from ..families import PACK, family_of
from ..statistics import is_known
from ..types import (
    Belief,
    End,
    Facts,
    Layout,
    Observation,
    Probe,
    Problem,
    Result,
    Stop,
    Timed,
    layout_of,
)
from .budget import Budget
from .decisions import explain_nobody, explain_probe, find_doubt
from .layouts import BALANCE, Candidate, LayoutOptions, same_measurement
from .observations import SHARDED, STAGES, Observations
from .race import Race
from .ranking import Standing, center, choose_winner, throughput
from .report import SearchReport
from .rows import RowDevices
from .sharding import Sharding
from .solo_stage import SMALL
from .texts import TextDevices

# of an epoch, that a free global batch leaves: an optimizer learns nothing in fewer
LEAST_STEPS = 20


class Search:
    """Finds the layout that trains fastest; see `evener.balancer.search` for the theory.

    Time comes in by observations alone: what is spent is the sum of their `elapsed_seconds`. Solo
    probes of one turn run at the same time, so only the longest counts.
    """

    def __init__(self, problem: Problem, options: LayoutOptions = BALANCE) -> None:
        self.problem, self.options = problem, options
        self._seen = Observations(problem)

    def tell(self, seen: Observation) -> None:
        """Take an observation: in any order, asked for or not, more than once."""
        self._seen.add(seen)
        self._read_again()

    def _read_again(self) -> None:
        """Forget what followed from the observations."""
        self.__dict__ = {"problem": self.problem, "options": self.options, "_seen": self._seen}

    def learn_data(self, facts: Facts) -> None:
        """Note the facts of the data and the model.

        By its rows a free global batch leaves 20 steps, unless a largest one is given; by their
        lengths they are assigned by what they cost. The number of the longest row is named if no
        device can hold it.
        """
        problem, quantum, rows = self.problem, self.problem.multiple_of, facts.rows
        if rows and problem.global_batch is None and problem.max_global_batch is None:
            most = (
                min(rows, max(rows // LEAST_STEPS, problem.devices * quantum, SMALL))
                // quantum
                * quantum
            )
            problem = msgspec.structs.replace(problem, max_global_batch=max(quantum, most))
        if facts.lengths:
            problem = msgspec.structs.replace(
                problem, lengths=facts.lengths, longest_row=facts.longest_row
            )
        if facts.state is not None:
            problem = msgspec.structs.replace(problem, shards=True, state=facts.state)
        if problem != self.problem:
            self.problem = problem
            self._read_again()

    def ask(self) -> tuple[Probe, ...]:
        """The probes to run now, at the same time; empty when the search is over. Asking changes
        nothing.
        """
        return self._next

    def ended(self) -> End | None:
        """Why nothing more is asked; None while something is."""
        return None if self._next else self._why_over()

    def why_stopped(self) -> str | None:
        """The same in words."""
        end = self.ended()
        return None if end is None else end.words

    def belief(self) -> Belief:
        """The search's view between two probes, to be drawn."""
        model = (
            self.sharding.devices
            if self.sharding is not None and not self.model.live
            else self.model
        )
        curves = tuple(model.sketch(i) for i in range(self.problem.devices))
        running = len(self.race.running) if self._next and self._next[0].stage == "race" else 0
        doing = [
            explain_probe(probe, bool(self.devices.splits), running) for probe in self._next[:1]
        ]
        return Belief(
            curves,
            "Tries once more what failed." if self._seen.open_failures() else (*doing, "Done.")[0],
        )

    # ------------------------------------------------------------------ what comes next

    @cached_property
    def _next(self) -> tuple[Probe, ...]:
        return next(filter(None, self._wishes()), ())

    def _wishes(self) -> Iterator[tuple[Probe, ...]]:
        """What each part of the search would measure now, in the order in which they are asked;
        empty for nothing.

        The race is interrupted whenever exploration wants a probe and its part of the budget isn't
        spent. When it is over, exploration may spend the rest of the budget; so it may after a
        check, which adds to the curves.
        """
        again = self._seen.open_failures()
        same = tuple(probe for probe in again if probe.stage == again[0].stage)
        yield same if again and again[0].stage == "solo" else same[:1]
        if not self._seen.timed("check"):
            yield self._explore(self.budget)
        if self.sharding is not None:
            yield self.sharding.next_probes()
        if self._why_none and not self.race.running:
            return
        yield self.race.next_probes()
        if (seconds := self.problem.budget_seconds) is not None:
            winner = self.race.ranking[:1]
            kept = sum(
                self.budget.least_seconds(one.candidate.layout) for one in winner
            )  # to check it
            yield self._explore_rest(max(0.0, seconds - kept))
        if best := self.best():
            yield self.race.check(best)
            if self.problem.spend_all:
                yield self.race.repeat_best(best.layout)

    def _explore(self, budget: Budget) -> tuple[Probe, ...]:
        """The next batch of every device alone, else the next split; empty when nothing is wanted
        or affordable.
        """
        return () if self._why_none else self.devices.next_probes(budget, self.options.with_splits)

    def _explore_rest(self, seconds: float | None) -> tuple[Probe, ...]:
        """The next probe of exploration once the race is over, with a budget of `seconds`; None
        means no budget.
        """
        problem = msgspec.structs.replace(self.problem, budget_seconds=seconds)
        return self._explore(
            Budget(problem, self.options, self._seen, True, self.devices.predicted_rate)
        )

    @cached_property
    def _why_none(self) -> End | None:
        """Why no device can train; None if one can."""
        return self.devices.why_none() if self.model.live else explain_nobody(self.model)

    def _why_over(self) -> End:
        found = self.race.ranking
        if self._why_none and not self.race.running:
            return self._why_none
        if not found:
            spent = self._seen.in_stage("split") or self.model.holds_batch
            return End(Stop.BUDGET if spent else Stop.NO_FIT)
        waiting, tied = self.race.waiting
        if waiting or self._explore_rest(None):
            return End(Stop.BUDGET)
        if tied:
            leaders = sorted(found, key=lambda one: -one.throughput.value)[:2]
            known = all(is_known(one.throughput) for one in leaders)
            return End(Stop.TIED if known else Stop.UNCERTAIN)
        if len(found) == 1:
            return End(Stop.ONLY_ONE)
        best = self.best() if self.devices.by_rows else None
        doubt = find_doubt(self.model, best) if best else ""
        return End(Stop.UNSURE, doubt) if doubt else End(Stop.SETTLED)

    # ------------------------------------------------------------------ what follows from the
    # observations

    @cached_property
    def model(self) -> RowDevices:
        """The curves and limits of the devices, and what they say if all rows cost the same."""
        return RowDevices(self.problem, self._seen, self.budget)

    @cached_property
    def devices(self) -> RowDevices | TextDevices:
        """The model of the devices: by the lengths of rows, or by their number if no unequal
        lengths are known.
        """
        if not self.problem.lengths:
            return self.model
        return TextDevices(self.problem, self._seen, self.budget)

    @cached_property
    def sharding(self) -> Sharding | None:
        """A sharded training; None where the workload has none, or each device holds the model and
        nobody asks.
        """
        problem = self.problem
        full = any(
            not one.lost and one.out_of_use and self._seen.memory_limit(i) == limit
            for i, (one, limit) in enumerate(
                zip(self.model.devices, problem.memory_bytes, strict=True)
            )
        )
        asked = any(family.traits.sharded for family in self.options.wanted)
        if not (problem.shards and asked and problem.devices > 1 and (full or self.options.shards)):
            return None
        if problem.budget_seconds is not None:
            others = self._seen.spent_seconds(*set(STAGES) - set(SHARDED))
            problem = msgspec.structs.replace(
                problem, budget_seconds=max(0.0, problem.budget_seconds - others)
            )
        return Sharding(problem, self._seen.sharded)

    @cached_property
    def budget(self) -> Budget:
        """The part of the budget that is left."""
        return Budget(
            self.problem,
            self.options,
            self._seen,
            predict_rate=lambda one: self.devices.predicted_rate(one),
        )

    @cached_property
    def race(self) -> Race:
        """The layouts that exploration and families offer, and the race between them."""
        return Race(
            self.options,
            self.devices,
            self.budget,
            self.sharding.layouts() if self.sharding else [],
        )

    # ------------------------------------------------------------------ who is best

    def best(self) -> Result | None:
        """The layout to take, of everything that was measured and may still run; None before
        anything was.

        Its figure is that of the turns since it was chosen, if there are any: of noisy figures the
        highest is too high.
        """
        chosen = self._chosen
        fresh = self._seen.turns_once_chosen(chosen.layout) if chosen else {}
        if chosen is None or not fresh:
            return chosen
        every = {
            one.probe: one for one in (*self._seen.turns(chosen.layout).values(), *fresh.values())
        }.values()
        figure = center(throughput(dict(enumerate(every))), throughput(fresh).value)
        return Result(chosen.layout, figure, len(every))

    @cached_property
    def _chosen(self) -> Result | None:
        """The best layout, by the turns that chose it.

        A layout that the race has not measured yet counts with what exploration measured, unless no
        measurement could tell its shares from those of one of the race. If no layout may run any
        more, the best of those that ran.
        """
        raced = {one.candidate.layout: one.candidate for one in self.race.ranking}
        if not all(candidate.synchronous for candidate in raced.values()):
            return self.race.ranking[
                0
            ].result  # packs and placements are compared in the race alone
        fit = [
            layout
            for layout in self._ran
            if self.problem.global_batch in (None, layout.global_batch)
        ]
        layouts = [
            one
            for one in fit
            if one in raced or not any(same_measurement(one, each) for each in raced)
        ] or fit
        layouts = [
            one for one in layouts if one in raced or family_of(one).name in self.options.families
        ] or layouts
        candidates = [raced.get(layout, Candidate(family_of(layout), layout)) for layout in layouts]
        if not candidates:
            return None
        turns = {layout: self._turns(layout) for layout in layouts}
        return self._ran[choose_winner(candidates, turns, self.problem).layout]

    @cached_property
    def _ran(self) -> dict[Layout, Result]:
        """Every layout that ran as one whole training and may run again, over its turns; all that
        ran, if none may.
        """
        found = self._seen.timed("solo", "rest", "split", "shard", "race")
        trainings = [one for one in found if one.probe.layout.traits.by_shares]
        ran = [one for one in trainings if self.devices.is_training(one.probe.layout)]
        turns = {
            one.probe.layout: self._turns(one.probe.layout)
            for one in self._seen.still_fit(ran) or ran
        }
        return {layout: Result(layout, throughput(own), len(own)) for layout, own in turns.items()}

    def _turns(self, layout: Layout) -> dict[int, Timed]:
        """A layout's turns; of one that was never measured uncontended, its measurements of the
        solo stage.
        """
        return self._seen.turns(layout) or dict(enumerate(self._seen.timed_in(layout, "solo")))

    def ranking(self) -> tuple[Standing, ...]:
        """Every layout of the race, the winner first, each with the one figure that is said of
        it.
        """
        best, found = self.best(), self.race.ranking
        figures = (best if best and best.layout == one.candidate.layout else one for one in found)
        pairs = zip(found, figures, strict=True)
        return tuple(
            msgspec.structs.replace(one, throughput=said.throughput) for one, said in pairs
        )

    def results(self) -> tuple[Result, ...]:
        """Every layout that ran and may run again, the fastest first; all that ran, if none may."""
        order = sorted(
            self._ran,
            key=lambda one: (-self._ran[one].throughput.value, one.global_batch, one.shares),
        )
        return tuple(self._ran[layout] for layout in order)

    def solos(self) -> tuple[Result | None, ...]:
        """Each device's highest throughput alone, as measured; None for one that never ran."""
        alone = [one for one in self.results() if one.layout.traits.alone]
        fastest = {one.layout.active[0]: one for one in reversed(alone)}
        return tuple(fastest.get(i) for i in range(self.problem.devices))

    def best_single(self) -> Result | None:
        """The best single device: as raced, else the fastest measured at the global batch asked
        for.
        """
        raced = [one.result for one in self.ranking() if one.candidate.layout.traits.alone]
        batch = self.problem.global_batch
        alone = [one for one in self.solos() if one and batch in (None, one.layout.global_batch)]
        return raced[0] if raced else max(alone, key=lambda one: one.throughput.value, default=None)

    def turns(self, layout: Layout) -> tuple[Timed, ...]:
        """The turns that give a layout's figures."""
        return tuple(self._turns(layout).values())

    def report(self, own_batch: int | None = None) -> SearchReport | None:
        """All that a plan, a verdict and tables are made of; None before anything was measured.

        `own_batch` is that of the user's script today, whose samples/s are predicted.
        """
        chosen = self.best()
        if chosen is None:
            return None
        ranking, results, race = self.ranking(), self.results(), self.race
        layouts = dict.fromkeys(
            [
                chosen.layout,
                *(one.candidate.layout for one in ranking),
                *(one.layout for one in results),
            ]
        )
        splits = [one.layout for one in results if one.layout.traits.together]
        exchange = self.devices.exchange
        return SearchReport(
            problem=self.problem,
            options=self.options,
            chosen=chosen,
            ranking=ranking,
            results=results,
            solos=self.solos(),
            single=self.best_single(),
            turns={layout: self.turns(layout) for layout in layouts},
            at_rest=frozenset(layout for layout in layouts if self._seen.turns(layout)),
            broken=tuple(race.list_broken()),
            retreats=tuple(pair for pair in race.retreats if self._seen.turns(pair[1].layout)),
            unmeasured=race.unmeasured,
            ungrown=self._ungrown,
            packings=tuple((mode, tuple(packing.seen)) for mode, packing in race.packings),
            enough_seconds=self._enough_seconds,
            mean_length=self.mean_length,
            sync_seconds=self.devices.sync_seconds,
            apart_seconds={layout: self.devices.apart_seconds(layout) for layout in splits},
            network_seconds=tuple(exchange[n][-1] - exchange[1][-1] for n in range(len(exchange)))
            if len(exchange) > 1
            else (),
            curves=self.curves(chosen.layout),
            own_rate=self.model.rate_of(own_batch) if own_batch else 0.0,
        )

    @property
    def _ungrown(self) -> tuple[Candidate, ...]:
        """The next pack in each mode whose throughput still grew when packing's part of the budget
        was spent.
        """
        packings = [packing for _, packing in self.race.packings if packing.still_gains]
        found = [packing.next_layout() for packing in packings]
        return tuple(Candidate(PACK, layout) for layout in found if layout is not None)

    @property
    def _enough_seconds(self) -> float:
        """Seconds of a budget that would just have been enough to measure every layout once, and
        another pack of each mode.
        """
        race, budget, live = self.race, self.budget, self.model.live
        missing = [one.layout for one in race.unmeasured]
        if self.options.with_splits and len(live) > 1 and not self._seen.in_stage("split"):
            missing.append(layout_of(tuple(int(i in live) for i in range(self.problem.devices))))
        enough = budget.enough_for(sum(map(budget.least_seconds, missing)))
        grown = sum(budget.least_seconds(one.layout) for one in self._ungrown)
        return max(enough, budget.enough_to_grow(grown + race.turn_seconds)) if grown else enough

    # ------------------------------------------------------------------ what is known of the
    # machine

    @property
    def mean_length(self) -> float:
        """Tokens of a row, without padding; 0 where rows have no lengths."""
        return fmean(self.problem.lengths) if self.problem.lengths else 0.0

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Each device's curve in a split of rows, and the rows of a pass that surely fit; nothing
        for other layouts.
        """
        sharding = self.sharding if layout.traits.sharded else None
        return (sharding or self.devices).curves(layout)
