"""Compares two training runs, or the plans of two searches.

The result is the slowdown of the second run, with a 95 % interval, and the part of a step that
causes it. The functions have no side effects.

Other programs, on this machine or on other virtual machines of its host, slow whole training runs
by tens of percent, and each run by a different amount. They don't change the duration of a quick
step (the 5th percentile of step times) on a CPU core at full speed. So two training runs are
compared by the quick steps of their fastest windows, corrected for the speed of the core
(`quick_steps.py`). Quick steps don't contain work that isn't in every step, such as writing
checkpoints or waiting for late rows. The additional time that the second run certainly takes for
such work is therefore added to its slowdown.

A run's journal has a line for each window (a series of steps). Runs without quick steps in their
journals are compared by the means of these windows. A disturbance lasts for several windows, so
consecutive windows are correlated. They are therefore grouped into blocks, and the interval is
widened by the correlation between consecutive blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, variance
from typing import Literal

import msgspec

from evener.errors import RequestError
from evener.live.journal import RecordedTraining, StartEntry, StepsEntry
from evener.plan.file import Plan
from evener.training.step_sums import StepSums

from ..statistics import find_correlation, student
from .quick_steps import QuickWindow, compare_quick_steps

WARM_PART = 0.1  # fraction of a training's windows that is left out, because the machine warms up
MOST_BLOCKS = 12
FEWEST_WINDOWS = 5  # windows that must be left without the warm-up
LEAST_ERROR = 1e-3  # relative: clocks are no more precise
# relative half-width of a 95 % interval: the speed of an undisturbed training differs from one
# start to the next, because its memory is elsewhere and the machine's clocks differ
START_ERROR = 0.045
# A value is above a bound with 95 % probability, and within an interval with 95 %: the distance to
# the bound, as a fraction of the interval's half (of a normal distribution)
ONE_SIDED = NormalDist().inv_cdf(0.95) / NormalDist().inv_cdf(0.975)
# mean compute time (own work) divided by that of a quick step, from which other parts' means aren't
# used
MOST_DISTURBED = 2.0

# parts that may take much longer in some steps than in others
RARE = ("input_s", "files_s", "validation_s", "between_s")

PHASES = {
    "input": "input_s",
    "own work": "own_work_s",
    "waiting and exchange": "meeting_s",
    "work and waiting": "undivided_s",
    "optimizer": "update_s",
    "files": "files_s",
    "validation": "validation_s",
    "between steps": "between_s",
}


class PhaseDifference(msgspec.Struct, frozen=True):
    """How long one part of a step, such as data loading, takes in each of two training runs.

    All values are seconds per step on the first rank.
    """

    name: str
    before_s: float
    after_s: float
    low_s: float  # 95 % interval of the additional time in the second training
    high_s: float


class RunDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How much slower a second run is than a first, with 95 % intervals.

    `slowdown` is a fraction: 0.1 means that the second run takes 10 % longer for the same rows.
    """

    kind: Literal["training", "search"]
    before: str  # run names
    after: str
    before_samples_per_second: float
    after_samples_per_second: float
    slowdown: float  # 0.1: the second takes 10 % longer; below 0 it is faster
    low: float  # 95 % interval
    high: float
    least: float  # the slowdown is at least this with 95 % probability
    # over all steps, including what other programs cost in either training
    mean_slowdown: float = 0.0
    phases: tuple[PhaseDifference, ...] = ()
    other_batch: bool = False  # the two trainings have different numbers of rows per step

    def is_beyond(self, threshold: float) -> bool:
        """Return whether the second run is slower by more than the fraction `threshold`.

        Returns False if the second run may be as fast as the first within the error of the
        measurement.
        """
        return self.least > 0 and self.slowdown > threshold


