"""The outcome of a run: the plan, its evidence and its verdict, from its record and its search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from evener.devices.terms import write_limit
from evener.devices.types import Device
from evener.plan.file import (
    Evidence,
    Fingerprint,
    Plan,
    PlanLayout,
    SearchSummary,
    Share,
    Throughput,
    in_its_schema,
)

from ..events import Finished
from ..families import PACK, SOLO
from ..journal import Header, Record
from ..number_format import relative_error
from ..objectives import find_objective, mean_power
from ..probes.launch_plan import MIXED
from ..search.layouts import Candidate
from ..search.search import Search
from ..types import (
    Facts,
    Failed,
    Finding,
    Interval,
    Layout,
    ModelState,
    Observation,
    OutOfMemory,
    Result,
    Said,
    Stop,
    Timed,
    Warned,
    layout_of,
)
from . import measurements
from .learning import find_learning
from .rivals import (
    Rival,
    compare,
    describe,
    describe_rivals,
    find_larger,
    is_certain,
    list_rivals,
    list_shares,
)
from .verdict import cost_ratios, find_verdict, padding_share
from .words import say, say_all, write_verdict

MIB = 1 << 20
# on top of a budget that would just have been enough: starts of new children are guessed
MARGIN = 1.3
STEP_SECONDS = 10  # to which it is rounded up


class RunEnd(msgspec.Struct, frozen=True):
    """Why a run ended, after how many seconds of its clock, and what had not ended when the time
    was over.
    """

    why_stopped: str
    seconds: float
    interrupted: bool = False  # by the user
    unfinished: tuple[Finding, ...] = ()

    @property
    def code(self) -> str:
        """The reason in a word, as `settled` or `budget`."""
        return next(
            (stop.name.lower() for stop in Stop if self.why_stopped.startswith(stop.value)), ""
        )

    @property
    def late(self) -> bool:
        """True if the budget ended the run."""
        return self.why_stopped in (Stop.BUDGET.value, Stop.LATE.value)


def build_outcome(record: Record, search: Search, end: RunEnd) -> Finished | None:
    """The end of a run with the plan that its search has come to; None if nothing was measured."""
    chosen = search.best()
    if chosen is None:
        return None
    header, facts, devices = record.header, record.facts, record.header.devices
    request, knobs = header.request, chosen.layout.knobs
    rivals = list_rivals(chosen, search.ranking(), search.results(), search.best_single())
    figure = chosen.throughput
    doubts = measurements.find_doubts(
        record.observations, chosen.layout, relative_error(figure.value, figure.low, figure.high)
    )

    evidence = _find_evidence(chosen, rivals, search, devices)
    throughput = _write_throughput(figure, chosen.layout, search)
    known = is_certain(figure)
    taken = sorted(measurements.find_taken_bytes(record.observations))
    verdict = (
        *measurements.find_few_steps(chosen.layout, facts.rows),
        *find_short_budget(search, record.observations, end),
        *find_verdict(search, chosen, rivals, devices),
        *(
            find_objective_reached(search, chosen)
            if known
            else [measurements.find_remedy(doubts, header.run)]
        ),
        *(
            [Finding("taken.verdict", {"devices": [devices[i].label for i in taken]})]
            if taken
            else ()
        ),
        *(measurements.find_weakness(doubts) if known else ()),
        *(find_learning(header.job, chosen, search) if known else ()),
    )
    warnings = _find_warnings(record, search, end, chosen, doubts)
    plan = in_its_schema(
        Plan(
            created=header.created,
            workload=header.workload,
            framework=header.framework,
            precision=MIXED if "mixed" in knobs else request.precision,
            xla=request.xla or "xla" in knobs,
            layout=_write_layout(chosen.layout, devices, facts, search, chosen=True),
            throughput=throughput,
            evidence=tuple(_write_evidence(*one, devices, facts, search) for one in evidence),
            search=_summarize(record, end),
            fingerprint=_write_fingerprint(header, facts),
            warnings=say_all(warnings),
        )
    )
    said = Said(verdict, warnings, tuple(name for name, _ in evidence), end.code)
    as_read = msgspec.json.decode(
        msgspec.json.encode(said), type=Said
    )  # so that a journal gives the same
    return Finished(
        plan,
        search.results(),
        write_verdict(verdict),
        end.interrupted,
        end.seconds,
        findings=as_read,
    )


def _find_warnings(
    record: Record, search: Search, end: RunEnd, chosen: Result, doubts: Sequence[Warned]
) -> tuple[Finding, ...]:
    """Findings to know before trusting the figures, in the order in which the plan has them."""
    devices, seen = record.header.devices, record.observations
    count, cut = len(devices), end.why_stopped in (Stop.INTERRUPTED.value, Stop.CUT_OFF.value)
    return (
        *(Finding("note", {"text": note}) for note in record.header.notes),
        *(Finding("left_out", {"text": text}) for text in search.options.left_out),
        *find_unequal_rows(search),
        *find_not_compared(search, count),
        *find_unmeasured(search, count, cut),
        *find_retreats(search, count),
        *(() if end.interrupted else end.unfinished),
        *measurements.describe_doubts(doubts, devices),
        *measurements.find_taken_memory(seen, devices),
        *measurements.find_left_out(seen, devices, chosen.layout),
        *measurements.find_pass_statistics(chosen.layout, record.facts.batch_statistics),
    )


def find_not_compared(search: Search, devices: int) -> Iterator[Finding]:
    """Each layout of the race that did not run."""
    for candidate, seen in list_broken(search):
        layout = describe(candidate, devices)
        if isinstance(seen, Failed):
            why = seen.detail.rstrip(".")
            yield Finding(
                "not_compared.failed", {"layout": layout, "cause": seen.cause, "why": why}
            )
        else:
            yield Finding("not_compared.out_of_memory", {"layout": layout})


def list_broken(search: Search) -> list[tuple[Candidate, Observation]]:
    """The layouts of the race that failed, with the failure; the smallest pack of a mode of which
    none ever ran.
    """
    race = search.race
    layouts = [(one, race.seen.broken(one.layout)) for one in race.all]
    tried = [packing.seen for _, packing in race.packings]
    refused = [seen[:1] for seen in tried if not any(isinstance(one, Timed) for one in seen)]
    packs = [(Candidate(PACK, one.probe.layout), one) for seen in refused for one in seen]
    return [(one, seen) for one, seen in (*layouts, *packs) if seen]


def find_objective_reached(search: Search, chosen: Result) -> Iterator[Finding]:
    """Findings on the chosen layout's value of the objective, where the objective decided against
    speed.
    """
    objective = find_objective(search.problem.objective)

    def value(one: Result) -> float:
        return objective.value(one.throughput.value, search.turns(one.layout))

    own = value(chosen)
    if not objective.trades_speed or not own:
        return
    others = (*search.results(), *(one.result for one in search.ranking()))
    fastest = max((chosen, *others), key=lambda one: one.throughput.value)
    other, reached = value(fastest), {"objective": objective.name, "value": own}
    values = {"reached": reached, "slowdown": search.problem.max_slowdown}
    if fastest.throughput.value <= chosen.throughput.value or not other:
        yield Finding("objective.most", values)
    else:
        yield Finding("objective.more", values | {"gain": own / other - 1})


def find_unequal_rows(search: Search) -> Iterator[Finding]:
    """Layouts that were asked for but aren't compared, as rows are assigned by cost."""
    asked = [family.name for family in search.options.wanted if not family.traits.by_shares]
    if asked and search.mean_length:
        yield Finding("not_compared.by_rows", {"families": asked})


