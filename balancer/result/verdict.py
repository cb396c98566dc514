"""The verdict of a search, what to do and why, and the next steps: findings whose sentences follow
each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import msgspec

from evener.devices.registry import is_simulated
from evener.devices.types import Device
from evener.plan.file import Plan
from evener.shares.curves import Cost

from ..families import FAMILIES, is_even
from ..number_format import relative_error
from ..search.search import Search
from ..types import Finding, Interval, Layout, Result, Timed
from .rivals import (
    Rival,
    describe_rivals,
    find_larger,
    find_own_family,
    is_certain,
    is_rough,
    list_shares,
    printed_gain,
)

MOST_TIES = 3  # named in the sentence
USUAL_ROWS = 8  # of a pass
COVERS = 0.8  # of a loss: what is named as its cause


def find_verdict(
    search: Search, chosen: Result, rivals: Sequence[Rival], devices: Sequence[Device]
) -> list[Finding]:
    """The parts of the verdict: what to do and why, with the figures."""
    labels = [device.label for device in devices]
    advice = _advise(chosen, labels, search.mean_length)
    if not is_certain(chosen.throughput):
        return [advice, Finding("unknown.figure", {"error": _error(chosen.throughput)})]
    compared = [one for one in rivals if one.compared]
    return [
        advice,
        _describe_figure(search, chosen),
        *_find_gains(chosen, compared, labels),
        *_find_split_losses(search, chosen, rivals, labels),
        *_find_other_losses(chosen, compared),
        *_find_larger(chosen, compared),
        *_find_knobs(chosen, compared),
        *_find_ties(chosen, rivals, len(labels)),
        *_find_left_out_hosts(search, chosen, devices),
    ]


def waiting_share(seen: Sequence[Timed]) -> float | None:
    """The part of a step in which the busiest device waits for others or for data; None where that
    isn't measured.
    """
    own = _own_seconds(seen)
    if own is None or any(one.step_seconds <= 0 for one in seen):
        return None
    return fmean(
        max(0.0, 1 - max(each) / one.step_seconds) for each, one in zip(own, seen, strict=True)
    )


def padding_share(seen: Sequence[Timed]) -> float:
    """The part of the computed tokens that is padding."""
    return fmean([one.padding for one in seen] or [0.0])


def work_gap(seen: Sequence[Timed]) -> float | None:
    """The difference between the devices' own work, as a part of the longest; None if it wasn't
    measured.
    """
    own = _own_seconds(seen)
    if own is None or any(max(each) <= 0 for each in own):
        return None
    return fmean(1 - min(each) / max(each) for each in own)


def _own_seconds(seen: Sequence[Timed]) -> list[list[float]] | None:
    """The own work of each device that computes, by measurement; None where one of them is
    unknown.
    """
    own = [[one.device_seconds[i] or 0.0 for i in one.probe.layout.active] for one in seen]
    missing = any(one.device_seconds[i] is None for one in seen for i in one.probe.layout.active)
    return None if missing or not own else own


def cost_ratios(costs: Sequence[Cost | None], row_tokens: float) -> tuple[float, ...]:
    """Each device's part of the cost of a batch, when all finish at the same time; of passes of a
    few usual rows.
    """
    speeds = [1 / cost.seconds(USUAL_ROWS, round(row_tokens)) if cost else 0.0 for cost in costs]
    return tuple(speed / sum(speeds) for speed in speeds)


def _advise(chosen: Result, labels: Sequence[str], row_tokens: float) -> Finding:
    """The layout to take."""
    layout = chosen.layout
    parts = [share / layout.global_batch for share in layout.shares]
    values = {
        "devices": [labels[i] for i in layout.active],
        "samples": layout.global_batch,
        "shares": list_shares(layout),
        "states": [part for part in layout.state if part],
        "ratios": [
            part
            for part in (cost_ratios(layout.costs, row_tokens) if layout.costs else parts)
            if part
        ],
        "trainings": layout.processes,
        "mode": layout.placement,
        "placement": layout.placement,
        "alone": len(labels) > 1,
        "knobs": list(layout.knobs),
    }
    return Finding(
        "advice.cost" if layout.costs else f"advice.{find_own_family(layout).name}", values
    )


def _describe_figure(search: Search, chosen: Result) -> Finding:
    """Samples/s, or tokens/s with what belongs to them."""
    layout, speed = chosen.layout, chosen.throughput.value
    figure = {"samples_per_second": speed, "error": _error(chosen.throughput)}
    if not search.mean_length:
        return Finding("figure.samples", figure)
    turns = search.turns(layout)
    gap = work_gap(turns) if len(layout.active) > 1 else None
    more = {
        "tokens_per_second": speed * search.mean_length,
        "padding": padding_share(turns),
        "gap": gap,
    }
    return Finding("figure.tokens", figure | more)


def _find_gains(
    chosen: Result, rivals: Sequence[Rival], labels: Sequence[str]
) -> Iterator[Finding]:
    """The gains of a layout over several devices, or of several trainings, over an even split and
    one device alone.
    """
    layout = chosen.layout
    if layout.traits.together and not is_even(layout):
        evens = [one for one in rivals if one.family and one.family.equal_shares]
        even = next(
            (one for one in evens if len(one.candidate.layout.active) == len(layout.active)), None
        )
        if even:
            yield _compare(chosen, even, "even_by_rows" if layout.costs else "even")
    single = next((one for one in rivals if one.family and one.candidate.layout.traits.alone), None)
    if layout.traits.alone or single is None:
        return
    (position,) = single.candidate.layout.active
    yield _compare(chosen, single, labels[position])
    if layout.traits.side_by_side:  # trainings side by side lose each
        own = layout.global_batch * layout.processes / chosen.throughput.value
        times = own / (single.candidate.layout.global_batch / single.throughput.value)
        yield Finding("each.slower", {"times": times})


def _compare(chosen: Result, rival: Rival, over: str) -> Finding:
    """The gain of the chosen layout over a rival, or a tie."""
    values = {"over": over, **_comparison(chosen, rival)}
    if rival.tie:
        return Finding("gain.tie", values)
    gain = rival.gain_of(chosen)
    size = {"gain": gain} if gain >= 0 else {"loss": -gain}
    return Finding("gain.faster" if gain >= 0 else "gain.slower", size | values)


def _comparison(chosen: Result, rival: Rival) -> dict[str, Any]:
    """The rival's samples a step if they differ from the chosen layout's, and whether both were
    measured in turn.
    """
    batch = rival.candidate.layout.global_batch
    return {"batch": batch if batch != chosen.layout.global_batch else None, "paired": rival.paired}


def _lose_or_win(group: str, chosen: Result, rival: Rival, **values: Any) -> Finding:
    """The loss of a rival; its gain if it is faster, as something other than speed has decided."""
    values |= _comparison(chosen, rival)
    loss = 1 - 1 / (1 + rival.gain_of(chosen))
    if rival.gain < 0:
        return Finding(f"{group}.faster", {"gain": -loss, **values})
    return Finding(f"{group}.loses", {"loss": loss, **values})


def _find_split_losses(
    search: Search, chosen: Result, rivals: Sequence[Rival], labels: Sequence[str]
) -> Iterator[Finding]:
    """The best split's loss and its cause, if another layout is chosen; or the reason why the loss
    is unknown.
    """
    if chosen.layout.traits.together or len(labels) < 2:
        return
    splits = [one for one in rivals if one.family and one.candidate.layout.traits.together]
    split = next((one for one in splits if one.compared), None)
    if split:
        layout, speed = split.candidate.layout, split.throughput.value
        values = {"devices": [labels[i] for i in layout.active], "samples_per_second": speed}
        if split.tie:
            yield Finding("split.tie", values | _comparison(chosen, split))
            return
        said = _lose_or_win("split", chosen, split, **values)
        yield said
        if said.code == "split.loses" and (cause := _find_cause(search, chosen, split)):
            yield cause
    elif any(not is_certain(one.throughput) for one in splits):
        yield Finding("split.unknown")
    elif chosen.layout.traits.alone:
        yield Finding("split.unmeasured", {"batch": chosen.layout.global_batch if splits else None})


def _find_cause(search: Search, chosen: Result, rival: Rival) -> Finding | None:
    """The cause of a split's loss: keeping in step, or time that a smaller share doesn't shorten;
    else known times.
    """
    split = rival.candidate.layout
    apart, known = search.devices.apart_seconds(split), search.devices.sync_seconds
    if not chosen.layout.traits.alone or (apart is None and known is None):
        return None
    batch, sync, share = split.global_batch, known or 0.0, max(split.shares)
    took, whole = (batch / one.throughput.value for one in (rival, chosen))
    kept = (apart or 0.0) - whole * share / batch
    if kept > sync and kept >= COVERS * (took - whole):
        same = batch == chosen.layout.global_batch
        return Finding(
            "cause.longest_part",
            {"longest_seconds": apart, "whole": [whole, batch] if same else None},
        )
    if sync >= COVERS * (took - whole):
        return Finding("cause.sync", {"sync_seconds": sync})
    return Finding("cause.unexplained", {"step_seconds": took, "longest_seconds": apart})


def _find_other_losses(chosen: Result, rivals: Sequence[Rival]) -> Iterator[Finding]:
    """The losses of packs and placements."""
    for family in FAMILIES.values():
        rival = next((one for one in rivals if one.family is family), None)
        if (
            family.subjected
            and chosen.layout.kind != family.kind
            and rival is not None
            and not rival.tie
        ):
            layout = rival.candidate.layout
            yield _lose_or_win(
                family.name, chosen, rival, trainings=layout.processes, placement=layout.placement
            )


def _find_larger(chosen: Result, rivals: Sequence[Rival]) -> Iterator[Finding]:
    """The gain of a larger global batch, if the tolerance chose a smaller one."""
    larger = find_larger(chosen, rivals)
    if larger is not None and not larger.tie:
        about = not larger.paired and is_rough(chosen.throughput, larger.throughput)
        gain = 1 / (1 + larger.gain_of(chosen)) - 1
        values = {
            "samples": larger.candidate.layout.global_batch,
            "gain": gain,
            "paired": larger.paired,
        }
        yield Finding("larger.adds_about" if about else "larger.adds", values)


def _find_knobs(chosen: Result, rivals: Sequence[Rival]) -> Iterator[Finding]:
    """The gain or loss of each knob, whether the chosen layout has it or not."""
    for one in rivals:
        layout, gain = one.candidate.layout, one.gain_of(chosen)
        if layout.knobs:
            code, values = (
                "knob.loses",
                {"knobs": list(layout.knobs), "loss": 1 - 1 / (1 + gain), "paired": one.paired},
            )
        elif chosen.layout.knobs and msgspec.structs.replace(chosen.layout, knobs=()) == layout:
            code, values = (
                "knob.gives",
                {"knobs": list(chosen.layout.knobs), "gain": gain, "paired": one.paired},
            )
        else:
            continue
        yield Finding("knob.same" if one.tie else code, values)


def _find_ties(chosen: Result, rivals: Sequence[Rival], devices: int) -> Iterator[Finding]:
    """Packs and placements that tie, and those of which too little is certain."""
    described = describe_rivals(chosen, rivals, devices)
    tied = [
        (layout, one)
        for layout, one in zip(described, rivals, strict=True)
        if one.tie and one.family and not one.candidate.layout.traits.by_shares
    ]
    for code, unclear in (("tie.certain", False), ("tie.unclear", True)):
        found = [layout for layout, one in tied if one.unclear == unclear][:MOST_TIES]
        if found:
            yield Finding(code, {"layouts": found})


def _find_left_out_hosts(
    search: Search, chosen: Result, devices: Sequence[Device]
) -> Iterator[Finding]:
    """The hosts that a chosen split leaves out and why, where a split over more of them was
    measured as slower.
    """

    def list_hosts(layout: Layout) -> list[str]:
        return list(dict.fromkeys(devices[i].host for i in layout.active))

    own = list_hosts(chosen.layout)
    wider = [one for one in search.results() if len(list_hosts(one.layout)) > len(own)]
    fastest = max(wider, key=lambda one: one.throughput.value, default=None)
    if (
        not chosen.layout.traits.together
        or fastest is None
        or fastest.throughput.value >= chosen.throughput.value
    ):
        return
    there, batch, speed = (
        list_hosts(fastest.layout),
        fastest.layout.global_batch,
        fastest.throughput.value,
    )
    exchange, loss = search.devices.exchange, -printed_gain(speed, chosen.throughput.value)
    seconds = exchange[len(there)][-1] - exchange[1][-1]  # of all devices, beyond that on one host
    values = {
        "hosts": [host for host in there if host not in own],
        "most": len(there),
        "batch": batch if batch != chosen.layout.global_batch else None,
        "samples_per_second": speed,
        "loss": loss,
        "network_seconds": seconds if seconds >= COVERS * loss * batch / speed else None,
    }
    yield Finding("hosts.left_out", values)


def _error(figure: Interval) -> float:
    return relative_error(figure.value, figure.low, figure.high)


def find_next_steps(
    run: str, plan: Plan, path: str, interrupted: bool, measured: bool
) -> list[Finding]:
    """The steps after a search; `path` is the plan's file, if it was written. `measured`: this
    session measured any.
    """
    write = (
        Finding("next.written", {"path": path}) if path else Finding("next.export", {"run": run})
    )
    steps = [write, *find_training_step(plan, path or "plan.toml")]
    if interrupted:
        return [*steps, Finding("next.resume", {"run": run})]
    return steps if measured else [*steps, Finding("next.extend", {"run": run})]


def find_training_step(plan: Plan, path: str) -> list[Finding]:
    """The command that trains by a plan in this file; none without a script to launch."""
    active, (script, _, _) = plan.layout.active, plan.workload.rpartition(":")
    simulated = is_simulated(share.device for share in active)
    if not plan.layout.traits.by_shares or simulated or not script:
        return []
    hosts = [host for host in dict.fromkeys(share.host for share in active) if host]
    return [Finding("next.train", {"command": ["evener", "launch", path, script], "hosts": hosts})]
