"""Adapt the shares of a training run to the speed of its ranks, while it trains.

A rank's speed is measured by its compute time (own work): the time until its last gradient is
ready, without the time in which it waits for other ranks. Steps are grouped into windows of
consecutive steps. For each rank, a window gives one number, the factor: the median compute time of
its steps, divided by the time that the curve of the rank's device predicts. Because of the median,
a single slow step has no effect.

New shares are proposed if they would have made the steps of the last windows sufficiently faster in
total. They must also have been faster in most of these windows, including both of the last two. A
large change of speed is detected after two windows, and a small one after up to 64. The first
change of a training run's shares requires a larger gain than later changes.

If a change of shares is soon reversed by the next one, it was a mistake. After a mistake, a change
needs 32 windows, and after each further mistake twice as many, until a change lasts.

If no curve was measured, compute time is assumed to be proportional to rows. When a rank's rows
change, its compute times before and after the change show which part of the time is fixed. Each
pass also costs the host a fixed time, however few rows it has. That cost is measured when a rank's
number of passes changes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import mul
from statistics import median
from typing import NamedTuple

import msgspec

from ..plan.layout import Share
from ..plan.solver import scale, solve_shares
from ..shares.curves import Curve, step_in_passes

LEAST_SHIFT = 0.02  # relative gain in steps/s; smaller gains don't justify new tensor shapes
FIRST_SHIFT = 0.04  # the same for the first change, because equal devices differ by a few per cent
FIRST_SURE = 0.3  # before drifts are known, the minimum gain is this / sqrt(number of windows)
NOISE_ERRORS = 3.0  # number of standard errors added to the required gain
DRIFT_WINDOWS = 8  # number of consecutive windows that vary together if a device's speed drifts
FEWEST_DRIFT = 16  # minimum number of windows to measure drifts
FEWEST_WINDOWS, MOST_WINDOWS = 2, 64  # minimum and maximum number of windows that are considered
PATIENT_WINDOWS = 32  # minimum number of windows after a mistake
SOON = 8  # a change reversed within this many times the minimum number of windows was a mistake
REVERSED = 0.5  # fraction of a change that a reversal undoes
AGREEING = 0.75  # fraction of the considered windows that must gain by themselves
GROWTH = 1.25  # maximum rows per pass if memory isn't measured, relative to the initial rows
LARGEST_QUANTUM = 8  # maximum quantum of shares, in rows
FINE = 64  # minimum number of quanta in a mean share
FIRST_NOISE, LEAST_NOISE = 0.02, 0.002  # relative noise of a window
NOISE_MEMORY = 16  # number of windows over which noise is averaged
CLEAR_ROWS = 0.1  # minimum relative change of rows to learn which part of own work is fixed
MOST_FIXED = 0.9  # maximum fixed fraction of own work
CLEAR_PASSES = 0.5  # minimum change in the number of passes to learn the cost of a pass
NEAR = 0.9  # the slope of a curve is measured from this fraction of a share to the share


class Change(msgspec.Struct, frozen=True):
    """New shares for a training run, with the reason and the expected gain."""

    shares: tuple[int, ...]
    micros: tuple[int, ...]  # rows per pass: the whole share if it fits in one pass
    reason: str  # "GPU:1 slower by 38 % since step 1 204"
    gain: float  # 0.12: 12 % more steps/s, computed from own work

    def describe(self, before: Sequence[int]) -> str:
        """Return the reason for the change, and the shares before and after it, as text."""
        shown = " -> ".join("+".join(map(str, shares)) for shares in (before, self.shares))
        return f"{self.reason}: {shown}"


class Advice(msgspec.Struct, frozen=True):
    """Shares that would make training faster, and the expected gain."""

    shares: tuple[int, ...]
    gain: float  # 0.12: 12 % more samples/s
    # own work is predicted by the plan's curves; if False, it is assumed proportional to rows
    by_curves: bool = False
    error: float = 0.0  # two standard errors of the gain, from the variation of own work


class Window(NamedTuple):
    """Measurements of all ranks over a few consecutive steps."""

    start: int  # first step of the window
    factors: tuple[float, ...]  # each rank's own work divided by its curve's seconds
    rest_s: float  # time of a step minus the slowest rank's own work; 0 if unknown


class Room(NamedTuple):
    """How many rows fit in a device's memory.

    There are two limits: for a single pass, and for each pass if there are several.
    """

    at_once: int  # maximum rows of a share that is computed in one pass
    in_several: int  # maximum rows of each of several passes; 0 if shares can't be divided

    def rows_of_a_pass(self, share: int) -> int:
        """Return the rows of each pass if the device computes `share` rows in each step."""
        return self.in_several if self.in_several and share > self.at_once else share


class Rebalancer:
    """Observes the compute times of all ranks, and decides when to change their shares.

    The same measurements always give the same shares. So every rank can have its own instance,
    without exchanging the result.

    - `shares`: rows of each rank.
    - `curves`: for each device, its step time in seconds as a function of its rows. A curve that
      wasn't measured is a straight line: step time proportional to rows.
    - `max_rows`: maximum rows per pass of each rank; 0 if unknown.
    - `passes`: whether a share may be computed in several passes.
    - `names`: names of the devices for messages; by default "rank 0" and so on.
    """

    # If `max_rows` is unknown for a rank, a change adds at most half of its current rows. If fewer
    # are predicted to fit in memory at once (`fits` of `observe`), the new share must fit in one
    # pass, or in several passes of up to `passes_fit` rows. If memory isn't measured, the share
    # stays within 1.25 times its initial rows.

    def __init__(
        self,
        shares: Sequence[int],
        curves: Sequence[Curve],
        max_rows: Sequence[int],
        passes: bool,
        names: Sequence[str] = (),
    ) -> None:
        self._curves = list(curves)
        self._proportional = [_is_proportional(curve) for curve in curves]
        # the devices' speed was unknown when the training began
        self._even = all(self._proportional) and len(set(shares)) == 1
        self._most = tuple(max_rows)
        self._unmeasured = tuple(math.ceil(GROWTH * share) for share in shares)
        self._passes = passes
        walls = map(_first_above_zero, self._most, self._unmeasured)
        self._rooms = [Room(wall, wall * passes) for wall in walls]
        self._limited = self._rooms  # also by passes that have run out of memory
        # extra seconds of each further pass; None until measured
        self._extras: list[float | None] = [None] * len(shares)
        # own work, rows and passes with the last shares
        self._before: list[tuple[float, int, int]] = []
        self._names = tuple(names) or tuple(f"rank {rank}" for rank in range(len(shares)))
        self._quantum = choose_quantum(shares)
        self._noise = [FIRST_NOISE] * len(shares)
        # relative standard deviation of each rank's windows; empty until measured
        self._drifts: list[float] = []
        self._patience = FEWEST_WINDOWS  # minimum number of windows for a change
        self._last: tuple[int, ...] = ()  # shares before the last change
        self._reversed = False  # the last change reversed the one before it
        self._usual: tuple[float, ...] = ()  # factors when the shares were chosen; empty at first
        self._next_step = 0  # first step of the next window
        self._own: deque[tuple[float, ...]] = deque()  # the newest windows with these shares
        self._planned: list[float] = []  # seconds of the shares by the curves
        self._counts: list[int] = []  # passes of the shares
        self.shares = tuple(shares)
        self._begin(self.shares)

    @property
    def windows_seen(self) -> int:
        """The number of windows of steps that were measured since the shares last changed."""
        return self._seen

    @property
    def windows_needed(self) -> int:
        """The number of windows of steps that have to be measured before the shares may change."""
        return self._patience

    def _begin(self, shares: tuple[int, ...]) -> None:
        if self._own:
            self._before = list(
                zip(_medians(list(self._own)), self.shares, self._counts, strict=True)
            )
        self.shares = shares
        self._counts = self._count_passes(shares)
        self._plan_shares()
        self._own = deque(maxlen=FEWEST_WINDOWS)
        self._windows: deque[Window] = deque(maxlen=MOST_WINDOWS)
        self._seen = 0  # windows with these shares

    def _plan_shares(self) -> None:
        self._planned = self._predict(self.shares)
        self._slopes = [
            _slope(curve, share) for curve, share in zip(self._curves, self.shares, strict=True)
        ]

    def _predict(self, shares: Sequence[int]) -> list[float]:
        """Return the ranks' predicted compute times in seconds with these shares."""
        given = zip(
            self._curves, shares, self._count_passes(shares), self._list_extras(), strict=True
        )
        return [step_in_passes(*each) for each in given]

    def _count_passes(self, shares: Sequence[int]) -> list[int]:
        """Return the number of passes that each rank needs for these shares."""
        return [
            -(-share // room.in_several) if room.in_several and share > room.at_once else 1
            for share, room in zip(shares, self._limited, strict=True)
        ]

    def observe(
        self,
        step: int,
        own_work_s: Sequence[float],
        rows: Sequence[int],
        limits: Sequence[int] = (),
        *,
        fits: Sequence[int] = (),
        passes_fit: Sequence[int] = (),
        step_s: float = 0.0,
        min_windows: int = FEWEST_WINDOWS,
    ) -> Change | None:
        """Add the measurements of a window of steps, and return new shares if they would be faster.

        - `step`: last step of the window.
        - `own_work_s`: median compute time of each rank in seconds; inf or 0 if unknown.
        - `rows`: the ranks' rows in these steps.
        - `limits`: maximum rows per pass of each rank, set when it ran out of memory; 0 for no
          limit.
        - `fits`, `passes_fit`: rows of each rank that are predicted to fit in memory in a single
          pass, and in each of several passes; 0 if unknown.
        - `step_s`: time of a step in seconds; 0 if unknown.
        - `min_windows`: minimum number of windows before a change; with 0, shares don't change.

        Returns None if the shares stay the same. The window is ignored if `rows` aren't the current
        shares. Once new shares have been returned, the next windows have to be measured with them.
        """
        start, self._next_step = self._next_step, step + 1
        known = all(0 < own < math.inf for own in own_work_s)
        if tuple(rows) != self.shares or not known or not min_windows:
            return None
        unknown = (0,) * len(rows)
        self._set_memory_limits(limits or unknown, fits or unknown, passes_fit or unknown)
        self._own.append(tuple(own_work_s))
        if len(self._own) == FEWEST_WINDOWS > len(self._windows) and self._learn():
            self._plan_shares()
            self._recompute_factors()
        factors = self._find_factors(own_work_s)
        self._update_noise(factors)
        self._windows.append(Window(start, factors, max(0.0, step_s - max(own_work_s))))
        self._seen += 1
        span = min(max(self._patience, min_windows), MOST_WINDOWS)
        while span <= len(self._windows):
            if (
                self._seen % (span // 2) == 0
                and (found := self._find_faster_shares(span)) is not None
            ):
                return self._change(*found, span)
            span *= 2
        return None

    def _recompute_factors(self) -> None:
        """Recompute each rank's ratio of measured to predicted compute time in past windows.

        Call it after the predictions have changed.
        """
        # the newest compute times belong to a window that isn't stored yet
        past = list(self._own)[:-1]
        windows = [
            window._replace(factors=self._find_factors(own_work_s))
            for window, own_work_s in zip(self._windows, past, strict=True)
        ]
        self._windows.clear()
        self._windows.extend(windows)

    def _set_memory_limits(
        self, limits: Sequence[int], fits: Sequence[int], passes_fit: Sequence[int]
    ) -> None:
        """Update how many rows fit in each rank's memory.

        - `limits`: maximum rows per pass of each rank, set when it ran out of memory; 0 for no
          limit.
        - `fits`, `passes_fit`: rows of each rank that are predicted to fit in a single pass, and in
          each of several passes; 0 if unknown.

        If this changes how many passes a rank needs, the windows measured so far are discarded.
        """
        ranks = range(len(self.shares))
        self._rooms = list(map(self._find_room, ranks, fits, passes_fit))
        self._limited = list(map(self._limit_room, self._rooms, limits))
        if self._count_passes(self.shares) != self._counts:
            self._begin(self.shares)

    def _find_room(self, rank: int, fits: int, passes_fit: int) -> Room:
        """Return how many rows fit in a rank's memory: in a single pass, and in each of several.

        `fits` and `passes_fit` are how many rows are predicted to fit in these two cases; 0 if
        unknown. They are used only if the plan has no limit for the rank.
        """
        # The plan's number comes first, then a prediction from measured memory. Without either, the
        # initial share may grow by a fixed factor.
        share, most, now = self.shares[rank], self._most[rank], self._rooms[rank]
        if most:
            return Room(most, most * self._passes)
        if not fits:
            return Room(self._unmeasured[rank], self._unmeasured[rank] * self._passes)
        if now.rows_of_a_pass(share) < share:  # keep the passes until the share changes
            return now
        grown = share + max(share // 2, self._quantum)
        at_once = max(share, min(grown, fits))
        # a share grows in one pass as long as it can, before it is divided
        divides = self._passes and at_once < grown
        return Room(at_once, passes_fit if divides else 0)

    def _limit_room(self, room: Room, limit: int) -> Room:
        """Return `room`, reduced to `limit` rows per pass because larger passes ran out of memory.

        A `limit` of 0 means that memory hasn't run out. Then, or if the room is no larger than
        `limit`, `room` is returned unchanged.
        """
        if not limit or limit >= room.at_once:
            return room
        return Room(limit, limit * self._passes)

    def _learn(self) -> bool:
        """Improve the predictions, from the compute times before and after a change of shares.

        Returns True if a prediction has changed.
        """
        passes, fixed = self._learn_extras(), self._learn_fixed()
        self._before = []
        return passes or fixed

    def _learn_fixed(self) -> bool:
        """Estimate which part of each rank's compute time doesn't depend on its rows.

        The estimate uses the times before and after the last change of shares. Returns True if
        there is a new estimate for any rank.
        """
        # The compute time of n rows is t = a + b * n. So the fixed part a follows from the times
        # before and after a change of the rows. A noisy measurement gets less weight.
        learned = False
        for rank, (own, share, count) in enumerate(self._before):
            now, moved = self.shares[rank], math.log(self.shares[rank] / share)
            if not self._proportional[rank] or self._counts[rank] != count:
                continue
            if count > 1 or abs(moved) < CLEAR_ROWS:
                continue
            after = _medians(list(self._own))[rank]
            by_rows = now * (after - own) / (now - share) / after
            seen = min(max(1 - by_rows, 0.0), MOST_FIXED)
            trust = abs(moved) / (abs(moved) + NOISE_ERRORS * self._noise[rank])
            curve = self._curves[rank]
            whole = curve.seconds(now)
            part = curve.seconds(0) / whole
            fixed = part + (seen - part) * trust
            self._curves[rank] = Curve((0.0,), (fixed * whole,), (1 - fixed) * whole / now)
            learned = True
        return learned

    def _learn_extras(self) -> bool:
        """Estimate how much time each pass after the first adds on each rank.

        The estimate uses the times before and after the last change of shares. Returns True if
        there is a new estimate for any rank.
        """
        # The compute time of k passes is F * (t(rows in k passes) + (k - 1) * extra), where `extra`
        # is the cost. The unknown factor F is the same before and after the change, so it cancels
        # out.
        learned, guess = (
            False,
            self._list_extras() if any(each is not None for each in self._extras) else None,
        )
        for rank, (own, share, count) in enumerate(self._before):
            ratio, now = _medians(list(self._own))[rank] / own, self._counts[rank]
            more = (now - 1) - ratio * (count - 1)
            if now != count and abs(more) >= CLEAR_PASSES:
                curve = self._curves[rank]
                then = step_in_passes(curve, share, count, 0.0)
                rows = ratio * then - step_in_passes(curve, self.shares[rank], now, 0.0)
                seen = max(0.0, rows / more)  # the device's speed may have changed meanwhile
                self._extras[rank], learned = (
                    seen if guess is None else (guess[rank] + seen) / 2,
                    True,
                )
        return learned

    def _list_extras(self) -> list[float]:
        """Return, for each rank, the predicted extra time of each pass after the first, in seconds.

        The extra time is added to the time that the rank's curve gives for the rows of the pass.
        """
        # The seconds are for the speed that a rank's curve describes. For the current speed, they
        # are multiplied by the rank's factor. A rank without a learned value gets the mean of the
        # learned values, or 0 if there are none.
        known = [each for each in self._extras if each is not None]
        usual = math.fsum(known) / len(known) if known else 0.0
        return [usual if each is None else each for each in self._extras]

    def _find_factors(self, own_work_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(own / planned for own, planned in zip(own_work_s, self._planned, strict=True))

    def _update_noise(self, factors: tuple[float, ...]) -> None:
        """Update the estimates of how much each rank's compute time varies between windows.

        `factors` are the ranks' compute times in the newest window, divided by the predicted ones.
        """
        # a rank's noise is the standard deviation of the logarithm of its factor, from one window
        # to the next
        if not self._windows:
            return
        for rank, (now, before) in enumerate(zip(factors, self._windows[-1].factors, strict=True)):
            noise = self._noise[rank]
            # a mean difference is 1.128 deviations
            seen = min(abs(math.log(now / before)) * 0.886, 3 * noise)
            self._noise[rank] = max(noise + (seen - noise) / NOISE_MEMORY, LEAST_NOISE)

    def _find_faster_shares(
        self, span: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], float] | None:
        """Return shares that would have made the last `span` windows faster.

        The result consists of the shares, the ranks' factors (measured divided by predicted compute
        time) and the relative gain. Returns None if no gain is certain.
        """
        # The gain over the last `span` windows must reach `_needed_gain`. There must also be a gain
        # in each of the last two windows, and in at least three quarters of all.
        recent = list(self._windows)[-span:]
        factors = _medians([each.factors for each in recent])
        rest_s = median(each.rest_s for each in recent)
        least = self._needed_gain(span, factors, self._planned, rest_s)
        if max(self._counts) == 1 and self._estimate_largest_gain(factors, rest_s) < least:
            return None  # with several passes, the gain could jump with their number
        shares = self._solve_for_shares(factors)
        if shares is None or shares == self.shares:
            return None
        seconds = self._predict(shares)
        gain = self._gain(recent, seconds)
        gaining = [self._gain([each], seconds) > 0 for each in recent]
        if not all(gaining[-2:]) or sum(gaining) < AGREEING * span:
            return None
        if gain < self._needed_gain(span, factors, seconds, rest_s):
            return None
        return shares, factors, gain

    def _solve_for_shares(self, factors: Sequence[float]) -> tuple[int, ...] | None:
        """Return the fastest shares for the ranks' present speeds, or None if none fit in memory.

        `factors` are the ranks' measured compute times divided by the predicted ones.
        """
        curves = [scale(curve, factor) for curve, factor in zip(self._curves, factors, strict=True)]
        extras = list(map(mul, factors, self._list_extras()))
        walls, rows = zip(*self._limited, strict=True)
        return solve_shares(curves, sum(self.shares), walls, rows, self._quantum, extras)

    def _needed_gain(
        self, span: int, factors: Sequence[float], seconds: Sequence[float], rest_s: float
    ) -> float:
        """Return how large a gain must be, as a fraction, for the shares to change.

        Noisier measurements require a larger gain, and more windows a smaller one. `span` is the
        number of windows. `seconds` are the compute times that are predicted for the ranks, and
        `factors` are measured compute times divided by predicted ones. `rest_s` is how much longer
        a step takes than the slowest rank computes, in seconds.
        """
        # Noise is the variation from one window to the next, and drift that over many windows. The
        # longer a rank computes in a step, the more its variation counts.
        own = [factor * each for factor, each in zip(factors, seconds, strict=True)]
        weights = [each / (max(own) + rest_s) for each in own]
        noise: float = max(map(mul, self._noise, weights))
        needed: float = LEAST_SHIFT if self._last else FIRST_SHIFT
        needed += NOISE_ERRORS * noise / math.sqrt(span)
        drifts = self._find_drifts(len(self._windows))
        if drifts:
            drift: float = max(map(mul, drifts, weights))
            return max(needed, NOISE_ERRORS * drift / math.sqrt(max(1, span / DRIFT_WINDOWS)))
        return needed if self._last else max(needed, FIRST_SURE / math.sqrt(span))

    def _find_drifts(self, count: int) -> list[float]:
        """Return how much each rank's speed drifts over many windows, relative to the other ranks.

        The result is measured over the first `count` windows with the current shares. If `count` is
        below 16, the drifts measured with earlier shares are returned, or [] if there are none.
        """
        if count < FEWEST_DRIFT:
            return self._drifts
        factors = [_relative_to_others(window.factors) for window in list(self._windows)[:count]]
        return list(map(_deviation, zip(*factors, strict=True)))

    def _estimate_largest_gain(self, factors: Sequence[float], rest_s: float) -> float:
        """Estimate the largest gain in speed that any other shares could bring, as a fraction.

        The estimate uses the slopes of the curves. `factors` are the ranks' measured compute times
        divided by the predicted ones. `rest_s` is how much longer a step takes than the slowest
        rank computes, in seconds.
        """
        # The slopes are those at the current shares. `_find_faster_shares` checks this estimate
        # first, because solving for the shares takes far longer.
        own: list[float] = list(map(mul, factors, self._planned))
        rates = [1 / (factor * slope) for factor, slope in zip(factors, self._slopes, strict=True)]
        level = _common_compute_time(own, rates)
        stuck = [
            i for i, share in enumerate(self.shares) if self._is_stuck(i, share, own[i] > level)
        ]
        for i in stuck:
            rates[i] = 0.0
        levels = [own[i] for i in stuck] + (
            [_common_compute_time(own, rates)] if any(rates) else []
        )
        return (max(own) + rest_s) / (max(levels) + rest_s) - 1

    def _is_stuck(self, rank: int, share: int, shrinks: bool) -> bool:
        """Return True if a rank's share can't be reduced, or can't be increased.

        `shrinks` says which: True asks about a smaller share, and False about a larger one.
        """
        if shrinks:
            return share <= self._quantum
        room = self._limited[rank]
        return not room.in_several and share + self._quantum > room.at_once

    def _gain(self, windows: Sequence[Window], seconds: Sequence[float]) -> float:
        """Return how much faster recent windows would have been with new shares, as a fraction.

        `seconds` are the compute times that the curves predict for each rank with the new shares.
        """
        rest = math.fsum(window.rest_s for window in windows)
        before, after = (
            rest + math.fsum(max(map(mul, window.factors, some)) for window in windows)
            for some in (self._planned, seconds)
        )
        return before / after - 1

    def _change(
        self, shares: tuple[int, ...], factors: tuple[float, ...], gain: float, span: int
    ) -> Change:
        soon = self._seen < SOON * self._patience
        back = soon and bool(self._last) and _reverses(self._last, self.shares, shares)
        if back:
            self._patience = min(max(PATIENT_WINDOWS, 2 * self._patience), MOST_WINDOWS)
        elif not soon and not self._reversed:
            self._patience = FEWEST_WINDOWS
        reason = self._explain_change(factors, span)
        self._drifts = self._find_drifts(len(self._windows) - span)
        self._reversed, self._last, self._usual = back, self.shares, factors
        self._begin(shares)
        micros = tuple(map(Room.rows_of_a_pass, self._rooms, shares))
        return Change(shares, micros, reason, gain)

    def _explain_change(self, factors: tuple[float, ...], span: int) -> str:
        """Return the reason for a change of shares: usually a device whose speed has changed.

        `factors` are the ranks' measured compute times in the last `span` windows, divided by the
        predicted ones.
        """
        # If no device's speed has changed, the reason is a device that has been slow from the
        # start, or one that takes several passes.
        windows = list(self._windows)
        usual = _medians([window.factors for window in windows[:-span]]) or self._usual or factors
        shifts = [math.log(now / before) for now, before in zip(factors, usual, strict=True)]
        rank = max(range(len(shifts)), key=lambda i: abs(shifts[i]))
        apart = math.log(max(factors) / min(factors))
        # the device was this slow or fast from the beginning
        if abs(shifts[rank]) < max(LEAST_SHIFT, apart / 2):
            rank = max(range(len(factors)), key=factors.__getitem__)
            percent = 100 * (factors[rank] / min(factors) - 1)
            if percent < 100 * LEAST_SHIFT and max(self._counts) > 1:
                rank = max(range(len(factors)), key=self._counts.__getitem__)
                return f"{self._names[rank]} takes {self._counts[rank]} passes"
            fastest = self._names[factors.index(min(factors))]
            than = fastest if self._even else "planned"
            return f"{self._names[rank]} slower by {percent:.0f} % than {than}"
        word, percent = (
            "slower" if shifts[rank] > 0 else "faster",
            100 * abs(math.expm1(shifts[rank])),
        )
        # from then on, factors are nearer to the shifted factor than to the usual one
        first = len(windows) - 1
        while first and _is_past_half(windows[first - 1].factors[rank], usual[rank], shifts[rank]):
            first -= 1
        since = f"{windows[first].start:,}".replace(",", " ")
        return f"{self._names[rank]} {word} by {percent:.0f} % since step {since}"


def advise(
    curves: Sequence[Curve],
    shares: Sequence[int],
    own_work_s: Sequence[float],
    step_s: float = 0.0,
    max_rows: Sequence[int] = (),
    passes: bool = True,
) -> Advice | None:
    """Return shares that would make training faster, or None if there are none.

    The gain is predicted from the ranks' measured compute times. It must be at least 2 %, and the
    shares must fit in memory.

    - `curves`: for each device, its step time in seconds as a function of its rows.
    - `shares`: current rows of each rank.
    - `own_work_s`: compute time of each rank in seconds.
    - `step_s`: time of a step in seconds; 0 if unknown.
    - `max_rows`: maximum rows per pass of each rank; 0 for no limit.
    - `passes`: whether a share may be computed in several passes.
    """
    scaled = [
        scale(c, own / c.seconds(share))
        for c, own, share in zip(curves, own_work_s, shares, strict=True)
    ]
    found = solve_shares(
        scaled, sum(shares), max_rows or (0,) * len(shares), passes, choose_quantum(shares)
    )
    if found is None:
        return None
    slowest = max(own_work_s)
    saved = slowest - max(curve.seconds(share) for curve, share in zip(scaled, found, strict=True))
    step = max(step_s, slowest)
    gain = step / (step - saved) - 1
    return Advice(found, gain, len(curves[0].batches) > 1) if gain >= LEAST_SHIFT else None


def name_devices(shares: Sequence[Share]) -> tuple[str, ...]:
    """Return the labels of the shares' devices, or () if two shares are on the same device."""
    if len({(share.host, share.device) for share in shares}) < len(shares):
        return ()
    return tuple(share.label for share in shares)


def choose_quantum(shares: Sequence[int]) -> int:
    """Return the quantum of shares: 8, 4, 2 or 1 rows. Shares change by multiples of it.

    It is the largest of these numbers that divides all current shares and is at most 1/64 of their
    mean, or else 1.
    """
    # the largest that divides all current shares and is at most 1/64 of their mean
    quantum = math.gcd(LARGEST_QUANTUM, *shares)
    while quantum > 1 and quantum * FINE * len(shares) > sum(shares):
        quantum //= 2
    return quantum


def _medians(windows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return each rank's median over all windows."""
    return tuple(map(median, zip(*windows, strict=True)))


def _relative_to_others(factors: Sequence[float]) -> list[float]:
    """Return how slow each rank is, relative to the geometric mean of the other ranks."""
    # A slowdown of all ranks alike is no reason to move rows, and cancels out.
    logs = list(map(math.log, factors))
    others = max(1, len(logs) - 1)
    return [math.exp(log - (math.fsum(logs) - log) / others) for log in logs]


def _deviation(ratios: Sequence[float]) -> float:
    """Return the relative standard deviation, estimated from the median absolute deviation."""
    middle = median(ratios)
    return 1.483 * median(abs(math.log(each / middle)) for each in ratios)


def _common_compute_time(own_work_s: Sequence[float], rates: Sequence[float]) -> float:
    """Return the compute time that all ranks would have if rows were moved to make it equal.

    The result and `own_work_s`, the ranks' present compute times, are in seconds. `rates` says how
    many more rows each rank computes if it gets one more second.
    """
    return math.fsum(map(mul, own_work_s, rates)) / math.fsum(rates)


def _slope(curve: Curve, share: int) -> float:
    """Return how many seconds one more row would add to a device's compute time at this share."""
    # the slope is above 0, even where the curve is level
    rise = (curve.seconds(share) - curve.seconds(NEAR * share)) / ((1 - NEAR) * share)
    return max(rise, curve.seconds(share) / share / 100)


def _reverses(before: Sequence[int], now: Sequence[int], then: Sequence[int]) -> bool:
    """Return True if a change of shares undoes at least half of the change before it.

    The earlier change was from `before` to `now`, and the new one is from `now` to `then`.
    """
    made = [b - a for a, b in zip(before, now, strict=True)]
    undone = sum((a - b) * c for a, b, c in zip(now, then, made, strict=True))
    return undone >= REVERSED * sum(each * each for each in made)


def _is_past_half(factor: float, usual: float, shift: float) -> bool:
    """Return True if a rank's factor is closer to its new value than to its usual value.

    The factor is the measured compute time divided by the predicted one. Distances are measured on
    a logarithmic scale. `shift` is the logarithm of the new value divided by the usual value.
    """
    return math.log(factor / usual) / shift > 0.5


def _is_proportional(curve: Curve) -> bool:
    """Return True if a curve is the default one, proportional to rows, and wasn't measured."""
    return curve.batches == (0.0,) and curve.times == (0.0,)


def _first_above_zero(one: int, other: int) -> int:
    return one or other
