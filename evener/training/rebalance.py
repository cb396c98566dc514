"""The rule by which a training's shares change, from the ranks' own work, window by window. Pure.

Own work is a rank's time up to its last gradient; what it waits for the others isn't in it. A
window's medians say how many times as long as by its curve each device takes, and one slow step
isn't seen in them. New shares are proposed where the last windows together would have gained enough
by them, and each of the last two a little: a large change shows in two windows, a small one in up
to 64. Once a change had to be taken back soon, the next need 32 windows, until one stands: what
comes and goes too fast isn't chased. A pass costs the host about as much however few rows it has:
what one more costs is seen when a rank takes more or fewer of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import eq, mul
from statistics import median

import msgspec

from ..plan.layout import Share
from ..plan.solver import pass_rows, scale, solve_shares
from ..shares.curves import Curve, step_in_passes

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
CLEAR_PASSES = 0.5  # by how many more or fewer a step must differ to show what one costs
NEAR = 0.9  # of a share: its slope is taken from there


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
    # own work follows the plan's curves; else it is taken to be in proportion to rows
    by_curves: bool = False
    error: float = 0.0  # of the gain, by how own work varies: two standard errors


class Rebalancer:
    """Proposes new shares; fed with the same figures it decides the same, so each rank can have its
    own.

    `shares` are the rows of each rank, `curves` its device's seconds of rows, `most` the rows of
    one pass that its memory holds (0: unknown). Without `passes` each share is one pass. `names`
    are the devices', for the reasons. A wall that `grows` is a guess: a share may have a quarter
    more rows than one that ran, as failed ones are cut.
    """

    def __init__(
        self,
        shares: Sequence[int],
        curves: Sequence[Curve],
        most: Sequence[int],
        passes: bool,
        names: Sequence[str] = (),
        grows: Sequence[bool] = (),
    ) -> None:
        self._curves = tuple(curves)
        self._walls = tuple(
            wall or math.ceil(GROWTH * share) for wall, share in zip(most, shares, strict=True)
        )
        self._grows = tuple(grows) or (False,) * len(shares)
        self._passes = passes
        self._limits = self._walls  # rows of a pass in force, where memory has run out too
        self._extras: list[float | None] = [None] * len(
            shares
        )  # seconds of each further pass beside its rows, if seen
        self._before: list[
            tuple[float, int, int]
        ] = []  # with the last shares: own work, rows, passes
        self._names = tuple(names) or tuple(f"rank {rank}" for rank in range(len(shares)))
        self._quantum = choose_quantum(shares)
        self._noise = [FIRST_NOISE] * len(shares)
        self._patience = FEWEST_WINDOWS  # the fewest windows that a change needs
        self._last: tuple[int, ...] = ()  # shares before the last change
        self._taken_back = False  # the last change took back the one before
        self._usual: tuple[float, ...] = ()  # factors when the shares were chosen; none yet
        self._next_step = 0  # the first of the next window
        self._own: deque[tuple[float, ...]] = deque()  # the newest windows with these shares
        self._planned: list[float] = []  # seconds of the shares by the curves
        self._counts: list[int] = []  # passes of the shares
        self.shares = tuple(shares)
        self._begin(self.shares)

    def _begin(self, shares: tuple[int, ...]) -> None:
        if self._own:
            self._before = list(
                zip(_medians(list(self._own)), self.shares, self._counts, strict=True)
            )
        self.shares = shares
        self._counts = self._count_passes(shares)
        self._planned = self._predict(shares)
        self._slopes = [
            _slope(curve, share) for curve, share in zip(self._curves, shares, strict=True)
        ]
        self._own = deque(maxlen=FEWEST_WINDOWS)
        self._windows: deque[tuple[float, ...]] = deque(maxlen=MOST_WINDOWS)  # factors
        self._starts: deque[int] = deque(maxlen=MOST_WINDOWS)  # their first steps
        self._seen = 0  # windows with these shares

    def _predict(self, shares: Sequence[int]) -> list[float]:
        """Seconds of each rank's share by its curve, with what further passes cost beside their
        rows.
        """
        given = zip(
            self._curves, shares, self._count_passes(shares), self._list_extras(), strict=True
        )
        return [step_in_passes(*each) for each in given]

    def _count_passes(self, shares: Sequence[int]) -> list[int]:
        """The passes of each share, where memory holds as many rows of one as it did last."""
        return [
            -(-share // limit) if self._passes else 1
            for share, limit in zip(shares, self._limits, strict=True)
        ]

    def observe(
        self,
        step: int,
        own_work_s: Sequence[float],
        rows: Sequence[int],
        limits: Sequence[int] = (),
    ) -> Change | None:
        """A window that ended at `step`: medians of each rank's own work, and the rows that they
        were of.

        `limits` are the rows of a pass that didn't run out of memory, 0 where none did. A change
        holds for the windows that follow. Windows of other rows than the shares in force are passed
        over.
        """
        start, self._next_step = self._next_step, step + 1
        if tuple(rows) != self.shares or not all(0 < own < math.inf for own in own_work_s):
            return None
        known = tuple(
            min(wall, most or wall)
            for wall, most in zip(self._walls, limits or self._walls, strict=True)
        )
        if known != self._limits:
            self._limits = known
            self._begin(self.shares)
        self._own.append(tuple(own_work_s))
        self._raise_walls()
        if len(self._own) == FEWEST_WINDOWS > len(self._windows) and self._learn_extras():
            self._planned = self._predict(self.shares)
            self._windows.clear()
            self._windows.extend(self._find_factors(own) for own in list(self._own)[:-1])
        factors = self._find_factors(own_work_s)
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

    def _raise_walls(self) -> None:
        """Let a share that is one pass have a quarter more rows once it has run for two windows."""
        if len(self._own) == FEWEST_WINDOWS:
            ran = [
                math.ceil(GROWTH * share) if grows and count == 1 else 0
                for share, grows, count in zip(self.shares, self._grows, self._counts, strict=True)
            ]
            pairs = zip(self._limits, self._walls, ran, strict=True)
            self._limits = tuple(
                max(wall, most) if limit == wall else limit for limit, wall, most in pairs
            )
            self._walls = tuple(map(max, self._walls, ran))

    def _learn_extras(self) -> bool:
        """Learn what a further pass costs from a step in more or fewer of them than before; True if
        that was seen.

        Own work is F * (t(rows in k passes) + (k - 1) * extra) before and after; F drops out of its
        ratio.
        """
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
        self._before = []
        return learned

    def _list_extras(self) -> list[float]:
        """Seconds of each rank's further passes by its curve; the mean of the others' where they
        weren't seen.
        """
        known = [each for each in self._extras if each is not None]
        usual = math.fsum(known) / len(known) if known else 0.0
        return [usual if each is None else each for each in self._extras]

    def _find_factors(self, own_work_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(own / planned for own, planned in zip(own_work_s, self._planned, strict=True))

    def _note_noise(self, factors: tuple[float, ...]) -> None:
        """Follow the standard deviation of each rank's windows by how much two in a row differ."""
        if not self._windows:
            return
        for rank, (now, before) in enumerate(zip(factors, self._windows[-1], strict=True)):
            noise = self._noise[rank]
            seen = min(
                abs(math.log(now / before)) * 0.886, 3 * noise
            )  # a mean difference is 1.128 deviations
            self._noise[rank] = max(noise + (seen - noise) / NOISE_MEMORY, LEAST_NOISE)

    def _try(self, span: int) -> tuple[tuple[int, ...], tuple[float, ...], float] | None:
        """Shares that the last windows call for, with the factors behind them and the gain; None if
        it is too small.
        """
        recent = list(self._windows)[-span:]
        factors = _medians(recent)
        needed = LEAST_SHIFT + NOISE_ERRORS * max(self._noise) / math.sqrt(span)
        if max(self._counts) == 1 and self._hope(factors) < needed:  # passes come and go by leaps
            return None
        curves = [scale(curve, factor) for curve, factor in zip(self._curves, factors, strict=True)]
        extras, batch = list(map(mul, factors, self._list_extras())), sum(self.shares)
        guesses = map(
            mul, self._grows, map(eq, self._limits, self._walls)
        )  # which will be above that soon
        cut = [self._passes and not guess for guess in guesses]
        shares = solve_shares(curves, batch, self._limits, cut, self._quantum, extras)
        if shares is None or shares == self.shares:
            return None
        seconds = self._predict(shares)
        gain = self._gain(recent, seconds)
        if gain < needed or any(self._gain([one], seconds) <= 0 for one in recent[-2:]):
            return None
        return shares, factors, gain

    def _hope(self, factors: Sequence[float]) -> float:
        """About the most that any shares gain, by slopes at those in force; solving takes far
        longer.
        """
        own: list[float] = list(map(mul, factors, self._planned))
        rates = [1 / (factor * slope) for factor, slope in zip(factors, self._slopes, strict=True)]
        level = _level(own, rates)
        stuck = [
            i for i, share in enumerate(self.shares) if self._is_stuck(i, share, own[i] > level)
        ]
        for i in stuck:
            rates[i] = 0.0
        levels = [own[i] for i in stuck] + ([_level(own, rates)] if any(rates) else [])
        return max(own) / max(levels) - 1

    def _is_stuck(self, rank: int, share: int, gives: bool) -> bool:
        """True if a share that is to give rows has none to give, or one that is to take some is at
        its wall.
        """
        if gives:
            return share <= self._quantum
        return not self._passes and share + self._quantum > self._walls[rank]

    def _gain(self, windows: Sequence[Sequence[float]], seconds: Sequence[float]) -> float:
        """The gain of these windows if each rank's curve had given it these seconds."""
        before = math.fsum(max(map(mul, window, self._planned)) for window in windows)
        return before / math.fsum(max(map(mul, window, seconds)) for window in windows) - 1

    def _change(
        self, shares: tuple[int, ...], factors: tuple[float, ...], gain: float, span: int
    ) -> Change:
        soon = self._seen < SOON * self._patience
        back = bool(self._last) and 2 * _distance(shares, self._last) < _distance(
            self.shares, self._last
        )
        if back and soon:
            self._patience = PATIENT_WINDOWS
        elif not soon and not self._taken_back:
            self._patience = FEWEST_WINDOWS
        reason = self._explain(factors, span)
        self._taken_back, self._last, self._usual = back and soon, self.shares, factors
        self._begin(shares)
        return Change(shares, pass_rows(shares, self._walls), reason, gain)

    def _explain(self, factors: tuple[float, ...], span: int) -> str:
        """The device that got slower, or faster, than in earlier windows, in words: by how much,
        and since when.
        """
        windows = list(self._windows)
        usual = _medians(windows[:-span]) or self._usual or factors
        shifts = [math.log(now / before) for now, before in zip(factors, usual, strict=True)]
        rank = max(range(len(shifts)), key=lambda i: abs(shifts[i]))
        if abs(shifts[rank]) < LEAST_SHIFT:
            rank = max(range(len(factors)), key=factors.__getitem__)
            percent = 100 * (factors[rank] / min(factors) - 1)
            if percent < 100 * LEAST_SHIFT and max(self._counts) > 1:
                rank = max(range(len(factors)), key=self._counts.__getitem__)
                return f"{self._names[rank]} takes {self._counts[rank]} passes"
            return f"{self._names[rank]} slower by {percent:.0f} % than planned"
        word, percent = (
            "slower" if shifts[rank] > 0 else "faster",
            100 * abs(math.expm1(shifts[rank])),
        )
        first = (
            len(windows) - 1
        )  # since then they are nearer to the shifted factor than to the usual one
        while first and math.log(windows[first - 1][rank] / usual[rank]) / shifts[rank] > 0.5:
            first -= 1
        since = f"{self._starts[first]:,}".replace(",", " ")
        return f"{self._names[rank]} {word} by {percent:.0f} % since step {since}"


