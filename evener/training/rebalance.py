"""The rule by which a training's shares change, from the ranks' own work, window by window. Pure.

Own work is a rank's time up to its last gradient; what it waits for the others isn't in it. A window's medians say how
many times as long as by its curve each device takes, and one slow step isn't seen in them. New shares are proposed
where the last windows together would have gained enough by them, and each of the last two a little: a large change
shows in two windows, a small one in up to 64. Once a change had to be taken back soon, the next need 32 windows, until
one stands: what comes and goes too fast isn't chased.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import mul
from statistics import median

import msgspec

from ..plan.layout import Share
from ..plan.solver import pass_rows, scale, solve_shares
from ..shares.curves import Curve

LEAST_SHIFT = 0.02  # in own work; smaller ones aren't worth new shapes
NOISE_ERRORS = 3.0  # and this many standard errors of the windows
FEWEST_WINDOWS, MOST_WINDOWS = 2, 64  # that are looked back on
PATIENT_WINDOWS = 32  # the fewest, after a mistake
SOON = 8  # times the fewest windows: a change that is taken back before was a mistake
GROWTH = 1.25  # times the first rows of a pass: the most, where nothing says what memory holds
LARGEST_QUANTUM = 8  # rows that shares stay multiples of, if they were
FINE = 64  # quanta in a mean share, or more
FIRST_NOISE, LEAST_NOISE = 0.02, 0.002  # relative, of a window
NOISE_MEMORY = 16  # windows
NEAR = 0.9  # of a share: its slope is taken from there


class ShareSchedule:
    """The shares that a loop began with at row `position` of its epoch, and those that it changed to."""

    def __init__(self, shares: tuple[int, ...], position: int) -> None:
        self.begun = position  # the row after the loop's newest batch
        self._changes = [(position, shares)]

    def at(self, first: int) -> tuple[int, ...]:
        """The shares of the batch that begins with the epoch's row `first`."""
        for start, shares in reversed(self._changes):
            if first >= start:
                return shares
        return self._changes[0][1]

    def change(self, rows: int, shares: tuple[int, ...]) -> None:
        """Take these shares from the batch on that begins `rows` rows after the end of the newest one."""
        self._changes.append((self.begun + rows, shares))


class Change(msgspec.Struct, frozen=True):
    """New shares for all ranks."""

    shares: tuple[int, ...]
    micros: tuple[int, ...]  # rows of each pass: the share where it fits at once
    reason: str  # "GPU:1 slower by 38 % since step 1 204"
    gain: float  # 0.12: the slowest rank's own work gets 12 % faster

    def describe(self, before: Sequence[int]) -> str:
        """The reason, and the shares before and after."""
        shown = " -> ".join("+".join(map(str, shares)) for shares in (before, self.shares))
        return f"{self.reason}: {shown}"


class Advice(msgspec.Struct, frozen=True):
    """Shares that would be faster than those in force."""

    shares: tuple[int, ...]
    gain: float  # 0.12: 12 % more samples/s
    by_curves: bool = False  # own work follows the plan's curves; else it is taken to be in proportion to rows
    error: float = 0.0  # of the gain, by how own work varies: two standard errors


