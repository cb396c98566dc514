"""Derive everything that a search knows from its observations: next probes, winner and report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import fmean

import msgspec

from evener.plan.layout import Knots

from ..families import PACK, family_of
from ..statistics import is_known, typical_single_step_error
from ..types import (
    Belief,
    End,
    Interval,
    Layout,
    Probe,
    Problem,
    Result,
    Stage,
    Stop,
    Timed,
    layout_of,
)
from .budget import Budget
from .decisions import explain_no_device, explain_probe, find_doubt
from .explore import explore
from .family_view import FamilyView
from .layouts import Candidate, LayoutOptions, same_measurement
from .machine_model import MachineModel
from .observations import SHARDED, STAGES, Observations, Turns
from .offers import Offers
from .race import Race
from .ranking import RankedLayout, center, choose_winner, throughput, widen
from .report import SearchReport
from .rows import RowPolicy
from .sharding import Sharding
from .subset import ShardingOfSome, search_shards
from .text_model import TextModel
from .texts import TextPolicy
from .time_left import FEWEST_STEPS, TimeLeft


class Evaluation:
    """The conclusions that a search draws from one set of observations.

    An evaluation never changes. After each new observation, a new one is made from scratch.
    """

    def __init__(
        self, problem: Problem, options: LayoutOptions, observations: Observations
    ) -> None:
        self.problem = problem
        self.options = options
        self._seen = observations

    # ------------------------------------------------------------------ what comes next

    @cached_property
    def next_probes(self) -> tuple[Probe, ...]:
        """The probes to run next, all at the same time; empty if the search is over."""
        retries = self._retries()
        if retries:
            return retries
        wanted = next(filter(None, self._wanted_probes()), ())
        # a journal may be read in any order, so each probe after a check records the turn of that
        # check
        turn = self._seen.checked_turn
        return tuple(msgspec.structs.replace(probe, after=turn) for probe in wanted)

    def _wanted_probes(self) -> Iterator[tuple[Probe, ...]]:
        """Yield the probes that each part of the search asks for, by priority.

        The first tuple that isn't empty is run.
        """
        # exploration interrupts the race until it has spent its part of the budget
        if not self._seen.timed(Stage.CHECK):
            yield self._explore(self.budget)
        if self.sharding is not None:
            yield self.sharding.next_probes()
        if self._why_impossible and not self.race.running:
            return
        yield self.race.next_probes()
        if self.problem.budget_seconds is not None:
            # exploration may spend the rest, also after a check, which adds points to the curves
            yield self._explore_rest(max(0.0, self.problem.budget_seconds - self._check_seconds))
        if self.best:
            yield self.race.check(self.best)
            if self.problem.spend_all:
                yield self.race.repeat_best(self.best.layout)

    def _retries(self) -> tuple[Probe, ...]:
        """Return the failed probes to run again.

        Failed probes of single devices run at the same time. Any other probe runs by itself.
        """
        failed = self._seen.failures_to_retry()
        if failed and failed[0].stage == Stage.SOLO:
            return tuple(probe for probe in failed if probe.stage == Stage.SOLO)
        return tuple(failed[:1])

    @property
    def _check_seconds(self) -> float:
        """The time, in seconds, to reserve for measuring the winner again."""
        winner = self.race.ranking[:1]
        return sum(self.budget.least_seconds(one.candidate.layout) for one in winner)

    def _explore(self, budget: Budget) -> tuple[Probe, ...]:
        """Return the next probes that would improve the predicted speeds.

        Empty if none is worth its time, or if no layout can work at all.
        """
        if self._why_impossible:
            return ()
        return explore(self.policy, budget, self.options.needs_split_probes)

    def _explore_rest(self, seconds: float | None) -> tuple[Probe, ...]:
        """Return further probes, after the final comparison, that improve the predicted speeds.

        `seconds` is the total budget to assume. None means an unlimited one, to find out whether a
        search with more time would go on.
        """
        problem = msgspec.structs.replace(self.problem, budget_seconds=seconds)
        rest = Budget(problem, self.options, self._seen, self.machine, race_is_over=True)
        return self._explore(rest)

    def belief(self) -> Belief:
        """Return the predicted step times and what is measured next, for display."""
        curves_of: RowPolicy | Sharding | ShardingOfSome = self.by_rows
        if self.sharding is not None and not self.model.live:
            curves_of = self.sharding
        curves = tuple(curves_of.predicted_curve(i) for i in range(self.problem.devices))
        return Belief(curves, self._explain_next())

    def _explain_next(self) -> str:
        """Return a sentence for users about the next probes."""
        if self._seen.failures_to_retry():
            return "Tries once more what failed."
        if not self.next_probes:
            return "Done."
        probe = self.next_probes[0]
        running = len(self.race.running) if probe.stage == Stage.RACE else 0
        return explain_probe(self.problem, probe, bool(self.machine.splits), running)

    # ------------------------------------------------------------------ why it ends

    def ended(self) -> End | None:
        """Return why the search ended, or None if there are more probes to run."""
        return None if self.next_probes else self._why_over()

    @cached_property
    def _why_impossible(self) -> End | None:
        """The reason why no layout can work, such as no usable device; None if one may work."""
        return self.policy.why_impossible() if self.model.live else explain_no_device(self.model)

    def _why_over(self) -> End:
        """Return why the search has no more probes to run."""
        if self._why_impossible and not self.race.running:
            return self._why_impossible
        if not self.race.ranking:
            fits = self._seen.in_stage(Stage.SPLIT) or self.model.holds_batch
            limited = self.problem.budget_seconds is not None
            return End(Stop.BUDGET if fits and limited else Stop.NO_FIT)
        waiting, tied = self.race.waiting
        goes_on = bool(self._explore_rest(None))
        if self.problem.budget_seconds is None:
            if goes_on:
                return End(Stop.UNSURE, "other batches, which weren't measured, may gain more")
            # layouts that still wait were measured as often as a search repeats them
            return self._why_finished(tied or bool(waiting))
        if waiting or goes_on:
            return End(Stop.BUDGET)  # with more time, it would go on
        return self._why_finished(tied)

    def _why_finished(self, tied: bool) -> End:
        """Return why the search ended although it had budget left.

        `tied` is True if more measurements couldn't show which of the best layouts is the fastest.
        """
        best_is_known = self.best is None or is_known(self.best.throughput)
        if tied:
            leaders = [one.throughput for one in self.ranking()[:2]]
            return End(Stop.TIED if best_is_known and is_known(*leaders) else Stop.UNCERTAIN)
        if len(self.race.ranking) == 1:
            return End(Stop.ONLY_ONE)
        return self._end_when_settled() if best_is_known else End(self._why_uncertain())

    def _why_uncertain(self) -> Stop:
        """Return why the chosen layout isn't measured again, although its speed is uncertain."""
        has_time = self.best is not None and self.budget.affords(
            self.best.layout, Stage.CHECK, steps=FEWEST_STEPS
        )
        return Stop.UNSTEADY if has_time else Stop.BUDGET

    def _end_when_settled(self) -> End:
        """Return why the search ended, if it needs no more measurements.

        The reason includes a doubt about the winner, if there is one.
        """
        if self.best is None or not self.machine.by_rows:
            return End(Stop.SETTLED)
        doubt = find_doubt(self.model, self.best)
        return End(Stop.UNSURE, doubt) if doubt else End(Stop.SETTLED)

    # ------------------------------------------------------------------ models of the machine

    @cached_property
    def time(self) -> TimeLeft:
        """How much of the search's budget is left."""
        return TimeLeft(self.problem, self.options, self._seen)

    @cached_property
    def model(self) -> MachineModel:
        """The model that predicts step time and memory from the number of rows per device."""
        return MachineModel(self.problem, self._seen, self.time)

    @cached_property
    def by_rows(self) -> RowPolicy:
        """The rules that choose layouts for rows that all cost the same."""
        return RowPolicy(self.model)

    @cached_property
    def policy(self) -> RowPolicy | TextPolicy:
        """The rules that choose the layouts of this search.

        They depend on whether the workload's rows differ in length.
        """
        if not self.problem.lengths:
            return self.by_rows
        return TextPolicy(TextModel(self.problem, self._seen, self.time))

    @property
    def machine(self) -> MachineModel:
        """The model that predicts step times in this search."""
        return self.policy.machine

    @cached_property
    def budget(self) -> Budget:
        """The plan of this search's time: how long each probe may take, and which ones fit."""
        return Budget(self.problem, self.options, self._seen, self.machine)

    @cached_property
    def sharding(self) -> Sharding | ShardingOfSome | None:
        """The search for sharded layouts; None if they are impossible or not needed.

        They are needed if the user requested them, or if a device can't hold the whole model.
        """
        problem = self.problem
        asked = any(family.traits.sharded for family in self.options.wanted)
        if not problem.shards or not asked or problem.devices < 2:
            return None
        if not self.options.shards and not self._lacks_memory():
            return None
        if problem.budget_seconds is not None:
            others = self._seen.spent_seconds(*set(STAGES) - set(SHARDED))
            left = max(0.0, problem.budget_seconds - others)
            problem = msgspec.structs.replace(problem, budget_seconds=left)
        return search_shards(problem, [*self._seen.sharded, *self._seen.sharded_failures()])

    def _lacks_memory(self) -> bool:
        """Whether a device can't hold the model although no other process uses its memory."""
        for position, device in enumerate(self.model.devices):
            # a device whose memory other processes use doesn't count
            all_its_own = self._seen.memory_limit(position) == self.problem.memory_bytes[position]
            holds_nothing = (
                device.memory.smallest_failed is not None and not device.memory.largest_ran
            )
            if holds_nothing and not device.lost and all_its_own:
                return True
        return False

    @cached_property
    def offers(self) -> Offers:
        """The layouts that the families propose for the final comparison."""
        shards = self.sharding.layouts() if self.sharding else []
        view = FamilyView(self.options, self.policy, self.budget, shards)
        return Offers(view, self.policy)

    @cached_property
    def race(self) -> Race:
        """The final comparison of the proposed layouts."""
        return Race(self.offers, self.machine, self.budget)

    # ------------------------------------------------------------------ who is best

    @cached_property
    def best(self) -> Result | None:
        """The layout to recommend, with its throughput; None if nothing ran.

        The throughput for which it was chosen is biased upwards, because it is the highest of
        several noisy values. If it was measured again after that, only the later values count.
        """
        chosen = self._chosen
        if chosen is None:
            return None
        fresh = self._seen.turns_after_choice(chosen.layout)
        if not fresh:
            return chosen
        both = (*self._seen.turns(chosen.layout).values(), *fresh.values())
        every = list({one.probe: one for one in both}.values())
        every = [one for one in every if not one.is_single_step] or every
        interval = center(self._samples_per_second(dict(enumerate(every))), throughput(fresh).value)
        return Result(chosen.layout, interval, len(every))

    @cached_property
    def _chosen(self) -> Result | None:
        """The layout to recommend, with the throughput for which it was chosen.

        None if nothing ran.
        """
        raced = {one.candidate.layout: one.candidate for one in self.race.ranking}
        if not all(candidate.synchronous for candidate in raced.values()):
            return self.race.ranking[0].result  # in the race, packs and placements are compared
        # layouts of the race are judged by their turns, others by their measurements in exploration
        layouts = self._eligible_layouts(raced)
        if not layouts:
            return None
        candidates = [raced.get(layout, Candidate(family_of(layout), layout)) for layout in layouts]
        turns = {layout: self._turns(layout) for layout in layouts}
        return self._results_that_ran[choose_winner(candidates, turns, self.problem).layout]

    def _eligible_layouts(self, raced: dict[Layout, Candidate]) -> Sequence[Layout]:
        """Return the measured layouts from which the winner is chosen.

        They have the requested global batch. A layout that wasn't in the final comparison (`raced`)
        must be of a requested kind, and must differ measurably from those that were. A condition
        that no layout meets is ignored.
        """
        fit = [
            one
            for one in self._results_that_ran
            if self.problem.global_batch in (None, one.global_batch)
        ]
        distinct = [
            one for one in fit if one in raced or not _is_indistinguishable(one, raced)
        ] or fit
        wanted = self.options.families
        requested = [one for one in distinct if one in raced or family_of(one).name in wanted]
        return requested or distinct

    @cached_property
    def _results_that_ran(self) -> dict[Layout, Result]:
        """The throughput of each measured layout that can probably still run.

        If there are none, all layouts that ran are included.
        """
        with_room = [one for one in self._trainings if one.probe.layout not in self._nearly_full]
        ran = [training for training in with_room if self.policy.is_sensible(training.probe.layout)]
        layouts = [one.probe.layout for one in self._seen.still_fit(ran) or ran]
        turns = {layout: self._turns(layout) for layout in layouts}
        return {
            layout: Result(layout, self._samples_per_second(own), len(own))
            for layout, own in turns.items()
        }

    @cached_property
    def _trainings(self) -> list[Timed]:
        """The measurements of layouts by shares, before the winner was chosen."""
        found = self._seen.timed(Stage.SOLO, Stage.REST, Stage.SPLIT, Stage.SHARD, Stage.RACE)
        return [one for one in found if one.probe.layout.traits.by_shares]

    @cached_property
    def _nearly_full(self) -> frozenset[Layout]:
        """The sharded layouts that may not become the plan, as memory was nearly full in a probe.

        A pass of a model in shards can't be repeated when memory runs out, so that ends a training.
        If memory was nearly full in every sharded layout, none is ruled out.
        """
        sharded = [one for one in self._trainings if one.probe.layout.traits.sharded]
        full = {one.probe.layout for one in sharded if one.is_short_of_memory()}
        others = {one.probe.layout for one in sharded} - full
        return frozenset(full if others else ())

    def _samples_per_second(self, turns: Turns) -> Interval:
        """Return the mean throughput of a layout's measurements in samples/s, with its interval.

        A probe that timed a single step doesn't show the noise of steps. If there are no other
        probes, the interval is widened by the usual noise.
        """
        interval = throughput(turns)
        if not all(turn.is_single_step for turn in turns.values()):
            return interval
        return widen(interval, self._single_step_error / math.sqrt(len(turns)))

    @cached_property
    def _single_step_error(self) -> float:
        """The typical relative error of a probe that timed a single step."""
        single_steps = [timed for timed in self._seen.timed() if timed.is_single_step]
        return typical_single_step_error(
            [(one.first_step_seconds, one.step_seconds) for one in single_steps]
        )

    def _turns(self, layout: Layout) -> dict[int, Timed]:
        """Return a layout's measurements from the final comparison, by round.

        If it has none, its measurements from the solo stage are returned, in which the other
        devices were busy too.
        """
        return self._seen.turns(layout) or dict(enumerate(self._seen.timed_in(layout, Stage.SOLO)))

    def turns(self, layout: Layout) -> tuple[Timed, ...]:
        """Return the measurements from which a layout's throughput is computed."""
        return tuple(self._turns(layout).values())

    # ------------------------------------------------------------------ the report

    def report(self, own_batch: int | None = None) -> SearchReport | None:
        """Return everything about the search from which its result is written.

        `own_batch` is the global batch of the user's script. Its speed is predicted for the report.
        None if nothing ran.
        """
        if self.best is None:
            return None
        ranking = self.ranking()
        results = self.results()
        raced = [one.candidate.layout for one in ranking]
        ran = [result.layout for result in results]
        layouts = list(dict.fromkeys((self.best.layout, *raced, *ran)))
        splits = [layout for layout in ran if layout.traits.together]
        race = self.race
        return SearchReport(
            problem=self.problem,
            options=self.options,
            chosen=self.best,
            ranking=ranking,
            results=results,
            solos=self.solos(),
            single=self.best_single(),
            turns={layout: self.turns(layout) for layout in layouts},
            others_idle=frozenset(layout for layout in layouts if self._seen.turns(layout)),
            failed=tuple(self.offers.list_failed()),
            replaced_layouts=self._replaced_layouts,
            nearly_full=self._nearly_full,
            unmeasured=race.unmeasured,
            ungrown=self._growing_packs,
            packings=tuple(
                (mode, tuple(packing.seen)) for mode, packing in self.offers.view.packings
            ),
            enough_seconds=self._enough_seconds,
            mean_length=self.mean_length,
            sync_seconds=self.machine.sync_seconds,
            seconds_alone={layout: self.policy.seconds_alone(layout) for layout in splits},
            network_seconds=self._network_seconds(),
            curves=self._curves(self.best.layout),
            own_rate=self.by_rows.predictions.rate_of(own_batch) if own_batch else 0.0,
        )

    def ranking(self) -> tuple[RankedLayout, ...]:
        """Return the layouts of the final comparison, best first.

        The throughput of the chosen layout is the one that was measured after it was chosen.
        """
        found = list(self.race.ranking)
        for place, one in enumerate(found):
            if self.best and self.best.layout == one.candidate.layout:
                interval = self.best.throughput
                found[place] = msgspec.structs.replace(one, throughput=interval)
        return tuple(found)

    def results(self) -> tuple[Result, ...]:
        """Return all measured layouts that can probably still run, fastest first.

        If there are none, all layouts that ran are returned.
        """

        def order(result: Result) -> tuple[float, int, tuple[int, ...]]:
            return -result.throughput.value, result.layout.global_batch, result.layout.shares

        return tuple(sorted(self._results_that_ran.values(), key=order))

    def solos(self) -> tuple[Result | None, ...]:
        """Return the fastest result of each device on its own; None for devices that never ran."""
        alone = [result for result in self.results() if result.layout.traits.alone]
        fastest = {one.layout.active[0]: one for one in reversed(alone)}
        return tuple(fastest.get(i) for i in range(self.problem.devices))

    def best_single(self) -> Result | None:
        """Return the fastest result of a single device with the requested batch, or None.

        If single devices took part in the final comparison, it is the best of them.
        """
        for one in self.ranking():
            if one.candidate.layout.traits.alone:
                return one.result
        batch = self.problem.global_batch
        alone = [one for one in self.solos() if one and batch in (None, one.layout.global_batch)]
        return max(alone, key=lambda one: one.throughput.value, default=None)

    @property
    def _replaced_layouts(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Layouts that ran out of memory, each with the smaller layout that ran instead."""
        pairs = self.offers.replaced_layouts
        return tuple(pair for pair in pairs if self._seen.turns(pair[1].layout))

    @property
    def _growing_packs(self) -> tuple[Candidate, ...]:
        """Layouts to try with more jobs on a device, at most one for each way to share a device.

        There is none for a way in which the largest number of jobs so far isn't the fastest.
        """
        packings = [packing for _, packing in self.offers.view.packings if packing.still_gains]
        found = [packing.next_layout() for packing in packings]
        return tuple(Candidate(PACK, layout) for layout in found if layout is not None)

    @property
    def _enough_seconds(self) -> float:
        """The total budget, in seconds, that would probably suffice for all missing measurements.

        These are the first step over several devices, the unmeasured layouts of the final
        comparison, and larger numbers of jobs on a device if they may be faster.
        """
        budget = self.budget
        live = self.model.live
        missing = [one.layout for one in self.race.unmeasured]
        if (
            self.options.needs_split_probes
            and len(live) > 1
            and not self._seen.in_stage(Stage.SPLIT)
        ):
            missing.append(layout_of(tuple(int(i in live) for i in range(self.problem.devices))))
        enough = budget.budget_with_more_turns(sum(map(budget.least_seconds, missing)))
        # packs that were still gaining get one more step
        grown = sum(budget.least_seconds(pack.layout) for pack in self._growing_packs)
        if not grown:
            return enough
        return max(enough, budget.budget_with_larger_packs(grown + self.race.turn_seconds))

    @property
    def mean_length(self) -> float:
        """Mean tokens per row; 0 if rows have no lengths."""
        return fmean(self.problem.lengths) if self.problem.lengths else 0.0

    def _network_seconds(self) -> tuple[float, ...]:
        """Return how many seconds longer gradient exchange takes over several hosts than on one.

        Item `h` of the result is for h hosts, so item 1 is 0.
        """
        exchange = self.machine.exchange
        if len(exchange) < 2:
            return ()
        return tuple(costs[-1] - exchange[1][-1] for costs in exchange)

    def _curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return each device's curve of compute time and its maximum rows in a layout."""
        sharding = self.sharding if layout.traits.sharded else None
        return (sharding or self.policy).curves(layout)


def _is_indistinguishable(layout: Layout, others: dict[Layout, Candidate]) -> bool:
    """Whether a measurement can't show a difference between the layout and one of the others."""
    return any(same_measurement(layout, each) for each in others)
