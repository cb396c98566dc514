"""What a search ends with: the plan, its evidence and its verdict, from what was measured and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from evener.balancer.probes.launch_plan import MIXED
from evener.balancer.probes.prober import Facts
from evener.balancer.result import explain_measurements as measurements
from evener.balancer.result.explain import Costs, Tokens, cost_ratios, explain, work_gap
from evener.balancer.result.explain_hosts import explain_hosts
from evener.balancer.result.gains import is_certain
from evener.balancer.result.layout_names import list_samples, name_candidate
from evener.balancer.result.number_format import efficiency, join_words, percent, relative_error
from evener.balancer.result.rivals import Rival, compare, find_larger, list_rivals, name_rivals
from evener.balancer.search.decisions import Stop
from evener.balancer.search.layouts import Candidate
from evener.balancer.search.search import Search
from evener.balancer.store.journal import Header
from evener.balancer.types import Failed, Interval, Layout, Observation, OutOfMemory, Result, Timed, Warned
from evener.devices.limits import write_limit
from evener.devices.types import Device
from evener.plan.file import (
    BEST_SINGLE,
    LARGER_BATCH,
    SOLO_PREFIX,
    Evidence,
    Fingerprint,
    Plan,
    PlanLayout,
    SearchSummary,
    Share,
    Throughput,
    make_layout,
)
from evener.plan.layout import Knots

MIB = 1 << 20
MARGIN = 1.3  # on top of a budget that would just have been enough: starts of new children are guessed
STEP_SECONDS = 10  # to which it is rounded up


class Outcome(msgspec.Struct, frozen=True):
    """A plan and the sentence that goes with it."""

    plan: Plan
    verdict: str


def build_outcome(
    header: Header,
    search: Search,
    seen: Sequence[Observation],
    facts: Facts,
    why_stopped: str,
    seconds: float,
    unfinished: Sequence[str] = (),
) -> Outcome | None:
    """The plan that a search has come to after `seconds` of its clock; None if nothing was measured.

    `unfinished` are sentences on what had not ended when the time was over.
    """
    chosen = search.best()
    if chosen is None:
        return None
    devices = header.devices
    labels = [device.label for device in devices]
    rivals = list_rivals(chosen, search.ranking(), search.results(), search.best_single())
    doubts = measurements.find_doubts(seen, chosen.layout, relative_error(*msgspec.structs.astuple(chosen.throughput)))
    gap = work_gap(search.turns(chosen.layout))
    tokens = Tokens(search.mean_length, search.padding(chosen.layout), gap)
    sentence = explain(chosen, rivals, labels, Costs(search.sync_seconds(), search.apart_seconds), tokens)
    if is_certain(chosen.throughput):
        sentence += explain_hosts(chosen, search.results(), devices, search.network_seconds)
    warnings = (
        *header.notes,
        *search.options.left_out,
        *explain_by_rows(search),
        *explain_failures(search, labels),
        *explain_unmeasured(search, labels, why_stopped in (Stop.INTERRUPTED.value, Stop.CUT_OFF.value)),
        *explain_retreats(search, labels),
        *unfinished,
        *measurements.explain_doubts(doubts, devices),
        *measurements.explain_taken_memory(seen, devices),
        *measurements.explain_left_out(seen, devices, chosen.layout),
        *measurements.explain_passes(chosen.layout, facts.batch_statistics),
    )
    request, knobs = header.request, chosen.layout.knobs

    def write(layout: Layout) -> PlanLayout:
        return _write_layout(layout, devices, facts.engine, search.mean_length)

    plan = Plan(
        created=header.created,
        workload=header.workload,
        framework=header.framework,
        precision=MIXED if "mixed" in knobs else request.precision,
        xla=request.xla or "xla" in knobs,
        layout=_add_curves(write(chosen.layout), search.curves(chosen.layout)),
        throughput=_write_throughput(chosen.throughput, chosen.layout, search),
        evidence=_write_evidence(chosen, rivals, search, devices, write),
        search=_summarize(header, seen, why_stopped, seconds),
        fingerprint=_write_fingerprint(header, facts),
        warnings=warnings,
    )
    few_steps = measurements.explain_few_steps(chosen.layout, facts.rows)
    verdict = _finish_verdict(sentence, plan, search, seen, doubts, header)
    return Outcome(plan, few_steps + explain_short_budget(search, seen, why_stopped) + verdict)


def _finish_verdict(
    sentence: str,
    plan: Plan,
    search: Search,
    seen: Sequence[Observation],
    doubts: Sequence[Warned],
    header: Header,
) -> str:
    """The sentence with what bounds it: doubts of its figures, or how to measure on, and memory that others hold."""
    chosen = search.best()
    if chosen is None or is_certain(chosen.throughput):
        said = measurements.add_taken_memory(sentence + explain_efficiency(search, plan), seen, header.devices)
        return measurements.add_doubt(said, doubts)
    remedy = measurements.add_remedy(sentence, doubts, header.run)
    return measurements.add_taken_memory(remedy, seen, header.devices)


def explain_failures(search: Search, labels: Sequence[str]) -> tuple[str, ...]:
    """A sentence for each layout of the race that did not run."""
    lines = []
    for candidate, seen in search.broken():
        why = seen.detail.rstrip(".") if isinstance(seen, Failed) else "it ran out of memory"
        lines.append(f"Not compared: {name_candidate(candidate, len(labels))}: {why}.")
    return tuple(lines)


def explain_efficiency(search: Search, plan: Plan) -> str:
    """What the chosen layout does with its energy, where that decided; else nothing."""
    slowdown, own = search.problem.max_slowdown, plan.throughput
    if slowdown is None or not own.samples_per_joule:
        return ""
    fastest = max((one.throughput for one in plan.evidence), key=lambda one: one.samples_per_second, default=own)
    figure = f" It trains {efficiency(own.samples_per_joule)} samples per joule"
    within = f"of the layouts at most {percent(slowdown)} slower than the fastest"
    if fastest.samples_per_second <= own.samples_per_second or not fastest.samples_per_joule:
        return f"{figure}, the most {within}."
    more = percent(own.samples_per_joule / fastest.samples_per_joule - 1)
    return f"{figure}, the most {within}, and {more} more than the fastest."


def explain_by_rows(search: Search) -> tuple[str, ...]:
    """What was asked for and isn't compared with rows that are dealt by cost."""
    asked = [word for family, word in (("pack", "packs"), ("place", "placements")) if family in search.options.families]
    if not asked or not search.mean_length:
        return ()
    return (f"Not compared: {join_words(asked)}, which train by rows; --objective samples compares by rows.",)


