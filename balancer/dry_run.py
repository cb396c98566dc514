"""An outlook on a search from one build and the steps of two small batches on one device; nothing is kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import msgspec

from evener.errors import NoLayoutError
from evener.system.files import new_error_file

from .events import ProbeProgress
from .probes.child_prober import make_prober
from .probes.prober import Prober, Report
from .request import Job
from .result.explain_failure import find_unfinished
from .result.outlook import find_largest_model
from .result.words import make_fault
from .search.layouts import BALANCE
from .search.model.memory import Memory
from .search.search import Search
from .store.locks import lock_job
from .types import Failed, Finding, Probe, Problem, Timed

BATCHES = 2  # stepped: two points give a line
PROBE_SECONDS = 0.5
TELLING = 0.02  # of the bytes: where they rise by less from one batch to the other, an optimizer's peak hides the rows'


class DeviceOutlook(msgspec.Struct, frozen=True):
    """A device's memory, and the most rows that should fit it at once; None: unknown."""

    label: str
    name: str
    memory_bytes: int | None
    largest_batch: int | None


class Outlook(msgspec.Struct, frozen=True):
    """The findings of a dry run; `steps` are (batch, seconds) on the first device."""

    workload: str
    framework: str
    devices: tuple[DeviceOutlook, ...]
    steps: tuple[tuple[int, float], ...]
    start_seconds: float  # to start a process and build the workload
    budget_seconds: float | None
    notes: tuple[str, ...] = ()
    simulated: bool = False  # the workload itself was not run
    largest: tuple[Finding, ...] = ()  # the largest models that the devices could train

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The parts of what a dry run says; `result.words` makes sentences of them."""
        steps = {
            "workload": self.workload,
            "framework": self.framework,
            "device": self.devices[0].label,
            "start_seconds": self.start_seconds,
            "steps": self.steps,
        }
        limit = Finding("outlook.search", {"budget_seconds": self.budget_seconds})
        tried = Finding("outlook.simulated" if self.simulated else "outlook.steps", steps)
        limits = () if self.budget_seconds is None else (limit,)
        return tried, *limits, *self.largest, Finding("outlook.nothing_kept")


def dry_run(resolved: Job, report: Report, stop: threading.Event) -> Outlook | None:
    """Build on the first device, step two batches, and say what fits; None once `stop` is set.

    NoLayoutError if the workload fails, or doesn't step within the budget.
    """
    alone = _keep_first(resolved)
    with (
        lock_job(alone),
        closing(make_prober(alone, error_file=new_error_file())) as prober,
    ):
        timed = _step(alone, prober, report, stop, tuple(find_largest_model(resolved)))
    return None if len(timed) < BATCHES and stop.is_set() else _foresee(resolved, timed)


def _keep_first(job: Job) -> Job:
    """The job on its first device alone, with an even split's part of a fixed batch at the most."""
    machine, request = job.machine, job.request
    if machine is not None:
        machine = msgspec.structs.replace(machine, devices=machine.devices[:1], limits=machine.limits[:1])
    if request.global_batch is not None:
        most = max(1, request.global_batch // len(job.devices))
        request = msgspec.structs.replace(request, global_batch=None, max_global_batch=most)
    return msgspec.structs.replace(job, request=request, devices=job.devices[:1], machine=machine)


def _step(
    alone: Job, prober: Prober, report: Report, stop: threading.Event, largest: tuple[Finding, ...]
) -> list[Timed]:
    """The first batches of a search on one device, as many as ran until `stop`; `largest` follows where none fits."""
    search, timed = Search(alone.problem, BALANCE), list[Timed]()
    running: dict[Probe, ProbeProgress] = {}
    over = threading.Event()

    def watch(progress: ProbeProgress) -> None:
        running[progress.probe] = progress
        report(progress)

    def end() -> None:
        over.set()
        stop.set()

    budget = alone.request.budget_seconds
    alarm = threading.Timer(threading.TIMEOUT_MAX if budget is None else budget, end)
    alarm.daemon = True
    alarm.start()
    try:
        while len(timed) < BATCHES and not stop.is_set() and (probes := search.ask()):
            running.clear()
            short = tuple(msgspec.structs.replace(probe, seconds=PROBE_SECONDS) for probe in probes)
            for seen in prober.measure(short, watch, stop):
                if isinstance(seen, Failed):
                    fails = Finding("fault.workload", {"cause": seen.cause, "why": seen.detail.rstrip(".")})
                    raise make_fault(NoLayoutError, fails, remedy=Finding("remedy.again"))
                search.tell(seen)
                timed += [seen] if isinstance(seen, Timed) else []
    finally:
        alarm.cancel()
    if over.is_set() and not timed:
        late = find_unfinished(alone.workload, alone.devices, tuple(running.values()))
        parts = late or (Finding("fault.no_step", {"budget_seconds": budget}),)
        raise make_fault(NoLayoutError, *parts, remedy=Finding("remedy.longer_budget"))
    if not timed and not stop.is_set():
        none = Finding("fault.no_sample", {"device": alone.devices[0].label})
        raise make_fault(
            NoLayoutError, none, *largest, remedy=Finding("remedy.shards" if largest else "remedy.free_memory")
        )
    return timed


def _foresee(resolved: Job, timed: Sequence[Timed]) -> Outlook:
    problem = resolved.problem
    steps = tuple((seen.probe.layout.global_batch, seen.step_seconds) for seen in timed)
    points = tuple((seen.probe.layout.global_batch, size) for seen in timed if (size := seen.memory_bytes[0]))
    devices = tuple(
        DeviceOutlook(device.label, device.name, limit, _predict_largest(limit, points, problem))
        for device, limit in zip(resolved.devices, problem.memory_bytes, strict=True)
    )
    return Outlook(
        workload=resolved.workload,
        framework=resolved.framework,
        devices=devices,
        steps=steps,
        start_seconds=timed[0].start_seconds,
        budget_seconds=problem.budget_seconds,
        notes=resolved.notes,
        simulated=resolved.machine is not None,
        largest=tuple(find_largest_model(resolved)),
    )


def _predict_largest(limit_bytes: int | None, points: tuple[tuple[int, int], ...], problem: Problem) -> int | None:
    rises = len(points) > 1 and points[-1][1] - points[0][1] >= TELLING * points[-1][1]
    guess = Memory(limit_bytes, points).predict_largest() if rises else None
    bounds = [bound for bound in (guess, problem.largest_share) if bound is not None]
    return min(bounds) if bounds else None
