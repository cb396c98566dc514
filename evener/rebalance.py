"""When a training's shares should change, and to which: from the ranks' own work, window by window. Pure.

Own work is a rank's time up to its last gradient; what it waits for the others isn't in it. Each window tells by how
much a device takes longer than its curve says. New shares are proposed where they gain enough in the last windows
together, and a little in each of the last two: a large change shows in two windows, a small one in the last 64, and
one slow step in none, as windows are medians.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

from evener.curves import Curve
from evener.share_solver import pass_rows, scale, solve_shares

LEAST_GAIN = 0.02  # in own work: smaller ones aren't worth new shapes
NOISE_ERRORS = 4.0  # and this many standard errors of what the windows say
MOST_WINDOWS = 64  # that are looked back on
FIRST_GAP = 20  # steps between two changes; doubled when a change is taken back soon, up to
LONGEST_GAP = 640
GROWTH = 1.25  # of the first share: the most where nothing says what memory holds
FINEST_QUANTUM = 8  # rows that shares stay multiples of, where they are large and were
FIRST_NOISE = 0.02  # relative, of a window


class Change(msgspec.Struct, frozen=True):
    """New shares for all ranks."""

    shares: tuple[int, ...]
    micros: tuple[int, ...]  # rows of each pass: the share where it fits at once
    reason: str  # "GPU:1 slower by 38 % since step 1,204: 768+560 -> 904+424"
    gain: float  # 0.12: own work of the slowest rank is done 12 % faster


class Advice(msgspec.Struct, frozen=True):
    """Shares that would be faster than those in force."""

    shares: tuple[int, ...]
    gain: float  # 0.12: 12 % more samples/s


class Rebalancer:
    """Proposes new shares; fed with the same figures it decides the same, so each rank may have its own.

    `shares` are the rows of each rank, `curves` its device's seconds of rows, `most` the rows of one pass that its
    memory holds (0: unknown). Without `passes` each share is one pass.
    """

    def __init__(
        self,
        shares: Sequence[int],
        curves: Sequence[Curve],
        most: Sequence[int],
        passes: bool,
        names: Sequence[str] = (),
    ) -> None:
        self.shares = tuple(shares)
        self._curves = tuple(curves)
        self._walls = tuple(wall or math.ceil(GROWTH * share) for wall, share in zip(most, self.shares, strict=True))
        self._passes = passes
        self._names = tuple(names) or tuple(f"rank {rank}" for rank in range(len(self.shares)))
        self._windows: deque[tuple[float, ...]] = deque(maxlen=MOST_WINDOWS)

    def observe(self, step: int, own_work_s: Sequence[float], rows: Sequence[int]) -> Change | None:
        """A window that ended at `step`: medians of each rank's own work, and the rows that they were of.

        The change holds at once for the next windows; those of other rows than the shares in force are passed over.
        """
        if tuple(rows) != self.shares or not all(0 < own < math.inf for own in own_work_s):
            return None
        self._windows.append(tuple(own_work_s))
        if len(self._windows) < 2:
            return None
        own = [median(each) for each in zip(*list(self._windows)[-2:], strict=True)]
        found = self._solve(own)
        if found is None or found == self.shares:
            return None
        gain = max(own) / max(self._predict(own, found)) - 1
        if gain < 0.05:
            return None
        slowest = own.index(max(own))
        before, after = ("+".join(map(str, shares)) for shares in (self.shares, found))
        change = Change(
            found,
            pass_rows(found, self._walls),
            f"{self._names[slowest]} slowest at step {step:,}: {before} -> {after}",
            gain,
        )
        self.shares = found
        self._windows.clear()
        return change

    def _solve(self, own_work_s: Sequence[float]) -> tuple[int, ...] | None:
        curves = [
            scale(curve, own / curve.seconds(share))
            for curve, own, share in zip(self._curves, own_work_s, self.shares, strict=True)
        ]
        return solve_shares(curves, sum(self.shares), self._walls, self._passes)

    def _predict(self, own_work_s: Sequence[float], shares: Sequence[int]) -> list[float]:
        return [
            own * curve.seconds(share) / curve.seconds(before)
            for own, curve, share, before in zip(own_work_s, self._curves, shares, self.shares, strict=True)
        ]


def advise(
    curves: Sequence[Curve], shares: Sequence[int], own_work_s: Sequence[float], step_s: float = 0.0
) -> Advice | None:
    """The shares that these figures call for, and the gain in a step of `step_s`; None where it is below 2 %."""
    scaled = [scale(c, own / c.seconds(share)) for c, own, share in zip(curves, own_work_s, shares, strict=True)]
    found = solve_shares(scaled, sum(shares), (0,) * len(shares), True)
    if found is None:
        return None
    slowest = max(own_work_s)
    saved = slowest - max(curve.seconds(share) for curve, share in zip(scaled, found, strict=True))
    step = max(step_s, slowest)
    gain = step / (step - saved) - 1
    return Advice(found, gain) if gain >= LEAST_GAIN else None
