"""A device's seconds for a step over rows of unequal length, fitted to the work that it was measured with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from evener.shares.curves import Cost, Work

from ..statistics import fit_rates

MISFIT = 0.01  # relative: the difference of a real step from any such cost, however well it was timed
FEWEST_POINTS = 3  # a cost has three rates: of a pass, of tokens, of tokens times lengths
CLEARLY = 4.0  # two standard errors, squared: 95 %


class WorkPoint(msgspec.Struct, frozen=True):
    """One measured step; `error` is its relative standard error, at least MISFIT."""

    work: Work
    seconds: float
    error: float


class StepCost(msgspec.Struct, frozen=True):
    """A device's cost of a step; `step_s` is what it takes beside its passes, such as the optimizer's time."""

    step_s: float
    cost: Cost

    def seconds(self, work: Work) -> float:
        """The seconds of a whole step."""
        return self.step_s + self.cost.seconds_for(work)

    def slowed(self, factor: float) -> StepCost:
        """The cost of a device that is slower by this factor."""
        cost = self.cost
        slower = Cost(cost.fixed_s * factor, cost.per_token_s * factor, cost.per_token_length_s * factor)
        return StepCost(self.step_s * factor, slower)


def fit_step_cost(points: Iterable[WorkPoint]) -> StepCost | None:
    """The cost that explains the points; None with too few.

    What isn't rows and tokens is a pass's, unless the points clearly say that it is a step's: passes that were taken to
    be free would be cut ever smaller.
    """
    found = list(points)
    if len(found) < FEWEST_POINTS:
        return None
    fits = [_fit(found, steps) for steps in (0.0, 1.0)]
    best = fits[1] if _misfit(fits[1], found) < _misfit(fits[0], found) - CLEARLY else fits[0]
    return best if best.cost.is_valid() else None


def _fit(points: Sequence[WorkPoint], steps: float) -> StepCost:
    rows = [(steps, one.work.passes, one.work.padded, one.work.padded_lengths) for one in points]
    errors = [one.error * one.seconds for one in points]
    step_s, *rates = fit_rates(rows, [one.seconds for one in points], errors)
    return StepCost(step_s, Cost(*rates))


def _misfit(cost: StepCost, points: Sequence[WorkPoint]) -> float:
    """The sum of squared errors, each in its standard error."""
    return sum(((cost.seconds(one.work) / one.seconds - 1) / one.error) ** 2 for one in points)
