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
from .search.budget import LONGEST_PROBE_SECONDS
from .search.layouts import BALANCE, LayoutOptions
from .search.model.memory import Memory
from .search.search import Search
from .search.statistics import relative_half_width
from .store.locks import lock_job
from .types import Failed, Finding, Probe, Problem, Timed

BATCHES = 2  # stepped: two points give a line
PROBE_SECONDS = 0.5
STARTS = 2.5  # of a search over several devices: a split's children take longer than those of one device
ROUNDS, ROUNDS_ALONE = 9, 3  # of probes in a search over several devices, and over one
PACKS = 6  # further starts and probes where trainings are packed on a device too
SHORTEST_ROUND, LONGEST_STEADY = 2.0, 5.0  # seconds of a probe of quick steps: of steady ones, of ones that vary
PRECISION = 0.005  # relative: a probe of quick steps ends once it knows them so well
STEPS_A_ROUND = 6  # of the largest batch, as not every probe is of it


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
    search_seconds: float  # that a search should take, about
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
        search = {
            "seconds": self.search_seconds,
            "budget_seconds": self.budget_seconds,
            "simulated": self.simulated,
        }
        tried = Finding("outlook.simulated" if self.simulated else "outlook.steps", steps)
        return tried, Finding("outlook.search", search), *self.largest, Finding("outlook.nothing_kept")


def dry_run(resolved: Job, report: Report, stop: threading.Event) -> Outlook | None:
    """Build on the first device, step two batches, and say what a search would do; None once `stop` is set.

    NoLayoutError if the workload fails, or doesn't step within the budget.
    """
    alone = _keep_first(resolved)
    with (
        lock_job(alone),
        closing(make_prober(alone, error_file=new_error_file())) as prober,
    ):
        timed = _step(alone, prober, report, stop, tuple(find_largest_model(resolved)))
    return None if len(timed) < BATCHES and stop.is_set() else _foresee(resolved, alone, timed)


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


def _foresee(resolved: Job, alone: Job, timed: Sequence[Timed]) -> Outlook:
    problem = resolved.problem
    steps = tuple((seen.probe.layout.global_batch, seen.step_seconds) for seen in timed)
    points = tuple((seen.probe.layout.global_batch, size) for seen in timed if (size := seen.memory_bytes[0]))
    devices = tuple(
        DeviceOutlook(device.label, device.name, limit, _predict_largest(limit, points, problem))
        for device, limit in zip(resolved.devices, problem.memory_bytes, strict=True)
    )
    at_most = (devices[0].largest_batch, alone.problem.max_global_batch)
    largest = min((batch for batch in at_most if batch is not None), default=0)
    return Outlook(
        workload=resolved.workload,
        framework=resolved.framework,
        devices=devices,
        steps=steps,
        start_seconds=timed[0].start_seconds,
        search_seconds=_expect_seconds(problem, resolved.request.compare or BALANCE, timed, largest),
        budget_seconds=problem.budget_seconds,
        notes=resolved.notes,
        simulated=resolved.machine is not None,
        largest=tuple(find_largest_model(resolved)),
    )


def _predict_largest(limit_bytes: int | None, points: tuple[tuple[int, int], ...], problem: Problem) -> int | None:
    memory = Memory(limit_bytes, points, ran=points[-1][0] if points else 0)
    guess = None if memory.unsure else memory.predict_largest()
    bounds = [bound for bound in (guess, problem.largest_share) if bound is not None]
    return min(bounds) if bounds else None


def _expect_seconds(problem: Problem, options: LayoutOptions, timed: Sequence[Timed], largest: int) -> float:
    """Seconds of a search: the starts of its children, and its rounds of probes, all of one length.

    A probe lasts until steps of this variation are known to 0.5 %, within limits, and has time for a few steps
    of the largest batch. What a search compares besides splits has children of its own.
    """
    first, alone = timed[0], problem.devices == 1
    others = (PACKS if options.needs_more_children else 0) + len(options.placements) + len(options.knobs)
    starts = first.start_seconds + (others if alone else STARTS - 1 + others) * first.restart_seconds
    variation = max(relative_half_width(seen.throughput) for seen in timed)
    steady = min(LONGEST_STEADY, max(SHORTEST_ROUND, PROBE_SECONDS * (variation / PRECISION) ** 2))
    slow = min(LONGEST_PROBE_SECONDS, STEPS_A_ROUND * _predict_step(timed, largest))
    seconds = starts + ((ROUNDS_ALONE if alone else ROUNDS) + others) * max(steady, slow)
    return seconds if problem.budget_seconds is None else min(seconds, problem.budget_seconds)


def _predict_step(timed: Sequence[Timed], largest: int) -> float:
    """Seconds of a step of the largest batch, on the line through the two that were stepped."""
    small, large = timed[0], timed[-1]
    batches = large.probe.layout.global_batch - small.probe.layout.global_batch
    slope = max(0.0, large.step_seconds - small.step_seconds) / max(1, batches)
    return large.step_seconds + slope * max(0, largest - large.probe.layout.global_batch)
