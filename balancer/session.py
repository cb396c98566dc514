"""Runs a search: ask for probes, measure them, journal the observations, tell the search; can be stopped and resumed.

The loop has its own thread, so a signal that interrupts whoever reads the events doesn't break it: the handler calls
`stop` and goes on reading until the plan comes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec

from evener import __version__
from evener.balancer import resolve
from evener.balancer.events import Event, Finished, Observed, Paused, ProbeStarted, Started
from evener.balancer.probes.prober import Facts, Prober
from evener.balancer.request import Request, ResolvedRequest
from evener.balancer.result.explain_failure import explain_no_plan
from evener.balancer.result.outcome import build_outcome
from evener.balancer.search.search import Search, Stop
from evener.balancer.store import journal, replay, runs
from evener.balancer.store.journal import (
    AskedEntry,
    EndedEntry,
    FactsEntry,
    FailedEntry,
    Header,
    Journal,
    ObservationEntry,
    Record,
)
from evener.balancer.store.locks import RunLock, lock_devices
from evener.balancer.types import Observation, OutOfMemory, Probe
from evener.errors import RequestError

__all__ = ["Request", "Session"]

GRACE_SHARE, GRACE_SECONDS = 0.25, 2.0  # beyond the budget, for probes that still run when it ends
CLOSE_SECONDS = 5.0
ERRORS = "errors.txt"  # in the run's folder: what failing children wrote
POLL_SECONDS = 0.1


class Session:
    """One run, new or resumed, driven by `events`. RequestError or DeviceError if it can't begin."""

    def __init__(self, request: Request | ResolvedRequest, *, resume: str | None = None) -> None:
        self._halt = threading.Event()  # running probes end
        self._interrupted = False
        self._late = False
        self._go = threading.Event()
        self._go.set()
        self._paused_seconds = 0.0
        self._events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._seen: list[Observation] = []
        self._journal: Journal | None = None
        self._locks = ExitStack()
        try:
            self._record, self._resolved = self._begin(request) if resume is None else self._reopen(request, resume)
        except BaseException:
            self._release()
            raise
        self._header = self._record.header
        self._facts = self._record.facts
        errors = runs.run_folder(self._header.run) / ERRORS
        self._prober: Prober = resolve.make_prober(self._resolved, replay.read_clock(self._record), errors)
        self._search: Search = replay.make_search(self._header, (entry.seen for entry in self._record.seen))

    @property
    def run_id(self) -> str:
        """The id by which the run can be resumed, shown and exported."""
        return self._header.run

    @property
    def search(self) -> Search:
        """What decided on the probes; read it once the session has ended."""
        return self._search

    @property
    def resolved(self) -> ResolvedRequest:
        """The request, with the devices and the workload that it means here."""
        return self._resolved

    def events(self) -> Iterator[Event]:
        """Drive the session and yield what happens; ends after Finished. It can be iterated again after an interrupt.

        Raises NoLayoutError if nothing could be measured, RequestError if the journal can't be written.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._drive, name="session", daemon=True)
            self._thread.start()
        return _Events(self._events)

    def stop(self) -> None:
        """End with the best plan so far; Finished says that it was interrupted. From any thread or signal handler."""
        self._interrupted = True
        self._halt.set()
        self._go.set()

    def pause(self) -> None:
        """Start no more probes; running ones continue."""
        self._go.clear()

    def unpause(self) -> None:
        """Continue after `pause`."""
        self._go.set()

    def close(self) -> None:
        """End every child and release the devices; safe to call twice."""
        self.stop()
        self._prober.close()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._release()

    def _begin(self, request: Request | ResolvedRequest) -> tuple[Record, ResolvedRequest]:
        found = request if isinstance(request, ResolvedRequest) else resolve.resolve_request(request)
        request = found.request
        run = runs.new_id()
        if not request.share:
            self._locks.enter_context(lock_devices(run, found.devices))
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        header = Header(
            run, created, request, found.devices, found.workload, found.framework, __version__, found.largest_share,
            found.notes,
        )  # fmt: skip
        replay.make_search(header, ())  # raises for a request that no search can meet, before a run is made
        try:
            self._locks.enter_context(RunLock(run))
            self._journal = journal.create(runs.journal_path(run), header)
        except BaseException:
            runs.forget_empty(run)
            raise
        return Record(header, (), 0), found

    def _reopen(self, request: Request | ResolvedRequest, resume: str) -> tuple[Record, ResolvedRequest]:
        """The run's own request counts, except for `pace`, `share` and a new budget."""
        request = request.request if isinstance(request, ResolvedRequest) else request
        run = runs.find(resume)
        self._locks.enter_context(RunLock(run))
        self._journal, record = journal.reopen(runs.journal_path(run))
        wanted = msgspec.structs.replace(record.header.request, pace=request.pace, share=request.share)
        if request.budget_seconds != Request().budget_seconds:
            wanted = msgspec.structs.replace(wanted, budget_seconds=request.budget_seconds)
        found = resolve.resolve_request(wanted)
        then = [(device.id, device.cores) for device in record.header.devices]
        if then != [(device.id, device.cores) for device in found.devices]:
            raise RequestError(
                f"The run {run} was measured on {', '.join(device.id for device in record.header.devices)};"
                f" this machine has {', '.join(device.id for device in found.devices)}.",
                "Resume it on the machine where it began, or start a new run.",
            )
        if not request.share:
            self._locks.enter_context(lock_devices(run, found.devices))
        header = msgspec.structs.replace(record.header, request=wanted)
        found = msgspec.structs.replace(found, devices=header.devices)
        return Record(header, record.entries, record.whole_bytes), found

    def _drive(self) -> None:
        try:
            self._start()
            self._loop()
            self._events.put(self._finish())
        except BaseException as error:
            self._events.put(error)
        finally:
            self._prober.close()
            self._release()
            self._events.put(None)

    def _start(self) -> None:
        header = self._header
        self._seen = [entry.seen for entry in self._record.seen]
        self._events.put(
            Started(
                run=header.run,
                devices=tuple(device.label for device in header.devices),
                workload=header.workload,
                budget_seconds=header.request.budget_seconds,
                replayed=len(self._seen),
                notes=self._resolved.notes,
                virtual_time=self._resolved.machine is not None,
            )
        )

    def _loop(self) -> None:
        left = replay.find_pending(self._record)
        if left is not None:
            asked, missing = left
            self._measure(missing, tuple(probe for probe in asked.probes if probe not in missing))
        while not self._halt.is_set():
            probes = self._search.ask()
            if not probes:
                return
            self._wait_while_paused()
            if self._halt.is_set():
                return
            self._write(AskedEntry(probes, self._prober.now()))
            self._measure(probes, ())

    def _measure(self, probes: tuple[Probe, ...], finished: tuple[Probe, ...]) -> None:
        for probe in probes:
            self._events.put(ProbeStarted(probe, self._prober.now()))
        alarm = self._alarm()
        try:
            for seen in self._prober.measure(probes, self._events.put, self._halt, finished):
                self._take(seen)
        finally:
            if alarm is not None:
                alarm.cancel()

    def _take(self, seen: Observation) -> None:
        """Journal an observation, then tell the search."""
        at = self._prober.now()
        facts = self._prober.facts()
        if facts not in (self._facts, Facts()):
            self._facts = facts
            self._write(FactsEntry(facts))
        self._write(ObservationEntry(seen, at))
        self._search.tell(seen)
        self._seen.append(seen)
        self._events.put(
            Observed(
                seen=seen,
                belief=self._search.belief(),
                best=self._search.best(),
                probes=len(self._seen),
                out_of_memory=sum(isinstance(one, OutOfMemory) for one in self._seen),
                at_seconds=at,
            )
        )

    def _alarm(self) -> threading.Timer | None:
        """Ends running probes when the budget and its grace are over; in virtual time the search keeps to it."""
        budget = self._header.request.budget_seconds
        if budget is None or self._resolved.machine is not None:
            return None
        spent = self._prober.now() - self._paused_seconds
        left = budget + max(GRACE_SECONDS, GRACE_SHARE * budget) - spent
        alarm = threading.Timer(max(0.0, left), self._ring)
        alarm.daemon = True
        alarm.start()
        return alarm

    def _ring(self) -> None:
        self._late = True
        self._halt.set()

    def _wait_while_paused(self) -> None:
        if self._go.is_set():
            return
        started = time.monotonic()
        self._events.put(Paused(self._prober.now()))
        while not self._go.wait(POLL_SECONDS):
            pass
        self._paused_seconds += time.monotonic() - started

    def _finish(self) -> Finished:
        """Journal the best plan so far; NoLayoutError if there is none."""
        seen, at = tuple(self._seen), self._prober.now()
        found = build_outcome(self._header, self._search, seen, self._facts, self._why_stopped(), self._seconds())
        if found is None:
            fault = explain_no_plan(self._header, seen, self._search.belief(), self._why_stopped(), self._interrupted)
            if not self._interrupted:
                self._write(FailedEntry(fault.message, at))
            raise fault
        interrupted = self._interrupted and self._search.why_stopped() is None
        results = self._search.results()
        ended = EndedEntry(found.plan, results, found.verdict, interrupted, at)
        if ended != self._record.ended:
            self._write(ended)
        return Finished(self.run_id, found.plan, results, found.verdict, interrupted, at)

    def _seconds(self) -> float:
        """Seconds that the search took, without pauses; a replayed run that is complete keeps its own."""
        if len(self._seen) == len(self._record.seen):
            return replay.read_clock(self._record)
        return max(0.0, self._prober.now() - self._paused_seconds)

    def _why_stopped(self) -> str:
        done = self._search.why_stopped()
        if done is not None:
            return done
        return (Stop.LATE if self._late and not self._interrupted else Stop.INTERRUPTED).value

    def _write(self, entry: journal.Entry) -> None:
        assert self._journal is not None
        self._journal.append(entry)

    def _release(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._locks.close()


class _Events(Iterator[Event]):
    """Events as they come. Unlike a generator, it can be read on after an exception in the reader."""

    def __init__(self, source: queue.SimpleQueue[Event | BaseException | None]) -> None:
        self._source = source

    def __next__(self) -> Event:
        event = self._source.get()
        if event is None:
            self._source.put(None)
            raise StopIteration
        if isinstance(event, BaseException):
            raise event
        return event
