"""Decide how long each probe measures, and whether there is time for it.

The probes before the final comparison get only a part of the budget, so that the comparison can
measure every layout once. If all layouts in it train one model over the devices, that part is
nearly the whole budget. It is smaller if layouts with several jobs per device, with placed layers
or with tuning options follow: each of them starts processes of its own, which takes time.

Before the first step over several devices, single devices may be measured in more rounds than are
strictly necessary. Such a round may take at most the fraction `EXPLORES` / 2 of the time left for
this stage, and it must leave enough time for that first step. Any other probe only has to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from statistics import median

from ..types import Layout, Probe, Problem, Stage
from .layouts import LayoutOptions
from .machine_model import MachineModel
from .observations import EXPLORATION, FIRST_TURN, Observations
from .ranking import LEAST_GAIN
from .starts import StartTimes
from .time_left import (
    EXPLORES,
    FEWEST_STEPS,
    LATER_TURNS_END_BY,
    LONGEST_PROBE_SECONDS,
    SHORTEST_PROBE_SECONDS,
    STEPS_TO_TIME_ONE,
    SURPRISE,
    TimeLeft,
    first_step_overhead,
    untimed_seconds,
)

BASE_SECONDS: dict[Stage, float] = {  # duration of a probe whose steps are quick
    Stage.SOLO: 3.0, Stage.REST: 3.0, Stage.SPLIT: 4.0, Stage.PART: 4.0, Stage.SHARD: 6.0,
    Stage.PACK: 2.0, Stage.RACE: 3.0, Stage.KNOBS: 3.0, Stage.CHECK: 4.0,
}  # fmt: skip
# number of slow steps that a probe should have time for: fewer tell little about their noise
STEPS_A_PROBE = 12
# consecutive warm-up steps that must agree before steps are timed; a single step has none
WARM_UP_STEPS = 2
PRICE = 0.05  # relative gain for which a probe may take all of the remaining time
# fraction of the budget in which packs may grow: knobs follow, which start child processes
GROWS = 0.65
# fraction of the remaining time: a race probe that needs more than this to show its noise times a
# single step
CERTAIN_TURN = 0.5


class Budget:
    """Plans a search's time: how long each probe may run, and which ones are worth their time."""

    def __init__(
        self,
        problem: Problem,
        options: LayoutOptions,
        observations: Observations,
        machine: MachineModel | None = None,
        race_is_over: bool = False,
    ) -> None:
        """Read the time spent so far, and what probes usually cost, from the observations.

        - `observations`: all observations of the search so far.
        - `machine`: the model that predicts step times of layouts that haven't run yet. If it is
          None, they are estimated from the speeds of single devices.
        - `race_is_over`: whether the final comparison has ended. All remaining time may then be
          used for further probes.
        """
        self._options = options
        self._seen = observations
        self.race_is_over = race_is_over
        self._machine = machine
        self._timed = observations.timed()
        self.starts = StartTimes(observations, problem.all_together)
        self.time = TimeLeft(problem, options, observations)
        self.seconds = self.time.seconds
        # without a budget, or after the race: used to ask whether a finished search would go on
        self._endless = race_is_over and math.isinf(self.seconds)
        # least relative gain for which a probe is worth its time
        self.least_gain = max(LEAST_GAIN, problem.tolerance) if self._endless else LEAST_GAIN

    @property
    def spent(self) -> float:
        """The time, in seconds, that the probes have taken so far."""
        return self.time.spent

    def probe_seconds(
        self,
        layout: Layout,
        stage: Stage,
        probes_left: int = 1,
        step_seconds: float | None = None,
        reserved: float = 0.0,
    ) -> float:
        """Return how many seconds of steps a probe should time, not counting its warm-up.

        If steps are so slow that the probe should time only one, the result is at most half of a
        step's time. A probe that is given less time than a step takes runs exactly one.

        - `probes_left`: the number of probes that share the remaining time, including this one.
        - `step_seconds`: the expected step time. If it is None, it is measured or predicted.
        - `reserved`: seconds to keep for other probes.
        """
        step = self._step_seconds(layout) if step_seconds is None else step_seconds
        wanted = min(LONGEST_PROBE_SECONDS, max(BASE_SECONDS[stage], STEPS_A_PROBE * step))
        if math.isinf(self.seconds):
            return wanted
        left = self._stage_end_seconds(stage) - self.spent - reserved - self.starts.seconds(layout)
        probes = SURPRISE if stage in EXPLORATION else max(1, probes_left)
        part = 1 / SURPRISE if stage in EXPLORATION else CERTAIN_TURN
        # a check always has two steps, because it confirms the winner's samples/s
        if stage != Stage.CHECK and self.time.times_single_step(step, part):
            return min(SHORTEST_PROBE_SECONDS, round(step / 2, 3))
        each = (
            left / probes
            - self._warm_up_seconds(layout, 0.0)
            - self._further_warm_up_seconds(layout)
        )
        return round(max(SHORTEST_PROBE_SECONDS, 2 * step, min(wanted, each)), 3)

    def affords(
        self,
        layout: Layout,
        deadline_stage: Stage,
        step_seconds: float | None = None,
        turn: int = 0,
        reserved: float = 0.0,
        steps: int | None = None,
    ) -> bool:
        """Whether the shortest useful probe of a layout can finish before the deadline of a stage.

        - `deadline_stage`: the stage whose deadline counts. It may be later than the probe's own
          stage, if there would be no result without this probe.
        - `step_seconds`: the expected step time. If it is None, it is measured or predicted.
        - `turn`: the probe's round of the final comparison. Rounds after the first have to end
          earlier.
        - `reserved`: seconds to keep for other probes.
        - `steps`: how many steps the probe has to time. None means the fewest that are useful at
          this step time.
        """
        # the first turns of the race may use the whole budget, later turns only 95 % of it
        ends = self.spent + reserved + self.least_seconds(layout, step_seconds, steps)
        return ends <= self._stage_end_seconds(deadline_stage, turn)

    def probes(
        self, layout: Layout, stage: Stage, turn: int, probes_left: int = 1, reserved: float = 0.0
    ) -> tuple[Probe, ...]:
        """Return one probe of the layout, in a tuple; empty if there is no time for it.

        `reserved` seconds of the remaining time are kept for later. The rest is shared by
        `probes_left` probes, including this one.
        """
        fewest = FEWEST_STEPS if stage == Stage.CHECK else None
        if not self.affords(layout, stage, turn=turn, reserved=reserved, steps=fewest):
            return ()
        seconds = self.probe_seconds(layout, stage, probes_left, reserved=reserved)
        return (Probe(layout, stage, seconds, turn),)

    def has_time(self, seconds: float, reserved: float = 0.0, step_seconds: float = 0.0) -> bool:
        """Whether there is time for a probe of a single device and for the probes after it.

        The probe may use only a fraction of the remaining time, unless its steps take so long that
        it times just one.

        - `seconds`: the duration of the probe.
        - `reserved`: seconds to keep for later probes.
        - `step_seconds`: the expected step time; 0 if unknown.
        """
        left = self._stage_end_seconds(Stage.SOLO) - self.spent
        if self.time.times_single_step(step_seconds):
            return seconds + reserved <= left
        part = EXPLORES / 2 if reserved else EXPLORES
        return seconds + reserved <= left and seconds <= part * left

    def is_expensive(self, seconds: float) -> bool:
        """Whether a probe of `seconds` would take more than 5 % of the remaining time."""
        return seconds > PRICE * (self.seconds - self.spent)

    def is_cheap(self, seconds: float) -> bool:
        """Whether a probe of `seconds` would take at most 5 % of the remaining time.

        Always False once a search without a budget has finished its final comparison.
        """
        # after the race of a search without a budget, any probe would be cheap, so none is
        return not self._endless and seconds <= PRICE * (self.seconds - self.spent)

    def pays(self, gain: float, seconds: float) -> bool:
        """Whether the speedup to expect from a probe justifies its duration.

        `gain` is the speedup as a fraction: 0.1 is 10 % more samples/s. The more of the remaining
        time the probe takes (`seconds`), the larger the gain must be.
        """
        left = max(self.seconds - self.spent, SHORTEST_PROBE_SECONDS)
        return gain > self.least_gain + PRICE * seconds / left

    def least_seconds(
        self, layout: Layout, step_seconds: float | None = None, steps: int | None = None
    ) -> float:
        """Return how many seconds the shortest useful probe takes, including its start and warm-up.

        - `step_seconds`: the expected step time. If it is None, it is measured or predicted.
        - `steps`: how many steps the probe has to time. None means the fewest that are useful at
          this step time.
        """
        step = self._step_seconds(layout) if step_seconds is None else step_seconds
        fewest = steps or self.time.fewest_steps(step)
        measured = max(SHORTEST_PROBE_SECONDS, fewest * step)
        single_step = fewest == STEPS_TO_TIME_ONE
        overhead = (
            self._first_step_overhead(layout, step)
            if single_step
            else self._warm_up_seconds(layout, step)
        )
        return self.starts.seconds(layout) + overhead + measured

    def turns_left(self, layouts: Iterable[Layout]) -> float:
        """Return how many rounds, with one probe of each layout, fit in the remaining time.

        The number may be fractional. It is infinite without a budget, and 0 without layouts.
        """
        each = sum(max(self.least_seconds(layout), BASE_SECONDS[Stage.RACE]) for layout in layouts)
        if not each:
            return 0.0
        return max(0.0, LATER_TURNS_END_BY * self.seconds - self.spent) / each

    def budget_with_more_turns(self, missing_seconds: float) -> float:
        """Return how large the total budget must be for a complete final comparison, in seconds.

        `missing_seconds` is how much longer that comparison would have taken.
        """
        # exploration uses a fixed part of a budget, so the turns get only a part of the additional
        # time
        others = self.spent - self._seen.spent_seconds(*EXPLORATION) + missing_seconds
        kept = 1 - EXPLORES if self._options.needs_more_children else 1.0
        return max(self.spent + missing_seconds, others / kept)

    def budget_with_larger_packs(self, grown_seconds: float) -> float:
        """Return the total budget, in seconds, that is enough to try more jobs on a device.

        `grown_seconds` is how long the measurements with more jobs take.
        """
        # packs may grow only until a fixed fraction (GROWS) is spent, which includes exploration
        # and the first turns
        spent = self._seen.spent_seconds(until_turn=FIRST_TURN)
        return (spent + grown_seconds) / GROWS

    def _stage_end_seconds(self, stage: Stage, turn: int = FIRST_TURN) -> float:
        """Return how many seconds the search may have taken by the end of a stage.

        Infinite without a budget. `turn` is the round of the final comparison.
        """
        later = turn > FIRST_TURN and stage in (Stage.RACE, Stage.KNOBS)
        if self.race_is_over or later:  # after the race, exploration may use the rest of the budget
            return LATER_TURNS_END_BY * self.seconds
        if stage in EXPLORATION:
            return self.time.explore_seconds
        if stage == Stage.PACK:
            return GROWS * self.seconds
        return self.seconds

    # ------------------------------------------------------------------ what probes cost

    def _warm_up_seconds(self, layout: Layout, step_seconds: float) -> float:
        """Return how many seconds a probe spends on warm-up and other untimed work.

        The start of its processes isn't included. If the layout was never measured, the result is
        estimated from the probes of other layouts and from `step_seconds`.
        """
        measured = [untimed_seconds(timed) for timed in self._seen.timed_in(layout)]
        return min(
            measured, default=self.time.overhead_seconds + self.time.tuning_steps * step_seconds
        )

    def _first_step_overhead(self, layout: Layout, step_seconds: float) -> float:
        """Return how many seconds longer the first step of a layout takes than a later one.

        This is the overhead of a probe that has no warm-up because it times a single step.
        """
        own = [first_step_overhead(timed) for timed in self._seen.timed_in(layout)]
        # if the layout was never measured
        typical = self.time.first_step_overhead_seconds + self.time.tuning_steps * step_seconds
        return min(own, default=typical)

    def _further_warm_up_seconds(self, layout: Layout) -> float:
        """Return the warm-up time, in seconds, of a layout that was only timed in single steps.

        Probes of a single step have no warm-up, so their measured overhead doesn't include it. 0 if
        the layout never ran, or if several steps were timed.
        """
        own = self._seen.timed_in(layout)
        if not own or not all(one.is_single_step for one in own):
            return 0.0
        return WARM_UP_STEPS * median(one.step_seconds for one in own)

    def _step_seconds(self, layout: Layout) -> float:
        """Return the expected step time of a layout in seconds; 0 if nothing is known about it."""
        own = self._seen.timed_in(layout)
        if own:
            return median(one.step_seconds for one in own)
        if self._machine and layout.traits.by_shares and not layout.knobs:
            predicted = self._machine.predicted_rate(layout)
            if predicted:
                return layout.global_batch / predicted
        # without a measurement or a prediction, it is estimated from solo speeds
        rates = [self._solo_rates[i] for i in layout.active if i in self._solo_rates]
        if not rates:
            return 0.0
        rate = sum(rates) if layout.traits.together else max(rates)
        return layout.global_batch * layout.processes / rate if rate else 0.0

    @cached_property
    def _solo_rates(self) -> dict[int, float]:
        """The highest measured throughput of each device on its own, by position, in samples/s."""
        rates: dict[int, float] = {}
        for seen in self._timed:
            layout = seen.probe.layout
            if layout.traits.alone and not layout.length:
                position = layout.active[0]
                rates[position] = max(rates.get(position, 0.0), seen.samples_per_second)
        return rates
