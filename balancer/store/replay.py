"""A journal told to a fresh search: the same observations give the same search, and so the same plan."""

from __future__ import annotations

from collections.abc import Iterable

from evener.balancer.probes.prober import Facts
from evener.balancer.result.build_comparison import outcome_of
from evener.balancer.result.build_plan import Findings, Outcome, plan_of
from evener.balancer.search.comparison import Comparison
from evener.balancer.search.search import Search
from evener.balancer.store.journal import Asked, Header, Record, Seen
from evener.balancer.types import Observation, Probe, Problem
from evener.errors import NoLayoutError


def problem_of(header: Header) -> Problem:
    """What the search was asked to solve."""
    request = header.request
    return Problem(
        devices=len(header.devices),
        memory_bytes=tuple(device.usable_memory_bytes for device in header.devices),
        global_batch=request.global_batch,
        max_global_batch=request.max_global_batch,
        multiple_of=request.multiple_of,
        tolerance=request.tolerance,
        budget_seconds=request.budget_seconds,
        largest_share=header.largest_share,
    )


def search_of(header: Header, seen: Iterable[Observation]) -> Search | Comparison:
    """A search, or a comparison if that was asked for, that has been told all of it."""
    problem, wanted = problem_of(header), header.request.compare
    search = Search(problem) if wanted is None else Comparison(problem, wanted)
    for observation in seen:
        search.tell(observation)
    return search


def pending(record: Record) -> tuple[Asked, tuple[Probe, ...]] | None:
    """The last asking and those of its probes that have no observation yet; None if it was answered."""
    last = max((i for i, entry in enumerate(record.entries) if isinstance(entry, Asked)), default=-1)
    if last < 0:
        return None
    asked = record.entries[last]
    assert isinstance(asked, Asked)
    answered = {entry.seen.probe for entry in record.entries[last + 1 :] if isinstance(entry, Seen)}
    missing = tuple(probe for probe in asked.probes if probe not in answered)
    return (asked, missing) if missing else None


def clock_of(record: Record) -> float:
    """Where the session's clock goes on: at the start of an unanswered asking, else at the last observation."""
    left = pending(record)
    if left is not None:
        return left[0].at_seconds
    return max((entry.at_seconds for entry in record.seen), default=0.0)


def outcome(
    header: Header,
    search: Search | Comparison,
    seen: tuple[Observation, ...],
    facts: Facts,
    why_stopped: str,
    seconds: float,
) -> Outcome | None:
    """The plan that this search has come to; None if nothing was measured."""
    if isinstance(search, Comparison):
        return outcome_of(header, search, seen, facts, why_stopped, seconds)
    chosen = search.best()
    if chosen is None:
        return None
    found = Findings(
        header=header,
        seen=seen,
        results=search.results(),
        chosen=chosen,
        facts=facts,
        even=search.even_split(),
        single=search.best_single(),
        solos=search.solos(),
        sync_seconds=search.belief().sync_seconds,
        apart_seconds=search.apart_seconds,
        why_stopped=why_stopped,
        seconds=seconds,
    )
    return plan_of(found, header.notes)


def recover(record: Record) -> Outcome:
    """The plan of a run that was cut off, from what it had measured; NoLayoutError if that is nothing."""
    seen = tuple(entry.seen for entry in record.seen)
    search = search_of(record.header, seen)
    why = search.why_stopped() or "the run was cut off"
    found = outcome(record.header, search, seen, record.facts, why, clock_of(record))
    if found is None:
        raise NoLayoutError(
            f"The run {record.header.run} ended before anything was measured.",
            f"Go on with evener balance --resume {record.header.run}.",
        )
    return found
