"""A journal replayed into a fresh search: the same observations give the same search, and so the same plan."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from evener.errors import NoLayoutError

from ..intake import read_job
from ..journal import Record
from ..probes.prober import Facts
from ..request import Job
from ..result.outcome import Outcome, RunEnd, build_outcome
from ..result.words import make_fault
from ..search.decisions import Stop
from ..search.layouts import BALANCE
from ..search.search import Search
from ..types import Finding, Observation

NOTHING = Facts()  # is known yet


def make_search(job: Job, facts: Facts = NOTHING, seen: Iterable[Observation] = (), spend_all: bool = False) -> Search:
    """A search for a job, with what is known of its data and everything that was seen.

    With `spend_all` it measures the best layouts until the budget is spent.
    """
    problem = msgspec.structs.replace(job.problem, spend_all=True) if spend_all else job.problem
    search = Search(problem, job.request.compare or BALANCE)
    search.learn_data(facts.rows, facts.lengths, facts.longest_row)
    for observation in seen:
        search.tell(observation)
    return search


def recover(record: Record) -> Outcome:
    """The plan of a run that was cut off, from what it had measured; NoLayoutError if that is nothing."""
    search = make_search(read_job(record.header), record.facts, record.observations)
    why = search.why_stopped() or Stop.CUT_OFF.value
    outcome = build_outcome(record, search, RunEnd(why, record.clock_seconds))
    if outcome is None:
        run = {"run": record.header.run}
        raise make_fault(NoLayoutError, Finding("fault.cut_off", run), remedy=Finding("remedy.resume", run))
    return outcome
