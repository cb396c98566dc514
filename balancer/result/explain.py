"""The verdict: one sentence of what to do and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from evener.balancer.result.layout_names import KNOBS, PACK_MODES, list_samples, name_all
from evener.balancer.result.number_format import half_width, join_words, milliseconds, percent, rate
from evener.balancer.search.layouts import Candidate, is_even
from evener.balancer.search.ranking import Standing, overlap
from evener.balancer.types import Interval, Layout, Result, Timed
from evener.costs import Cost

MOST_TIES = 3  # named in the sentence
USUAL_ROWS = 8  # of a pass


class Rival(msgspec.Struct, frozen=True):
    """Another layout that ran. `gain`: the chosen layout's samples/s over this one's, less 1."""

    candidate: Candidate
    throughput: Interval
    gain: float
    tie: bool
    unclear: bool

    @property
    def family(self) -> str:
        """Of layouts without other knobs; "knobs" for the others."""
        return "knobs" if self.candidate.layout.knobs else self.candidate.family


class Costs(msgspec.Struct, frozen=True):
    """What takes a split's time, where it is measured."""

    sync_seconds: float | None = None  # the exposed cost of keeping replicas in step
    apart_seconds: Callable[[Layout], float | None] = lambda _: None  # the longest that a device takes for its share


class Tokens(msgspec.Struct, frozen=True):
    """What a row has on average, 0 where rows have no lengths; and the part of the computed tokens that is padding.

    `gap` is by how much the devices' own work of a step differs, as a part of the longest; None where that is unknown.
    """

    of_row: float = 0.0
    padding: float = 0.0
    gap: float | None = None


def list_rivals(chosen: Result, ranking: Sequence[Standing], results: Sequence[Result] = ()) -> tuple[Rival, ...]:
    """Everything in the ranking but the chosen layout: compared turn by turn with the winner, else by throughput.

    Against one device or a pack, the fastest split of the `results` comes first, though it may not have been raced.
    """
    found = _fastest_split(chosen, ranking, results)
    for one in ranking:
        if one.candidate.layout == chosen.layout:
            continue
        if ranking[0].candidate.layout == chosen.layout and one.against is not None:
            gain = 1 / (1 + one.against.value) - 1
            found.append(Rival(one.candidate, one.throughput, gain, one.tie, one.unclear))
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
    """A rival without turns in common with the chosen layout: overlapping intervals are a tie."""
    gain = chosen.throughput.value / throughput.value - 1
    return Rival(rival, throughput, gain, overlap(chosen.throughput, throughput), False)


def explain(
    chosen: Result,
    rivals: Sequence[Rival],
    labels: Sequence[str],
    costs: Costs | None = None,
    tokens: Tokens = Tokens(),  # noqa: B008 - frozen
) -> str:
    """What to do and why, with the figures; `labels` are the devices' short names."""
    begin = f"{_advice(chosen, labels, tokens)}: {_figure(chosen, tokens)}"
    gains = _gains(chosen, rivals, labels)
    clauses = [*_losses(chosen, rivals, labels, costs or Costs()), *_larger(chosen, rivals)]
    clauses += [*_knobs(chosen, rivals), *_ties(chosen, rivals, len(labels))]
    return "; ".join([begin + (f", {' and '.join(gains)}" if gains else ""), *clauses]) + "."


def _figure(chosen: Result, tokens: Tokens) -> str:
    """Samples/s, or tokens/s with what belongs to them."""
    samples, error = f"{rate(chosen.throughput.value)} samples/s", _error(chosen.throughput)
    if not tokens.of_row:
        return f"{samples}{error}"
    beside = f"{samples}, {percent(tokens.padding)} padding"
    if tokens.gap is not None and len(chosen.layout.active) > 1:
        beside += f", the devices' own work within {percent(tokens.gap)}"
    return f"{rate(chosen.throughput.value * tokens.of_row)} tokens/s{error} ({beside})"


def name_rivals(chosen: Result, rivals: Sequence[Rival], devices: int) -> tuple[str, ...]:
    """A name for each, beside the chosen layout's own."""
    layout = chosen.layout
    family = layout.kind if layout.kind != "split" else "even" if is_even(layout) else "split"
    return name_all([Candidate(family, layout), *(one.candidate for one in rivals)], devices)[1:]


def waiting_share(seen: Sequence[Timed]) -> float | None:
    """The part of a step in which the busiest device waits for others or for data; None where that isn't measured."""
    own = _own_seconds(seen)
    if own is None or any(one.step_seconds <= 0 for one in seen):
        return None
    return fmean(max(0.0, 1 - max(each) / one.step_seconds) for each, one in zip(own, seen, strict=True))


