"""The seconds that exploration has left, and how long a step may take: what the devices' models
have to know of the budget.

What probes cost is the budget's; it asks the devices' models, so these can't ask it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from statistics import median

from ..types import Problem, Timed
from .layouts import LayoutOptions
from .model.memory import SAFE_GROWTH
from .observations import EXPLORATION, Observations

LONGEST_PROBE_SECONDS = 60.0  # so that a step takes at most a fifth of it
SHORTEST_PROBE_SECONDS = 0.2  # ten blocks of 20 ms, the shortest (block_timing)
FEWEST_STEPS = 5  # of a probe that shows its noise: with fewer it isn't worth its start
LONE_STEPS = 2  # of a probe of a lone step: the first isn't timed
# seconds: a single shorter step says too little, as what else the cores do takes a part of it
SHORTEST_LONE_STEP = 0.5
# steps of the shortest probe that shows its noise: a first one, two to warm up, three that are
# timed (block_timing.FEWEST_BLOCKS)
CERTAIN_STEPS = 6
# an exploring probe has 1 / this of what is left: a level curve hides long steps, and other batches
# may matter more; but steps that are slow and noisy need the seconds
SURPRISE = 10
# times: where a probe of a lone step on a level curve would take all the time that is left if its
# step took longer in proportion, it may take this much more. Most steps don't, and what ran stays
# the plan
BOLD = 2.0
# of the budget: exploration and later turns stop here, as probes may overrun
LATER_TURNS_END_BY = 0.95
# of the budget, where packs and placements follow, whose children have to start; and of what is
# left, for a round that is expected to gain, as what follows decides too. Half of that before the
# first split, which adds to all curves
EXPLORES = 0.4


class TimeLeft:
    """The time of a search after its observations so far."""

    def __init__(self, problem: Problem, options: LayoutOptions, seen: Observations) -> None:
        self._devices = problem.devices
        self._seen = seen
        self.seconds = math.inf if problem.budget_seconds is None else problem.budget_seconds
        part = EXPLORES if options.needs_more_children else LATER_TURNS_END_BY
        self.explore_seconds = part * self.seconds

    @cached_property
    def spent(self) -> float:
        """Seconds of all probes so far."""
        return self._seen.spent_seconds()

    def growth(self, step_seconds: float) -> float:
        """The factor by which two steps may turn out longer than predicted.

        A level curve says nothing of larger batches, so a step may take longer in proportion.
        """
        if not step_seconds:
            return math.inf
        if self.takes_lone_steps(step_seconds):
            return max(1.0, BOLD * self._left_to_explore / (LONE_STEPS * step_seconds))
        split_ran = self._devices == 1 or bool(self._seen.in_stage("split"))
        part = EXPLORES if split_ran else EXPLORES / 2
        return max(1.0, part * self._left_to_explore / (2 * step_seconds))

    def longest_step(self) -> float:
        """The longest step, in seconds, of a device alone or in a split: one probe leaves time for
        others.
        """
        left = max(SHORTEST_PROBE_SECONDS, EXPLORES * self._left_to_explore - self.overhead_seconds)
        fewest = LONE_STEPS if self._lone_steps_save_time else FEWEST_STEPS
        longest = LONGEST_PROBE_SECONDS / (FEWEST_STEPS + self.tuning_steps)
        return min(longest, left / (fewest + self.tuning_steps))

    def takes_lone_steps(self, step_seconds: float, part: float = 1 / SURPRISE) -> bool:
        """True if a probe that shows its noise would take more than this part of the time left.

        With such steps a time that is known to 3 % for each of several batches is worth more than a
        certain one for a few of them.
        """
        if not self._lone_steps_save_time or step_seconds < SHORTEST_LONE_STEP:
            return False
        left = max(0.0, self.seconds - self.spent)
        return CERTAIN_STEPS * step_seconds > part * left

    def fewest_steps(self, step_seconds: float) -> int:
        """The steps of the shortest probe."""
        return LONE_STEPS if self.takes_lone_steps(step_seconds) else FEWEST_STEPS

    @property
    def _lone_steps_save_time(self) -> bool:
        """False where the first step at a new size takes longer than all that follow: a lone step
        would cost as much as a certain one.
        """
        return self.tuning_steps <= CERTAIN_STEPS

    @cached_property
    def _left_to_explore(self) -> float:
        return max(0.0, self.explore_seconds - self._seen.spent_seconds(*EXPLORATION))

    @cached_property
    def overhead_seconds(self) -> float:
        """Seconds of a typical probe that are not timed steps: tracing, warm-up. Starts are counted
        separately.
        """
        return median([untimed_seconds(seen) for seen in self._seen.timed(*EXPLORATION)] or [0.0])

    @cached_property
    def tuning_steps(self) -> float:
        """The time of the first step at a new size, in usual steps, as kernels are tuned for it:
        with TensorFlow up to 100.

        From each device's quickest and slowest step alone. A first step's fixed cost is part of the
        overhead.
        """
        alone: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for seen in self._seen.timed("solo"):
            layout = seen.probe.layout
            if layout.by_rows and not layout.in_passes:
                alone[layout.active[0]].append((seen.step_seconds, seen.first_step_seconds))
        found = []
        for steps in alone.values():
            quick, first_of_quick = min(steps)
            slow, first_of_slow = max(steps)
            if slow > SAFE_GROWTH * quick:
                more = first_of_slow - first_of_quick
                found.append(max(0.0, more / (slow - quick) - 1))
        return median(found or [0.0])


def untimed_seconds(seen: Timed) -> float:
    """What a probe took besides its start and its timed steps: tracing, warm-up."""
    return max(0.0, seen.elapsed_seconds - seen.start_seconds - seen.steps * seen.step_seconds)