class Rebalancer:
    """Proposes new shares; fed with the same figures it decides the same, so each rank can have its own.

    `shares` are the rows of each rank, `curves` its device's seconds of rows, `most` the rows of one pass that its
    memory holds (0: unknown). Without `passes` each share is one pass. `names` are the devices', for the reasons.
    """

    def __init__(
        self,
        shares: Sequence[int],
        curves: Sequence[Curve],
        most: Sequence[int],
        passes: bool,
        names: Sequence[str] = (),
    ) -> None:
        self._curves = tuple(curves)
        self._walls = tuple(wall or math.ceil(GROWTH * share) for wall, share in zip(most, shares, strict=True))
        self._passes = passes
        self._names = tuple(names) or tuple(f"rank {rank}" for rank in range(len(shares)))
        self._quantum = choose_quantum(shares)
        self._noise = [FIRST_NOISE] * len(shares)
        self._patience = FEWEST_WINDOWS  # the fewest windows that a change needs
        self._last: tuple[int, ...] = ()  # shares before the last change
        self._taken_back = False  # the last change took back the one before
        self._usual: tuple[float, ...] = ()  # factors when the shares were chosen; none yet
        self._next_step = 0  # the first of the next window
        self._begin(tuple(shares))

    def _begin(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self._planned = [curve.seconds(share) for curve, share in zip(self._curves, shares, strict=True)]
        self._slopes = [_slope(curve, share) for curve, share in zip(self._curves, shares, strict=True)]
        self._windows: deque[tuple[float, ...]] = deque(maxlen=MOST_WINDOWS)  # factors
        self._starts: deque[int] = deque(maxlen=MOST_WINDOWS)  # their first steps
        self._seen = 0  # windows with these shares

    def observe(self, step: int, own_work_s: Sequence[float], rows: Sequence[int]) -> Change | None:
        """A window that ended at `step`: medians of each rank's own work, and the rows that they were of.

        A change holds for the windows that follow. Windows of other rows than the shares in force are passed over.
        """
        start, self._next_step = self._next_step, step + 1
        if tuple(rows) != self.shares or not all(0 < own < math.inf for own in own_work_s):
            return None
        factors = tuple(own / planned for own, planned in zip(own_work_s, self._planned, strict=True))
        self._note_noise(factors)
        self._windows.append(factors)
        self._starts.append(start)
        self._seen += 1
        span = self._patience
        while span <= len(self._windows):
            if self._seen % (span // 2) == 0 and (found := self._try(span)) is not None:
                return self._change(*found, span)
            span *= 2
        return None

    def _note_noise(self, factors: tuple[float, ...]) -> None:
        """Follow the standard deviation of each rank's windows by how much two in a row differ."""
        if not self._windows:
            return
        for rank, (now, before) in enumerate(zip(factors, self._windows[-1], strict=True)):
            noise = self._noise[rank]
            seen = min(abs(math.log(now / before)) * 0.886, 3 * noise)  # a mean difference is 1.128 deviations
            self._noise[rank] = max(noise + (seen - noise) / NOISE_MEMORY, LEAST_NOISE)

    def _try(self, span: int) -> tuple[tuple[int, ...], tuple[float, ...], float] | None:
        """Shares that the last windows call for, with the factors behind them and the gain; None if it is too small."""
        recent = list(self._windows)[-span:]
        factors = _medians(recent)
        needed = LEAST_SHIFT + NOISE_ERRORS * max(self._noise) / math.sqrt(span)
        if self._hope(factors) < needed:
            return None
        curves = [scale(curve, factor) for curve, factor in zip(self._curves, factors, strict=True)]
        shares = solve_shares(curves, sum(self.shares), self._walls, self._passes, self._quantum)
        if shares is None or shares == self.shares:
            return None
        seconds = [curve.seconds(share) for curve, share in zip(self._curves, shares, strict=True)]
        gain = self._gain(recent, seconds)
        if gain < needed or any(self._gain([one], seconds) <= 0 for one in recent[-2:]):
            return None
        return shares, factors, gain

    def _hope(self, factors: Sequence[float]) -> float:
        """About the most that any shares gain, by slopes at those in force; solving takes far longer."""
        own: list[float] = list(map(mul, factors, self._planned))
        rates = [1 / (factor * slope) for factor, slope in zip(factors, self._slopes, strict=True)]
        level = _level(own, rates)
        stuck = [i for i, share in enumerate(self.shares) if self._is_stuck(i, share, own[i] > level)]
        for i in stuck:
            rates[i] = 0.0
        levels = [own[i] for i in stuck] + ([_level(own, rates)] if any(rates) else [])
        return max(own) / max(levels) - 1

    def _is_stuck(self, rank: int, share: int, gives: bool) -> bool:
        """True if a share that is to give rows has none to give, or one that is to take some is at its wall."""
        if gives:
            return share <= self._quantum
        return not self._passes and share + self._quantum > self._walls[rank]

    def _gain(self, windows: Sequence[Sequence[float]], seconds: Sequence[float]) -> float:
        """The gain of these windows if each rank's curve had given it these seconds."""
        before = math.fsum(max(map(mul, window, self._planned)) for window in windows)
        return before / math.fsum(max(map(mul, window, seconds)) for window in windows) - 1

    def _change(self, shares: tuple[int, ...], factors: tuple[float, ...], gain: float, span: int) -> Change:
        soon = self._seen < SOON * self._patience
        back = bool(self._last) and 2 * _distance(shares, self._last) < _distance(self.shares, self._last)
        if back and soon:
            self._patience = PATIENT_WINDOWS
        elif not soon and not self._taken_back:
            self._patience = FEWEST_WINDOWS
        reason = self._explain(factors, span)
        self._taken_back, self._last, self._usual = back and soon, self.shares, factors
        self._begin(shares)
        return Change(shares, pass_rows(shares, self._walls), reason, gain)

    def _explain(self, factors: tuple[float, ...], span: int) -> str:
        """The device that got slower, or faster, than in earlier windows, in words: by how much, and since when."""
        windows = list(self._windows)
        usual = _medians(windows[:-span]) or self._usual or factors
        shifts = [math.log(now / before) for now, before in zip(factors, usual, strict=True)]
        rank = max(range(len(shifts)), key=lambda i: abs(shifts[i]))
        if abs(shifts[rank]) < LEAST_SHIFT:
            rank = max(range(len(factors)), key=factors.__getitem__)
            percent = 100 * (factors[rank] / min(factors) - 1)
            return f"{self._names[rank]} slower by {percent:.0f} % than planned"
        word, percent = "slower" if shifts[rank] > 0 else "faster", 100 * abs(math.expm1(shifts[rank]))
        since = f"{self._find_start(rank, usual[rank], shifts[rank]):,}".replace(",", " ")
        return f"{self._names[rank]} {word} by {percent:.0f} % since step {since}"

    def _find_start(self, rank: int, usual: float, shift: float) -> int:
        """The step since which the rank's windows are nearer to the shifted factor than to the usual one."""
        first = len(self._windows) - 1
        while first and math.log(self._windows[first - 1][rank] / usual) / shift > 0.5:
            first -= 1
        return self._starts[first]


def advise(
    curves: Sequence[Curve],
    shares: Sequence[int],
    own_work_s: Sequence[float],
    step_s: float = 0.0,
    most: Sequence[int] = (),
    passes: bool = True,
) -> Advice | None:
    """The shares that these medians call for, and the gain in a step of `step_s`; None where it is below 2 %.

    `most` are the rows of one pass that each memory holds, 0 where that is unknown; without `passes` no share is above.
    """
    scaled = [scale(c, own / c.seconds(share)) for c, own, share in zip(curves, own_work_s, shares, strict=True)]
    found = solve_shares(scaled, sum(shares), most or (0,) * len(shares), passes, choose_quantum(shares))
    if found is None:
        return None
    slowest = max(own_work_s)
    saved = slowest - max(curve.seconds(share) for curve, share in zip(scaled, found, strict=True))
    step = max(step_s, slowest)
    gain = step / (step - saved) - 1
    return Advice(found, gain, len(curves[0].batches) > 1) if gain >= LEAST_SHIFT else None


def name_devices(shares: Sequence[Share]) -> tuple[str, ...]:
    """The devices' names in the monitor; none where shares don't tell devices apart."""
    if len({(share.host, share.device) for share in shares}) < len(shares):
        return ()
    return tuple(f"{share.host}/{_name(share)}" if share.host else _name(share) for share in shares)


def _name(share: Share) -> str:
    return f"GPU:{share.index}" if share.on_gpu else share.device


def choose_quantum(shares: Sequence[int]) -> int:
    """The quantum of new shares, which divides these too: up to 8, and fine enough for small shares."""
    quantum = math.gcd(LARGEST_QUANTUM, *shares)
    while quantum > 1 and quantum * FINE * len(shares) > sum(shares):
        quantum //= 2
    return quantum


def _medians(windows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Each rank's median; nothing without windows."""
    return tuple(map(median, zip(*windows, strict=True)))


def _level(own: Sequence[float], rates: Sequence[float]) -> float:
    """The time at which all are done together, if each rank does this many rows a second more or less."""
    return math.fsum(map(mul, own, rates)) / math.fsum(rates)


def _slope(curve: Curve, share: int) -> float:
    """Seconds a row, below a share; above 0 for a level curve too."""
    rise = (curve.seconds(share) - curve.seconds(NEAR * share)) / ((1 - NEAR) * share)
    return max(rise, curve.seconds(share) / share / 100)


def _distance(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))
