"""A journal replayed into a fresh search: the same observations give the same search, and so the same plan."""

from __future__ import annotations

from collections.abc import Iterable

from evener.errors import NoLayoutError

from ..intake.problem import make_problem
from ..journal import AskedEntry, Header, ObservationEntry, Record
from ..probes.prober import Facts
from ..request import check_request
from ..result.outcome import Outcome, RunEnd, build_outcome
from ..search.decisions import Stop
from ..search.layouts import BALANCE
from ..search.search import Search
from ..types import Observation, Probe

NOTHING = Facts()  # is known yet


def make_search(
    header: Header,
    seen: Iterable[Observation],
    facts: Facts = NOTHING,
    spend_all: bool = False,
) -> Search:
    """A search for what was asked, with everything that was seen and what is known of the data.

    RequestError for a journal whose request no search can meet.
    """
    check_request(header.request)
    search = Search(make_problem(header, spend_all), header.request.compare or BALANCE)
    search.learn_data(facts.rows, facts.lengths, facts.longest_row)
    for observation in seen:
        search.tell(observation)
    return search


def find_pending(record: Record) -> tuple[AskedEntry, tuple[Probe, ...]] | None:
    """The last asking and those of its probes that have no observation yet; None if it was answered."""
    last = max((i for i, entry in enumerate(record.entries) if isinstance(entry, AskedEntry)), default=-1)
    if last < 0:
        return None
    asked = record.entries[last]
    assert isinstance(asked, AskedEntry)
    answered = {entry.seen.probe for entry in record.entries[last + 1 :] if isinstance(entry, ObservationEntry)}
    missing = tuple(probe for probe in asked.probes if probe not in answered)
    return (asked, missing) if missing else None


def read_clock(record: Record) -> float:
    """The time at which the session's clock goes on: the start of an unanswered asking, else the last observation."""
    pending = find_pending(record)
    if pending is not None:
        return pending[0].at_seconds
    return max((entry.at_seconds for entry in record.seen), default=0.0)


def recover(record: Record) -> Outcome:
    """The plan of a run that was cut off, from what it had measured; NoLayoutError if that is nothing."""
    search = make_search(record.header, record.observations, record.facts)
    why = search.why_stopped() or Stop.CUT_OFF.value
    outcome = build_outcome(record, search, RunEnd(why, read_clock(record)))
    if outcome is None:
        raise NoLayoutError(
            f"The run {record.header.run} ended before anything was measured.",
            f"Go on with evener balance --resume {record.header.run}.",
        )
    return outcome
