"""Measurements outside a search: runs at given batch sizes, and dry runs.

A run reports metrics for each device. On CPU slices and simulated devices, the timed steps show how
long each device computes (own work) and how long it waits. If they don't show this, each device is
also timed alone, with its share of the batch.

A dry run shows what to expect of a search. It builds the workload once and runs steps of two small
batches on one device. None of its results are saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import msgspec

from evener.devices.types import Device
from evener.errors import NoLayoutError, RequestError
from evener.system.files import new_error_file

from .events import ProbeProgress, Report
from .model_memory import FULL, LORA, QLORA, TrainingMethod
from .number_format import count_nouns, count_samples, duration, join_words, millions, step_time
from .probes.child_prober import Prober, make_prober
from .request import Job
from .result.explain_failure import find_unfinished
from .result.sentences import write_unfinished
from .search.model.memory import Memory
from .store.locks import lock_job
from .store.runs import make_search
from .types import (
    Failed,
    Interval,
    Layout,
    MeasurementDoubt,
    Observation,
    OutOfMemory,
    Power,
    Probe,
    Problem,
    Stage,
    Timed,
    layout_of,
)

# seconds per run; a run with a number of steps may warm up for half of this time
DEFAULT_SECONDS = 10.0
ALONE_SECONDS = 3.0  # seconds for each device alone
BATCHES = 2  # number of batches that a dry run measures: two points give a line
PROBE_SECONDS = 0.5  # seconds per batch
# relative increase in bytes between the two batches: below it, the memory of the rows is hidden by
# an optimizer's peak
LEAST_RISE = 0.02


class ProbeLength(msgspec.Struct, frozen=True):
    """How long each repetition of a probe lasts: `steps` steps or, if `steps` is 0, `seconds`."""

    seconds: float = DEFAULT_SECONDS
    steps: int = 0


class ProbeRepeat(msgspec.Struct, frozen=True):
    """Result of one repetition of a probe.

    `samples` and `samples_per_second` cover all repetitions so far. `own` has each device's
    samples/s while it computes, without the time it waits for other devices; None means unknown.
    """

    samples: int
    samples_per_second: float
    own: tuple[float | None, ...]
    alone: bool  # `own` was measured on each device alone
    steps: int  # timed steps in this run
    # peak of each device in this run; None: unknown or unused
    memory_bytes: tuple[int | None, ...]
    warnings: tuple[MeasurementDoubt, ...]  # doubts about this run
    this_run: Interval  # samples/s of this run alone
    power: Power | None = None  # in this run; None: a device doesn't report its power
    samples_per_joule: float | None = None  # in this run, over all devices of the request


def choose_layout(
    devices: int, positions: Sequence[int] | None, batches: Sequence[int], micro: Sequence[int] = ()
) -> Layout:
    """Return the layout that the user asked `evener probe` to measure.

    - `devices`: how many devices there are.
    - `positions`: the devices to use; None means the first ones, as many as there are batches.
    - `batches`: the rows of each of the used devices.
    - `micro`: the most rows that each of them computes at once; empty means all of its rows.

    Raises RequestError if these don't fit together.
    """
    if any(batch < 1 for batch in batches):
        raise RequestError(
            f"A batch of {min(batches)} can't be trained.", "Give 1 or more for each device."
        )
    if positions is None:
        if len(batches) > devices:
            raise RequestError(
                f"--batches gives {len(batches)} batches for {count_nouns(devices, 'device')}.",
                "Give at most one for each device, or more --devices.",
            )
        positions = range(len(batches))
    if len(positions) != len(batches):
        raise RequestError(
            f"--gpus names {count_nouns(len(positions), 'device')}, and --batches gives "
            f"{len(batches)}.",
            "Give one batch for each device.",
        )
    if max(positions) >= devices:
        there = "There is one device, 0."
        if devices > 1:
            there = f"There are {devices} devices, from 0 to {devices - 1}."
        raise RequestError(f"--gpus names {max(positions)}.", there)
    _check_micro(batches, micro)
    shares, rows = (
        dict(zip(positions, sizes, strict=True)) for sizes in (batches, micro or batches)
    )
    return layout_of(*(tuple(sizes.get(i, 0) for i in range(devices)) for sizes in (shares, rows)))


def _check_micro(batches: Sequence[int], micro: Sequence[int]) -> None:
    if micro and len(micro) != len(batches):
        message = (
            f"--micro gives {len(micro)} number{'' if len(micro) == 1 else 's'}, --batches "
            f"{len(batches)}."
        )
        raise RequestError(message, "Give the rows of one pass for each batch.")
    for rows, batch in zip(micro, batches, strict=False):
        if not 1 <= rows <= batch:
            raise RequestError(
                f"--micro {rows} isn't a part of {count_nouns(batch, 'row')}.",
                f"Give a number from 1 to {batch}.",
            )


@contextmanager
def repeat_probe(
    job: Job, layout: Layout, repeat: int, length: ProbeLength, stop: threading.Event
) -> Iterator[Iterator[ProbeRepeat]]:
    """Context manager that locks the devices, and yields an iterator over repetitions of a probe.

    The iterator runs the layout `repeat` times and yields each result. It ends early once `stop` is
    set. If the request shares the devices with other searches, they aren't locked. Raises
    NoLayoutError if a probe fails, and DeviceError if another search uses a device.
    """
    with _locked_prober(job, layout.active) as prober:
        yield _runs(prober, layout, job.devices, repeat, length, stop)


@contextmanager
def _locked_prober(job: Job, positions: Sequence[int] | None = None) -> Iterator[Prober]:
    """Context manager that locks the devices at `positions`, or all, and yields a prober."""
    with lock_job(job, positions), closing(make_prober(job, error_file=new_error_file())) as prober:
        yield prober


def _runs(
    prober: Prober,
    layout: Layout,
    devices: Sequence[Device],
    repeat: int,
    length: ProbeLength,
    stop: threading.Event,
) -> Iterator[ProbeRepeat]:
    samples = 0
    spent = 0.0
    stage: Stage = Stage.SPLIT if layout.traits.together else Stage.SOLO
    alone: tuple[float | None, ...] = ()
    for turn in range(repeat):
        probe = Probe(layout, stage, length.seconds, turn, True, length.steps)
        seen = _require_timed(_measure(prober, probe, stop), devices)
        if seen is None:
            return
        samples += seen.steps * layout.global_batch
        spent += seen.steps * seen.step_seconds
        own: tuple[float | None, ...] = tuple(
            share / part if share and part else None
            for share, part in zip(layout.shares, seen.device_seconds, strict=True)
        )
        if layout.traits.together and not any(own):
            alone = own = alone or _measure_alone(
                prober, layout, min(length.seconds, ALONE_SECONDS), stop
            )
        power = seen.power
        yield ProbeRepeat(
            samples,
            samples / spent,
            own,
            bool(alone),
            seen.steps,
            seen.memory_bytes,
            seen.warnings,
            seen.throughput,
            power,
            power.samples_per_joule(seen.throughput.value) if power else None,
        )


def _measure(prober: Prober, probe: Probe, stop: threading.Event) -> Observation | None:
    """Run one probe, and return its outcome, or None if it was stopped."""
    return next(iter(prober.measure((probe,), lambda _: None, stop)), None)


def _require_timed(observation: Observation | None, devices: Sequence[Device]) -> Timed | None:
    """Return a successful measurement, or None if the probe was stopped.

    Raises NoLayoutError if the probe failed.
    """
    if isinstance(observation, OutOfMemory):
        labels = ", ".join(devices[i].label for i in observation.devices)
        where = f" on {labels}" if labels else ""
        raise NoLayoutError(
            f"Out of memory{where}: {observation.detail[:200].rstrip('.')}.",
            "Use smaller batches or passes (--micro).",
        )
    if isinstance(observation, Failed):
        why = observation.detail[:300].rstrip(".")
        raise NoLayoutError(f"The training failed: {why}.", "Fix that and try again.")
    return observation


def _measure_alone(
    prober: Prober, layout: Layout, seconds: float, stop: threading.Event
) -> tuple[float | None, ...]:
    """Measure each device on its own, with its share of the layout, and return its samples/s.

    None stands for an unused device, and for a measurement that failed or was stopped.
    """
    speeds: list[float | None] = []
    for position, share in enumerate(layout.shares):
        sizes = (layout.shares, layout.pass_rows)
        own = (tuple(rows * (i == position) for i, rows in enumerate(size)) for size in sizes)
        probe = Probe(layout_of(*own), Stage.SOLO, seconds)
        seen = _measure(prober, probe, stop) if share and not stop.is_set() else None
        speeds.append(seen.samples_per_second if isinstance(seen, Timed) else None)
    return tuple(speeds)


class DryRunDevice(msgspec.Struct, frozen=True):
    """What a dry run predicts for a device: usable memory in bytes, and the largest batch.

    None means unknown.
    """

    label: str
    name: str
    memory_bytes: int | None
    largest_batch: int | None


class LargestSizes(msgspec.Struct, frozen=True):
    """Largest parameter counts that fit in memory, for an unsharded model and for a sharded one."""

    whole: int  # if each device holds the model
    sharded: int  # if the devices hold parts of it


class LargestModel(LargestSizes, frozen=True, kw_only=True):
    """Largest parameter counts that fit in memory: for full training, LoRA and QLoRA."""

    lora: LargestSizes
    qlora: LargestSizes

    def write(self) -> str:
        """Return the parameter counts as a sentence."""
        return (
            f"AdamW in float32 trains at most {millions(self.whole)} parameters where each device "
            f"holds the model, and {millions(self.sharded)} in shards (split.shard); "
            f"{LORA.description} {millions(self.lora.whole)} and {millions(self.lora.sharded)}, "
            f"{QLORA.description} {millions(self.qlora.whole)} and {millions(self.qlora.sharded)}: "
            f"by memory alone, as gathered units and activations take some"
        )


class DryRunResult(msgspec.Struct, frozen=True):
    """What a dry run measured and predicts.

    `steps` has the batch size and the seconds per step of each measurement.
    """

    workload: str
    framework: str
    devices: tuple[DryRunDevice, ...]
    steps: tuple[tuple[int, float], ...]
    start_seconds: float  # seconds to start a process and build the workload
    budget_seconds: float | None
    notes: tuple[str, ...] = ()
    simulated: bool = False  # the workload itself was not run
    largest: LargestModel | None = (
        None  # the largest model that the devices could train; None: unknown
    )

    def write_tried(self) -> str:
        """Return a sentence about what the dry run trained, and how long its steps took."""
        what = "A simulated model" if self.simulated else self.workload
        if not self.simulated and self.framework != "none":
            what += f" ({self.framework})"
        built = f"built in {duration(self.start_seconds)} and " if self.start_seconds else ""
        steps = [f"{step_time(each)} with {count_samples(batch)}" for batch, each in self.steps]
        where = self.devices[0].label
        return f"{what} was {built}stepped on {where}: a step took {join_words(steps)}."

    def write_rest(self) -> str:
        """Return sentences about how long a search would take, and about the largest model."""
        sentences = []
        if self.budget_seconds is not None:
            sentences.append(f"A search takes at most {duration(self.budget_seconds)}.")
        if self.largest is not None:
            sentences.append(f"{self.largest.write()}.")
        return " ".join([*sentences, "Nothing was kept."])


def dry_run(job: Job, report: Report, stop: threading.Event) -> DryRunResult | None:
    """Train a few steps on the first device, and predict the largest batch of every device.

    Returns None if it was stopped. Raises NoLayoutError if the workload fails or doesn't fit in
    memory, or if a single step takes longer than the budget.
    """
    alone = _limit_to_first_device(job)
    with _locked_prober(alone) as prober:
        timed = _measure_first_batches(alone, prober, report, stop, find_largest_model(job))
    if len(timed) < BATCHES and stop.is_set():
        return None
    return _predict_sizes(job, timed)


def _limit_to_first_device(job: Job) -> Job:
    """Return a copy of the job that uses only its first device."""
    machine = job.machine
    request = job.request
    if machine is not None:
        machine = msgspec.structs.replace(
            machine, devices=machine.devices[:1], limits=machine.limits[:1]
        )
    if request.global_batch is not None:
        # the device's share of the fixed batch in an even split
        most = max(1, request.global_batch // len(job.devices))
        request = msgspec.structs.replace(request, global_batch=None, max_global_batch=most)
    return msgspec.structs.replace(job, request=request, devices=job.devices[:1], machine=machine)


def _measure_first_batches(
    one_device_job: Job,
    prober: Prober,
    report: Report,
    stop: threading.Event,
    largest: LargestModel | None,
) -> list[Timed]:
    """Measure the first batches of a search on one device.

    `largest` is for the error message: the largest models that would fit in memory, or None.
    Returns an empty list if the user stopped. Raises NoLayoutError if no step ended within the
    budget, or if not even one row fits.
    """
    budget = one_device_job.request.budget_seconds
    running: dict[Probe, ProbeProgress] = {}

    def watch(progress: ProbeProgress) -> None:
        running[progress.probe] = progress
        report(progress)

    with _stopped_after(budget, stop) as over:
        timed = _measure_batches(one_device_job, prober, watch, stop)
    if timed:
        return timed
    if over.is_set():
        late = find_unfinished(
            one_device_job.workload, one_device_job.devices, tuple(running.values())
        )
        what = " ".join(map(write_unfinished, late))
        raise NoLayoutError(
            what or f"No step ended within {budget:g} s.", "Give a longer --budget."
        )
    if not stop.is_set():
        raise _refuse_memory(one_device_job.devices[0], largest)
    return []


@contextmanager
def _stopped_after(seconds: float | None, stop: threading.Event) -> Iterator[threading.Event]:
    """Context manager that sets `stop` after some seconds, for example to end a dry run.

    It yields another event, which is set only if the time is up, not if the user stops.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        stop.set()

    alarm = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, end)
    alarm.daemon = True
    alarm.start()
    try:
        yield over
    finally:
        alarm.cancel()


