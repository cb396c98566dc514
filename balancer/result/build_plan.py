"""What a session ends with: the plan, its evidence and its verdict, from what was measured and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from evener import plan as plans
from evener.balancer.probes.launch_plan import MIXED
from evener.balancer.probes.prober import Facts
from evener.balancer.result import explain as words
from evener.balancer.store.journal import Header
from evener.balancer.types import Interval, Layout, Observation, OutOfMemory, Result
from evener.devices.limits import write_limit
from evener.devices.types import Device
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
    apart_seconds: Callable[[Layout], float | None]  # the longest that a device alone takes for its share of a layout
    why_stopped: str
    seconds: float  # of the session's clock


def plan_of(found: Findings, notes: Sequence[str] = ()) -> Outcome:
    """The chosen layout with the evidence for it; the same findings give the same plan."""
    header, chosen = found.header, found.chosen
    larger = _larger(found)
    split = _fastest_split(found.results)
    apart = None if split is None else found.apart_seconds(split.layout)
    rivals = words.Rivals(_even(found), found.single, split, found.sync_seconds, apart, larger)
    doubts = words.doubts_of(found.seen, chosen.layout)
    plain = words.verdict(chosen, rivals, header.devices)
    sentence = words.doubtful(words.room_left(plain, found.seen, header.devices), doubts)
    doubts_in_words = words.warnings(doubts, header.devices)
    of_devices = (
        *words.crowded(found.seen, header.devices),
        *words.left_out(found.seen, header.devices, chosen.layout),
    )
    warnings = (*notes, *doubts_in_words, *of_devices)
    summary = summary_of(header, found.seen, found.why_stopped, found.seconds)
    return Outcome(assemble(header, chosen, _evidence(found), summary, found.facts, warnings), sentence)


def assemble(
    header: Header,
    chosen: Result,
    evidence: Sequence[Evidence],
    summary: SearchSummary,
    facts: Facts,
    warnings: Sequence[str],
) -> Plan:
    """The plan for a chosen layout; knobs of the layout stand over what the request says."""
    request, knobs = header.request, chosen.layout.knobs
    return Plan(
        created=header.created,
        workload=header.workload,
        framework=header.framework,
        precision=MIXED if "mixed" in knobs else request.precision,
        xla=request.xla or "xla" in knobs,
        layout=layout_of_plan(chosen.layout, header.devices, facts.engine),
        throughput=throughput_of_plan(chosen.throughput),
        evidence=tuple(evidence),
        search=summary,
        fingerprint=_fingerprint(header, facts),
        warnings=tuple(warnings),
    )


def summary_of(header: Header, seen: Sequence[Observation], why_stopped: str, seconds: float) -> SearchSummary:
    """What finding the plan took."""
    return SearchSummary(
        probes=len(seen),
        out_of_memory=sum(isinstance(one, OutOfMemory) for one in seen),
        seconds=round(seconds, 3),
        seed=header.request.seed,
        why_stopped=why_stopped,
    )


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
    """The even split, a faster one with more samples, the best single device, each device alone at its fastest."""
    devices = found.header.devices
    named = [
        ("even split", _even(found)),
        ("larger global batch", _larger(found)),
        ("best single device", found.single),
    ]
    named += [(f"solo {device.label}", result) for device, result in zip(devices, found.solos, strict=True)]
    return tuple(
        Evidence(
            name, layout_of_plan(result.layout, devices, found.facts.engine), throughput_of_plan(result.throughput)
        )
        for name, result in named
        if result is not None
    )


def _even(found: Findings) -> Result | None:
    """The even split as a rival; None where the chosen layout is one itself."""
    return None if words.is_even(found.chosen.layout) else found.even


def _larger(found: Findings) -> Result | None:
    """The fastest layout that was measured, where the tolerance chose one with fewer samples."""
    fastest = max(found.results, key=lambda result: result.throughput.value, default=found.chosen)
    more = fastest.layout.global_batch > found.chosen.layout.global_batch and fastest.layout.kind == "split"
    return fastest if more and fastest.throughput.value > found.chosen.throughput.value else None


def _fastest_split(results: Sequence[Result]) -> Result | None:
    splits = (result for result in results if result.layout.kind == "split")
    return max(splits, key=lambda result: result.throughput.value, default=None)


def throughput_of_plan(figure: Interval) -> Throughput:
    """A figure in the plan's own words, in order."""
    return Throughput(figure.value, max(0.0, min(figure.low, figure.value)), max(figure.high, figure.value))


def _fingerprint(header: Header, facts: Facts) -> Fingerprint:
    def described(device: Device) -> str:
        size = device.memory_bytes
        return device.name if size is None else f"{device.name} ({size // MIB} MiB)"

    versions = {**facts.versions, "evener": header.evener}
    return Fingerprint(tuple(map(described, header.devices)), facts.driver, versions, facts.workload_digest)
