"""Build the result of a finished search: its verdict, its text and the plan file's content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from evener.devices.terms import write_limit
from evener.devices.types import Device
from evener.plan.file import (
    LARGER_BATCH,
    SOLO_PREFIX,
    Evidence,
    EvidenceKind,
    Fingerprint,
    Plan,
    PlanLayout,
    SearchSummary,
    Share,
    Throughput,
    with_current_schema,
)

from ..events import Finished
from ..journal import Header, JournalContents
from ..objectives import mean_power
from ..probes.launch_plan import MIXED
from ..search.report import SearchReport
from ..types import Facts, Interval, Layout, ModelState, OutOfMemory, Timed
from ..verdict import Verdict
from .judge import (
    SearchEnd,
    choose_single,
    compare_alone,
    find_ratios,
    judge,
    list_alone,
    padding_share,
)
from .rivals import ComparedLayout, compare_all, find_larger, name_layout, name_rivals
from .sentences import write_verdict

MIB = 1 << 20
# fraction by which the peak of a training may exceed the highest peak of its probes: PyTorch's
# allocator doesn't split a block if less than 1 MiB of it would remain, so equal steps take
# different amounts in different processes (0.0 to 0.16 % more on two H200s)
BLOCK_SLACK = 0.002


def build_outcome(record: JournalContents, report: SearchReport, end: SearchEnd) -> Finished:
    """Return the result of a finished search: plan, verdict and text."""
    header, facts, chosen = record.header, record.facts, report.chosen
    request, knobs = header.request, chosen.layout.knobs
    verdict = judge(record, report, end)
    written = write_verdict(verdict)
    plan = Plan(
        created=header.created,
        workload=header.workload,
        framework=header.framework,
        precision=MIXED if "mixed" in knobs else request.precision,
        xla=request.xla or "xla" in knobs,
        layout=_write_chosen(record, chosen.layout, report),
        throughput=_write_throughput(chosen.throughput, chosen.layout, report),
        evidence=_list_evidence(report, header.devices, facts),
        search=_summarize(record, end),
        fingerprint=_write_fingerprint(header, facts),
        warnings=written.warnings,
        link=verdict.link,
    )
    return Finished(
        with_current_schema(plan),
        report.results,
        written.text,
        end.interrupted,
        end.seconds,
        found=_as_read(verdict),
    )


def _as_read(verdict: Verdict) -> Verdict:
    """Return a verdict as it would be after writing it as JSON and reading it back."""
    # if a resumed run ends in the same way, the new end equals the recorded one and isn't written
    # again
    return msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict)


def _list_evidence(
    report: SearchReport, devices: Sequence[Device], facts: Facts
) -> tuple[Evidence, ...]:
    """Return the measurements that the plan file stores to justify the recommended layout."""
    rivals = compare_all(report.chosen, report.ranking, report.results, report.single)
    found = [*_list_rivals(report, rivals, len(devices)), *_list_alone(report, rivals, devices)]
    return tuple(
        _write_evidence(name, kind, one, devices, facts, report) for name, kind, one in found
    )


_Named = tuple[str, EvidenceKind, ComparedLayout]


def _list_rivals(
    report: SearchReport, rivals: Sequence[ComparedLayout], devices: int
) -> list[_Named]:
    """Return an entry for each compared layout, with its name and its kind in the plan file."""
    chosen = report.chosen
    names = name_rivals(chosen, rivals, devices)
    found: list[_Named] = [
        (name, _find_kind(rival, devices), rival) for name, rival in zip(names, rivals, strict=True)
    ]
    if report.single is not None:
        alone = _find_layout(rivals, report.single.layout) or compare_alone(chosen, report.single)
        name = name_layout(alone.candidate, devices)
        if name not in names:
            found.append((name, "best_device", alone))
    single = choose_single(report, rivals)
    if single is not None:
        # the verdict's device becomes the first "best_device"
        found = _put_first(single, found, devices)
    # the fastest layout with a larger batch, if it is faster than the plan, has a second entry
    with_room = [one for one in rivals if one.layout not in report.nearly_full]
    larger = find_larger(chosen, with_room)
    if larger is not None:
        found.append((LARGER_BATCH, "larger_batch", larger))
    return found


def _put_first(single: ComparedLayout, entries: Sequence[_Named], devices: int) -> list[_Named]:
    """Move `single` ahead of all other single devices in the list of entries.

    `single` is the device that the verdict compares the plan with. If it has no entry, one is
    added. Returns a new list.
    """
    known = [named for named in entries if named[2].layout == single.layout]
    name = name_layout(single.candidate, devices, is_second=True, with_shares=True)
    first = known or [(name, _find_kind(single, devices), single)]
    others = [named for named in entries if named[2].layout != single.layout]
    place = next((i for i, (_, kind, _) in enumerate(others) if kind == "best_device"), len(others))
    return [*others[:place], *first, *others[place:]]


def _list_alone(
    report: SearchReport, rivals: Sequence[ComparedLayout], devices: Sequence[Device]
) -> Iterator[_Named]:
    """Yield entries for each device on its own: at its fastest batch, and at the plan's batch.

    An entry at the plan's batch is left out if the device wasn't measured at that batch.
    """
    fastest = [one for one in report.solos if one is not None]
    for result in fastest:
        # a device that took part in the race has the result of the race
        alone = _find_layout(rivals, result.layout) or compare_alone(report.chosen, result)
        yield f"{SOLO_PREFIX}{_label(result.layout, devices)}", "one_device", alone
    shown = [one.layout for one in fastest]
    for at_batch in list_alone(report):
        layout = at_batch.layout
        if layout not in shown:
            name = f"{SOLO_PREFIX}{_label(layout, devices)} at {layout.global_batch}"
            yield name, "one_device", _find_layout(rivals, layout) or at_batch


def _find_layout(rivals: Sequence[ComparedLayout], layout: Layout) -> ComparedLayout | None:
    return next((rival for rival in rivals if rival.layout == layout), None)


def _label(layout: Layout, devices: Sequence[Device]) -> str:
    (position,) = layout.active
    return devices[position].label


def _find_kind(compared: ComparedLayout, devices: int) -> EvidenceKind:
    """Return what kind of evidence a compared layout is in the plan file, such as "best_device"."""
    traits = compared.layout.traits
    if compared.family is None or traits.sharded or not traits.by_shares:
        return "other"
    if traits.alone:
        return "best_device"
    if not compared.family.equal_shares:
        return "other_shares"
    return "equal_shares" if len(compared.layout.active) == devices else "other"


def _write_evidence(
    name: str,
    kind: EvidenceKind,
    compared: ComparedLayout,
    devices: Sequence[Device],
    facts: Facts,
    report: SearchReport,
) -> Evidence:
    """Return the measurement of a compared layout in the form of the plan file."""
    layout = compared.layout
    contended = layout.traits.alone and len(layout.shares) > 1 and layout not in report.others_idle
    return Evidence(
        name,
        _write_layout(layout, devices, facts, report),
        _write_throughput(compared.throughput, layout, report),
        kind,
        compared.tie,
        compared.gain if compared.compared else None,
        compared.paired,
        contended,
    )


def _summarize(record: JournalContents, end: SearchEnd) -> SearchSummary:
    return SearchSummary(
        probes=len(record.seen),
        out_of_memory=sum(
            isinstance(observation, OutOfMemory) for observation in record.observations
        ),
        seconds=round(end.seconds, 3),
        seed=record.header.request.seed,
        why_stopped=end.why_stopped,
    )


def _write_chosen(record: JournalContents, layout: Layout, report: SearchReport) -> PlanLayout:
    """Return the recommended layout in the form of the plan file.

    It includes the compute time of each device as a function of the rows, and its expected memory.
    """
    devices, state = record.header.devices, record.facts.state
    written = _write_layout(layout, devices, record.facts, report)
    ran = [observation for observation in record.observations if isinstance(observation, Timed)]
    ran = [one for one in ran if one.probe.layout == layout]
    curves = report.curves or (((), 0),) * len(devices)
    shares = []
    for i, share in enumerate(written.share):
        curve, most = curves[i]
        held, peak = _predict_memory(layout, i, ran, state)
        shares.append(
            msgspec.structs.replace(share, curve=curve, most=most, held_bytes=held, peak_bytes=peak)
        )
    return msgspec.structs.replace(written, share=tuple(shares))


def _write_layout(
    layout: Layout, devices: Sequence[Device], facts: Facts, report: SearchReport
) -> PlanLayout:
    """Return a layout in the form of the plan file."""
    batch, costs = layout.global_batch, layout.costs
    ratios = find_ratios(layout, report.mean_length)
    shares = tuple(
        Share(
            device.id,
            device.index,
            device.name,
            layout.shares[i],
            ratios[i],
            write_limit(device.limit),
            layout.pass_rows[i],
            costs[i] if costs else None,
            layout.tokens[i] if layout.tokens else 0,
            device.host,
            state=layout.state[i] if layout.state else 0.0,
        )
        for i, device in enumerate(devices)
    )
    engine = facts.engine if layout.traits.together else ""
    return PlanLayout(layout.kind, batch, shares, engine, layout.processes, layout.placement)


def _predict_memory(
    layout: Layout, position: int, measurements: Sequence[Timed], state: ModelState | None
) -> tuple[int, int]:
    """Return the bytes that the model takes on a device in sharded training, and the peak bytes.

    The first value is the device's part of the state and the weights that are gathered at the same
    time. The peak is the highest that was measured, plus a margin. Both are 0 for layouts without
    shards.
    """
    # the margin of the peak is BLOCK_SLACK
    if not (layout.traits.sharded and state and position in layout.active):
        return 0, 0
    held = (
        round((layout.state[position] if layout.state else 0.0) * state.state_bytes)
        + state.gathered_bytes
    )
    most = max((timed.memory_bytes[position] or 0 for timed in measurements), default=0)
    return held, round(most * (1 + BLOCK_SLACK))


def _write_throughput(interval: Interval, layout: Layout, report: SearchReport) -> Throughput:
    """Return a layout's throughput in the form of the plan file.

    It has the samples/s and, where they are known, the tokens/s, the padding and the power.
    """
    low, high = max(0.0, min(interval.low, interval.value)), max(interval.high, interval.value)
    turns = report.turns_of(layout)
    tokens = (interval.value * report.mean_length, padding_share(turns))
    power = mean_power(turns)
    if power is None or not power.watts:
        return Throughput(interval.value, low, high, *tokens)
    return Throughput(
        interval.value,
        low,
        high,
        *tokens,
        interval.value / power.watts,
        power.active_watts,
        power.idle_watts,
    )


def _write_fingerprint(header: Header, facts: Facts) -> Fingerprint:
    def describe(device: Device) -> str:
        size = device.memory_bytes
        return device.name if size is None else f"{device.name} ({size // MIB} MiB)"

    versions = {**facts.versions, "evener": header.evener}
    return Fingerprint(
        tuple(map(describe, header.devices)), facts.driver, versions, facts.workload_digest
    )
