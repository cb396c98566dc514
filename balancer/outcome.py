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
    even: Result | None  # the even split
    single: Result | None  # the best device alone
    solos: tuple[Result | None, ...]  # each device alone at its fastest
    sync_seconds: float | None
    why_stopped: str
    seconds: float  # of the session's clock


def plan_of(found: Findings, notes: Sequence[str] = ()) -> Outcome:
    """The chosen layout with the evidence for it; the same findings give the same plan."""
    header, request = found.header, found.header.request
    chosen = found.chosen
    rivals = words.Rivals(found.even, found.single, _fastest_split(found.results), found.sync_seconds)
    doubts = words.doubts_of(found.seen, chosen.layout)
    sentence = words.doubtful(words.verdict(chosen, rivals, header.devices), doubts)
    plan = Plan(
        created=header.created,
        workload=header.workload,
        framework=header.framework,
        precision=request.precision,
        xla=request.xla,
        layout=layout_of_plan(chosen.layout, header.devices, found.facts.engine),
        throughput=_throughput(chosen.throughput),
        evidence=_evidence(found),
        search=SearchSummary(
            probes=len(found.seen),
            out_of_memory=sum(isinstance(seen, OutOfMemory) for seen in found.seen),
            seconds=round(found.seconds, 3),
            seed=request.seed,
            why_stopped=found.why_stopped,
        ),
        fingerprint=_fingerprint(header, found.facts),
        warnings=(*notes, *words.warnings(doubts, header.devices), *words.left_out(found.seen, header.devices)),
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


def _evidence(found: Findings) -> tuple[Evidence, ...]:
    """The even split, the best single device, and each device alone at its fastest."""
    devices = found.header.devices
    named = [("even split", found.even), ("best single device", found.single)]
    named += [(f"solo {device.label}", result) for device, result in zip(devices, found.solos, strict=True)]
    return tuple(
        Evidence(name, layout_of_plan(result.layout, devices, found.facts.engine), _throughput(result.throughput))
        for name, result in named
        if result is not None
    )


def _fastest_split(results: Sequence[Result]) -> Result | None:
    splits = (result for result in results if result.layout.kind == "split")
    return max(splits, key=lambda result: result.throughput.value, default=None)


def _throughput(figure: Interval) -> Throughput:
    return Throughput(figure.value, max(0.0, min(figure.low, figure.value)), max(figure.high, figure.value))


def _fingerprint(header: Header, facts: Facts) -> Fingerprint:
    def described(device: Device) -> str:
        size = device.memory_bytes
        return device.name if size is None else f"{device.name} ({size // MIB} MiB)"

    versions = {**facts.versions, "evener": header.evener}
    return Fingerprint(tuple(map(described, header.devices)), facts.driver, versions, facts.workload_digest)
