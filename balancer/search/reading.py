"""A reading of one set of observations: the machine, the predicted layouts, the candidates, and the best of them.

Everything is computed once, when it is first asked for. What exploration alone decides is kept for as long as it sees
nothing new.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from ..families import family_of
from ..types import Layout, Problem, Result, Timed
from .budget import Budget
from .candidates import Candidates
from .layouts import Candidate, LayoutOptions, same_measurement
from .observations import SHARDED, STAGES, Observations
from .race import Race
from .ranking import Standing, choose_winner, throughput
from .rows import RowDevices
from .sharding import Sharding
from .texts import TextDevices


class SearchReading:
    """One reading of the observations of a search, and of what it takes over from the one before."""

    def __init__(
        self, problem: Problem, options: LayoutOptions, seen: Observations, before: SearchReading | None = None
    ) -> None:
        self.problem, self.options, self.seen = problem, options, seen
        self._version = seen.explored_version
        if before is not None and (before.problem, before._version) == (problem, self._version):
            kept = ("model", "devices", "sharding", "_first_budget")  # what exploration alone decides
            self.__dict__.update({name: one for name, one in before.__dict__.items() if name in kept})

    @cached_property
    def model(self) -> RowDevices:
        """The curves and limits of the devices, and what they say if all rows cost the same."""
        return RowDevices(self.problem, self.seen, self._first_budget)

    @cached_property
    def devices(self) -> RowDevices | TextDevices:
        """The model of the devices: by the lengths of rows, or by their number if no unequal lengths are known."""
        if not self.problem.lengths:
            return self.model
        longest = self._first_budget.longest_step() if self._first_budget.seconds is not None else None
        return TextDevices(self.problem, self.seen, self.model.live, longest)

    @cached_property
    def sharding(self) -> Sharding | None:
        """A sharded training; None where the workload has none, or each device holds the model and nobody asks."""
        problem = self.problem
        full = any(
            not one.lost and one.out_of_use(problem.multiple_of) and self.seen.memory_limit(i) == limit
            for i, (one, limit) in enumerate(zip(self.model.devices, problem.memory_bytes, strict=True))
        )
        asked = any(family.traits.sharded for family in self.options.wanted)
        if not (problem.shards and asked and problem.devices > 1 and (full or self.options.shards)):
            return None
        if problem.budget_seconds is not None:
            others = self.seen.spent_seconds(set(STAGES) - set(SHARDED))
            problem = msgspec.structs.replace(problem, budget_seconds=max(0.0, problem.budget_seconds - others))
        return Sharding(problem, self.seen.sharded)

    @cached_property
    def _first_budget(self) -> Budget:
        return Budget(self.problem, self.options, self.seen)

    @cached_property
    def budget(self) -> Budget:
        """The part of the budget that is left."""
        return Budget(self.problem, self.options, self.seen, predict_rate=self.devices.predicted_rate)

    @cached_property
    def candidates(self) -> Candidates:
        """The layouts of the race."""
        shards = self.sharding.layouts() if self.sharding else []
        return Candidates(self.options, self.devices, self.budget, shards)

    @cached_property
    def race(self) -> Race:
        """The race between the candidates."""
        return Race(self.problem, self.options, self.candidates, self.budget)

    # ------------------------------------------------------------------ who is best

    @cached_property
    def chosen(self) -> Result | None:
        """The best layout, by the turns that chose it.

        A layout that the race has not measured yet counts with what exploration measured. If no layout may run any
        more, the best of those that ran.
        """
        raced = {one.candidate.layout: one.candidate for one in self.race.ranking}
        if not all(candidate.synchronous for candidate in raced.values()):
            return result_of(self.race.ranking[0])  # packs and placements are compared in the race alone
        fit = [layout for layout in self.still_run() if self.problem.global_batch in (None, layout.global_batch)]
        layouts = [layout for layout in fit if not self._repeats(layout, raced)] or fit
        layouts = [one for one in layouts if one in raced or family_of(one).name in self.options.families] or layouts
        candidates = [raced.get(layout, Candidate(family_of(layout), layout)) for layout in layouts]
        if not candidates:
            return None
        turns = {layout: self.turns(layout) for layout in layouts}
        return self.result_for(choose_winner(candidates, turns, self.problem).layout)

    def _repeats(self, layout: Layout, raced: dict[Layout, Candidate]) -> bool:
        """True if an explored layout is one of the race but for shares that no measurement could tell apart."""
        return layout not in raced and any(same_measurement(layout, one) for one in raced)

    def still_run(self) -> dict[Layout, list[Timed]]:
        """Every layout that ran as one training and may run again; all that ran, if none may."""
        ran = {layout: turns for layout, turns in self._ran().items() if self.turns(layout)}
        return self.seen.still_fit(ran) or ran

    def _ran(self) -> dict[Layout, list[Timed]]:
        """Every layout that ran as one whole training."""
        found = self.seen.timed(("solo", "rest", "split", "shard", "race"))
        trainings = {layout: turns for layout, turns in found.items() if layout.traits.by_shares}
        return {layout: turns for layout, turns in trainings.items() if self.devices.is_training(layout)}

    def raced(self, layout: Layout) -> dict[int, Timed]:
        """Every turn that a layout took in the race, or with other knobs."""
        return self.seen.turns(layout, "knobs" if layout.knobs else "race")

    def turns(self, layout: Layout) -> dict[int, Timed]:
        """A layout's turns; of one that was never measured uncontended, its measurements of the solo stage."""
        return self.raced(layout) or dict(enumerate(self.seen.timed_in(layout, "solo")))

    def result_for(self, layout: Layout) -> Result:
        """A layout's throughput over its turns."""
        turns = self.turns(layout)
        return Result(layout, throughput(turns), len(turns))


def result_of(one: Standing) -> Result:
    """A layout's throughput in the race."""
    return Result(one.candidate.layout, one.throughput, one.turns)
