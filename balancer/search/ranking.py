"""Ranks layouts that were measured in turns A B C A B C.

Layouts are compared within each turn. Drift between turns, such as from heat or other processes,
affects all layouts of a turn. So the difference between two layouts is more certain than the
samples/s of either.

Two layouts deserve another turn as long as choosing the one that seems slower may still gain more
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
LEAST_RATE = 1e-9  # samples/s; avoids division by 0
ROUGH = 0.05  # relative half-width: a winner that is less certain is measured again
# relative; a layout may miss the tolerance by up to this much if its interval is that wide
EDGE_SLACK = 0.005
# time is planned for this many turns of each layout; with more turns, their spread gives the error
ENOUGH_TURNS = 3

TurnsByLayout = Mapping[Layout, Turns]


class Difference(msgspec.Struct, frozen=True):
    """A mean over turns, with the standard deviation of a single turn.

    It is the mean of a layout's samples/s, or of the relative difference of two layouts' samples/s.
    `turns` is the number of turns.
    """

    value: float
    deviation: float
    turns: int

    def interval(self) -> Interval:
        """Return the mean with its 95 % interval, by Student's t."""
        half = student(DRIFT_WEIGHT + self.turns - 1) * self.deviation / math.sqrt(self.turns)
        return Interval(self.value, self.value - half, self.value + half)

    def expected_gain(self, more_turns: float = 0.0) -> float:
        """Return the expected gain from choosing the really faster of two layouts.

        The gain is E[max(0, d)], where d is how much faster the first layout really is, relative to
        the second. `more_turns` is a number of further turns: the gain is then the one to expect
        after them if the mean stays the same.
        """
        error = self.deviation / math.sqrt(self.turns + more_turns)
        z = self.value / error
        return error * NormalDist().pdf(z) + self.value * NormalDist().cdf(z)


class RankedLayout(msgspec.Struct, frozen=True):
    """A layout that ran in the race, compared with the winner.

    - `against`: the relative difference of its samples/s from the winner's; None for the winner
      itself.
    - `tie`: True if this difference is below 1 %, or if it may be 0 while the intervals of the two
      layouts' samples/s overlap.
    - `turns`: the number of the layout's turns.
    """

    candidate: Candidate
    throughput: Interval  # samples/s, over all its turns
    against: Interval | None
    tie: bool
    turns: int

    @property
    def result(self) -> Result:
        """The layout and its samples/s in the race, as a `Result`."""
        return Result(self.candidate.layout, self.throughput, self.turns)

    @property
    def unclear(self) -> bool:
        """True for a tie whose measured gap is above 3 %.

        The true gap may be 0, but it may also be large.
        """
        return self.tie and self.against is not None and abs(self.against.value) > UNCLEAR

    @property
    def step(self) -> Interval:
        """The duration of one optimizer step in seconds, calculated from `throughput`."""
        layout = self.candidate.layout
        rate = self.throughput
        samples = layout.global_batch * layout.processes
        longest = samples / rate.low if rate.low else math.inf
        return Interval(samples / rate.value, samples / rate.high, longest)


def rank(
    candidates: Sequence[Candidate], turns: TurnsByLayout, problem: Problem
) -> tuple[RankedLayout, ...]:
    """Return every candidate that ran: the winner, then the others by falling samples/s.

    `turns` has the measurements of each layout. The problem decides which candidate wins.
    """
    ran = [candidate for candidate in candidates if turns.get(candidate.layout)]
    ran.sort(key=lambda one: -throughput(turns[one.layout]).value)
    if not ran:
        return ()
    winner = choose_winner(ran, turns, problem)
    ran.sort(key=lambda one: one is not winner)
    return tuple(_rank_layout(one, winner, turns) for one in ran)