def _measure_batches(
    one_device_job: Job, prober: Prober, watch: Report, stop: threading.Event
) -> list[Timed]:
    """Run the first probes of a search for a short time, and return the successful measurements.

    `watch` is called with their progress. Raises NoLayoutError if the workload fails.
    """
    search = make_search(one_device_job)
    timed: list[Timed] = []
    while len(timed) < BATCHES and not stop.is_set():
        probes = search.ask()
        if not probes:
            break
        short = tuple(msgspec.structs.replace(probe, seconds=PROBE_SECONDS) for probe in probes)
        for seen in prober.measure(short, watch, stop):
            if isinstance(seen, Failed):
                why = seen.detail.rstrip(".")
                raise NoLayoutError(f"The workload fails: {why}.", "Fix that and try again.")
            search.tell(seen)
            if isinstance(seen, Timed):
                timed.append(seen)
    return timed


def _refuse_memory(device: Device, largest: LargestModel | None) -> NoLayoutError:
    """Return the error for a device whose memory is too small even for one row.

    If `largest` is given, the message mentions these largest models that would fit in memory.
    """
    none = f"Not even one sample fits on {device.label}."
    if largest is None:
        return NoLayoutError(none, "Free some of its memory.")
    return NoLayoutError(
        f"{none} {largest.write()}.",
        "Free some of its memory, or run evener balance, which also tries the model in shards "
        "over all of the devices.",
    )