def explain_unmeasured(search: Search, labels: Sequence[str], interrupted: bool = False) -> tuple[str, ...]:
    """Layouts that the budget left out, with a budget that should do."""
    missing = [name_candidate(one, len(labels)) for one in search.unmeasured()]
    larger = [name_candidate(one, len(labels)) for one in search.ungrown()]
    lines = []
    if search.problem.budget_seconds is not None and not interrupted and (missing or larger):
        enough = _enough(search)
        if missing:
            lines.append(f"The budget left no time to measure {join_words(missing)}; {enough}.")
        if larger:
            lines.append(f"Packs still gained when the budget left no time for a {join_words(larger)}; {enough}.")
    return tuple(lines)


def explain_retreats(search: Search, labels: Sequence[str]) -> tuple[str, ...]:
    """Layouts that were measured with fewer samples than was meant."""
    return tuple(
        f"{name_candidate(wished, len(labels)).capitalize()}: {list_samples(wished.layout)} ran out of memory;"
        f" {list_samples(instead.layout)} was measured instead."
        for wished, instead in search.retreats()
        if search.turns(instead.layout)
    )


def _enough(search: Search) -> str:
    return f"--budget {STEP_SECONDS * math.ceil(MARGIN * search.enough_seconds() / STEP_SECONDS)}s should do"


def explain_short_budget(search: Search, seen: Sequence[Observation], why_stopped: str) -> str:
    """A sentence to begin the verdict with, if the budget was over before any split was tried; "" if not."""
    tried = any(len(one.probe.layout.active) > 1 for one in seen)
    late = why_stopped in (Stop.BUDGET.value, Stop.LATE.value)
    budget = search.problem.budget_seconds
    if tried or not late or budget is None or search.problem.devices < 2 or "split" not in search.options.families:
        return ""
    at_once = [one.start_seconds for one in seen if isinstance(one, Timed) and one.probe.stage == "solo"]
    later = [one.start_seconds for one in seen if isinstance(one, Timed) and one.probe.stage != "solo"]
    starts = max(at_once, default=0.0) + sum(later)
    return (
        f"The budget of {budget:g} s was over before any split was measured: starting processes took"
        f" {starts:.0f} s of it, and {_enough(search)}. "
    )


