"""Compute how much of a search's budget is left, and what a probe costs besides its timed steps."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from statistics import median

from ..types import Problem, Stage, Timed
from .layouts import LayoutOptions
from .model.memory import SAFE_GROWTH
from .observations import EXPLORATION, Observations

LONGEST_PROBE_SECONDS = 60.0  # a step takes at most a fifth of this
SHORTEST_PROBE_SECONDS = 0.2  # ten blocks of 20 ms, the shortest (block_timing)
FEWEST_STEPS = 5  # steps of a probe that shows its noise: a probe of fewer isn't worth its start
STEPS_TO_TIME_ONE = 2  # steps of a probe that times a single step: the first step isn't timed
# seconds; a shorter single step says too little, because other work on the cores takes a part of it
SHORTEST_SINGLE_STEP = 0.5
# steps of the shortest probe that shows its noise: a first one, two for warm-up, three that are
# timed (block_timing.FEWEST_BLOCKS)
CERTAIN_STEPS = 6
# a probe of exploration gets 1 / SURPRISE of the remaining time, because steps beyond a plateau may
# turn out long, and other batches may matter more; but slow and noisy steps need that much time
SURPRISE = 10
# factor by which the probe of a single step after a plateau may exceed the remaining time in the
# worst case, which is a step time that grows in proportion to the batch; it mostly doesn't, and if
# it does, the best measured layout remains the plan
BOLD = 2.0
# fraction of the budget at which exploration and later turns stop, because probes may overrun
LATER_TURNS_END_BY = 0.95
# fraction of the budget for exploration if packs and placements follow, whose child processes have
# to start; also the fraction of the remaining time for a round that is expected to gain. Half of
# that before the first split, which adds points to all curves
EXPLORES = 0.4


class TimeLeft:
    """How much time a search has left, and how long steps may take to fit into it."""

    def __init__(
        self, problem: Problem, options: LayoutOptions, observations: Observations
    ) -> None:
        self._devices = problem.devices
        self._seen = observations
        self.seconds = math.inf if problem.budget_seconds is None else problem.budget_seconds
        part = EXPLORES if options.needs_more_children else LATER_TURNS_END_BY
        self.explore_seconds = part * self.seconds

    @cached_property
    def spent(self) -> float:
        """The time, in seconds, that all probes have taken so far."""
        return self._seen.spent_seconds()

    def growth(self, step_seconds: float) -> float:
        """Return how many times larger the next batch may be than the largest one so far.

        Call this if the measured step times don't rise with the batch yet, so that nothing is known
        about larger batches. The step time is then assumed to grow in proportion to the batch, and
        the remaining time limits the factor. `step_seconds` is the step time of the largest batch
        so far. The result is at least 1, and infinite for a step time of 0.
        """
        if not step_seconds:
            return math.inf
        if self.times_single_step(step_seconds):
            return max(1.0, BOLD * self._left_to_explore / (STEPS_TO_TIME_ONE * step_seconds))
        split_ran = self._devices == 1 or bool(self._seen.in_stage(Stage.SPLIT))
        part = EXPLORES if split_ran else EXPLORES / 2
        return max(1.0, part * self._left_to_explore / (2 * step_seconds))

    def longest_step(self) -> float:
        """Return the longest step time, in seconds, at which a new batch may still be measured."""
        left = max(SHORTEST_PROBE_SECONDS, EXPLORES * self._left_to_explore - self.overhead_seconds)
        fewest = STEPS_TO_TIME_ONE if self._single_steps_save_time else FEWEST_STEPS
        longest = LONGEST_PROBE_SECONDS / (FEWEST_STEPS + self.tuning_steps)
        return min(longest, left / (fewest + self.tuning_steps))

    def times_single_step(self, step_seconds: float, fraction: float = 1 / SURPRISE) -> bool:
        """Whether steps are so slow that a probe should time just one.

        This is so if a probe that is long enough to show the noise of steps would take more than
        `fraction` of the remaining time. Measuring several batches with an error of 3 % each is
        more useful than measuring a few exactly.
        """
        if not self._single_steps_save_time or step_seconds < SHORTEST_SINGLE_STEP:
            return False
        left = max(0.0, self.seconds - self.spent)
        return CERTAIN_STEPS * step_seconds > fraction * left

    def fewest_steps(self, step_seconds: float) -> int:
        """Return the fewest steps that a probe needs, including a first one that isn't timed."""
        return STEPS_TO_TIME_ONE if self.times_single_step(step_seconds) else FEWEST_STEPS

    @property
    def _single_steps_save_time(self) -> bool:
        """Whether timing a single step takes much less time than timing several.

        It doesn't if the first step is slow because kernels are tuned in it.
        """
        return self.tuning_steps <= CERTAIN_STEPS

    @cached_property
    def _left_to_explore(self) -> float:
        return max(0.0, self.explore_seconds - self._seen.spent_seconds(*EXPLORATION))

    @cached_property
    def overhead_seconds(self) -> float:
        """The median time, in seconds, that probes spend on warm-up and other untimed work.

        The start of processes isn't included.
        """
        return median([untimed_seconds(seen) for seen in self._seen.timed(*EXPLORATION)] or [0.0])

    @cached_property
    def first_step_overhead_seconds(self) -> float:
        """Median of how much longer a probe's first step takes than a later one, in seconds."""
        found = [first_step_overhead(seen) for seen in self._seen.timed(*EXPLORATION)]
        return median(found or [0.0])

    @cached_property
    def tuning_steps(self) -> float:
        """How long the first step spends on tuning, such as choosing kernels.

        The unit is the duration of a later step: 2.0 means that tuning takes as long as two steps.
        """
        alone: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for seen in self._seen.timed(Stage.SOLO):
            layout = seen.probe.layout
            if layout.by_rows and not layout.in_passes:
                alone[layout.active[0]].append((seen.step_seconds, seen.first_step_seconds))
        found = []
        for steps in alone.values():
            quick, first_of_quick = min(steps)
            slow, first_of_slow = max(steps)
            if slow > SAFE_GROWTH * quick:
                more = first_of_slow - first_of_quick
                # the part of a first step that doesn't grow with the step's duration is overhead,
                # not tuning
                found.append(max(0.0, more / (slow - quick) - 1))
        return median(found or [0.0])


def untimed_seconds(timed: Timed) -> float:
    """Return how many seconds of a probe were neither process start nor timed steps."""
    return max(0.0, timed.elapsed_seconds - timed.start_seconds - timed.steps * timed.step_seconds)


def first_step_overhead(timed: Timed) -> float:
    """Return how many seconds longer the first step took than later ones; at least 0."""
    return max(0.0, timed.first_step_seconds - timed.step_seconds)
