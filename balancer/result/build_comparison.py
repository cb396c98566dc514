"""What a comparison ends with: the winner as a plan, its rivals as evidence, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.balancer.probes.prober import Facts
from evener.balancer.result import explain as words
from evener.balancer.result.build_plan import Outcome, assemble, layout_of_plan, summary_of, throughput_of_plan
from evener.balancer.result.explain_ranking import listed, name, names, samples, verdict
from evener.balancer.search.comparison import Comparison
from evener.balancer.search.ranking import Standing
from evener.balancer.store.journal import Header
from evener.balancer.types import Failed, Observation, Result
from evener.plan import Evidence

MARGIN = 1.15  # on top of a budget that would just have been enough
STEP_SECONDS = 10  # to which it is rounded up


def outcome_of(
    header: Header, found: Comparison, seen: Sequence[Observation], facts: Facts, why_stopped: str, seconds: float
) -> Outcome | None:
    """The plan that a comparison has come to; None if nothing was measured."""
    chosen = found.best()
    if chosen is None:
        return None
    labels = [device.label for device in header.devices]
    standings = found.standings()
    doubts = words.doubts_of(seen, chosen.layout)
    before_race = words.verdict(chosen, words.Rivals(), header.devices)
    sentence = verdict(standings, labels, found.timed) if standings else before_race
    wanted = header.request.compare
    warnings = (
        *header.notes,
        *(wanted.left_out if wanted else ()),
        *failures(found, labels),
        *left_out(found, labels),
        *words.warnings(doubts, header.devices),
        *words.crowded(seen, header.devices),
    )
    plan = assemble(
        header,
        chosen,
        _evidence(header, standings, found.solos(), facts),
        summary_of(header, seen, why_stopped, seconds),
        facts,
        warnings,
    )
    return Outcome(plan, words.doubtful(sentence, doubts))


def failures(found: Comparison, labels: Sequence[str]) -> tuple[str, ...]:
    """A sentence for each layout that did not run."""
    lines = []
    for candidate, seen in found.broken():
        why = seen.detail if isinstance(seen, Failed) else "it ran out of memory"
        lines.append(f"Not compared: {name(candidate, len(labels))}: {why}.".replace("..", "."))
    return tuple(lines)


def left_out(found: Comparison, labels: Sequence[str]) -> tuple[str, ...]:
    """What the budget did not suffice for, and one that should; and what was measured smaller than was meant."""
    missing = [name(one, len(labels)) for one in found.unmeasured()]
    larger = [name(one, len(labels)) for one in found.ungrown()]
    lines = []
    if found.problem.budget_seconds is not None and (missing or larger):
        enough = f"--budget {STEP_SECONDS * math.ceil(MARGIN * found.enough_seconds() / STEP_SECONDS)}s should do"
        if missing:
            lines.append(f"The budget left no time to measure {listed(missing)}; {enough}.")
        if larger:
            lines.append(f"Packs still gained when the budget left no time for a {listed(larger)}; {enough}.")
    for wished, instead in found.retreats():
        if found.timed(instead.layout):
            lines.append(
                f"{name(wished, len(labels)).capitalize()}: {samples(wished)} ran out of memory;"
                f" {samples(instead)} was measured instead."
            )
    return tuple(lines)


def _evidence(
    header: Header, standings: Sequence[Standing], solos: Sequence[Result | None], facts: Facts
) -> tuple[Evidence, ...]:
    """Every rival by its name, then each device alone at its fastest."""
    devices, engine = header.devices, facts.engine
    titles = names([one.candidate for one in standings], len(devices))
    rivals = [
        (title, one.candidate.layout, one.throughput)
        for title, one in zip(titles, standings, strict=True)
        if one.against is not None
    ]
    alone = [
        (f"solo {device.label}", result.layout, result.throughput)
        for device, result in zip(devices, solos, strict=True)
        if result is not None
    ]
    return tuple(
        Evidence(title, layout_of_plan(layout, devices, engine), throughput_of_plan(figure))
        for title, layout, figure in (*rivals, *alone)
    )
