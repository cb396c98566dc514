"""The search: a problem in, probes out, observations back, and at every moment the best layout measured so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import msgspec

from evener.balancer.search.budget import Budget
from evener.balancer.search.decisions import (
    Decision,
    Stop,
    explain_nobody,
    explain_race,
    explain_solo,
    explain_split,
    explain_text,
    explain_too_long,
    sketch_curve,
)
from evener.balancer.search.findings import Findings
from evener.balancer.search.machine_model import MachineModel
from evener.balancer.search.ranking import ROUGH
from evener.balancer.search.solo_stage import SoloStage
from evener.balancer.search.split_stage import SplitStage
from evener.balancer.search.statistics import relative_half_width
from evener.balancer.search.text_stage import TextStage
from evener.balancer.types import Belief, Observation, Probe


class Search(Findings):
    """Finds the layout that trains fastest; see `evener.balancer.search` for the theory."""

    def ask(self) -> tuple[Probe, ...]:
        """What to measure now, at the same time; empty when the search is over. Asking changes nothing."""
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
        curves = tuple(sketch_curve(self._predictions.model, i) for i in range(self.problem.devices))
        return Belief(curves, self._decision.doing)

    # ------------------------------------------------------------------ the stages in their order

    @cached_property
    def _decision(self) -> Decision:
        """The first stage that wants a probe gets it.

        The race is interrupted if all measured splits no longer fit, or the budget was raised. When it is over,
        exploration may spend the rest of the budget.
        """
        if again := self._seen.open_failures():
            same = tuple(probe for probe in again if probe.stage == again[0].stage)
            return Decision(same if again[0].stage == "solo" else same[:1], "Tries once more what failed.")
        model = self._predictions.model
        if not model.live:
            return Decision((), "Nothing more can be measured.", explain_nobody(model))
        if self._text and not self._text.can_hold(model.live):
            return Decision((), "Nothing more can be measured.", explain_too_long(self.problem))
        if self._explores(model) and (decision := self._explore(self._budget)):
            return decision
        if decision := self._repeat(ROUGH):
            return decision
        if probe := self._race.next_probe():
            return Decision((probe,), explain_race(probe, len(self._candidates.running)))
        if self.problem.budget_seconds is not None and (decision := self._explore(self._rest)):
            return decision
        return self._check() or self._repeat() or Decision((), "Done.", self._why_over(model))

    @property
    def _rest(self) -> Budget:
        """What the race left of the budget, less the time to check its winner."""
        kept = max((self._budget.least_seconds(one.candidate.layout) for one in self._race.ranking[:1]), default=0.0)
        seconds = (self.problem.budget_seconds or 0.0) - kept
        problem = msgspec.structs.replace(self.problem, budget_seconds=max(0.0, seconds))
        return Budget(problem, self.options, self._seen, race_is_over=True)

    def _check(self) -> Decision | None:
        """The chosen layout again: its figure is to be one that didn't choose it."""
        chosen = self._chosen()
        probe = self._race.check(chosen) if chosen else None
        return Decision((probe,), explain_race(probe, 1)) if probe else None

    def _repeat(self, rougher_than: float = 0.0) -> Decision | None:
        """Another turn of the best layouts in time that was added, if the figure is rougher than that."""
        chosen = self.best() if self.problem.spend_all else None
        if chosen is None or relative_half_width(chosen.throughput) <= rougher_than:
            return None
        probe = self._race.repeat_best(chosen.layout)
        return Decision((probe,), "Measures the best layouts again, in the time that was added.") if probe else None

    def _explore(self, budget: Budget) -> Decision | None:
        """The next batch of every device alone, else the next split; None when nothing is wanted or affordable."""
        if self._text:
            probes = TextStage(self._text, budget, self._with_splits).next_probes()
            return Decision(probes, explain_text(probes[0].layout)) if probes else None
        if probes := SoloStage(self._predictions, budget).next_probes():
            return Decision(probes, explain_solo(probes[0]))
        if probe := SplitStage(self._predictions, budget, self._with_splits).next_probe():
            return Decision((probe,), explain_split(self._predictions.model, probe))
        return None

    def _explores(self, model: MachineModel) -> bool:
        """Whether exploration may go on.

        True without a budget, before the race, while under 60 % of exploration's part is spent, or when no measured
        split fits any more.
        """
        none_fits = bool(model.splits) and not model.fitting_splits
        return none_fits or not self._seen.in_stage("race") or self._budget.has_time_to_explore

    def _why_over(self, model: MachineModel) -> str:
        found = self._race.ranking
        if not found:
            return (Stop.BUDGET if self._seen.in_stage("split") or model.holds_batch else Stop.NO_FIT).value
        problem = msgspec.structs.replace(self.problem, budget_seconds=None)
        endless = Budget(problem, self.options, self._seen, race_is_over=True)
        if self._race.waits_for_budget or self._explore(endless):
            return Stop.BUDGET.value
        if self._race.tied:
            return Stop.TIED.value
        return (Stop.SETTLED if len(found) > 1 else Stop.ONLY_ONE).value