def work_gap(seen: Sequence[Timed]) -> float | None:
    """By how much the devices' own work differs, as a part of the longest; None where that isn't measured."""
    own = _own_seconds(seen)
    if own is None or any(max(each) <= 0 for each in own):
        return None
    return fmean(1 - min(each) / max(each) for each in own)


def _own_seconds(seen: Sequence[Timed]) -> list[list[float]] | None:
    """Of each device that computes, by measurement."""
    own = [[one.device_seconds[i] or 0.0 for i in one.probe.layout.active] for one in seen]
    missing = any(one.device_seconds[i] is None for one in seen for i in one.probe.layout.active)
    return None if missing or not own else own


def cost_ratios(costs: Sequence[Cost | None], row_tokens: float) -> tuple[float, ...]:
    """Each device's part of the cost of a batch, when all finish at the same time; of passes of a few usual rows."""
    speeds = [1 / cost.seconds(USUAL_ROWS, round(row_tokens)) if cost else 0.0 for cost in costs]
    return tuple(speed / sum(speeds) for speed in speeds)


def _advice(chosen: Result, labels: Sequence[str], tokens: Tokens) -> str:
    layout = chosen.layout
    names = join_words([labels[i] for i in layout.active])
    match layout.kind:
        case "split" if layout.costs:
            ratios = ":".join(f"{ratio:.3f}" for ratio in cost_ratios(layout.costs, tokens.of_row) if ratio)
            advice = f"Split the cost of each batch {ratios} over {names} ({layout.global_batch} samples)"
        case "split" if is_even(layout):
            advice = f"Split evenly over {names} ({list_samples(layout)} samples)"
        case "split":
            ratios = ":".join(f"{layout.shares[i] / layout.global_batch:.3f}" for i in layout.active)
            advice = f"Split {ratios} over {names} ({list_samples(layout)} samples)"
        case "pack":
            mode = PACK_MODES.get(layout.placement, "")
            advice = (
                f"Run {layout.processes} trainings side by side on {names}{mode}, {layout.global_batch} samples each"
            )
        case "place":
            advice = f"Place the model's parts as {layout.placement} over {names}, {layout.global_batch} samples"
        case _:
            advice = f"Use {names}{' alone' if len(labels) > 1 else ''}, {list_samples(layout)} samples a step"
    return advice + "".join(f", with {KNOBS.get(knob, knob)}" for knob in layout.knobs)


def _gains(chosen: Result, rivals: Sequence[Rival], labels: Sequence[str]) -> list[str]:
    """What a layout over several devices, or of several trainings, gains over an even split and one device alone."""
    layout = chosen.layout
    reasons = []
    if layout.kind == "split" and not is_even(layout):
        even = _first(rivals, "even", devices=len(layout.active))
        name = "the even split of rows as they come" if layout.costs else "the even split"
        reasons += [_compare(name, even)] if even else []
    single = _first(rivals, "solo")
    if layout.kind != "solo" and single is not None:
        reasons.append(_gain_over_one(chosen, single, labels))
    return reasons


def _gain_over_one(chosen: Result, single: Rival, labels: Sequence[str]) -> str:
    """What it gains over one device alone, and what trainings side by side lose each."""
    layout = chosen.layout
    (position,) = single.candidate.layout.active
    reason = _compare(f"{labels[position]} alone", single)
    if layout.kind != "pack":
        return reason
    own = layout.global_batch * layout.processes / chosen.throughput.value
    times = own / (single.candidate.layout.global_batch / single.throughput.value)
    return f"{reason}, though each training takes {times:.1f} times as long"


def _compare(name: str, rival: Rival) -> str:
    if rival.tie:
        return f"as fast as {name} within the error"
    if rival.gain < 0:
        return f"{percent(-rival.gain)} slower than {name}"
    return f"{percent(rival.gain, 0 if rival.gain >= 0.01 else 1)} faster than {name}"


def _losses(chosen: Result, rivals: Sequence[Rival], labels: Sequence[str], costs: Costs) -> list[str]:
    """What the best split, pack and placement lose, if another layout is chosen."""
    clauses = []
    if chosen.layout.kind != "split" and len(labels) > 1:
        split = next((one for one in rivals if one.family in ("even", "split")), None)
        if split:
            clauses.append(_split_loses(chosen, split, labels, costs))
        elif chosen.layout.kind == "solo":
            clauses.append("no split over several devices was measured")
    return clauses + _others_lose(chosen, rivals)