def _predict_sizes(job: Job, timed: Sequence[Timed]) -> DryRunResult:
    problem = job.problem
    steps = tuple((seen.probe.layout.global_batch, seen.step_seconds) for seen in timed)
    sizes = [(seen.probe.layout.global_batch, seen.memory_bytes[0]) for seen in timed]
    points = tuple((batch, size) for batch, size in sizes if size)
    devices = tuple(
        DryRunDevice(device.label, device.name, limit, _predict_largest(limit, points, problem))
        for device, limit in zip(job.devices, problem.memory_bytes, strict=True)
    )
    return DryRunResult(
        workload=job.workload,
        framework=job.framework,
        devices=devices,
        steps=steps,
        start_seconds=timed[0].start_seconds,
        budget_seconds=problem.budget_seconds,
        notes=job.notes,
        simulated=job.machine is not None,
        largest=find_largest_model(job),
    )


def find_largest_model(job: Job) -> LargestModel | None:
    """Return the largest models that the job's devices could train, or None if unknown.

    It is unknown unless the workload can be sharded over several devices of known memory.
    """
    sizes = [size for size in job.problem.memory_bytes if size is not None]
    sharded = job.machine.shards is not None if job.machine is not None else job.problem.shards
    if sharded and job.problem.devices > 1 and len(sizes) == job.problem.devices:
        full, lora, qlora = (_find_largest(method, sizes) for method in (FULL, LORA, QLORA))
        return LargestModel(full.whole, full.sharded, lora=lora, qlora=qlora)
    return None


def _find_largest(method: TrainingMethod, sizes: Sequence[int]) -> LargestSizes:
    return LargestSizes(method.largest_whole(sizes), method.largest_sharded(sizes))


def _predict_largest(
    limit_bytes: int | None, points: tuple[tuple[int, int], ...], problem: Problem
) -> int | None:
    rises = len(points) > 1 and points[-1][1] - points[0][1] >= LEAST_RISE * points[-1][1]
    guess = Memory(limit_bytes, points).predict_largest() if rises else None
    bounds = [bound for bound in (guess, problem.largest_share) if bound is not None]
    return min(bounds) if bounds else None