def advise(
    curves: Sequence[Curve],
    shares: Sequence[int],
    own_work_s: Sequence[float],
    step_s: float = 0.0,
    most: Sequence[int] = (),
    passes: bool = True,
) -> Advice | None:
    """The shares that these medians call for, and the gain in a step of `step_s`; None where it is
    below 2 %.

    `most` are the rows of one pass that each memory holds, 0 where that is unknown; without
    `passes` no share is above.
    """
    scaled = [
        scale(c, own / c.seconds(share))
        for c, own, share in zip(curves, own_work_s, shares, strict=True)
    ]
    found = solve_shares(
        scaled, sum(shares), most or (0,) * len(shares), passes, choose_quantum(shares)
    )
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
    names = [share.gpu_label or share.device for share in shares]
    return tuple(
        f"{share.host}/{name}" if share.host else name
        for share, name in zip(shares, names, strict=True)
    )


def choose_quantum(shares: Sequence[int]) -> int:
    """The quantum of new shares, which divides these too: up to 8, and fine enough for small
    shares.
    """
    quantum = math.gcd(LARGEST_QUANTUM, *shares)
    while quantum > 1 and quantum * FINE * len(shares) > sum(shares):
        quantum //= 2
    return quantum


def _medians(windows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Each rank's median; nothing without windows."""
    return tuple(map(median, zip(*windows, strict=True)))


def _level(own: Sequence[float], rates: Sequence[float]) -> float:
    """The time at which all are done together, if each rank does this many rows a second more or
    less.
    """
    return math.fsum(map(mul, own, rates)) / math.fsum(rates)


def _slope(curve: Curve, share: int) -> float:
    """Seconds a row, below a share; above 0 for a level curve too."""
    rise = (curve.seconds(share) - curve.seconds(NEAR * share)) / ((1 - NEAR) * share)
    return max(rise, curve.seconds(share) / share / 100)


def _distance(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))
