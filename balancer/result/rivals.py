"""Compare the recommended layout with the others, and name them for users."""

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
    candidate: Candidate, devices: int, is_second: bool = False, with_shares: bool = False
) -> str:
    """Return the name of a layout for users.

    - `is_second`: whether a better layout already has the usual name, so that this one needs
      another name.
    - `with_shares`: whether to append the rows of each device.
    """
    layout = candidate.layout
    knobs = "".join(f", {KNOBS.get(knob, knob)}" for knob in layout.knobs)
    shares = f", {list_samples(layout)}" if with_shares else ""
    return f"{candidate.family.title(layout, devices, is_second)}{knobs}{shares}"


def name_all(candidates: Sequence[Candidate], devices: int) -> tuple[str, ...]:
    """Return a name for each layout; all names are different.

    The layouts must be sorted, best first.
    """
    names: list[str] = []
    for candidate in candidates:
        name = name_layout(candidate, devices)
        after_split = bool(names) and candidates[0].layout.traits.together
        if name in names or (after_split and name == BEST_SPLIT):
            name = name_layout(candidate, devices, is_second=True)
        if name in names:
            name = name_layout(candidate, devices, is_second=True, with_shares=True)
        names.append(name)
    return tuple(names)


def list_samples(layout: Layout) -> str:
    """Format the rows of each device that computes, such as "826 + 571"."""
    return join_shares([(layout.shares[i], layout.pass_rows[i]) for i in layout.computing])


COARSE = 0.02  # relative error above which a gain is given in whole percents
SURELY = 0.01  # relative, beyond both intervals: a device this much faster in a split than alone
NEAR = 2  # relative to a split's batch: the largest batch of a plan with which it is compared


class ComparedLayout(msgspec.Struct, frozen=True):
    """A layout that is compared with the plan, and how much faster the plan is.

    - `gain`: the plan's samples/s relative to this layout's, minus 1.
    - `unclear`: whether the two layouts tie although their difference may be large.
    - `paired`: whether the gain comes from measuring the two alternately.
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
        """The layout that the plan is compared with."""
        return self.candidate.layout

    @property
    def family(self) -> Family | None:
        """The family of the layout.

        It is None if the layout has tuning options.
        """
        return None if self.candidate.layout.knobs else self.candidate.family

    def gain_of(self, chosen: Result) -> float:
        """Return how much faster the plan is than this layout, as a fraction.

        It comes from alternating measurements if these decided the comparison. Otherwise, it is
        computed from the rounded samples/s, so that it matches the values that users read.
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
    """Compare the plan with the layouts of the final comparison, and a few others.

    - `ranking`: the layouts of the final comparison, best first.
    - `results`: all measured layouts. If the plan uses one device, the fastest layout over
      several devices is compared too.
    - `single`: the best single device, which is compared too if the final comparison had none.
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
    chosen: Result, rival: Candidate, interval: Interval, ranked: RankedLayout | None = None
) -> ComparedLayout:
    """Compare the plan with one other layout.

    - `interval`: the samples/s of the other layout.
    - `ranked`: its result in the final comparison, in which the two layouts were measured
      alternately. It decides whether the layouts tie. The gain is taken from it too if the
      separately measured samples/s contradict it. None if there was no such comparison.
    """
    own, layout = chosen.throughput, rival.layout
    comparable = is_comparable(own, chosen.layout.shares, interval, layout.shares)
    if layout == chosen.layout or not comparable:
        return ComparedLayout(rival, interval, 0.0, compared=False)
    gain, tie = own.value / interval.value - 1, overlap(own, interval)
    if ranked is None or ranked.against is None:
        return ComparedLayout(rival, interval, gain, tie, difference=_compare_rates(own, interval))
    found = _reverse_gap(ranked.against)
    if ranked.tie or found.low <= 0 <= found.high:
        return ComparedLayout(rival, interval, gain, True, ranked.unclear, difference=found)
    paired = tie or not found.low <= gain <= found.high
    gain = found.value if paired else gain
    return ComparedLayout(rival, interval, gain, paired=paired, difference=found)


def _compare_rates(own: Interval, other: Interval) -> RateGap:
    """Return how much faster the plan is than another layout, with bounds from their intervals."""
    low = own.low / other.high - 1
    high = own.high / max(other.low, LEAST_RATE) - 1
    return RateGap(printed_gain(own.value, other.value), low, high)


def _reverse_gap(against: Interval) -> RateGap:
    """Return how much faster the plan is than another layout, given the opposite comparison.

    `against` says how much faster the other layout is than the plan.
    """
    low, value, high = (
        1 / (1 + max(-0.99, each)) - 1 for each in (against.high, against.value, against.low)
    )
    return RateGap(value, low, high, alternately=True)


def find_own_family(layout: Layout) -> Family:
    """Return the family of a layout, with equal shares as a family of their own.

    `family_of` doesn't make this distinction: it returns the family of unequal shares for both.
    """
    whole = layout.traits.together and not layout.traits.sharded
    return EVEN if whole and is_even(layout) else family_of(layout)


def name_rivals(chosen: Result, rivals: Sequence[ComparedLayout], devices: int) -> tuple[str, ...]:
    """Return names for the compared layouts, all different from each other and from the plan's."""
    layout = chosen.layout
    own = Candidate(find_own_family(layout), layout)
    return name_all([own, *(rival.candidate for rival in rivals)], devices)[1:]


def find_larger(chosen: Result, rivals: Sequence[ComparedLayout]) -> ComparedLayout | None:
    """Return the fastest layout that beats the plan with a larger global batch, or None."""
    if not chosen.layout.traits.by_shares:
        return None
    faster = [rival for rival in rivals if rival.candidate.synchronous and rival.gain < 0]
    larger = [one for one in faster if one.layout.global_batch > chosen.layout.global_batch]
    return min(larger, key=lambda one: one.gain, default=None)


def is_comparable(
    own: Interval, own_shares: Sequence[int], other: Interval, shares: Sequence[int]
) -> bool:
    """Return whether it makes sense to compare the plan's speed with another layout's.

    - Both speeds must be known precisely enough.
    - A layout over several devices needs at least half of the plan's global batch.
    - A single device must not have been slower alone than it is within the plan. If it was, its
      solo measurement is out of date.

    `own` and `own_shares` are the speed and the shares of the plan. `other` and `shares` are those
    of the other layout. If `shares` is empty, `other` is the sum of the speeds that all devices
    reach when each trains alone.
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
    """Return the relative difference of two rates, which are first rounded as in the output.

    The difference then matches the rates that users read.
    """
    first, second = (float(rate(one).replace(" ", "")) or one for one in (own, other))
    return first / second - 1


def is_rough(*intervals: Interval) -> bool:
    """Return whether one of these throughputs has a relative error above 2 %.

    Gains are then written as percentages without decimals.
    """
    return any(
        relative_error(interval.value, interval.low, interval.high) > COARSE
        for interval in intervals
    )


def write_gain(gain: float, *intervals: Interval) -> str:
    """Return a gain as a percentage, with one decimal if the rates are precise enough for it."""
    return percent(gain, 0 if is_rough(*intervals) and gain >= 0.005 else 1)
