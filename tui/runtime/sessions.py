"""The journal of a run as a session's events, which the app and the terminal replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from evener.balancer import journal
from evener.balancer.events import Event, EventThread, Finished, Observed, ProbeStarted, Started
from evener.balancer.intake import read_job
from evener.balancer.journal import AskedEntry, EndedEntry, FailedEntry, ObservationEntry, Record
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory
from evener.errors import NoLayoutError
from evener.plan.file import parse_plan, to_json


def read_run(name: str) -> Record:
    """The journal of a run; RequestError if it can't be read."""
    return journal.read(runs.journal_path(runs.find(name)))


def recorded_events(record: Record) -> Iterator[Event]:
    """The session's events from its journal alone: a new search gets the same observations.

    The end of a run that failed is raised, as it was by its session.
    """
    header = record.header
    request = header.request
    labels = tuple(device.label for device in header.devices)
    yield Started(header.run, labels, header.workload, request.budget_seconds, 0)
    search = runs.make_search(read_job(header), record.facts)
    probes = out_of_memory = 0
    for entry in record.entries:
        if isinstance(entry, AskedEntry):
            for probe in entry.probes:
                yield ProbeStarted(probe, entry.at_seconds)
        elif isinstance(entry, ObservationEntry):
            search.tell(entry.seen)
            probes += 1
            out_of_memory += isinstance(entry.seen, OutOfMemory)
            yield Observed(entry.seen, search.belief(), search.best(), probes, out_of_memory, entry.at_seconds)
        elif isinstance(entry, EndedEntry) and entry is record.ended:
            plan = parse_plan(to_json(entry.plan), header.run)  # one of an older schema becomes today's
            ended = (plan, entry.results, entry.verdict, entry.interrupted, entry.at_seconds, entry.findings)
            yield Finished(header.run, *ended)
    if isinstance(record.last_end, FailedEntry):
        raise NoLayoutError(record.last_end.message or "The run failed.")


class RunReplay(EventThread):
    """Recorded events as a session: `speed` times as fast as they were, no gap longer than `longest_gap_seconds`."""

    def __init__(self, events: Iterable[Event], *, speed: float = 8.0, longest_gap_seconds: float = 0.7) -> None:
        super().__init__()
        self._recorded = events
        self._speed = speed
        self._longest_gap_seconds = longest_gap_seconds

    def _work(self) -> None:
        before = 0.0
        for event in self._recorded:
            at_seconds = float(getattr(event, "at_seconds", before))
            gap = min(self._longest_gap_seconds, max(0.0, at_seconds - before) / self._speed)
            before = at_seconds
            if self._halt.wait(gap):
                return
            self._going.wait()
            self._events.put(event)