def choose_winner(ran: Sequence[Candidate], turns: TurnsByLayout, problem: Problem) -> Candidate:
    """Return the fastest candidate, or one that is preferred although it may be slower.

    - The objective may give up speed, for example to save energy: return the layout with the best
      value of the objective. It may be slower than the fastest by at most `max_slowdown`.
    - The user accepts a tolerance and didn't fix the global batch: return the layout with the
      smallest batch within the tolerance. The fastest layout must not be a pack or placement, nor
      have knobs (tuned options such as XLA).
    - All other cases: return the simplest of the layouts that are about as fast. They are slower
      than the fastest by less than 1 %, or by less than the tolerance if that is smaller.
    """
    rates = {one.layout: throughput(turns[one.layout]).value for one in ran}

    def rate(candidate: Candidate) -> float:
        return rates[candidate.layout]

    leader = max(ran, key=rate)
    lead = turns[leader.layout]
    gaps = {one.layout: compare_turns(turns[one.layout], lead).interval().value for one in ran}

    def gap(candidate: Candidate) -> float:
        return gaps[candidate.layout]

    objective = find_objective(problem.objective)
    if objective.trades_speed:
        quick = [one for one in ran if gap(one) >= -problem.max_slowdown]

        def worth(candidate: Candidate) -> float:
            return objective.value(rate(candidate), turns[candidate.layout].values())

        return max([leader, *quick], key=worth)
    if leader.synchronous and problem.global_batch is None and problem.tolerance:
        within = _list_tolerable(ran, turns, lead, problem.tolerance)
        return min([leader, *within], key=lambda one: (one.layout.global_batch, -gap(one)))
    margin = min(TIE, problem.tolerance)
    close = [one for one in ran if one is leader or abs(gap(one)) < margin]
    return min(close, key=lambda one: (one.simplicity, -rate(one)))


def _list_tolerable(
    ran: Sequence[Candidate], turns: TurnsByLayout, leader: Turns, tolerance: float
) -> list[Candidate]:
    """Return the synchronous layouts within the tolerance of the leader."""
    # other layouts have global batches that can't be compared with the leader's
    synchronous = [candidate for candidate in ran if candidate.synchronous]
    return [one for one in synchronous if is_tolerable(turns[one.layout], leader, tolerance)]


def is_tolerable(one: Turns, leader: Turns, tolerance: float) -> bool:
    """True if a layout is slower than the leader by at most the tolerance.

    The measured difference may exceed the tolerance by half the width of its interval, but at most
    by `EDGE_SLACK`.
    """
    # the true difference may be smaller than the measured one
    gap = compare_turns(one, leader).interval()
    return gap.value + min((gap.high - gap.low) / 2, EDGE_SLACK) >= -tolerance


def undecided(
    ran: Sequence[Candidate], turns: TurnsByLayout, turns_left: float, most_turns: int
) -> tuple[list[Candidate], bool]:
    """Return the candidates that deserve another turn, and whether there is a tie.

    A rival deserves another turn if choosing it may still gain more than `LEAST_GAIN`, and the
    remaining turns can decide that. If they can't, there is a tie. If a rival deserves another
    turn, so does the fastest candidate. There are at most `turns_left` more turns, and a candidate
    has at most `most_turns` in total.
    """
    # the fastest takes part because the two are compared within turns
    if len(ran) < 2:
        return [], False
    leader, *others = sorted(ran, key=lambda candidate: -throughput(turns[candidate.layout]).value)
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
    """Return the relative difference between the samples/s of two layouts.

    It is positive if `one` is faster than `other`. It is computed from the turns that both took
    part in. Without such turns, it is computed from all pairs of their turns.
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
    """Return the interval of a layout's samples/s over all its turns.

    The samples/s are computed from the mean step time of the turns. For a single turn, return the
    interval that was measured in it.
    """
    measured = [seen.throughput for _, seen in sorted(turns.items())]
    if len(measured) == 1:
        return measured[0]
    value = len(measured) / math.fsum(1 / one.value for one in measured)
    own = fmean(relative_error(seen) ** 2 for seen in turns.values())
    deviation = _pooled_deviation(own, [one.value / value for one in measured])
    interval = Difference(value, value * deviation, len(measured)).interval()
    return center(interval, value)  # never below 0


def _pooled_deviation(assumed: float, values: Sequence[float]) -> float:
    """Estimate the standard deviation of one turn from few values."""
    mean = fmean(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    # `assumed`, the usual variance, counts as much as `DRIFT_WEIGHT` turns
    return math.sqrt((DRIFT_WEIGHT * assumed + spread) / (DRIFT_WEIGHT + len(values) - 1))


def center(interval: Interval, value: float) -> Interval:
    """Return an interval of the same width around `value`, cut off at 0."""
    half = (interval.high - interval.low) / 2
    return Interval(value, max(0.0, value - half), value + half)


def widen(interval: Interval, error: float) -> Interval:
    """Return the interval, extended where a bound is nearer to the value than `error`.

    `error` is relative to the value.
    """
    low = min(interval.low, interval.value * max(0.0, 1 - error))
    return Interval(interval.value, low, max(interval.high, interval.value * (1 + error)))


def overlap(one: Interval, other: Interval) -> bool:
    """True if two 95 % intervals overlap, so that neither layout is certainly faster."""
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
