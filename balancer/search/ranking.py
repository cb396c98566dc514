"""Rank layouts that were measured in turns A B C A B C.

A turn, or round, is one measurement of each layout. Layouts are compared within each turn, because
drift between turns, such as from heat or other processes, affects all layouts of a turn. So the
difference between two layouts is more certain than the samples/s of either.

Two layouts are measured again as long as choosing the one that seems slower may still gain more
than `LEAST_GAIN`. The expected gain is E[max(0, d)], with d normally distributed around the
measured difference (Jones and others, "Efficient global optimization", 1998).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import NormalDist, fmean

import msgspec

from ..objectives import find_objective
from ..statistics import student
from ..types import Interval, Layout, Problem, Result
from .layouts import TIE, Candidate
from .model.evidence import relative_error, step_error
from .observations import Turns

# relative; a tie with a larger gap is unclear, because drift alone makes two probes differ by 2.7 %
UNCLEAR = 0.03
# assumed relative standard deviation between two probes (66 recorded pairs: 0.6 %)
PROBE_DRIFT = 0.007
# weight of this assumption in turns, because two turns may agree by chance (from the 95 % intervals
# of benchmarks.search)
DRIFT_WEIGHT = 4
LEAST_GAIN = 0.002  # relative: a smaller gain is not worth a measurement, whatever the tolerance
# fraction of an expected gain that is achieved: a batch that may fit runs out of memory as often as
# not, because kernels need a workspace for more rows
COMES_TRUE = 0.5
# fraction of the fastest layout's samples/s; a layout that is predicted to reach less than that
# isn't measured if its processes start slowly, or if it is in shards
FAR_SLOWER = 0.5
LEAST_RATE = 1e-9  # samples/s; avoids division by 0
ROUGH = 0.05  # relative half-width: a winner that is less certain is measured again
# relative; a layout may miss the tolerance by up to this much if its interval is that wide
EDGE_SLACK = 0.005
# time is planned for this many turns of each layout; with more turns, their spread gives the error
ENOUGH_TURNS = 3

TurnsByLayout = Mapping[Layout, Turns]


class Difference(msgspec.Struct, frozen=True):
    """How much faster one layout is than another, with its uncertainty.

    `value` is the mean relative difference of their throughputs over `turns` pairs of measurements.
    `deviation` is the standard deviation of a single pair.
    """

    value: float
    deviation: float
    turns: int

    def interval(self) -> Interval:
        """Return the mean with its 95 % confidence interval."""
        half = student(DRIFT_WEIGHT + self.turns - 1) * self.deviation / math.sqrt(self.turns)
        return Interval(self.value, self.value - half, self.value + half)

    def expected_gain(self, more_turns: float = 0.0) -> float:
        """Return E[max(0, d)], the expected gain from choosing the first layout.

        d is the true relative difference. If it is negative, the first layout is slower and nothing
        is gained. `more_turns` is the number of additional measurements to assume, which reduce the
        uncertainty.
        """
        error = self.deviation / math.sqrt(self.turns + more_turns)
        z = self.value / error
        return error * NormalDist().pdf(z) + self.value * NormalDist().cdf(z)


class RankedLayout(msgspec.Struct, frozen=True):
    """A layout of the final comparison, with its result and its difference from the winner.

    `against` is its throughput divided by the winner's, minus 1; None for the winner itself.
    """

    candidate: Candidate
    throughput: Interval  # samples/s, over all its turns
    against: Interval | None
    tie: bool
    turns: int

    @property
    def result(self) -> Result:
        """The layout with its throughput and number of measurements."""
        return Result(self.candidate.layout, self.throughput, self.turns)

    @property
    def unclear(self) -> bool:
        """Whether the layout ties with the winner although its throughput differs by more than 3 %.

        The measurements are then too noisy to show which of the two is faster.
        """
        return self.tie and self.against is not None and abs(self.against.value) > UNCLEAR

    @property
    def step(self) -> Interval:
        """The step time in seconds, with its 95 % interval."""
        layout = self.candidate.layout
        rate = self.throughput
        samples = layout.global_batch * layout.processes
        longest = samples / rate.low if rate.low else math.inf
        return Interval(samples / rate.value, samples / rate.high, longest)


def rank(
    candidates: Sequence[Candidate], turns: TurnsByLayout, problem: Problem
) -> tuple[RankedLayout, ...]:
    """Return the measured layouts: the winner first, then the others, fastest first."""
    ran = [candidate for candidate in candidates if turns.get(candidate.layout)]
    ran.sort(key=lambda one: -throughput(turns[one.layout]).value)
    if not ran:
        return ()
    winner = choose_winner(ran, turns, problem)
    ran.sort(key=lambda one: one is not winner)
    return tuple(_rank_layout(one, winner, turns) for one in ran)


def choose_winner(
    measured: Sequence[Candidate], turns: TurnsByLayout, problem: Problem
) -> Candidate:
    """Return the layout to use for training.

    - For an objective such as energy, it is the layout with the best value of the objective, among
      those that aren't too slow.
    - If the global batch is free, it is the layout with the smallest batch within the tolerance of
      the fastest.
    - Otherwise, it is the simplest layout that is practically as fast as the fastest.
    """
    rates = {one.layout: throughput(turns[one.layout]).value for one in measured}

    def rate(candidate: Candidate) -> float:
        return rates[candidate.layout]

    leader = max(measured, key=rate)
    lead = turns[leader.layout]
    gaps = {one.layout: compare_turns(turns[one.layout], lead).interval().value for one in measured}

    def gap(candidate: Candidate) -> float:
        return gaps[candidate.layout]

    objective = find_objective(problem.objective)
    if objective.trades_speed:
        quick = [one for one in measured if gap(one) >= -problem.max_slowdown]

        def worth(candidate: Candidate) -> float:
            return objective.value(rate(candidate), turns[candidate.layout].values())

        return max([leader, *quick], key=worth)
    if leader.synchronous and problem.global_batch is None and problem.tolerance:
        within = _list_tolerable(measured, turns, lead, problem.tolerance)
        return min([leader, *within], key=lambda one: (one.layout.global_batch, -gap(one)))
    margin = min(TIE, problem.tolerance)
    close = [one for one in measured if one is leader or abs(gap(one)) < margin]
    return min(close, key=lambda one: (one.simplicity, -rate(one)))


def _list_tolerable(
    measured: Sequence[Candidate], turns: TurnsByLayout, leader: Turns, tolerance: float
) -> list[Candidate]:
    """Return the layouts that are slower than the fastest by at most the tolerance.

    Only synchronous layouts are considered, because the batches of others can't be compared.
    `leader` are the measurements of the fastest layout.
    """
    synchronous = [candidate for candidate in measured if candidate.synchronous]
    return [one for one in synchronous if is_tolerable(turns[one.layout], leader, tolerance)]


def is_tolerable(one: Turns, leader: Turns, tolerance: float) -> bool:
    """Whether a layout is slower than the fastest by at most `tolerance`, a fraction.

    If the difference is uncertain, up to half a percent more is allowed. `one` and `leader` are the
    measurements of the two layouts.
    """
    gap = compare_turns(one, leader).interval()
    return gap.value + min((gap.high - gap.low) / 2, EDGE_SLACK) >= -tolerance


def undecided(
    measured: Sequence[Candidate], turns: TurnsByLayout, turns_left: float, most_turns: int
) -> tuple[list[Candidate], bool]:
    """Return the layouts to measure again to find the fastest, and whether others are tied.

    - The layouts are the fastest so far, and all that may prove to be faster within the remaining
      turns. If there is no such rival, the list is empty.
    - A layout is tied if it may be faster, but the remaining turns can't show it.

    There is time for at most `turns_left` more turns, and a layout has at most `most_turns` in all.
    """
    # the fastest takes part because the two are compared within turns
    if len(measured) < 2:
        return [], False
    leader, *others = sorted(
        measured, key=lambda candidate: -throughput(turns[candidate.layout]).value
    )
    rivals = []
    tied = False
    for one in others:
        gap = compare_turns(turns[one.layout], turns[leader.layout])
        if gap.expected_gain() <= LEAST_GAIN:
            continue
        more = min(turns_left, most_turns - gap.turns)
        if more >= 1 and gap.expected_gain(more) <= LEAST_GAIN:
            rivals.append(one)
        else:
            tied = True
    return ([leader, *rivals] if rivals else []), tied


def compare_turns(one: Turns, other: Turns) -> Difference:
    """Return how much faster `one` is than `other`.

    Only rounds in which both were measured are compared. If there are none, all measurements are
    used.
    """
    common = [(one[turn], other[turn]) for turn in sorted(one.keys() & other.keys())]
    pairs = common or list(product(one.values(), other.values()))
    ratios = []
    variances = []
    for a, b in pairs:
        ratios.append(a.samples_per_second / b.samples_per_second - 1)
        variances.append(step_error(a) ** 2 + step_error(b) ** 2)
    assumed = fmean(variances) + PROBE_DRIFT**2
    deviation = _pooled_deviation(assumed, ratios)
    if common:
        return Difference(fmean(ratios), deviation, len(ratios))
    value = throughput(one).value / throughput(other).value - 1
    return Difference(value, max(math.sqrt(assumed), deviation), 1)


def throughput(turns: Turns) -> Interval:
    """Return the mean throughput of all measurements, with a 95 % confidence interval."""
    measured = [seen.throughput for _, seen in sorted(turns.items())]
    if len(measured) == 1:
        return measured[0]
    value = len(measured) / math.fsum(1 / one.value for one in measured)
    own = fmean(relative_error(seen) ** 2 for seen in turns.values())
    deviation = _pooled_deviation(own, [one.value / value for one in measured])
    interval = Difference(value, value * deviation, len(measured)).interval()
    return center(interval, value)  # never below 0


def _pooled_deviation(assumed_variance: float, values: Sequence[float]) -> float:
    """Return the standard deviation of a few values, pooled with an assumed variance.

    Without the assumed variance, the result would be too small if the few values agree by chance.
    """
    mean = fmean(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    # `assumed_variance` counts as much as `DRIFT_WEIGHT` turns
    return math.sqrt((DRIFT_WEIGHT * assumed_variance + spread) / (DRIFT_WEIGHT + len(values) - 1))


def center(interval: Interval, value: float) -> Interval:
    """Return an interval of the same width around `value`; its low end is at least 0."""
    half = (interval.high - interval.low) / 2
    return Interval(value, max(0.0, value - half), value + half)


def widen(interval: Interval, error: float) -> Interval:
    """Return the interval, widened to at least `error` on both sides of its value.

    `error` is a fraction of the value.
    """
    low = min(interval.low, interval.value * max(0.0, 1 - error))
    return Interval(interval.value, low, max(interval.high, interval.value * (1 + error)))


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals overlap."""
    return one.low <= other.high and other.low <= one.high


def _rank_layout(candidate: Candidate, winner: Candidate, turns: TurnsByLayout) -> RankedLayout:
    own = turns[candidate.layout]
    best = turns[winner.layout]
    speed = throughput(own)
    if candidate is winner:
        return RankedLayout(candidate, speed, None, False, len(own))
    against = compare_turns(own, best).interval()
    uncertain = against.low <= 0 <= against.high and overlap(speed, throughput(best))
    return RankedLayout(candidate, speed, against, uncertain or abs(against.value) < TIE, len(own))
