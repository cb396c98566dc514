"""What a comparison ends with: the winner as a plan, its rivals as evidence, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from balancer import verdict as words
from balancer.compare.comparison import Comparison
from balancer.compare.rank import Standing
from balancer.compare.verdict import name, verdict
from balancer.journal import Header
from balancer.outcome import Outcome, assemble, layout_of_plan, summary_of, throughput_of_plan
from balancer.probes.prober import Facts
from balancer.records import Failed, Observation, Result
from evener.plan import Evidence


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
        *(f"The budget left no time to measure: {name(one, len(labels))}." for one in found.unmeasured()),
        *words.warnings(doubts, header.devices),
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


def _evidence(
    header: Header, standings: Sequence[Standing], solos: Sequence[Result | None], facts: Facts
) -> tuple[Evidence, ...]:
    """Every rival by its name, then each device alone at its fastest."""
    devices, engine = header.devices, facts.engine
    rivals = [
        (name(one.candidate, len(devices)), one.candidate.layout, one.throughput)
        for one in standings
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
