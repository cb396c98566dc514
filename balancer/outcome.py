"""What a session ends with: the plan, its evidence and its verdict, from what was measured and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from balancer import verdict as words
from balancer.journal import Header
from balancer.probes.prober import Facts
from balancer.records import Interval, Layout, Observation, OutOfMemory, Result
from devices.base import Device
from devices.limits import write_limit
from evener import plan as plans
from evener.plan import Evidence, Fingerprint, Plan, SearchSummary, Share, Throughput

MIB = 1 << 20


class Outcome(msgspec.Struct, frozen=True):
    """A plan and the sentence that goes with it."""

    plan: Plan
    verdict: str


class Findings(msgspec.Struct, frozen=True):
    """All that was found out, whether just now or replayed from a journal."""

    header: Header
    seen: tuple[Observation, ...]
    results: tuple[Result, ...]  # every measured layout
    chosen: Result
    facts: Facts
    sync_seconds: float | None
    why_stopped: str
    seconds: float  # of the session's clock


def plan_of(found: Findings, notes: Sequence[str] = ()) -> Outcome:
    """The chosen layout with the evidence for it; the same findings give the same plan."""
    header, request = found.header, found.header.request
    chosen = found.chosen
    sentence = words.verdict(chosen, found.results, header.devices, found.sync_seconds)
    doubts = words.warnings(found.seen, chosen.layout, header.devices)
    plan = Plan(
        created=header.created,
        workload=header.workload,
        framework=header.framework,
        precision=request.precision,
        xla=request.xla,
        layout=layout_of_plan(chosen.layout, header.devices, found.facts.engine),
        throughput=_throughput(chosen.throughput),
        evidence=_evidence(found, chosen),
        search=SearchSummary(
            probes=len(found.seen),
            out_of_memory=sum(isinstance(seen, OutOfMemory) for seen in found.seen),
            seconds=round(found.seconds, 3),
            seed=request.seed,
            why_stopped=found.why_stopped,
        ),
        fingerprint=_fingerprint(header, found.facts),
        warnings=(*notes, *doubts, *words.left_out(found.seen, header.devices)),
    )
    return Outcome(plan, sentence)


def layout_of_plan(layout: Layout, devices: Sequence[Device], engine: str) -> plans.Layout:
    """The layout in the plan's own words: a share for each device of the request, in its order."""
    templates = tuple(
        Share(device.id, device.index, device.name, 0, 0.0, write_limit(device.limit)) for device in devices
    )
    return plans.make_layout(
        layout.kind,
        templates,
        layout.shares,
        engine=engine if layout.kind == "split" else "",
        processes=layout.processes,
        placement=layout.placement,
    )


def _evidence(found: Findings, chosen: Result) -> tuple[Evidence, ...]:
    """The even split, the best single device, and each device alone at its fastest."""
    solos = [result for result in found.results if result.layout.kind == "solo"]
    named: list[tuple[str, Result | None]] = [
        ("even split", _even(found, chosen)),
        ("best single device", _fastest(solos)),
    ]
    for i, device in enumerate(found.header.devices):
        named.append((f"solo {device.label}", _fastest([r for r in solos if r.layout.active == (i,)])))
    return tuple(
        Evidence(
            name,
            layout_of_plan(result.layout, found.header.devices, found.facts.engine),
            _throughput(result.throughput),
        )
        for name, result in named
        if result is not None
    )


def _even(found: Findings, chosen: Result) -> Result | None:
    """The even split of the chosen global batch if it was measured, else the fastest even split."""
    evens = [result for result in found.results if words.is_even(result.layout)]
    same = [result for result in evens if result.layout.global_batch == chosen.layout.global_batch]
    return _fastest(same or evens)


def _fastest(results: Sequence[Result]) -> Result | None:
    return max(results, key=lambda result: result.throughput.value, default=None)


def _throughput(figure: Interval) -> Throughput:
    return Throughput(figure.value, max(0.0, min(figure.low, figure.value)), max(figure.high, figure.value))


def _fingerprint(header: Header, facts: Facts) -> Fingerprint:
    def described(device: Device) -> str:
        size = device.memory_bytes
        return device.name if size is None else f"{device.name} ({size // MIB} MiB)"

    versions = {**facts.versions, "evener": header.evener}
    return Fingerprint(tuple(map(described, header.devices)), facts.driver, versions, facts.workload_digest)