def _others_lose(chosen: Result, rivals: Sequence[Rival]) -> list[str]:
    """What packs and placements lose."""
    clauses = []
    for family, verb in (("pack", "lose"), ("place", "loses")):
        rival = _first(rivals, family)
        if chosen.layout.kind == family or rival is None or rival.tie:
            continue
        layout = rival.candidate.layout
        who = f"{layout.processes} trainings side by side" if family == "pack" else f"the placement {layout.placement}"
        if rival.gain < 0:
            clauses.append(f"{who} {'are' if family == 'pack' else 'is'} {_faster(rival)}")
        else:
            clauses.append(f"{who} {verb} {_loss(rival)}")
    return clauses


def _split_loses(chosen: Result, split: Rival, labels: Sequence[str], costs: Costs) -> str:
    over = f"a split over {join_words([labels[i] for i in split.candidate.layout.active])}"
    if split.tie:
        return f"{over} is no faster within the error ({rate(split.throughput.value)} samples/s)"
    if split.gain < 0:
        return f"{over} is {_faster(split)} ({rate(split.throughput.value)} samples/s)"
    return f"{over} loses {_loss(split)}{_cause(chosen, split.candidate.layout, costs)}"


def _faster(rival: Rival) -> str:
    """A rival that is faster than the chosen layout, which something else has decided for."""
    return f"{percent(1 / (1 + rival.gain) - 1)} faster"


def _loss(rival: Rival) -> str:
    loss = 1 - 1 / (1 + rival.gain)
    return percent(loss, 0 if loss >= 0.02 else 1)


def _cause(chosen: Result, split: Layout, costs: Costs) -> str:
    """What takes most of a split's step: keeping in step, or what a smaller share does not shorten; "" if unknown."""
    if chosen.layout.kind != "solo":
        return ""
    sync, apart = costs.sync_seconds or 0.0, costs.apart_seconds(split) or 0.0
    batch = chosen.layout.global_batch
    whole, share = batch / chosen.throughput.value, max(split.shares)
    if apart - whole * share / batch > sync:
        took = f"a step of {share} samples alone still takes {milliseconds(apart)}"
        return f", because {took}, against the {milliseconds(whole)} of all {batch}"
    return f", because keeping them in step costs {milliseconds(sync)} a step" if sync else ""


def _larger(chosen: Result, rivals: Sequence[Rival]) -> list[str]:
    """What a larger global batch would add, where the tolerance chose a smaller one."""
    larger = find_larger(chosen, rivals)
    if larger is None or larger.tie:
        return []
    gain = 1 / (1 + larger.gain) - 1
    return [f"{larger.candidate.layout.global_batch} samples a step would add {percent(gain, 1)}"]


def find_larger(chosen: Result, rivals: Sequence[Rival]) -> Rival | None:
    """The fastest layout of one training with more samples, if it is faster than the chosen one."""
    if chosen.layout.kind not in ("solo", "split"):
        return None
    faster = [one for one in rivals if one.candidate.synchronous and one.gain < 0]
    larger = [one for one in faster if one.candidate.layout.global_batch > chosen.layout.global_batch]
    return min(larger, key=lambda one: one.gain, default=None)


def _knobs(chosen: Result, rivals: Sequence[Rival]) -> list[str]:
    """What each knob gave or took, whichever way the chosen layout has it."""
    clauses = []
    for one in rivals:
        layout = one.candidate.layout
        if layout.knobs:
            clauses.append(f"{_name_knobs(layout)} {'makes no difference' if one.tie else f'loses {_loss(one)}'}")
        elif chosen.layout.knobs and msgspec.structs.replace(chosen.layout, knobs=()) == layout:
            clauses.append(f"{_name_knobs(chosen.layout)} gives {percent(one.gain, 0 if one.gain >= 0.02 else 1)}")
    return clauses


def _name_knobs(layout: Layout) -> str:
    return " and ".join(KNOBS.get(knob, knob) for knob in layout.knobs)


def _ties(chosen: Result, rivals: Sequence[Rival], devices: int) -> list[str]:
    """Packs and placements that tie, and those of which too little is certain."""
    names = name_rivals(chosen, rivals, devices)
    found = [
        (name, one) for name, one in zip(names, rivals, strict=True) if one.tie and one.family in ("pack", "place")
    ]
    tied = [name for name, one in found if not one.unclear][:MOST_TIES]
    unclear = [name for name, one in found if one.unclear][:MOST_TIES]
    clauses = [f"{join_words(tied)} {'ties' if len(tied) == 1 else 'tie'} with it"] if tied else []
    return clauses + ([f"{join_words(unclear)} can't be distinguished from it yet"] if unclear else [])


def _first(rivals: Sequence[Rival], family: str, devices: int | None = None) -> Rival | None:
    found = (one for one in rivals if one.family == family)
    return next((one for one in found if devices is None or len(one.candidate.layout.active) == devices), None)


def _error(figure: Interval) -> str:
    half = half_width(figure.value, figure.low, figure.high)
    return "" if half == percent(0.0, 1) else f" ± {half}"