def find_unmeasured(search: Search, devices: int, interrupted: bool = False) -> Iterator[Finding]:
    """Layouts that the budget left out, with a budget that should do."""
    if search.problem.budget_seconds is None or interrupted:
        return
    for code, missing in (
        ("unmeasured.layouts", search.race.unmeasured),
        ("unmeasured.packs", list_ungrown(search)),
    ):
        if missing:
            layouts = [describe(one, devices) for one in missing]
            yield Finding(code, {"layouts": layouts, "enough_seconds": _find_enough(search)})


def find_retreats(search: Search, devices: int) -> Iterator[Finding]:
    """Layouts that were measured with fewer samples than was meant."""
    for wished, instead in search.race.retreats:
        if search.race.seen.turns(instead.layout):
            shares = {"shares": list_shares(wished.layout), "instead": list_shares(instead.layout)}
            yield Finding("retreat", {"layout": describe(wished, devices), **shares})


def list_ungrown(search: Search) -> list[Candidate]:
    """The next pack in each mode whose throughput still grew when packing's part of the budget was
    spent.
    """
    found = [packing.next_layout() for _, packing in search.race.packings if packing.still_gains]
    return [Candidate(PACK, layout) for layout in found if layout is not None]


def _find_enough(search: Search) -> int:
    """Seconds of a budget that should do to measure every layout once, and another pack of each
    mode.
    """
    race, budget, live = search.race, search.budget, search.model.live
    missing = [one.layout for one in race.unmeasured]
    if search.options.with_splits and len(live) > 1 and not race.seen.in_stage("split"):
        missing.append(layout_of(tuple(int(i in live) for i in range(race.devices))))
    enough = budget.enough_for(sum(map(budget.least_seconds, missing)))
    if grown := sum(budget.least_seconds(one.layout) for one in list_ungrown(search)):
        enough = max(enough, budget.enough_to_grow(grown + race.turn_seconds))
    return STEP_SECONDS * math.ceil(MARGIN * enough / STEP_SECONDS)


