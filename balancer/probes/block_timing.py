"""Decides how many steps a probe times next, and when it ends.

The functions have no side effects: the caller runs the steps and measures their time.

A `BlockTimer` first warms up. Warm-up steps are timed in series ("windows") until two consecutive
windows take about the same time per step. The timer then requests blocks of steps. It ends when the
95 % interval of the mean step time is within `TIGHT`, or the probe's time is used up. There are
four exceptions:

- A probe ends after half of its time if its interval would still exceed `TOO_IMPRECISE` at the end.
- If the first warm-up step takes longer than the probe's whole time, the probe ends with that step.
  The error of its duration is estimated from the step that ran before the warm-up.
- A probe with a drift or throttling warning is timed once more, for half of its time. The warning
  remains, even if the second round has none.
- `evener probe` measures for a requested time or number of steps, however precise the result is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum, sqrt
from statistics import fmean, median

import msgspec

from ..statistics import NORMAL_95, relative_half_width, single_step_error, student
from ..types import Interval, MeasurementDoubt, PartSeconds

TIGHT = 0.01  # half-width of the 95 % interval, relative to the mean, at which a probe ends
TOO_IMPRECISE_FROM = 0.5  # fraction of its time after which an imprecise probe ends
TOO_IMPRECISE = 0.015  # a probe is imprecise if its error would still exceed this at the end
AGREE = 0.05  # two warm-up windows that differ by less are steady
# fraction of a probe's time; a warm-up that is still unsteady then is a slow start
WARM_UP_SHARE = 0.5
WARM_UP_WINDOWS = 24  # most windows of a warm-up
FEWEST_BLOCKS = 3  # least number of blocks, even if they take longer than the probe's time
ENOUGH_BLOCKS = 5  # least number of blocks whose interval is trusted as tight
MOST_BLOCKS = 400
# in a whole run, which may be long, each block has at least 1 / this of all earlier steps
FINEST = 200
BLOCKS_PER_PROBE = 16  # a block should take the probe's seconds / this,
# within these limits
SHORTEST_BLOCK_SECONDS = 0.02
LONGEST_BLOCK_SECONDS = 0.5

NOISY = 0.03  # half-width / mean
# relative difference of the halves' means, which must also exceed DRIFT_ERRORS standard errors
DRIFT = 0.02
DRIFT_ERRORS = 4.0
# gap between the mean and the median block, or fraction of the time in which a device was throttled
THROTTLED = 0.05
CAPPED = 0.2  # fraction of the time at the power limit that is worth a warning
STALLED = 3.0  # a block is stalled if it took this many times as long as the median block
DISTURBED = 0.95  # CPU time / wall time of a process that never waits
DISTURBED_SHARE = 0.2  # fraction of disturbed blocks that is worth a warning
GREW = 1.01  # peak memory of a device after a block, relative to the peak before it
TOO_SHORT_SECONDS = 0.05  # seconds of timed steps: less than three of the shortest blocks
UNSTEADY = ("drift", "throttled")  # a probe with these warnings is timed again
AGAIN_SHARE = 0.5  # fraction of a probe's time for which it is timed again


class Block(msgspec.Struct, frozen=True):
    """Consecutive steps that were timed together, with one start and one end time.

    `own_seconds` has each rank's compute time in the block; None means unknown.
    """

    steps: int
    wall_seconds: float
    # fraction of the time in which a process with its own cores had the cores it wanted
    cpu_share: float | None = None
    own_seconds: tuple[float | None, ...] = ()
    # fraction of the block in which a device throttled itself (heat, a power brake, a fault)
    slowed: float = 0.0
    capped: float = 0.0  # fraction of the block in which a device was at its power limit
    slowest: int = -1  # position of the most throttled device; -1: none, or unknown
    parts: tuple[PartSeconds, ...] = ()  # parts of the whole block for each rank; empty: unknown
    # True if processes allocated new memory: a training does so only in its first steps
    grew: bool = False
    # the part of `wall_seconds` in which Python's garbage collector ran, and its longest run
    gc_seconds: float = 0.0
    longest_gc_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Mean time of a step, in seconds."""
        return self.wall_seconds / self.steps

    @property
    def step_seconds_without_gc(self) -> float:
        """Mean time of a step in seconds, without the garbage collector.

        Collections come every few steps, and may take as long as a step. So this varies less from
        block to block.
        """
        return max(0.0, self.wall_seconds - self.gc_seconds) / self.steps

    @property
    def disturbed(self) -> bool:
        """Whether other programs took so much CPU time that the block shouldn't count."""
        return self.cpu_share is not None and self.cpu_share < DISTURBED


