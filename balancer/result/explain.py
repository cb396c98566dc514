"""The verdict: one sentence of what to do and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from evener.balancer.result.gains import is_certain, write_gain
from evener.balancer.result.layout_names import KNOBS, PACK_MODES, list_samples
from evener.balancer.result.number_format import half_width, join_words, milliseconds, percent, rate
from evener.balancer.result.rivals import Rival, find_larger, name_rivals
from evener.balancer.search.layouts import is_even
from evener.balancer.types import Interval, Layout, Result, Timed
from evener.shares.costs import Cost

MOST_TIES = 3  # named in the sentence
USUAL_ROWS = 8  # of a pass
COVERS = 0.8  # of a loss: what is named as its cause


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


def explain(
    chosen: Result,
    rivals: Sequence[Rival],
    labels: Sequence[str],
    costs: Costs | None = None,
    tokens: Tokens = Tokens(),  # noqa: B008 - frozen
) -> str:
    """What to do and why, with the figures; `labels` are the devices' short names."""
    advice = _advice(chosen, labels, tokens)
    if not is_certain(chosen.throughput):
        return f"{advice}. The samples/s aren't known ({_error(chosen.throughput).strip()})."
    compared = [one for one in rivals if one.compared]
    gains = _gains(chosen, compared, labels)
    clauses = [*_losses(chosen, rivals, labels, costs or Costs()), *_larger(chosen, compared)]
    clauses += [*_knobs(chosen, compared), *_ties(chosen, rivals, len(labels))]
    begin = f"{advice}: {_figure(chosen, tokens)}"
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
        reasons += [_compare(chosen, name, even)] if even else []
    single = _first(rivals, "solo")
    if layout.kind != "solo" and single is not None:
        reasons.append(_gain_over_one(chosen, single, labels))
    return reasons


def _gain_over_one(chosen: Result, single: Rival, labels: Sequence[str]) -> str:
    """What it gains over one device alone, and what trainings side by side lose each."""
    layout = chosen.layout
    (position,) = single.candidate.layout.active
    reason = _compare(chosen, f"{labels[position]} alone", single)
    if layout.kind != "pack":
        return reason
    own = layout.global_batch * layout.processes / chosen.throughput.value
    times = own / (single.candidate.layout.global_batch / single.throughput.value)
    return f"{reason}, though each training takes {times:.1f} times as long"


def _compare(chosen: Result, name: str, rival: Rival) -> str:
    name += _at(chosen, rival)
    if rival.tie:
        return f"as fast as {name} within the error"
    gain = rival.gain_of(chosen)
    word, size = ("faster", gain) if gain >= 0 else ("slower", -gain)
    return f"{_whole(size)} {word} than {name}{_in_turn(rival)}"


def _at(chosen: Result, rival: Rival) -> str:
    """The rival's samples a step, where the chosen layout has others."""
    batch = rival.candidate.layout.global_batch
    return f" at {batch} samples" if batch != chosen.layout.global_batch else ""


def _in_turn(rival: Rival) -> str:
    return ", measured in turn" if rival.paired else ""


def _whole(share: float) -> str:
    return percent(share, 0 if share >= 0.01 else 1)


def _losses(chosen: Result, rivals: Sequence[Rival], labels: Sequence[str], costs: Costs) -> list[str]:
    """What the best split, pack and placement lose, if another layout is chosen."""
    clauses = []
    if chosen.layout.kind != "split" and len(labels) > 1:
        splits = [one for one in rivals if one.family in ("even", "split")]
        split = next((one for one in splits if one.compared), None)
        if split:
            clauses.append(_split_loses(chosen, split, labels, costs))
        elif any(not is_certain(one.throughput) for one in splits):
            clauses.append("how fast a split over several devices is isn't known")
        elif chosen.layout.kind == "solo":
            near = f" near {chosen.layout.global_batch} samples" if splits else ""
            clauses.append(f"no split over several devices was measured{near}")
    return clauses + _others_lose(chosen, [one for one in rivals if one.compared])


