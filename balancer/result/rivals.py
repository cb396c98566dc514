"""Names layouts, and compares every other layout that ran with the chosen one.

Layouts are compared by their printed samples/s, or by measurements in alternating turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.plan.file import BEST_SPLIT

from ..families import EVEN, SOLO, Family, family_of, is_even
from ..number_format import join_shares, percent, rate, relative_error
from ..search.layouts import Candidate
from ..search.ranking import LEAST_RATE, RankedLayout, overlap
from ..statistics import is_known
from ..types import Interval, Layout, Result
from ..verdict import RateGap

KNOBS = {
    "xla": "XLA",
    "mixed": "mixed precision",
    "workers0": "no loader workers",
    "workers2": "2 loader workers",
    "workers4": "4 loader workers",
    "workers8": "8 loader workers",
}


def name_layout(
    candidate: Candidate, devices: int, another: bool = False, with_shares: bool = False
) -> str:
    """Return a layout's name for tables, such as `best split, XLA`.

    `devices` is the number of devices of the request. With `another`, the name is for a second
    layout of its family. With `with_shares`, the name includes the samples per device.
    """
    layout = candidate.layout
    knobs = "".join(f", {KNOBS.get(knob, knob)}" for knob in layout.knobs)
    shares = f", {list_samples(layout)}" if with_shares else ""
    return f"{candidate.family.title(layout, devices, another)}{knobs}{shares}"


def name_all(candidates: Sequence[Candidate], devices: int) -> tuple[str, ...]:
    """Return a distinct name for each layout.

    `candidates` is sorted, the fastest first. Of two layouts of one family, the slower one gets a
    name such as `another split`. If the first layout is a split of any kind, no later one is named
    `best split`.
    """
    names: list[str] = []
    for candidate in candidates:
        name = name_layout(candidate, devices)
        after_split = bool(names) and candidates[0].layout.traits.together
        if name in names or (after_split and name == BEST_SPLIT):
            name = name_layout(candidate, devices, another=True)
        if name in names:
            name = name_layout(candidate, devices, another=True, with_shares=True)
        names.append(name)
    return tuple(names)


def list_samples(layout: Layout) -> str:
    """Return the samples of each device that has any, as text such as "820 + 568".

    Several passes are written as in "(820 = 2 × 410) + 568".
    """
    return join_shares([(layout.shares[i], layout.pass_rows[i]) for i in layout.computing])


COARSE = 0.02  # relative error above which a gain is given in whole percents
SURELY = 0.01  # relative, beyond both intervals: a device this much faster in a split than alone
NEAR = 2  # relative to a split's batch: the largest batch of a plan with which it is compared


class ComparedLayout(msgspec.Struct, frozen=True):
    """A layout that was measured, compared with the chosen layout.

    `gain` is the chosen layout's samples/s divided by this layout's, minus 1. `paired` is True if
    `gain` was measured in alternating turns.
    """

    candidate: Candidate
    throughput: Interval
    gain: float
    tie: bool = False
    unclear: bool = False
    paired: bool = False
    # False: its samples/s or the plan's are uncertain, or its batch is too far from the plan's
    compared: bool = True
    difference: RateGap | None = None  # None: it isn't compared

    @property
    def layout(self) -> Layout:
        """The layout itself, without its family."""
        return self.candidate.layout

    @property
    def family(self) -> Family | None:
        """The layout's family; None if the layout has knobs."""
        return None if self.candidate.layout.knobs else self.candidate.family

    def gain_of(self, chosen: Result) -> float:
        """Return the gain of the chosen layout over this layout.

        It was measured in turns, or is computed from the samples/s as they are printed.
        """
        return (
            self.gain
            if self.paired
            else printed_gain(chosen.throughput.value, self.throughput.value)
        )


def compare_all(
    chosen: Result,
    ranking: Sequence[RankedLayout],
    results: Sequence[Result] = (),
    single: Result | None = None,
) -> tuple[ComparedLayout, ...]:
    """Compare every layout in the ranking with the chosen one.

    If the chosen layout won the race, the layouts are compared by the turns of the race, and
    otherwise by their samples/s.

    For a plan of one device or a pack, the fastest split in `results` comes first, even if it
    wasn't in the race. If no single device was in the race, the best one (`single`) comes last.
    """
    won = ranking and ranking[0].candidate.layout == chosen.layout
    others = [ranked for ranked in ranking if ranked.candidate.layout != chosen.layout]
    raced = any(ranked.candidate.layout.traits.alone for ranked in ranking) or (
        single and single.layout == chosen.layout
    )
    return (
        *_fastest_split(chosen, ranking, results),
        *(compare(chosen, one.candidate, one.throughput, one if won else None) for one in others),
        *(
            [compare(chosen, Candidate(SOLO, single.layout), single.throughput)]
            if single and not raced
            else ()
        ),
    )


def _fastest_split(
    chosen: Result, ranking: Sequence[RankedLayout], results: Sequence[Result]
) -> list[ComparedLayout]:
    if chosen.layout.traits.together:
        return []
    found = [
        compare(chosen, Candidate(family_of(result.layout), result.layout), result.throughput)
        for result in results
        if result.layout.traits.together
    ]
    fastest = max(found, key=lambda one: (one.compared, one.throughput.value), default=None)
    raced = [ranked.candidate.layout for ranked in ranking]
    return [fastest] if fastest and fastest.layout not in raced else []