def compare_trainings(before: RecordedTraining, after: RecordedTraining) -> RunDifference:
    """Return how much slower the training run `after` is than `before`, without their warm-ups.

    The fastest steps of both runs are compared, because other programs disturb them least. Their
    times are corrected for the speed of the CPU, and the time of rare work such as checkpoints is
    added. Raises RequestError if a run is too short.
    """
    windows = [_list_windows(each) for each in (before, after)]
    first, second = windows
    per_sample = [_mean(each, lambda window: window.seconds / window.samples) for each in windows]
    mean_ratio = per_sample[1].value / per_sample[0].value
    error = max(math.hypot(*(each.error / each.value for each in per_sample)), LEAST_ERROR)
    ratio, rare = mean_ratio, 0.0
    timed = [[window for window in each if window.quick_s] for each in windows]
    if min(map(len, timed)) >= FEWEST_WINDOWS:
        quick, error = _compare_quick_steps((before, after), timed)
        ratio = quick[1].value / quick[0].value
        rare = _find_rare_work(windows, quick) / quick[0].value
        rare = max(0.0, rare - max(0.0, ratio - 1))  # a quick step contains some of it
    batches = [_mean_batch(each) for each in windows]
    return RunDifference(
        kind="training",
        before=before.run,
        after=after.run,
        before_samples_per_second=1 / per_sample[0].value,
        after_samples_per_second=1 / per_sample[1].value,
        slowdown=ratio - 1 + rare,
        low=ratio * math.exp(-error) - 1 + rare,
        high=ratio * math.exp(error) - 1 + rare,
        least=ratio * math.exp(-ONE_SIDED * error) - 1 + rare,
        mean_slowdown=mean_ratio - 1,
        phases=tuple(_compare_phases(first, second)),
        other_batch=not math.isclose(*batches, rel_tol=0.01),
    )


def compare_plans(before_name: str, before: Plan, after_name: str, after: Plan) -> RunDifference:
    """Return how much slower the plan `after` is than the plan `before`.

    `before_name` and `after_name` are the names of the searches that found these plans. Raises
    RequestError if a plan has no throughput.
    """
    throughputs = [before.throughput, after.throughput]
    if not all(throughput.samples_per_second > 0 for throughput in throughputs):
        raise RequestError("A plan has no samples/s.", "Compare runs that measured some.")
    ratio = throughputs[0].samples_per_second / throughputs[1].samples_per_second
    errors = [
        (throughput.high - throughput.low) / 2 / throughput.samples_per_second
        for throughput in throughputs
    ]
    error = max(math.hypot(*errors), LEAST_ERROR)
    return RunDifference(
        kind="search",
        before=before_name,
        after=after_name,
        before_samples_per_second=throughputs[0].samples_per_second,
        after_samples_per_second=throughputs[1].samples_per_second,
        slowdown=ratio - 1,
        low=ratio * math.exp(-error) - 1,
        high=ratio * math.exp(error) - 1,
        least=ratio * math.exp(-ONE_SIDED * error) - 1,
        mean_slowdown=ratio - 1,
        other_batch=before.layout.global_batch != after.layout.global_batch,
    )


def _list_windows(training: RecordedTraining) -> list[StepsEntry]:
    """Return the windows that a run has measured since its last start, without the warm-up.

    Raises RequestError if there are too few.
    """
    windows: list[StepsEntry] = []
    for entry in training.entries:
        if isinstance(entry, StartEntry):
            windows = []
        elif isinstance(entry, StepsEntry) and entry.steps and entry.samples and entry.seconds > 0:
            windows.append(entry)
    warm = max(1, round(WARM_PART * len(windows)))
    if len(windows) - warm < FEWEST_WINDOWS:
        raise RequestError(
            f"The training {training.run} is too short to be compared: it has {len(windows)} "
            f"windows of steps, of a second or more each, and {FEWEST_WINDOWS + warm} are needed.",
            "Train for 10 s or longer.",
        )
    return windows[warm:]


def _mean_batch(windows: Sequence[StepsEntry]) -> float:
    """Return the mean number of rows per step of a training run."""
    return sum(window.samples for window in windows) / sum(window.steps for window in windows)


class _Mean(msgspec.Struct, frozen=True):
    value: float
    error: float  # half of its 95 % interval


def _mean(
    windows: Sequence[StepsEntry], metric: Callable[[StepsEntry], float], minimum: float = 1e-12
) -> _Mean:
    """Return the time-weighted mean of a metric over windows of steps, with its error.

    The error allows for the correlation of neighbouring windows. The mean is at least `minimum`.
    """
    # consecutive windows are correlated, so they are grouped
    blocks = [_weighted_mean(block, metric) for block in _group_into_blocks(windows)]
    # at least `minimum`, because a divisor can't be 0
    value = max(fmean(blocks), minimum)
    if len(blocks) < 2:
        return _Mean(value, value)
    spread = variance(blocks)
    alike = find_correlation(blocks)
    inflated = spread * (1 + alike) / (1 - alike) / len(blocks)
    return _Mean(value, student(len(blocks) - 1) * math.sqrt(inflated))


