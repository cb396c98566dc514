"""Makes the verdicts of searches with given results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from evener.balancer.families import Placement, find_family, pack_on, place_on, split_evenly
from evener.balancer.journal import FactsEntry, Header, JournalContents, ObservationEntry
from evener.balancer.request import Request
from evener.balancer.result.judge import SearchEnd, judge
from evener.balancer.result.sentences import VerdictText, write_verdict
from evener.balancer.search.layouts import Candidate, LayoutOptions
from evener.balancer.search.ranking import RankedLayout
from evener.balancer.search.report import SearchReport
from evener.balancer.types import (
    End,
    Facts,
    Interval,
    Layout,
    MeasurementDoubt,
    Observation,
    Probe,
    Problem,
    Result,
    Stage,
    Stop,
    Timed,
    solo,
)
from evener.balancer.verdict import Unfinished, Verdict
from evener.devices.types import Device


def candidate(family: str, layout: Layout) -> Candidate:
    """Return a candidate of the family with this name."""
    return Candidate(find_family(family), layout)


SOLO = candidate("solo", solo(2, 0, 256))
OTHER = candidate("solo", solo(2, 1, 256))
EVEN = candidate("even", cast(Layout, split_evenly(2, (0, 1), 256)))
SPLIT = candidate("split", Layout("split", (150, 106)))
LARGER = candidate("split", Layout("split", (400, 300)))
FIXED = Request(framework="torch", global_batch=256)
PACK = candidate("pack", pack_on(SOLO.layout, 5))
PLACE = candidate("place", cast(Layout, place_on(2, Placement("towers"), 256)))


def result(one: Candidate, rate: float, error: float = 0.005) -> Result:
    """Return the throughput of a layout with its relative error."""
    return Result(one.layout, Interval(rate, rate * (1 - error), rate * (1 + error)), 2)


def standing(
    one: Candidate,
    rate: float,
    against: float | None = None,
    tie: bool = False,
    error: float = 0.0,
) -> RankedLayout:
    """Return an entry of the ranking; `against` is its difference from the winner, known
    to 0.1 %.
    """
    difference = None if against is None else Interval(against, against - 0.001, against + 0.001)
    figure = Interval(rate, rate * (1 - error), rate * (1 + error))
    return RankedLayout(one, figure, difference, tie, 3)


def judged(
    chosen: Result,
    ranking: Sequence[RankedLayout] = (),
    *,
    seen: Sequence[Observation] = (),
    kind: str = "gpu",
    request: Request | None = None,
    rows: int = 0,
    facts: Facts | None = None,
    hardware: Sequence[bool | None] = (),
    stop: Stop = Stop.SETTLED,
    unfinished: tuple[Unfinished, ...] = (),
    **known: Any,
) -> Verdict:
    """Return the verdict of a search with these results."""
    count = len(chosen.layout.shares)
    devices = tuple(
        Device(f"{kind}-{i}", i, "NVIDIA A", kind, None, bfloat16=has)
        for i, has in enumerate(hardware or (None,) * count)
    )
    request = request or Request(framework="torch")
    header = Header("run", "2026-01-01T00:00:00Z", request, devices, "train.py:build", "torch", "0")
    observed = [ObservationEntry(one, 1.0) for one in seen]
    known.setdefault("problem", Problem(count, (None,) * count, request.global_batch))
    known.setdefault("results", (chosen, *(one.result for one in ranking)))
    known.setdefault("solos", (None,) * count)
    own = Candidate(find_family("split"), chosen.layout)
    first = standing(own, chosen.throughput.value)
    report = SearchReport(
        chosen=chosen, ranking=(first, *ranking), options=LayoutOptions(), **known
    )
    return judge(
        JournalContents(header, (FactsEntry(facts or Facts(rows=rows)), *observed), 0),
        report,
        SearchEnd(End(stop), 60.0, unfinished=unfinished),
    )


def write_text(*args: Any, **known: Any) -> VerdictText:
    """Return the text of that verdict."""
    return write_verdict(judged(*args, **known))


def turn(layout: Layout, step: float, own: tuple[float | None, ...]) -> Timed:
    """Return one measured turn, with each device's own part of the step."""
    return Timed(Probe(layout, Stage.RACE, 1.0), step, step, step, 9, (None, None), own, step, 1.0)


def disturbed_turn(part: float, taken: float = 0.0) -> Timed:
    """Return a turn of SPLIT in which other work disturbed a fraction of its blocks."""
    one = turn(SPLIT.layout, 0.256, (0.2, 0.2))
    return msgspec.structs.replace(
        one, warnings=(MeasurementDoubt("disturbed", part, taken=taken),)
    )
