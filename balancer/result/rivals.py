"""What a chosen layout is compared with: every other layout that ran, by its rate or in turn."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer.result.gains import Gain, compare_in_turn, compare_rates, is_near, printed_gain
from evener.balancer.result.layout_names import name_all
from evener.balancer.search.layouts import Candidate, is_even
from evener.balancer.search.ranking import Standing
from evener.balancer.types import Interval, Result


class Rival(msgspec.Struct, frozen=True):
    """Another layout that ran. `gain`: the chosen layout's samples/s over this one's, less 1; `paired` in turn."""

    candidate: Candidate
    throughput: Interval
    gain: float
    tie: bool = False
    unclear: bool = False
    paired: bool = False
    compared: bool = True  # False: its samples/s or the plan's aren't known, or its batch is too far from the plan's

    @property
    def family(self) -> str:
        """Of layouts without other knobs; "knobs" for the others."""
        return "knobs" if self.candidate.layout.knobs else self.candidate.family

    def gain_of(self, chosen: Result) -> float:
        """As the two printed rates give it, or as measured in turn."""
        return self.gain if self.paired else printed_gain(chosen.throughput.value, self.throughput.value)


def list_rivals(chosen: Result, ranking: Sequence[Standing], results: Sequence[Result] = ()) -> tuple[Rival, ...]:
    """Everything in the ranking but the chosen layout: compared turn by turn with the winner, else by throughput.

    Against one device or a pack, the fastest split of the `results` comes first, though it may not have been raced.
    """
    found = _fastest_split(chosen, ranking, results)
    for one in ranking:
        if one.candidate.layout == chosen.layout:
            continue
        if ranking[0].candidate.layout == chosen.layout and one.against is not None:
            low, high = (1 / (1 + max(-0.99, bound)) - 1 for bound in (one.against.high, one.against.low))
            in_turn = Interval(1 / (1 + one.against.value) - 1, low, high)
            gain = compare_in_turn(chosen.throughput, one.throughput, in_turn, one.tie)
            found.append(_rival(chosen, one.candidate, one.throughput, gain, one.unclear))
        else:
            found.append(compare_throughput(chosen, one.candidate, one.throughput))
    return tuple(found)


def _fastest_split(chosen: Result, ranking: Sequence[Standing], results: Sequence[Result]) -> list[Rival]:
    fastest = max((one for one in results if one.layout.kind == "split"), key=_value, default=None)
    raced = (one.candidate.layout for one in ranking)
    if fastest is None or chosen.layout.kind == "split" or fastest.layout in raced:
        return []
    return [compare_throughput(chosen, Candidate("split", fastest.layout), fastest.throughput)]


def _value(one: Result) -> float:
    return one.throughput.value


def compare_throughput(chosen: Result, rival: Candidate, throughput: Interval) -> Rival:
    """A rival without turns in common with the chosen layout."""
    return _rival(chosen, rival, throughput, compare_rates(chosen.throughput, throughput))


def _rival(chosen: Result, rival: Candidate, throughput: Interval, gain: Gain, unclear: bool = False) -> Rival:
    split, batch = rival.layout.kind == "split", rival.layout.global_batch
    compared = gain.value is not None and is_near(batch, chosen.layout.global_batch, split)
    tie = gain.tie and compared
    return Rival(rival, throughput, gain.value or 0.0, tie, unclear and tie, gain.paired, compared)


def name_rivals(chosen: Result, rivals: Sequence[Rival], devices: int) -> tuple[str, ...]:
    """A name for each, beside the chosen layout's own."""
    layout = chosen.layout
    family = layout.kind if layout.kind != "split" else "even" if is_even(layout) else "split"
    return name_all([Candidate(family, layout), *(one.candidate for one in rivals)], devices)[1:]


def find_larger(chosen: Result, rivals: Sequence[Rival]) -> Rival | None:
    """The fastest layout of one training with more samples, if it is faster than the chosen one."""
    if chosen.layout.kind not in ("solo", "split"):
        return None
    faster = [one for one in rivals if one.candidate.synchronous and one.gain < 0]
    larger = [one for one in faster if one.candidate.layout.global_batch > chosen.layout.global_batch]
    return min(larger, key=lambda one: one.gain, default=None)
