"""Who is fastest, by how much, and how surely: layouts measured in turns A B C A B C, compared within each turn. Pure.

What drifts between turns (heat, other work) hits all layouts of a turn alike, so the difference of two layouts is
known better than either figure. A difference that may be none, or is below `TIE`, is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import msgspec

from evener.balancer.search.layouts import Candidate
from evener.balancer.search.statistics import paired, relative_half_width, student
from evener.balancer.types import Interval, Layout, Timed

TIE = 0.01  # relative; less than that is not worth a change
UNCLEAR = 0.03  # relative; a tie is not called one if its likeliest difference is larger
ENOUGH_TURNS, MOST_TURNS = 3, 8
LEAST_TURNS = 2  # of the leader and its nearest rival, however far apart one turn has them
HOPELESS = {1: 0.25, 2: 0.05}  # so far behind after so many turns, surely, a layout gets no more
DRIFT = 0.02  # between two probes, for a difference that rests on one turn

Turns = Mapping[Layout, Mapping[int, Timed]]  # layout -> turn -> what was timed


class Standing(msgspec.Struct, frozen=True):
    """A layout's place in the ranking. `against`: its samples/s over the winner's, less 1; None for the winner."""

    candidate: Candidate
    throughput: Interval  # samples/s, over all its turns
    step: Interval  # seconds of one optimizer step: the latency
    against: Interval | None
    tie: bool
    turns: int

    @property
    def unclear(self) -> bool:
        """A tie only because too little is known: the difference may be none, and may be large."""
        return self.tie and self.against is not None and abs(self.against.value) > UNCLEAR


def ranked(candidates: Sequence[Candidate], turns: Turns) -> tuple[Standing, ...]:
    """Every layout that ran: the winner, then the others by throughput."""
    ran = [candidate for candidate in candidates if turns.get(candidate.layout)]
    if not ran:
        return ()
    winner = _winner(ran, turns)
    others = [candidate for candidate in ran if candidate is not winner]
    others.sort(key=lambda one: throughput(turns[one.layout]).value, reverse=True)
    return (_standing(winner, None, turns), *(_standing(one, winner, turns) for one in others))


def contenders(candidates: Sequence[Candidate], turns: Turns) -> tuple[Candidate, ...]:
    """Those that deserve another turn, in the order of turns; empty when the ranking is settled."""
    ran = [candidate for candidate in candidates if turns.get(candidate.layout)]
    if len(ran) < 2:
        return ()
    leader = _leader(ran, turns)
    others = [one for one in ran if one is not leader]
    rivals = [one for one in others if not _settled(turns[one.layout], turns[leader.layout])]
    if not rivals and len(turns[leader.layout]) < LEAST_TURNS:
        rivals = [max(others, key=lambda one: throughput(turns[one.layout]).value)]
    return tuple(one for one in ran if one is leader or one in rivals) if rivals else ()


def difference(rival: Mapping[int, Timed], leader: Mapping[int, Timed]) -> Interval:
    """The rival's throughput over the leader's, less 1, from the turns that both took."""
    common = sorted(rival.keys() & leader.keys())
    if len(common) >= 2:
        pairs = [(rival[turn].samples_per_second, leader[turn].samples_per_second) for turn in common]
        return paired([a for a, _ in pairs], [b for _, b in pairs])
    first, second = throughput(rival), throughput(leader)
    value = first.value / second.value - 1
    half = math.hypot(relative_half_width(first), relative_half_width(second)) + DRIFT
    return Interval(value, value - half, value + half)


def throughput(turns: Mapping[int, Timed]) -> Interval:
    """Samples/s over all turns, each counted alike: as uncertain as the turns are, and as they differ.

    Two turns tell their spread so badly that it is judged with the quantile of three.
    """
    figures = [_rate(seen) for _, seen in sorted(turns.items())]
    count = len(figures)
    if count == 1:
        return figures[0]
    value = fmean(figure.value for figure in figures)
    within = math.sqrt(fmean(((figure.high - figure.low) / 2) ** 2 for figure in figures))
    between = student(max(2, count - 1)) * stdev(figure.value for figure in figures)
    half = math.hypot(within, between) / math.sqrt(count)
    return Interval(value, max(0.0, value - half), value + half)


def is_tie(against: Interval) -> bool:
    """A difference that may be none, or that nobody would notice."""
    return against.low <= 0 <= against.high or abs(against.value) < TIE


def _winner(ran: Sequence[Candidate], turns: Turns) -> Candidate:
    """The fastest; among those that nobody would tell from it, the simplest."""
    leader = _leader(ran, turns)
    close = [
        one for one in ran if one is leader or abs(difference(turns[one.layout], turns[leader.layout]).value) < TIE
    ]
    return min(close, key=lambda one: one.simplicity)


def _leader(ran: Sequence[Candidate], turns: Turns) -> Candidate:
    return max(ran, key=lambda one: throughput(turns[one.layout]).value)


def _settled(rival: Mapping[int, Timed], leader: Mapping[int, Timed]) -> bool:
    """Whether another turn would not change what is said of the two."""
    count = len(rival.keys() & leader.keys())
    against = difference(rival, leader)
    if count in HOPELESS and against.high < -HOPELESS[count]:
        return True
    if count < ENOUGH_TURNS:
        return False
    lost = against.high < -TIE
    tied = against.low > -TIE and against.high < TIE
    return lost or tied


def _standing(one: Candidate, winner: Candidate | None, turns: Turns) -> Standing:
    own = turns[one.layout]
    figure = throughput(own)
    samples = one.layout.global_batch * one.layout.processes
    step = Interval(samples / figure.value, samples / figure.high, samples / figure.low if figure.low else math.inf)
    against = None if winner is None else difference(own, turns[winner.layout])
    return Standing(one, figure, step, against, against is not None and is_tie(against), sum(turn >= 0 for turn in own))


def _rate(seen: Timed) -> Interval:
    layout = seen.probe.layout
    samples = layout.global_batch * layout.processes
    low = samples / seen.high_seconds if seen.high_seconds else 0.0
    high = samples / seen.low_seconds if seen.low_seconds else math.inf
    return Interval(seen.samples_per_second, low, min(high, 10 * seen.samples_per_second))
