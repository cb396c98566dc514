"""The data for the report of a run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer.events import Finished
from evener.balancer.journal import Header, JournalContents, ObservationEntry
from evener.balancer.result.learning import Point
from evener.balancer.result.sentences import VerdictText, write_next_steps, write_verdict
from evener.balancer.session_state import RatedLayout, plan_rate, plan_rivals
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Timed
from evener.devices.terms import write_limit
from evener.devices.types import Device
from evener.plan.file import Evidence, Plan, PlanLayout
from evener.printable import plain

from .summaries import format_device_share

THE_PLAN = "the plan"  # the plan's name in the ranking


class MeasuredCurve(msgspec.Struct, frozen=True):
    """The speed of one device that trains alone, at several batch sizes.

    - `points`: (batch size, samples/s) of each measurement, sorted by batch size.
    - `failed_batch`: the smallest batch size that ran out of memory, or None.
    """

    label: str
    points: tuple[tuple[int, float], ...]
    failed_batch: int | None


class ReportData(msgspec.Struct, frozen=True):
    """The contents of a run's report."""

    header: Header
    labels: tuple[str, ...]
    plan: Plan
    verdict: str
    curves: tuple[MeasuredCurve, ...]
    ranking: tuple[Evidence, ...]  # the plan and its rivals, the fastest first
    seen: tuple[ObservationEntry, ...]
    rivals: tuple[RatedLayout, ...]  # the plan, then the layouts that it is compared with
    steps: tuple[str, ...]  # the next steps, with their commands
    written: VerdictText | None = None  # the verdict as sentences; None for a run without a verdict
    frontier: Sequence[Point] = ()  # (batch, samples/s, worth); empty if the noise scale is unknown


def read_report(name: str) -> ReportData:
    """Read the run called `name` and its plan.

    Raises RequestError if the run can't be found or read, or has no plan.
    """
    found = runs.load_run(name)
    header = found.header
    plan = found.require_plan()
    labels = tuple(device.label for device in header.devices)
    compared = [
        each for each in plan_rivals(plan, labels) if each.kind not in ("larger_batch", "sum")
    ]
    end = found.end
    return ReportData(
        header=header,
        labels=tuple(_label(device) for device in header.devices),
        plan=plan,
        verdict=found.end.verdict if found.end else "",
        curves=tuple(_curve(found.record, i) for i in range(len(header.devices))),
        ranking=_rank(plan),
        seen=found.record.seen,
        rivals=(plan_rate(plan, labels), *compared),
        steps=_find_steps(header.run, end),
        written=write_verdict(end.found) if end is not None and end.found is not None else None,
        frontier=_find_frontier(found.end),
    )


def _find_steps(run: str, last_event: Finished | None) -> tuple[str, ...]:
    """Return the commands that the user can run next."""
    if last_event is None:
        return (f"to go on: evener balance --resume {run}",)
    return write_next_steps(run, last_event, "", True)


def _find_frontier(end: Finished | None) -> Sequence[Point]:
    learning = end.found.learning if end is not None and end.found is not None else None
    return learning.frontier if learning is not None else ()


def _label(device: Device) -> str:
    """Return a device's label, followed by "@" and its compute or memory limit if it has one."""
    limit = plain(write_limit(device.limit), 32)
    return f"{device.label} @{limit}" if limit else device.label


def _curve(record: JournalContents, position: int) -> MeasuredCurve:
    points: dict[int, float] = {}
    failed: list[int] = []
    for entry in record.seen:
        layout = entry.seen.probe.layout
        if not layout.traits.alone or layout.active != (position,) or layout.knobs or layout.length:
            continue
        if isinstance(entry.seen, Timed):
            points[layout.global_batch] = max(
                entry.seen.samples_per_second, points.get(layout.global_batch, 0.0)
            )
        elif isinstance(entry.seen, OutOfMemory):
            failed.append(layout.global_batch)
    label = _label(record.header.devices[position])
    return MeasuredCurve(label, tuple(sorted(points.items())), min(failed, default=None))


def _rank(plan: Plan) -> tuple[Evidence, ...]:
    """Return the plan and the layouts that it was compared with, fastest first."""
    # Three kinds of rivals are left out: layouts on one device, which the chart of curves shows;
    # larger batches; and the plan's own layout under another name.
    rivals = []
    for rival in plan.evidence:
        is_own = rival.layout.batches == plan.layout.batches and rival.gain is None
        if not is_own and rival.kind not in ("one_device", "larger_batch"):
            rivals.append(msgspec.structs.replace(rival, name=plain(rival.name, 40)))
    bars = [Evidence(THE_PLAN, plan.layout, plan.throughput), *rivals]
    return tuple(sorted(bars, key=lambda bar: bar.throughput.samples_per_second, reverse=True))


def format_layout(layout: PlanLayout, header: Header) -> str:
    """Return the devices of a layout with their shares, such as "GPU:0[640] + GPU:1[384]"."""
    parts = zip(header.devices, layout.share, strict=True)
    where = " + ".join(
        f"{each.label}[{format_device_share(share)}]" for each, share in parts if share.takes_part
    )
    return f"{layout.processes} x {where}" if layout.processes > 1 else where