def _compare_quick_steps(
    trainings: Sequence[RecordedTraining], windows: Sequence[Sequence[StepsEntry]]
) -> tuple[list[_Mean], float]:
    """Return each run's quick-step time in seconds per row, and the relative error of their ratio.

    `windows` are the windows of each run that have a quick-step time.
    """
    starts = [training.start for training in trainings]
    quick = [
        [QuickWindow(each.quick_s * each.steps / each.samples, each.core_s) for each in own]
        for own in windows
    ]
    same_product = starts[0].product == starts[1].product
    steps, shared = compare_quick_steps(quick, same_product)
    error = math.hypot(START_ERROR, shared, *(step.error for step in steps))
    return [_Mean(step.seconds, step.error * step.seconds) for step in steps], error


def _find_rare_work(trainings: Sequence[Sequence[StepsEntry]], quick: Sequence[_Mean]) -> float:
    """Return how many more seconds per row the second run spends on rare work, such as checkpoints.

    Returns 0 if the difference is within its error, or if it can't be known because other programs
    slowed the runs too much.
    """
    if not all(window.sums.steps for windows in trainings for window in windows):
        return 0.0
    # other programs slow rare work, such as checkpoints, as much as computing
    disturbed = [_find_disturbance(*each) for each in zip(trainings, quick, strict=True)]
    if max(disturbed) > MOST_DISTURBED:
        return 0.0
    longer = 0.0
    for field in RARE:
        part = _per_sample(_part(field))
        before, after = [_mean(training, part, 0.0) for training in trainings]
        error = math.hypot(before.error / disturbed[0], after.error / disturbed[1])
        longer += max(0.0, after.value / disturbed[1] - before.value / disturbed[0] - error)
    return longer


def _find_disturbance(windows: Sequence[StepsEntry], quick: _Mean) -> float:
    """Return how much other programs slowed a run: its mean step as a multiple of its quick step.

    Quick steps are the steps that other programs slow least. Only the compute time of the steps
    counts. The result is at least 1.
    """

    def work(window: StepsEntry) -> float:
        sums: StepSums = window.sums
        return (sums.seconds - sums.all_between_s + sums.update_s - sums.input_s) / sums.steps

    return max(1.0, _mean(windows, _per_sample(work)).value / quick.value)


def _per_sample(part: Callable[[StepsEntry], float]) -> Callable[[StepsEntry], float]:
    def read(window: StepsEntry) -> float:
        return part(window) * window.steps / window.samples

    return read


def _group_into_blocks(windows: Sequence[StepsEntry]) -> list[list[StepsEntry]]:
    """Group consecutive windows of steps into blocks of about equal duration."""
    whole_s = sum(window.seconds for window in windows)
    count = min(MOST_BLOCKS, len(windows))
    blocks: list[list[StepsEntry]] = [[] for _ in range(count)]
    so_far_s = 0.0
    for window in windows:
        middle = (so_far_s + window.seconds / 2) / whole_s
        blocks[min(count - 1, int(middle * count))].append(window)
        so_far_s += window.seconds
    return [block for block in blocks if block]


def _weighted_mean(windows: Sequence[StepsEntry], metric: Callable[[StepsEntry], float]) -> float:
    """Return the mean of a metric, weighted by the windows' duration."""
    seconds = sum(window.seconds for window in windows)
    return sum(metric(window) * window.seconds for window in windows) / seconds


def _compare_phases(
    first: Sequence[StepsEntry], second: Sequence[StepsEntry]
) -> list[PhaseDifference]:
    """Return how the time of each part of a step differs between two training runs.

    Returns an empty list if the runs didn't record the parts.
    """
    known = [[window for window in windows if window.sums.steps] for windows in (first, second)]
    if not all(known):
        return []
    found = []
    for name, field in PHASES.items():
        means = [_mean(each, _part(field), 0.0) for each in known]
        if not any(each.value for each in means):
            # the part takes no time in either training
            continue
        longer = means[1].value - means[0].value
        error = math.hypot(*(each.error for each in means))
        found.append(
            PhaseDifference(name, means[0].value, means[1].value, longer - error, longer + error)
        )
    return found


def _part(field: str) -> Callable[[StepsEntry], float]:
    def read(window: StepsEntry) -> float:
        sums: StepSums = window.sums
        return sums.mean(field)

    return read
