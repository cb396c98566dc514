"""A run's journal as the events that its session reported, for a screen to show again."""

from __future__ import annotations

from collections.abc import Iterator

from evener.balancer.events import Event, Finished, Observed, ProbeStarted, Started
from evener.balancer.store import journal, replay, runs
from evener.balancer.store.journal import Asked, Ended, Record, Seen
from evener.balancer.types import OutOfMemory


def read_run(name: str) -> Record:
    """The journal of a run; RequestError if it can't be read."""
    return journal.read(runs.journal_path(runs.find(name)))


def events_of(record: Record) -> Iterator[Event]:
    """What the session told, from its journal alone: the same observations told to a fresh search."""
    header = record.header
    request = header.request
    labels = tuple(device.label for device in header.devices)
    yield Started(header.run, labels, header.workload, request.budget_seconds, 0)
    search = replay.search_of(header, ())
    probes = out_of_memory = 0
    for entry in record.entries:
        if isinstance(entry, Asked):
            for probe in entry.probes:
                yield ProbeStarted(probe, entry.at_seconds)
        elif isinstance(entry, Seen):
            search.tell(entry.seen)
            probes += 1
            out_of_memory += isinstance(entry.seen, OutOfMemory)
            yield Observed(entry.seen, search.belief(), search.best(), probes, out_of_memory, entry.at_seconds)
        elif isinstance(entry, Ended) and entry is record.ended:
            yield Finished(header.run, entry.plan, entry.results, entry.verdict, entry.interrupted, entry.at_seconds)
