"""Run a search: pass probes to the devices, and their outcomes to the search and journal."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

import msgspec

from evener.devices.types import Device
from evener.errors import RequestError

from .events import EventThread, Finished, Observed, Paused, ProbeProgress, ProbeStarted, Started
from .journal import AskedEntry, FactsEntry, FailedEntry, ObservationEntry, UnwrittenError
from .objectives import find_objective
from .probes.child_prober import make_prober
from .request import Job
from .result.explain_failure import explain_no_plan, find_unfinished
from .result.judge import SearchEnd
from .result.outcome import build_outcome
from .run import OpenRun
from .search.report import SearchReport
from .search.search import Search
from .store import runs
from .store.links import find_known_link, note_link
from .store.runs import make_search
from .types import End, Facts, Failed, KnownLink, Observation, OutOfMemory, Probe, Stop, Timed

GRACE_SECONDS = 2.0  # seconds beyond the budget for probes that are still running when it ends;
GRACE_SHARE = 0.1  # or this fraction of the budget, if that is more and a probe is running steps
# a probe that was stopped earlier in a phase of its start isn't named as unfinished
LEAST_PHASE_SECONDS = 1.0
STEPPING = ("warming up", "measuring")
POLL_SECONDS = 0.1  # interval of looking whether a build has ended
# the seconds that these phases may take, even beyond the budget, as long as no probe has ended
FIRST_SECONDS = {
    "starting": 60.0,
    "building": 3.0,
}


class Session(EventThread):
    """A search that runs in its own thread, starting from an open run.

    Iterate over `events()`. The last event is Finished, with the plan. If there is no plan,
    NoLayoutError or DeviceError is raised instead. The run is closed at the end.

    If the journal can't be written any more, the search ends early, and UnwrittenError is raised.
    If there is a plan, the event Finished comes before that. Raises RequestError or DeviceError if
    the search can't begin.
    """

    def __init__(self, run: OpenRun) -> None:
        end = latest_end(run.job.request.budget_seconds)
        super().__init__()
        self._interrupted = self._late = False
        self._unwritten: UnwrittenError | None = None
        self._paused_seconds = 0.0
        self._running: dict[Probe, ProbeProgress] = {}
        self._run, self._job, record = run, run.job, run.began_with
        began, facts, seen = record.clock_seconds, record.facts, record.observations
        self._facts, self._seen = facts, list(seen)
        self._out_of_memory = sum(isinstance(one, OutOfMemory) for one in seen)
        self._linked: set[tuple[Device, ...]] = set()  # devices whose link speed is saved
        try:
            errors = runs.errors_path(record.header.run)
            self._search: Search = make_search(run.job, facts, seen, run.spend_all)
            self._prober = make_prober(run.job, began, errors, end, _find_link(run.job))
        except BaseException:
            run.close()
            raise

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._run.id

    @property
    def search(self) -> Search:
        """The search that decides what to measure."""
        return self._search

    def report(self) -> SearchReport:
        """Return the results of the search, which must have ended with a plan."""
        report = self._search.report(self._job.request.own_batch)
        assert report is not None, "a session without a plan raises"
        return report

    def stop(self) -> None:
        """Ask the search to end with the best plan so far.

        May be called from any thread or signal handler.
        """
        self._interrupted = True
        super().stop()

    def close(self) -> None:
        """Stop the search, kill all processes, and close the run."""
        self.stop()
        self._prober.close()
        super().close()
        self._run.close()

    def _work(self) -> None:
        try:
            self._start()
            self._unwritten = self._loop_until_unwritten()
            self._emit(self._finish())
            if self._unwritten is not None:
                raise self._unwritten
        finally:
            self._prober.close()
            self._run.close()

    def _loop_until_unwritten(self) -> UnwrittenError | None:
        """Run the search until it ends, or until its journal can't be written any more.

        Returns the error if it couldn't be written, else None.
        """
        try:
            self._loop()
        except UnwrittenError as fault:
            return fault
        return None

    def _start(self) -> None:
        job = self._job
        labels = tuple(device.label for device in job.devices)
        started = Started(
            self.run_id,
            labels,
            job.workload,
            job.request.budget_seconds,
            self._run.replayed,
            job.notes,
        )
        self._emit(started)

    def _loop(self) -> None:
        left = self._run.began_with.pending
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
            self._run.write(AskedEntry(probes, self._now()))
            self._measure(probes, ())

    def _measure(self, probes: tuple[Probe, ...], finished: tuple[Probe, ...]) -> None:
        self._running.clear()
        for probe in probes:
            self._emit(ProbeStarted(probe, self._now()))
        alarms = self._set_alarms()
        try:
            measured = 0
            for seen in self._prober.measure(probes, self._report, self._halt, finished):
                measured += 1
                self._record_observation(seen)
                if self._always_fails(seen):
                    self._halt.set()
                    return
            if (
                measured < len(probes) and not self._halt.is_set()
            ):  # a simulated prober ended because of the budget
                self._late = True
                self._halt.set()
        finally:
            for alarm in alarms:
                alarm.cancel()

    def _report(self, progress: ProbeProgress) -> None:
        """Emit an event about a probe's progress, with a time that doesn't include pauses."""
        at_seconds = progress.at_seconds - self._paused_seconds
        progress = msgspec.structs.replace(progress, at_seconds=at_seconds)
        self._running[progress.probe] = progress
        self._emit(progress)

    def _always_fails(self, observation: Observation) -> bool:
        """Return whether the user's code failed in this probe, and no probe has succeeded so far.

        The code would then fail on every device, so the search ends.
        """
        failed = isinstance(observation, Failed) and observation.user_code
        return failed and not any(isinstance(one, Timed) for one in self._seen)

    def _record_observation(self, observation: Observation) -> None:
        """Write an outcome to the journal, and pass it to the search."""
        at = self._now()
        facts = self._prober.facts()
        if facts not in (self._facts, Facts()):
            self._store_facts(facts, at)
        self._run.write(ObservationEntry(observation, at))
        self._keep_link(observation)
        self._seen.append(observation)
        self._out_of_memory += isinstance(observation, OutOfMemory)
        self._check_energy(observation, at)
        self._search.tell(observation)
        self._running.pop(observation.probe, None)
        belief, best = self._search.belief(), self._search.best()
        self._emit(Observed(observation, belief, best, len(self._seen), self._out_of_memory, at))

    def _keep_link(self, observation: Observation) -> None:
        """Save the link speed that a probe measured between its devices, for later runs."""
        # only a probe of a split can measure the link
        if not isinstance(observation, Timed) or not observation.link_bytes_per_second:
            return
        devices = tuple(self._job.devices[i] for i in observation.probe.layout.active)
        if devices not in self._linked:
            self._linked.add(devices)
            note_link(
                devices, self._job.driver, observation.link_path, observation.link_bytes_per_second
            )

    def _check_energy(self, observation: Observation, at_seconds: float) -> None:
        """Raise RequestError if the objective needs energy, and a device doesn't report any."""
        if not find_objective(self._job.request.objective).needs_energy or not isinstance(
            observation, Timed
        ):
            return
        timed = [one for one in self._seen if isinstance(one, Timed)]
        for position in observation.probe.layout.active:
            own = [one.watts for one in timed if position in one.probe.layout.active]
            # a device has two successful probes to report its energy
            if len(own) < 2 or any(watts and watts[position] is not None for watts in own):
                continue
            label = self._job.devices[position].label
            raise self._fail(
                at_seconds,
                f"{label} reports no energy, so samples per joule can't be compared.",
                "Leave --objective out, or choose other devices.",
            )

    def _store_facts(self, facts: Facts, at_seconds: float) -> None:
        """Write new facts to the journal, and pass them to the search.

        Raises RequestError if the objective counts tokens, but rows have no lengths.
        """
        self._run.write(FactsEntry(facts))
        self._facts = facts
        self._search.learn_data(facts)
        if find_objective(self._job.request.objective).needs_lengths and not facts.lengths:
            raise self._fail(
                at_seconds,
                f"{self._job.workload} gives no lengths of its rows, or all are equal, so tokens "
                f"can't be counted.",
                "Leave --objective out, or see evener help workload.",
            )

    def _fail(self, at_seconds: float, message: str, remedy: str) -> RequestError:
        """Write an error to the journal, and return it as an exception."""
        self._run.write(FailedEntry(message, at_seconds))
        return RequestError(message, remedy)

    def _set_alarms(self) -> list[threading.Timer]:
        """Start timers that end the search if probes still run after the budget is spent."""
        budget = self._job.request.budget_seconds
        if budget is None or self._job.machine is not None:
            # a simulated prober stops its own probes
            return []
        spent = self._now()
        # the first spares a probe that is running steps; the second, after the grace period,
        # doesn't
        alarms = [
            threading.Timer(
                max(0.0, budget + GRACE_SECONDS - spent), self._stop_late_probes, (STEPPING,)
            ),
            threading.Timer(max(0.0, latest_end(budget) - spent), self._stop_late_probes),
        ]
        for alarm in alarms:
            alarm.daemon = True
            alarm.start()
        return alarms

    def _stop_late_probes(self, spared_phases: tuple[str, ...] = ()) -> None:
        """Stop probes that are still running after the budget is spent. This ends the search.

        Nothing is stopped if a probe is in one of the phases in `spared_phases`.
        """
        # wait until the workload is built, so that errors in the user's code are reported
        while not self._seen and any(map(_is_being_built, tuple(self._running.values()))):
            if self._halt.wait(POLL_SECONDS):
                return
        if not any(one.phase in spared_phases for one in tuple(self._running.values())):
            self._late = True
            self._halt.set()

    def _wait_while_paused(self) -> None:
        if self._going.is_set():
            return
        self._emit(Paused(self._now()))
        paused_at = self._prober.now()
        while not self._going.wait(POLL_SECONDS):
            pass
        self._paused_seconds += self._prober.now() - paused_at

    def _finish(self) -> Finished:
        """Build the plan from the measurements, and write it to the journal.

        If there is no plan, raises UnwrittenError if the journal couldn't be written, otherwise
        NoLayoutError or DeviceError.
        """
        running = tuple(
            one
            for one in tuple(self._running.values())  # probes still report from their own threads
            if one.phase_seconds >= LEAST_PHASE_SECONDS
        )
        unfinished = find_unfinished(self._job.workload, self._job.devices, running)
        run, at = self._run, self._now()
        end = SearchEnd(self._find_end(), self._seconds(), self._interrupted, unfinished)
        record, report = run.record, self._search.report(self._job.request.own_batch)
        if report is None and self._unwritten is not None:
            raise self._unwritten
        if report is None:
            fault = explain_no_plan(record, self._search.belief(), end)
            if not self._interrupted:
                with suppress(UnwrittenError):  # the reason why there is no plan matters more
                    run.write(FailedEntry(fault.message, at))
            raise fault
        cut = self._interrupted or self._unwritten is not None
        interrupted = cut and self._search.ended() is None
        ended = msgspec.structs.replace(
            build_outcome(record, report, end),
            interrupted=interrupted,
            at_seconds=at,
            budget_seconds=run.raised_budget,
        )
        if self._unwritten is None and ended != record.ended:
            try:
                run.write(ended)
            except UnwrittenError as full:
                self._unwritten = full
        return ended

    def _now(self) -> float:
        """Return the seconds that the search has taken so far, without pauses."""
        return self._prober.now() - self._paused_seconds

    def _seconds(self) -> float:
        """Return how many seconds the search took in total.

        For a resumed run that measured nothing new, this is the time from before it was resumed.
        """
        if len(self._seen) == self._run.replayed:
            return self._run.record.clock_seconds
        return max(0.0, self._now())

    def _find_end(self) -> End:
        done = self._search.ended()
        late = self._late and not self._interrupted
        return done or End(Stop.LATE if late else Stop.INTERRUPTED)


def latest_end(budget_seconds: float | None) -> float:
    """Return the latest time at which a probe may end, in seconds since the search began.

    This is the end of the budget plus a grace period. Returns inf without a budget.
    """
    return (
        math.inf
        if budget_seconds is None
        else budget_seconds + max(GRACE_SECONDS, GRACE_SHARE * budget_seconds)
    )


def _is_being_built(progress: ProbeProgress) -> bool:
    return progress.phase_seconds < FIRST_SECONDS.get(progress.phase, 0.0)


def _find_link(job: Job) -> KnownLink | None:
    """Return the link between the job's devices that an earlier run measured, or None."""
    # only PyTorch exchanges gradients by the all-reduces with which links are measured
    if job.simulated or job.framework != "torch":
        return None
    return find_known_link(job.devices, job.driver)
