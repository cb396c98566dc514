"""What a report of a run shows, read from its journal: points, walls, shares, the ranking, the timeline. No drawing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer.store import journal, runs
from evener.balancer.store.journal import Record
from evener.balancer.types import OutOfMemory, Timed
from evener.errors import RequestError
from evener.plan import SOLO_PREFIX, Plan, PlanLayout, Throughput
from evener.tui.text.formatting import plain


class DeviceCurve(msgspec.Struct, frozen=True):
    """One device alone: (batch, samples/s) as measured, rising in batch, and the smallest batch that did not fit."""

    label: str
    points: tuple[tuple[int, float], ...]
    wall_batch: int | None


class Bar(msgspec.Struct, frozen=True):
    """One layout of the ranking: where it lies, and its samples/s with their 95 % interval."""

    name: str
    where: str
    throughput: Throughput
    step_seconds: float  # the latency of one optimizer step
    chosen: bool


class Span(msgspec.Struct, frozen=True):
    """One probe on the session's clock, in seconds."""

    start: float
    stop: float
    stage: str
    outcome: str  # timed | out of memory | failed
    lanes: tuple[int, ...]  # positions of the devices that took part


class Report(msgspec.Struct, frozen=True):
    """A run, ready to be drawn."""

    run: str
    created: str
    workload: str
    labels: tuple[str, ...]
    names: tuple[str, ...]
    plan: Plan
    verdict: str
    curves: tuple[DeviceCurve, ...]
    ranking: tuple[Bar, ...]  # fastest first
    spans: tuple[Span, ...]


def read_report(name: str) -> Report:
    """The report of a run by its id, the beginning of one, or `last`; RequestError if it has no plan.

    A run that was cut off has the plan of what it had measured, as when it is exported.
    """
    found = runs.load_run(name)
    header, run = found.header, found.header.run
    if found.plan is None:
        raise RequestError(
            f"The run {run} has no plan yet.", f"Finish it with evener balance --resume {run}, or choose another run."
        )
    record = journal.read(runs.journal_path(run))
    return Report(
        run=run,
        created=header.created,
        workload=header.workload,
        labels=tuple(device.label for device in header.devices),
        names=tuple(plain(device.name, 60) for device in header.devices),
        plan=found.plan,
        verdict=plain(found.verdict, 1000),
        curves=tuple(_curve(record, i) for i in range(len(header.devices))),
        ranking=_ranking(found.plan, [device.label for device in header.devices]),
        spans=_spans(record),
    )


def _curve(record: Record, position: int) -> DeviceCurve:
    points: dict[int, float] = {}
    failed: list[int] = []
    for entry in record.seen:
        layout = entry.seen.probe.layout
        if layout.kind != "solo" or layout.active != (position,) or layout.knobs:
            continue
        if isinstance(entry.seen, Timed):
            points[layout.global_batch] = max(entry.seen.samples_per_second, points.get(layout.global_batch, 0.0))
        elif isinstance(entry.seen, OutOfMemory):
            failed.append(layout.global_batch)
    label = record.header.devices[position].label
    return DeviceCurve(label, tuple(sorted(points.items())), min(failed, default=None))


def _ranking(plan: Plan, labels: Sequence[str]) -> tuple[Bar, ...]:
    """The plan and its rivals; each device alone is in the curves."""
    bars = [_bar("the plan", plan.layout, plan.throughput, labels)]
    rivals = [rival for rival in plan.evidence if not rival.name.startswith(SOLO_PREFIX)]
    bars += [_bar(plain(rival.name, 40), rival.layout, rival.throughput, labels) for rival in rivals]
    return tuple(sorted(bars, key=lambda bar: bar.throughput.samples_per_second, reverse=True))


def _bar(name: str, layout: PlanLayout, throughput: Throughput, labels: Sequence[str]) -> Bar:
    parts = zip(labels, layout.share, strict=True)
    where = " + ".join(f"{label}[{share.batch}]" for label, share in parts if share.batch)
    many = layout.processes
    rate = throughput.samples_per_second
    step = layout.global_batch * many / rate if rate else 0.0
    return Bar(name, f"{many} x {where}" if many > 1 else where, throughput, step, name == "the plan")


def _spans(record: Record) -> tuple[Span, ...]:
    spans = []
    for entry in record.seen:
        seen = entry.seen
        outcome = "timed" if isinstance(seen, Timed) else "out of memory" if isinstance(seen, OutOfMemory) else "failed"
        start = max(0.0, entry.at_seconds - seen.elapsed_seconds)
        spans.append(Span(start, entry.at_seconds, seen.probe.stage, outcome, seen.probe.layout.active))
    return tuple(spans)