class StepTiming(msgspec.Struct, frozen=True):
    """Mean step time with its 95 % interval, the breakdown of the step by rank, and warnings."""

    step: Interval  # seconds
    steps: int
    own_seconds: tuple[float | None, ...]  # per step
    warnings: tuple[MeasurementDoubt, ...]
    parts: tuple[PartSeconds, ...] = ()  # per step, for each rank


class BlockTimer:
    """Decides how many steps a probe times next, and when it has timed enough.

    The caller calls `next_steps`, times that many steps, and passes the result to `add`. It repeats
    this until `next_steps` returns 0.

    - `seconds`: the longest time to measure, without warm-up.
    - `whole`: measure for all of this time, even if the result is precise earlier.
    - `steps`: time this many steps instead; 0 means no fixed number.
    - `first_seconds`: the duration of the untimed first step.
    """

    def __init__(
        self, seconds: float, whole: bool = False, steps: int = 0, first_seconds: float = 0.0
    ) -> None:
        self._first_seconds = first_seconds
        self._whole = whole or steps > 0  # it lasts for the requested time or steps
        self._steps_asked = steps  # 0: it lasts for its seconds
        self._seconds = max(seconds, SHORTEST_BLOCK_SECONDS)
        self._block_seconds = min(
            max(self._seconds / BLOCKS_PER_PROBE, SHORTEST_BLOCK_SECONDS), LONGEST_BLOCK_SECONDS
        )
        self._windows: list[Block] = []
        self._blocks: list[Block] = []
        self._steps = 0  # steps of each timed block; 0 while warming up
        self._slow_start = 0.0
        # warnings of the first round, set after its end
        self._unsteady: tuple[MeasurementDoubt, ...] | None = None

    @property
    def phase(self) -> str:
        """Current phase: "warming up" or "measuring"."""
        return "measuring" if self._steps else "warming up"

    def next_steps(self) -> int:
        """Return the number of steps in the next block, or 0 if no more have to be timed."""
        if self._is_too_slow():
            return 0
        if not self._steps:
            return self._count_block_steps(self._windows[-1]) if self._windows else 1
        return 0 if self._over() and not self._start_second_round() else self._block_steps()

    def _is_too_slow(self) -> bool:
        """Return whether the first step took longer than the probe's time, which ends the probe."""
        return len(self._windows) == 1 and self._windows == self._blocks

    def add(self, block: Block) -> None:
        """Record a block of steps that was just timed."""
        if self._steps:
            self._blocks.append(block)
            return
        self._windows.append(block)
        if len(self._windows) == 1 and block.step_seconds > self._seconds and not self._whole:
            self._blocks.append(block)
        elif self._is_warmed_up():
            self._steps = self._count_block_steps(block)
            if self._steps_asked:
                self._steps = max(1, min(self._steps, self._steps_asked // BLOCKS_PER_PROBE))

    def interval(self) -> Interval | None:
        """Return the mean step time so far in seconds, with its 95 % interval.

        Returns None until two blocks have been timed.
        """
        clean = self._list_undisturbed()
        return step_time_interval(clean) if len(clean) > 1 else None

    def result(self) -> StepTiming | None:
        """Return the result so far, or None if nothing was timed."""
        clean = self._list_undisturbed()
        if not clean:
            return None
        step = step_time_interval(clean, self._first_seconds)
        steps = self._done() if self._whole else sum(block.steps for block in clean)
        return StepTiming(
            step, steps, _mean_own_seconds(clean), self._warnings(clean, step), mean_parts(clean)
        )

    def _count_block_steps(self, last: Block) -> int:
        """Return the number of steps that take about as long as a block should take.

        `last` is the block that was timed last.
        """
        wanted = (
            round(self._block_seconds / last.step_seconds)
            if last.step_seconds > 0
            else 16 * last.steps
        )
        # the time of a short block is imprecise, so the number grows in limited steps
        return max(1, min(wanted, 16 * last.steps))

    def _is_warmed_up(self) -> bool:
        """Return whether step times have become steady, or the warm-up has taken long enough.

        They are steady if two consecutive windows of steps take about the same time per step.
        """
        windows = self._windows
        if len(windows) < 2:
            return False
        before = windows[-2].step_seconds_without_gc
        last = windows[-1].step_seconds_without_gc
        gap = abs(before - last) / max(before, last, 1e-12)
        full = (
            windows[-1].wall_seconds >= self._block_seconds / 2
            or len(windows) >= WARM_UP_WINDOWS // 2
        )
        if full and gap <= AGREE:
            return True
        spent = sum(window.wall_seconds for window in windows)
        over = spent >= WARM_UP_SHARE * self._seconds or len(windows) >= WARM_UP_WINDOWS
        if over and before > last and gap > AGREE:
            # steps are still getting faster
            self._slow_start = gap
        # also if the warm-up has used up its time or its number of windows
        return over

    def _start_second_round(self) -> bool:
        """Discard the measurement if it shows drift or throttling, and begin a second one.

        Returns False if nothing was discarded, for example because this already is the second
        measurement.
        """
        # only the second round's blocks are reported, and it takes half of the time; a whole run
        # has none, because the user has requested its time or its number of steps
        timing = self.result()
        if self._whole or self._unsteady is not None or timing is None:
            return False
        self._unsteady = tuple(warning for warning in timing.warnings if warning.code in UNSTEADY)
        if self._unsteady:
            self._blocks = []
            self._seconds = self._seconds * AGAIN_SHARE
        return bool(self._unsteady)

    def _done(self) -> int:
        return sum(block.steps for block in self._blocks)

    def _block_steps(self) -> int:
        """Return the number of steps in the next block after the warm-up."""
        if not self._whole:
            return self._steps
        # the blocks of a whole run grow, so that a long run doesn't have too many
        done = self._done()
        steps = max(self._steps, done // FINEST)
        left = self._steps_asked - done
        return min(steps, left) if left > 0 else steps

    def _over(self) -> bool:
        blocks = self._blocks
        if len(blocks) < FEWEST_BLOCKS:
            return False
        if self._steps_asked:
            return self._done() >= self._steps_asked
        part = sum(block.wall_seconds for block in blocks) / self._seconds
        if self._whole:
            return part >= 1
        if part >= 1 or len(blocks) >= MOST_BLOCKS:
            return True
        clean = self._list_undisturbed()
        if len(clean) < ENOUGH_BLOCKS or len(clean) < len(blocks) / 2:
            return False
        return relative_half_width(step_time_interval(clean)) <= TIGHT or (
            part >= TOO_IMPRECISE_FROM and _stays_too_imprecise(clean, part)
        )

    def _list_undisturbed(self) -> list[Block]:
        """Return the blocks that other programs didn't disturb and in which memory didn't grow.

        If too few blocks are left, all blocks are returned.
        """
        undisturbed = [block for block in self._blocks if not block.disturbed]
        clean = [block for block in undisturbed if not block.grew]
        return clean if len(clean) >= FEWEST_BLOCKS else self._blocks

    def _taken_by_others(self) -> float:
        """Return the fraction of CPU time that other programs took in the disturbed blocks."""
        shares = [block.cpu_share for block in self._blocks if block.disturbed]
        return 1 - fmean(share for share in shares if share is not None) if shares else 0.0

    def _warnings(
        self, undisturbed: Sequence[Block], step: Interval
    ) -> tuple[MeasurementDoubt, ...]:
        means = [block.step_seconds_without_gc for block in undisturbed]
        spent = sum(block.wall_seconds for block in undisturbed)
        disturbed = sum(block.disturbed for block in self._blocks) / len(self._blocks)
        capped = sum(block.capped * block.wall_seconds for block in undisturbed) / spent
        half = relative_half_width(step)
        drift, drifts = _find_drift(means)
        longest = max(means) / median(means)
        judged = (
            (MeasurementDoubt("slow_start", self._slow_start), self._slow_start > 0),
            (
                MeasurementDoubt("too_short", spent),
                len(undisturbed) < FEWEST_BLOCKS or spent < TOO_SHORT_SECONDS,
            ),
            (MeasurementDoubt("noisy", half), half > NOISY),
            (MeasurementDoubt("drift", drift), drifts),
            _judge_throttling(undisturbed),
            (MeasurementDoubt("capped", capped), capped > CAPPED),
            (MeasurementDoubt("stalled", longest), longest > STALLED),
            (
                MeasurementDoubt("disturbed", disturbed, taken=self._taken_by_others()),
                disturbed > DISTURBED_SHARE,
            ),
        )
        found = [warning for warning, holds in judged if holds]
        codes = {warning.code for warning in found}
        before = (warning for warning in self._unsteady or () if warning.code not in codes)
        return (*found, *before)


def _judge_throttling(undisturbed: Sequence[Block]) -> tuple[MeasurementDoubt, bool]:
    """Return a warning about throttling, and whether it is strong enough to be reported.

    `undisturbed` are the blocks that other programs didn't disturb.
    """
    # the warning's value is the larger of two fractions: the time in which devices report
    # throttling, and the distance of the mean step time from the blocks' median
    spent = sum(block.wall_seconds for block in undisturbed)
    slowed = sum(block.slowed * block.wall_seconds for block in undisturbed) / spent
    middle = median(block.step_seconds_without_gc for block in undisturbed)
    gap = abs(_mean_without_gc(undisturbed) - middle) / middle
    reported = slowed > THROTTLED
    # the most throttled device, if devices report throttling
    device = max(undisturbed, key=lambda block: block.slowed).slowest if reported else -1
    holds = reported or (gap > THROTTLED and len(undisturbed) >= ENOUGH_BLOCKS)
    return MeasurementDoubt("throttled", max(slowed, gap), device), holds


def has_grown(before: Sequence[int | None], after: Sequence[int | None]) -> bool:
    """Return whether the peak memory of any device grew by over 1 %.

    The arguments are peaks in bytes before and after a block; None means unknown.
    """
    # the steps of a block in which memory grows take longer than usual
    # New pages cost the kernel much time. On a virtual machine, 16 us for each 4 KiB were 70 % of a
    # step of 0.36 s.
    pairs = zip(before, after, strict=False)
    return any(old is not None and new is not None and new > GREW * old for old, new in pairs)


def step_time_interval(blocks: Sequence[Block], first_seconds: float = 0.0) -> Interval:
    """Return the mean step time in seconds, with its 95 % interval by Student's t.

    Blocks are weighted by their number of steps. If there is only one block, its error is estimated
    from its difference from the untimed first step, which took `first_seconds`. The mean includes
    Python's garbage collector. It runs at regular intervals, so one of its long runs may be too
    many or too few. Raises ValueError if there are no steps.
    """
    steps = sum(block.steps for block in blocks)
    if steps <= 0:
        raise ValueError("an interval needs at least one timed step")
    value = fsum(block.wall_seconds for block in blocks) / steps
    if len(blocks) < 2:
        half = single_step_error(first_seconds, value) * value
        return Interval(value, max(0.0, value - half), value + half)
    mean = _mean_without_gc(blocks)
    weighted = fsum(
        block.steps * (block.step_seconds_without_gc - mean) ** 2 for block in blocks if block.steps
    )
    half = student(len(blocks) - 1) * sqrt(weighted / (len(blocks) - 1) / steps)
    half += max(block.longest_gc_seconds for block in blocks) / steps
    return Interval(value, max(0.0, value - half), value + half)


def _mean_without_gc(blocks: Sequence[Block]) -> float:
    """Return the mean time of a step in seconds, without the garbage collector."""
    steps = sum(block.steps for block in blocks)
    return fsum(block.step_seconds_without_gc * block.steps for block in blocks) / steps


def _stays_too_imprecise(blocks: Sequence[Block], elapsed_fraction: float) -> bool:
    """Return whether the step time will still be too imprecise when the probe's time is used up.

    `elapsed_fraction` is the fraction of the probe's time that `blocks` took.
    """
    times = [block.step_seconds_without_gc for block in blocks]
    # the noise is the median difference between consecutive blocks: a single change of speed
    # doesn't count, because a probe with such a change needs its full time
    gap = median([abs(after - before) for before, after in pairwise(times)]) / median(times)
    return NORMAL_95 * gap * sqrt(elapsed_fraction / len(blocks)) > TOO_IMPRECISE


def _mean_own_seconds(blocks: Sequence[Block]) -> tuple[float | None, ...]:
    """Return the mean compute time per step for each rank.

    None stands for a rank whose time is unknown in any block.
    """
    steps = sum(block.steps for block in blocks)
    columns = zip(*(block.own_seconds for block in blocks), strict=True)
    return tuple(
        None if None in column else sum(s for s in column if s is not None) / steps
        for column in columns
    )


def mean_parts(blocks: Sequence[Block]) -> tuple[PartSeconds, ...]:
    """Return the mean breakdown of a step for each rank.

    Returns an empty tuple if any block has no breakdown.
    """
    steps = sum(block.steps for block in blocks)
    if not steps or not all(block.parts for block in blocks):
        return ()
    ranks = zip(*(block.parts for block in blocks), strict=True)
    return tuple(_add_parts(parts, steps) for parts in ranks)


def _add_parts(parts: Sequence[PartSeconds], steps: int) -> PartSeconds:
    """Return the mean breakdown of a step of one rank.

    `parts` are the breakdowns of blocks, which have `steps` steps in all.
    """

    def mean(seconds: Sequence[float | None]) -> float | None:
        known = [each for each in seconds if each is not None]
        return sum(known) / steps if len(known) == len(seconds) else None

    named = [part for part in parts if part.taken_by] or parts
    # `taken_by`, the programs that used the cores, is that of the block with the longest wait
    most = max(named, key=lambda part: part.starved_seconds)
    return PartSeconds(
        input_seconds=mean([part.input_seconds for part in parts]),
        update_seconds=mean([part.update_seconds for part in parts]),
        starved_seconds=sum(part.starved_seconds for part in parts) / steps,
        idle_seconds=mean([part.idle_seconds for part in parts]),
        taken_by=most.taken_by,
        heat_seconds=sum(part.heat_seconds for part in parts) / steps,
        power_seconds=sum(part.power_seconds for part in parts) / steps,
    )


def _find_drift(means: Sequence[float]) -> tuple[float, bool]:
    """Return the relative change of step times from the first to the second half of a probe.

    `means` are the mean step times of its blocks. Also returns whether the change is large enough
    to be reported.
    """
    if len(means) < 2 * FEWEST_BLOCKS:
        return 0.0, False
    half = len(means) // 2
    (early, early_error), (late, late_error) = (
        _mean_and_error(means[:half]),
        _mean_and_error(means[half:]),
    )
    change = late / early - 1
    return change, abs(change) > DRIFT and abs(late - early) > DRIFT_ERRORS * sqrt(
        early_error**2 + late_error**2
    )


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sqrt(
        sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
    )