def _write_evidence(
    chosen: Result,
    rivals: Sequence[Rival],
    search: Search,
    devices: Sequence[Device],
    write: Callable[[Layout], PlanLayout],
) -> tuple[Evidence, ...]:
    """Every rival by its name, the best single device even if it is chosen, and each device alone at its fastest."""
    names = name_rivals(chosen, rivals, len(devices))
    larger, single = find_larger(chosen, rivals), search.best_single()
    found = list(zip(names, rivals, strict=True))
    by_layout = {one.candidate.layout: one for one in rivals}

    def compare_solo(one: Result) -> Rival:
        """The same comparison of one layout wherever it stands; the plan has one figure."""
        figure = chosen.throughput if one.layout == chosen.layout else one.throughput
        return by_layout.get(one.layout) or compare(chosen, Candidate("solo", one.layout), figure)

    if single is not None and BEST_SINGLE not in names:
        found.append((BEST_SINGLE, compare_solo(single)))
    if larger is not None:
        found.append((LARGER_BATCH, larger))
    for device, result in zip(devices, search.solos(), strict=True):
        if result is not None:
            found.append((f"{SOLO_PREFIX}{device.label}", compare_solo(result)))

    def describe(name: str, one: Rival) -> Evidence:
        layout, gain = one.candidate.layout, one.gain if one.compared else None
        figure = _write_throughput(one.throughput, layout, search)
        return Evidence(name, write(layout), figure, one.tie, gain, one.paired)

    return tuple(describe(name, one) for name, one in found)


def _summarize(header: Header, seen: Sequence[Observation], why_stopped: str, seconds: float) -> SearchSummary:
    return SearchSummary(
        probes=len(seen),
        out_of_memory=sum(isinstance(one, OutOfMemory) for one in seen),
        seconds=round(seconds, 3),
        seed=header.request.seed,
        why_stopped=why_stopped,
    )


def _write_layout(layout: Layout, devices: Sequence[Device], engine: str, row_tokens: float) -> PlanLayout:
    """The layout as the plan has it: a share for each device of the request, in its order."""
    costs, tokens = layout.costs or (None,) * len(devices), layout.tokens or (0,) * len(devices)
    templates = tuple(
        Share(
            device.id,
            device.index,
            device.name,
            0,
            0.0,
            write_limit(device.limit),
            cost=cost,
            tokens=wall,
            host=device.host,
        )
        for device, cost, wall in zip(devices, costs, tokens, strict=True)
    )
    return make_layout(
        layout.kind,
        templates,
        layout.shares,
        micros=layout.pass_rows,
        ratios=cost_ratios(layout.costs, row_tokens) if layout.costs else None,
        engine=engine if layout.kind == "split" else "",
        processes=layout.processes,
        placement=layout.placement,
    )


def _add_curves(layout: PlanLayout, curves: Sequence[tuple[Knots, int]]) -> PlanLayout:
    shares = zip(layout.share, curves, strict=True)
    described = tuple(msgspec.structs.replace(share, curve=curve, most=most) for share, (curve, most) in shares)
    return msgspec.structs.replace(layout, share=described)


def _write_throughput(figure: Interval, layout: Layout, search: Search) -> Throughput:
    """A layout's figure with its interval, in order, and what it means in tokens and energy."""
    low, high = max(0.0, min(figure.low, figure.value)), max(figure.high, figure.value)
    tokens = (figure.value * search.mean_length, search.padding(layout))
    power = search.power(layout)
    if power is None or not power.watts:
        return Throughput(figure.value, low, high, *tokens)
    return Throughput(
        figure.value, low, high, *tokens, figure.value / power.watts, power.active_watts, power.idle_watts
    )


def _write_fingerprint(header: Header, facts: Facts) -> Fingerprint:
    def describe(device: Device) -> str:
        size = device.memory_bytes
        return device.name if size is None else f"{device.name} ({size // MIB} MiB)"

    versions = {**facts.versions, "evener": header.evener}
    return Fingerprint(tuple(map(describe, header.devices)), facts.driver, versions, facts.workload_digest)