def compare(
    chosen: Result, rival: Candidate, interval: Interval, in_turn: RankedLayout | None = None
) -> ComparedLayout:
    """Compare a rival with the chosen layout by their samples/s.

    `interval` is the rival's samples/s. `in_turn` is the rival's result in the race; None if it
    wasn't raced.

    The gain usually comes from the samples/s. It comes from the turns of the race in two cases:
    only these turns show which layout is faster, or the samples/s contradict them.
    """
    own, layout = chosen.throughput, rival.layout
    comparable = is_comparable(own, chosen.layout.shares, interval, layout.shares)
    if layout == chosen.layout or not comparable:
        return ComparedLayout(rival, interval, 0.0, compared=False)
    gain, tie = own.value / interval.value - 1, overlap(own, interval)
    if in_turn is None or in_turn.against is None:
        return ComparedLayout(rival, interval, gain, tie, difference=_compare_rates(own, interval))
    found = _reverse_gap(in_turn.against)
    if in_turn.tie or found.low <= 0 <= found.high:
        return ComparedLayout(rival, interval, gain, True, in_turn.unclear, difference=found)
    paired = tie or not found.low <= gain <= found.high
    gain = found.value if paired else gain
    return ComparedLayout(rival, interval, gain, paired=paired, difference=found)


def _compare_rates(own: Interval, other: Interval) -> RateGap:
    """Return the gap in samples/s; its interval contains 0 for ties."""
    low = own.low / other.high - 1
    high = own.high / max(other.low, LEAST_RATE) - 1
    return RateGap(printed_gain(own.value, other.value), low, high)


def _reverse_gap(against: Interval) -> RateGap:
    """Return the chosen layout's gain, from the rival's gain `against` it."""
    low, value, high = (
        1 / (1 + max(-0.99, each)) - 1 for each in (against.high, against.value, against.low)
    )
    return RateGap(value, low, high, alternately=True)


def find_own_family(layout: Layout) -> Family:
    """Return the family of a chosen layout.

    A split with equal shares counts as an even split.
    """
    whole = layout.traits.together and not layout.traits.sharded
    return EVEN if whole and is_even(layout) else family_of(layout)


def name_rivals(chosen: Result, rivals: Sequence[ComparedLayout], devices: int) -> tuple[str, ...]:
    """Return a distinct name for each rival.

    No rival gets the chosen layout's name. `devices` is the number of devices of the request.
    """
    layout = chosen.layout
    own = Candidate(find_own_family(layout), layout)
    return name_all([own, *(rival.candidate for rival in rivals)], devices)[1:]


def find_larger(chosen: Result, rivals: Sequence[ComparedLayout]) -> ComparedLayout | None:
    """Return the fastest layout with a larger batch than the chosen one.

    It must also be faster than the chosen layout. Layouts of several trainings don't count. Return
    None if there is no such layout, or if the chosen layout isn't a single training in which each
    device computes a share.
    """
    if not chosen.layout.traits.by_shares:
        return None
    faster = [rival for rival in rivals if rival.candidate.synchronous and rival.gain < 0]
    larger = [one for one in faster if one.layout.global_batch > chosen.layout.global_batch]
    return min(larger, key=lambda one: one.gain, default=None)


def is_comparable(
    own: Interval, own_shares: Sequence[int], other: Interval, shares: Sequence[int]
) -> bool:
    """True if the gain of the chosen layout over another layout can be stated.

    `own` and `own_shares` describe the chosen layout, `other` and `shares` the other layout. If
    `shares` is empty, `other` is the sum of all devices alone. The gain would be misleading in
    three cases:

    - One of the rates is too uncertain.
    - The other layout is a split with less than half of the chosen layout's samples.
    - A device is faster in the chosen split than alone, so it wasn't measured alone at its best
      batch.
    """
    active = [i for i, share in enumerate(shares) if share]
    if not other.value or not is_known(own, other):
        return False
    if len(active) > 1:
        return NEAR * sum(shares) >= sum(own_shares)
    alike = own_shares.count(0) < len(own_shares) - 1 and len(shares) in (0, len(own_shares))
    part = sum(own_shares[i] for i in active) / sum(own_shares) if active else 1.0
    return not alike or part * own.low <= other.high * (1 + SURELY)


def printed_gain(own: float, other: float) -> float:
    """Return the gain of `own` over `other` from the printed rates."""
    first, second = (float(rate(one).replace(" ", "")) or one for one in (own, other))
    return first / second - 1


def is_rough(*intervals: Interval) -> bool:
    """True if a gain computed from these values is too uncertain to print with decimals.

    That is so if the relative error of any value is large.
    """
    return any(
        relative_error(interval.value, interval.low, interval.high) > COARSE
        for interval in intervals
    )


def write_gain(gain: float, *intervals: Interval) -> str:
    """Return a gain as a percentage, such as 36.4 %.

    `intervals` are the values from which the gain was computed, with their errors. If an error is
    large, a gain of 0.5 % or more has no decimals.
    """
    return percent(gain, 0 if is_rough(*intervals) and gain >= 0.005 else 1)
