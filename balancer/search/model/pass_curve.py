"""What a further pass costs beside a step of its rows, as fitted to measured steps in passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.balancer.search.model.step_time import LEAST_ERROR, Point
from evener.shares.curves import Curve

LEAST_REPEATED = 0.05  # of a pass: the least that a further one costs
LIKELY_REPEATED = 0.5  # the same where it was never measured


def fit_extra(steps: Sequence[Point], curve: Curve, rows: int) -> float:
    """What each further pass costs beside a step of its rows, by steps in several passes, at least one."""
    weights = [((p.passes - 1) / (max(p.error, LEAST_ERROR) * p.seconds)) ** 2 for p in steps]
    found = [(p.seconds - p.passes * curve.seconds(p.batch / p.passes)) / (p.passes - 1) for p in steps]
    mean = math.fsum(w * x for w, x in zip(weights, found, strict=True)) / math.fsum(weights)
    return max(mean, (LEAST_REPEATED - 1) * curve.seconds(rows))


def hope_for_extra(curve: Curve, rows: int) -> float:
    """The least to expect where no step in passes was measured: fixed costs, up to half a pass, aren't repeated."""
    return -min(curve.seconds(0), (1 - LIKELY_REPEATED) * curve.seconds(rows))
