"""The contents of a run's report, read from its journal: curves, shares, ranking, timeline. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer import journal
from evener.balancer.journal import Record
from evener.balancer.number_format import write_share
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Timed
from evener.devices.limits import write_limit
from evener.devices.types import Device
from evener.plan.file import LARGER_BATCH, SOLO_PREFIX, Plan, PlanLayout, Throughput

from ..text.formatting import plain
from ..text.progress import layout_words, outcome_name, outcome_words


class SoloCurve(msgspec.Struct, frozen=True):
    """A device alone: measured (batch, samples/s), by batch, and the smallest batch that did not fit."""

    label: str
    points: tuple[tuple[int, float], ...]
    wall_batch: int | None


class RankedLayout(msgspec.Struct, frozen=True):
    """A layout of the ranking: its devices, and its samples/s with the 95 % interval."""

    name: str
    where: str
    throughput: Throughput
    step_seconds: float  # the latency of one optimizer step
    chosen: bool


class ProbeSpan(msgspec.Struct, frozen=True):
    """A probe on the session's clock, in seconds."""

    start: float
    stop: float
    stage: str
    outcome: str  # timed | out of memory | failed
    lanes: tuple[int, ...]  # positions of the devices that took part
    layout: str
    result: str  # samples/s with their error and doubts, or what went wrong


class RunReport(msgspec.Struct, frozen=True):
    """A run, ready to be drawn."""

    run: str
    created: str
    workload: str
    labels: tuple[str, ...]
    names: tuple[str, ...]
    plan: Plan
    verdict: str
    curves: tuple[SoloCurve, ...]
    ranking: tuple[RankedLayout, ...]  # fastest first
    spans: tuple[ProbeSpan, ...]


def read_report(name: str) -> RunReport:
    """The report of a run by its id, the beginning of one, or `last`; RequestError if it has no plan.

    An unfinished run has the plan of what it measured, as in an export.
    """
    found = runs.load_run(name)
    header, run, plan = found.header, found.header.run, found.require_plan()
    record = journal.read(runs.journal_path(run))
    return RunReport(
        run=run,
        created=header.created,
        workload=header.workload,
        labels=tuple(_label(device) for device in header.devices),
        names=tuple(plain(device.name, 60) for device in header.devices),
        plan=plan,
        verdict=plain(found.verdict, 1000),
        curves=tuple(_curve(record, i) for i in range(len(header.devices))),
        ranking=_ranking(plan, [device.label for device in header.devices]),
        spans=_spans(record),
    )


def _label(device: Device) -> str:
    """A device's label with its limit, as in the plan's table."""
    return f"{device.label} @{limit}" if (limit := plain(write_limit(device.limit), 32)) else device.label


def _curve(record: Record, position: int) -> SoloCurve:
    points: dict[int, float] = {}
    failed: list[int] = []
    for entry in record.seen:
        layout = entry.seen.probe.layout
        if not layout.traits.alone or layout.active != (position,) or layout.knobs or layout.length:
            continue
        if isinstance(entry.seen, Timed):
            points[layout.global_batch] = max(entry.seen.samples_per_second, points.get(layout.global_batch, 0.0))
        elif isinstance(entry.seen, OutOfMemory):
            failed.append(layout.global_batch)
    label = _label(record.header.devices[position])
    return SoloCurve(label, tuple(sorted(points.items())), min(failed, default=None))


def _ranking(plan: Plan, labels: Sequence[str]) -> tuple[RankedLayout, ...]:
    """The plan and its rivals, without the solos, which are in the curves, and without a second name of one of them."""
    bars = [_bar("the plan", plan.layout, plan.throughput, labels)]
    own = [rival for rival in plan.evidence if rival.layout.batches == plan.layout.batches and rival.gain is None]
    rivals = [
        rival
        for rival in plan.evidence
        if not rival.name.startswith(SOLO_PREFIX) and rival.name != LARGER_BATCH and rival not in own
    ]
    bars += [_bar(plain(rival.name, 40), rival.layout, rival.throughput, labels) for rival in rivals]
    return tuple(sorted(bars, key=lambda bar: bar.throughput.samples_per_second, reverse=True))


def _bar(name: str, layout: PlanLayout, throughput: Throughput, labels: Sequence[str]) -> RankedLayout:
    parts = zip(labels, layout.share, strict=True)
    where = " + ".join(f"{label}[{write_share(share.batch, share.micro)}]" for label, share in parts if share.batch)
    many = layout.processes
    rate = throughput.samples_per_second
    step = layout.global_batch * many / rate if rate else 0.0
    return RankedLayout(name, f"{many} x {where}" if many > 1 else where, throughput, step, name == "the plan")


def _spans(record: Record) -> tuple[ProbeSpan, ...]:
    labels = [device.label for device in record.header.devices]
    spans = []
    for entry in record.seen:
        seen, layout = entry.seen, entry.seen.probe.layout
        start = max(0.0, entry.at_seconds - seen.elapsed_seconds)
        words = (plain(layout_words(layout, labels)), plain(outcome_words(seen, labels)))
        spans.append(ProbeSpan(start, entry.at_seconds, seen.probe.stage, outcome_name(seen), layout.active, *words))
    return tuple(spans)
