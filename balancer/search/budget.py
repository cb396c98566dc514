"""When a search ends, and how long a probe may last: each rule has a name and a sentence for people."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from functools import cached_property

from evener.balancer.search.observations import Ledger
from evener.balancer.search.statistics import median
from evener.balancer.types import Problem, Stage, Timed

BASE_SECONDS: dict[Stage, float] = {"solo": 4.0, "split": 6.0, "race": 6.0}  # a probe of quick steps
STEPS_A_PROBE = 12  # what a probe of slow steps should have time for
LONGEST_PROBE_SECONDS = 60.0
SHORTEST_PROBE_SECONDS = 0.2
FEWEST_STEPS = 5  # below it a probe is not worth its start
TELLING = 1.2  # steps that differ less, by this factor, don't tell how tuning grows with them
BY_STAGE: dict[Stage, float] = {"solo": 0.5, "split": 0.6, "race": 1.0}  # of the budget, spent at the end of a stage


class Rule(StrEnum):
    """Why a search ended."""

    SEPARATED = "The winner's interval lies above every rival's."
    TIED = "The leading layouts can't be told apart: every turn was taken and their intervals still overlap."
    ONLY_ONE = "There is one way to train on these devices, and it was measured."
    BUDGET = "The budget is spent."
    NO_FIT = "No layout of the global batch asked for fits the memory of these devices."
    NO_ROOM = "Every device ran out of memory at the smallest batch it was given"
    ALL_LOST = "Every device failed"


class Purse:
    """The budget against what was spent, and against what each stage may take of it."""

    def __init__(self, problem: Problem, ledger: Ledger) -> None:
        self.budget = problem.budget_seconds
        self._longest_step = problem.longest_step_seconds
        self.spent = ledger.spent_seconds()
        self._ledger = ledger

    def seconds(self, stage: Stage, step_seconds: float, probes_left: int) -> float:
        """How long the next probe of a stage may measure, with about so many to come."""
        wanted = min(LONGEST_PROBE_SECONDS, max(BASE_SECONDS[stage], STEPS_A_PROBE * step_seconds))
        if self.budget is None:
            return wanted
        left = (BY_STAGE[stage] * self.budget - self.spent) / max(1, probes_left) - self.overhead
        return round(max(SHORTEST_PROBE_SECONDS, min(wanted, left)), 3)

    def affords(self, stage: Stage, step_seconds: float) -> bool:
        """Whether a probe of such steps fits into what is left, for this stage, of the budget."""
        if self.budget is None:
            return True
        tuned = self.tuning if stage != "race" else 0.0  # what is raced has mostly run before
        return self.spent + self.overhead + (FEWEST_STEPS + tuned) * step_seconds <= BY_STAGE[stage] * self.budget

    @property
    def longest_step(self) -> float:
        """The longest step that a solo probe should have, in seconds."""
        return self._longest(self.spent)

    @property
    def longest_split_step(self) -> float:
        """The longest step that a device should have in a split; the same for all splits of a search."""
        return self._longest(self._ledger.spent_on("solo"))

    def _longest(self, spent: float) -> float:
        longest = LONGEST_PROBE_SECONDS
        if self.budget is not None:
            longest = min(longest, max(SHORTEST_PROBE_SECONDS, 0.2 * (self.budget - spent) - self.overhead))
        step = longest / (FEWEST_STEPS + self.tuning)
        return step if self._longest_step is None else min(step, self._longest_step)

    @cached_property
    def tuning(self) -> float:
        """Steps that the first step at a new size lasts, as it tries kernels of that size out: TensorFlow's up to 100.

        From each device's quickest and slowest step alone; what a first step costs at any size is in `overhead`.
        """
        alone: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for seen in self._ledger.of("solo"):
            if isinstance(seen, Timed):
                alone[seen.probe.layout.active[0]].append((seen.step_seconds, seen.first_step_seconds))
        slopes = []
        for steps in alone.values():
            (quick, first), (slow, last) = min(steps), max(steps)
            if slow > TELLING * quick:
                slopes.append(max(0.0, (last - first) / (slow - quick) - 1))
        return median(slopes) if slopes else 0.0

    @cached_property
    def overhead(self) -> float:
        """Seconds of a typical probe that are not timed steps: tracing, warm-up. New children are counted apart."""
        costs = [
            max(0.0, seen.elapsed_seconds - seen.start_seconds - seen.steps * seen.step_seconds)
            for stage in ("solo", "split")
            for seen in self._ledger.of(stage)
            if isinstance(seen, Timed)
        ]
        return median(costs) if costs else 0.0
