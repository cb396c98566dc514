"""A device's seconds(share) where a share that doesn't fit at once is taken in several passes.

k passes of a share b take k * t(b / k) + (k - 1) * extra: t is the step time of one pass, `extra` what each further
pass costs beside a whole step of its rows. It is negative where a part of the step, as the optimizer's, isn't repeated.
A share that fits at once is one pass; of a larger one the passes are as large as `rows` allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from evener.balancer.search.model.step_time import LEAST_ERROR, ROUNDING, Curve, Point

LEAST_REPEATED = 0.05  # of a pass: the least that a further one costs
LIKELY_REPEATED = 0.5  # the same where it was never measured


class PassCurve(msgspec.Struct, frozen=True):
    """Answers as a `Curve` does."""

    curve: Curve
    wall: int  # the largest share in one pass
    rows: int  # the most rows of each of several passes
    extra: float = 0.0

    @property
    def straight(self) -> bool:
        """Whether the times of one pass lie on a simple shape."""
        return self.curve.straight

    def passes(self, share: float) -> int:
        """One where the share fits at once, else as few as `rows` allows."""
        return 1 if share <= self.wall else math.ceil(share / self.rows)

    def seconds(self, share: float) -> float:
        """Predicted step time of `share` samples."""
        return self._in(self.passes(share), share)

    def largest(self, seconds: float, ceiling: int, quantum: int) -> int:
        """The most samples, a multiple of `quantum` up to `ceiling`, that take no longer than `seconds`; 0: none."""
        most = self.curve.largest(seconds, min(ceiling, self.wall), quantum)
        if math.isinf(seconds):
            return ceiling // quantum * quantum
        if most >= ceiling or most < self.wall == self.rows:
            return most
        full = int((seconds + self.extra) / (self.curve.seconds(self.rows) + self.extra) * (1 + ROUNDING))
        if full > 1:
            most = max(most, min(full * self.rows, ceiling) // quantum * quantum)
        if most + quantum > ceiling:
            return most
        passes = max(2, full + 1)
        each = self.curve.most_rows((seconds + self.extra) / passes - self.extra)
        return max(most, int(min(passes * min(each, self.rows), ceiling)) // quantum * quantum)

    def _in(self, passes: int, share: float) -> float:
        return step_in_passes(self.curve, share, passes, self.extra)


def step_in_passes(curve: Curve, share: float, passes: int, extra: float) -> float:
    """Seconds of a step of `share` samples in so many passes."""
    return passes * curve.seconds(share / passes) + (passes - 1) * extra


def fit_extra(points: Sequence[Point], curve: Curve, rows: int) -> float | None:
    """What each further pass costs beside a step of its rows, by steps in passes; None without any."""
    steps = [p for p in points if p.passes > 1]
    if not steps:
        return None
    weights = [((p.passes - 1) / (max(p.error, LEAST_ERROR) * p.seconds)) ** 2 for p in steps]
    found = [(p.seconds - p.passes * curve.seconds(p.batch / p.passes)) / (p.passes - 1) for p in steps]
    mean = math.fsum(w * x for w, x in zip(weights, found, strict=True)) / math.fsum(weights)
    return max(mean, (LEAST_REPEATED - 1) * curve.seconds(rows))


def hope_for_extra(curve: Curve, rows: int) -> float:
    """The least to expect where no step in passes was measured: fixed costs, up to half a pass, aren't repeated."""
    return -min(curve.seconds(0), (1 - LIKELY_REPEATED) * curve.seconds(rows))