def find_short_budget(
    search: Search, seen: Sequence[Observation], end: RunEnd
) -> Iterator[Finding]:
    """A budget that was over before any split was tried, and what starting processes took of it."""
    tried = any(len(one.probe.layout.active) > 1 for one in seen)
    budget = search.problem.budget_seconds
    if (
        tried
        or not end.late
        or budget is None
        or search.problem.devices < 2
        or not search.options.with_splits
    ):
        return
    at_once = [
        one.start_seconds for one in seen if isinstance(one, Timed) and one.probe.stage == "solo"
    ]
    later = [
        one.start_seconds for one in seen if isinstance(one, Timed) and one.probe.stage != "solo"
    ]
    starts = max(at_once, default=0.0) + sum(later)
    yield Finding(
        "budget.no_split",
        {"budget_seconds": budget, "start_seconds": starts, "enough_seconds": _find_enough(search)},
    )


def _find_evidence(
    chosen: Result, rivals: Sequence[Rival], search: Search, devices: Sequence[Device]
) -> list[tuple[Finding, Rival]]:
    """Every rival with its name, the best single device even if it is chosen, and each device alone
    at its fastest.
    """
    larger, single = find_larger(chosen, rivals), search.best_single()
    found = list(zip(describe_rivals(chosen, rivals, len(devices)), rivals, strict=True))
    by_layout = {one.candidate.layout: one for one in rivals}

    def compare_solo(one: Result) -> Rival:
        """The comparison of a single device, equal wherever it stands, as the plan has one
        figure.
        """
        figure = chosen.throughput if one.layout == chosen.layout else one.throughput
        return by_layout.get(one.layout) or compare(chosen, Candidate(SOLO, one.layout), figure)

    if single is not None:
        named = describe(Candidate(SOLO, single.layout), len(devices))
        if named not in [name for name, _ in found]:
            found.append((named, compare_solo(single)))
    if larger is not None:
        found.append((Finding("layout.larger_batch"), larger))
    for device, result in zip(devices, search.solos(), strict=True):
        if result is not None:
            found.append((Finding("layout.alone", {"device": device.label}), compare_solo(result)))
    return found


def _write_evidence(
    name: Finding, one: Rival, devices: Sequence[Device], facts: Facts, search: Search
) -> Evidence:
    """A rival as the plan has it."""
    layout, gain = one.candidate.layout, one.gain if one.compared else None
    figure = _write_throughput(one.throughput, layout, search)
    busy = layout.traits.alone and len(layout.shares) > 1 and not search.race.seen.turns(layout)
    return Evidence(
        say(name),
        _write_layout(layout, devices, facts, search),
        figure,
        one.tie,
        gain,
        one.paired,
        busy,
    )


def _summarize(record: Record, end: RunEnd) -> SearchSummary:
    return SearchSummary(
        probes=len(record.seen),
        out_of_memory=sum(isinstance(one, OutOfMemory) for one in record.observations),
        seconds=round(end.seconds, 3),
        seed=record.header.request.seed,
        why_stopped=end.why_stopped,
    )


def _write_layout(
    layout: Layout, devices: Sequence[Device], facts: Facts, search: Search, chosen: bool = False
) -> PlanLayout:
    """The layout as the plan has it; the chosen one with its devices' curves, and their memory if
    it is in shards.
    """
    batch, costs, turns = layout.global_batch, layout.costs, search.turns(layout)
    ratios = (
        cost_ratios(costs, search.mean_length)
        if costs
        else tuple(share / batch for share in layout.shares)
    )
    curves = search.curves(layout) if chosen else (((), 0),) * len(devices)
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
            *curves[i],
            layout.state[i] if layout.state else 0.0,
            *(_expect_memory(layout, i, turns, facts.state) if chosen else (0, 0)),
        )
        for i, device in enumerate(devices)
    )
    engine = facts.engine if layout.traits.together else ""
    return PlanLayout(layout.kind, batch, shares, engine, layout.processes, layout.placement)


def _expect_memory(
    layout: Layout, position: int, turns: Sequence[Timed], state: ModelState | None
) -> tuple[int, int]:
    """The bytes that a device holds in a sharded training, and the most that it was seen to take; 0
    where unknown.
    """
    if not (layout.traits.sharded and state and layout.shares[position]):
        return 0, 0
    held = (
        round((layout.state[position] if layout.state else 0.0) * state.state_bytes)
        + state.gathered_bytes
    )
    return held, max((turn.memory_bytes[position] or 0 for turn in turns), default=0)


def _write_throughput(figure: Interval, layout: Layout, search: Search) -> Throughput:
    """A layout's figure with its interval, in order, and what it means in tokens and energy."""
    low, high = max(0.0, min(figure.low, figure.value)), max(figure.high, figure.value)
    turns = search.turns(layout)
    tokens = (figure.value * search.mean_length, padding_share(turns))
    power = mean_power(turns)
    if power is None or not power.watts:
        return Throughput(figure.value, low, high, *tokens)
    return Throughput(
        figure.value,
        low,
        high,
        *tokens,
        figure.value / power.watts,
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