def _others_lose(chosen: Result, rivals: Sequence[Rival]) -> list[str]:
    """What packs and placements lose."""
    clauses = []
    for family, verb in (("pack", "lose"), ("place", "loses")):
        rival = _first(rivals, family)
        if chosen.layout.kind == family or rival is None or rival.tie:
            continue
        layout = rival.candidate.layout
        who = f"{layout.processes} trainings side by side" if family == "pack" else f"the placement {layout.placement}"
        who += _at(chosen, rival)
        if rival.gain < 0:
            clauses.append(f"{who} {'are' if family == 'pack' else 'is'} {_faster(chosen, rival)}")
        else:
            clauses.append(f"{who} {verb} {_loss(chosen, rival)}")
    return clauses


def _split_loses(chosen: Result, split: Rival, labels: Sequence[str], costs: Costs) -> str:
    over = f"a split over {join_words([labels[i] for i in split.candidate.layout.active])}{_at(chosen, split)}"
    if split.tie:
        return f"{over} is no faster within the error ({rate(split.throughput.value)} samples/s)"
    if split.gain < 0:
        return f"{over} is {_faster(chosen, split)} ({rate(split.throughput.value)} samples/s)"
    return f"{over} loses {_loss(chosen, split)}{_cause(chosen, split, costs)}"


def _faster(chosen: Result, rival: Rival) -> str:
    """A rival that is faster than the chosen layout, which something else has decided for."""
    return f"{_whole(1 / (1 + rival.gain_of(chosen)) - 1)} faster{_in_turn(rival)}"


def _loss(chosen: Result, rival: Rival) -> str:
    loss = 1 - 1 / (1 + rival.gain_of(chosen))
    return f"{percent(loss, 0 if loss >= 0.02 else 1)}{_in_turn(rival)}"


def _cause(chosen: Result, rival: Rival, costs: Costs) -> str:
    """What covers a split's loss: keeping in step, or what a smaller share doesn't shorten; else what is known."""
    split = rival.candidate.layout
    apart = costs.apart_seconds(split)
    if chosen.layout.kind != "solo" or (apart is None and costs.sync_seconds is None):
        return ""
    batch, sync, share = split.global_batch, costs.sync_seconds or 0.0, max(split.shares)
    took, whole = (batch / one.throughput.value for one in (rival, chosen))
    kept = (apart or 0.0) - whole * share / batch
    if kept > sync and kept >= COVERS * (took - whole):
        all_of_it = f", against the {milliseconds(whole)} of all {batch}" if not _at(chosen, rival) else ""
        return f", because its longest part alone still takes {milliseconds(apart or 0.0)}{all_of_it}"
    if sync >= COVERS * (took - whole):
        return f", because keeping them in step costs {milliseconds(sync)} a step"
    parts = f", its longest part alone {milliseconds(apart)}" if apart else ""
    return f": its step takes {milliseconds(took)}{parts}; the rest isn't explained"


def _larger(chosen: Result, rivals: Sequence[Rival]) -> list[str]:
    """What a larger global batch would add, where the tolerance chose a smaller one."""
    larger = find_larger(chosen, rivals)
    if larger is None or larger.tie:
        return []
    figures = () if larger.paired else (chosen.throughput, larger.throughput)
    gain = write_gain(1 / (1 + larger.gain_of(chosen)) - 1, *figures)
    return [f"{larger.candidate.layout.global_batch} samples a step would add {gain}{_in_turn(larger)}"]


def _knobs(chosen: Result, rivals: Sequence[Rival]) -> list[str]:
    """What each knob gave or took, whichever way the chosen layout has it."""
    clauses = []
    for one in rivals:
        layout = one.candidate.layout
        if layout.knobs:
            clauses.append(
                f"{_name_knobs(layout)} {'makes no difference' if one.tie else f'loses {_loss(chosen, one)}'}"
            )
        elif chosen.layout.knobs and msgspec.structs.replace(chosen.layout, knobs=()) == layout:
            gain = one.gain_of(chosen)
            given = f"{percent(gain, 0 if gain >= 0.02 else 1)}{_in_turn(one)}"
            clauses.append(f"{_name_knobs(chosen.layout)} {'makes no difference' if one.tie else f'gives {given}'}")
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
