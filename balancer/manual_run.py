"""Measurements outside a search: runs at batch sizes that a person chooses.

Per-device figures come from the step itself where a device's own work can be separated from waiting (CPU slices,
simulated devices); elsewhere each device is timed alone at its share.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import msgspec

from evener.devices.types import Device
from evener.errors import NoLayoutError, RequestError
from evener.system.files import new_error_file

from .probes.child_prober import make_prober
from .probes.prober import Prober
from .request import Job
from .result.words import make_fault
from .store.locks import lock_job
from .types import (
    Failed,
    Finding,
    Interval,
    Layout,
    Observation,
    OutOfMemory,
    Power,
    Probe,
    Stage,
    Timed,
    Warned,
    layout_of,
)

DEFAULT_SECONDS = 10.0  # of a run; one with a number of steps may warm up for half of it
ALONE_SECONDS = 3.0  # of each device by itself


class RunLength(msgspec.Struct, frozen=True):
    """The length of each run without warm-up: seconds, or a number of optimizer steps if that isn't 0."""

    seconds: float = DEFAULT_SECONDS
    steps: int = 0


class TimedRun(msgspec.Struct, frozen=True):
    """One run: samples and samples/s so far over all runs, and each device's own samples/s, None where unknown."""

    samples: int
    samples_per_second: float
    own: tuple[float | None, ...]
    alone: bool  # `own` was measured with each device by itself
    steps: int  # timed in this run
    memory_bytes: tuple[int | None, ...]  # peak of each device in this run; None: unknown, or left out
    warnings: tuple[Warned, ...]  # doubts about this run
    this_run: Interval  # samples/s of this run alone
    power: Power | None = None  # of this run; None: one of the devices doesn't report it
    samples_per_joule: float | None = None  # of this run, by all devices of the request


def choose_layout(
    devices: int, positions: Sequence[int] | None, batches: Sequence[int], micro: Sequence[int] = ()
) -> Layout:
    """One batch for each position, or for the first devices, in passes of up to `micro` rows where that is given.

    RequestError if they don't fit together.
    """
    if any(batch < 1 for batch in batches):
        raise RequestError(f"A batch of {min(batches)} can't be trained.", "Give 1 or more for each device.")
    if positions is None:
        positions = range(len(batches))
        if len(batches) > devices:
            message = f"--batches gives {len(batches)} batches for {devices} device{'' if devices == 1 else 's'}."
            raise RequestError(message, "Give at most one for each device, or more --devices.")
    if len(positions) != len(batches):
        names = f"--gpus names {len(positions)} device{'' if len(positions) == 1 else 's'}"
        raise RequestError(f"{names}, and --batches gives {len(batches)}.", "Give one batch for each device.")
    if max(positions) >= devices:
        there = f"There are {devices} devices, from 0 to {devices - 1}." if devices > 1 else "There is one device, 0."
        raise RequestError(f"--gpus names {max(positions)}.", there)
    _check_micro(batches, micro)
    shares, rows = (dict(zip(positions, sizes, strict=True)) for sizes in (batches, micro or batches))
    return layout_of(*(tuple(sizes.get(i, 0) for i in range(devices)) for sizes in (shares, rows)))


def _check_micro(batches: Sequence[int], micro: Sequence[int]) -> None:
    if micro and len(micro) != len(batches):
        message = f"--micro gives {len(micro)} number{'' if len(micro) == 1 else 's'}, --batches {len(batches)}."
        raise RequestError(message, "Give the rows of one pass for each batch.")
    for rows, batch in zip(micro, batches, strict=False):
        if not 1 <= rows <= batch:
            raise RequestError(f"--micro {rows} isn't a part of {batch} rows.", f"Give a number from 1 to {batch}.")


@contextlib.contextmanager
def timed_runs(
    resolved: Job, layout: Layout, repeat: int, length: RunLength, stop: threading.Event
) -> Iterator[Iterator[TimedRun]]:
    """Lock the devices, unless the request shares them, and yield `repeat` runs, each as it ends.

    NoLayoutError if the batch doesn't fit or the training fails, DeviceError if another session has a device.
    """
    with (
        lock_job(resolved, layout.active),
        contextlib.closing(make_prober(resolved, error_file=new_error_file())) as prober,
    ):
        yield _runs(prober, layout, resolved.devices, repeat, length, stop)


def _runs(
    prober: Prober, layout: Layout, devices: Sequence[Device], repeat: int, length: RunLength, stop: threading.Event
) -> Iterator[TimedRun]:
    samples, spent = 0, 0.0
    stage: Stage = "split" if layout.traits.together else "solo"
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
            alone = own = alone or _measure_alone(prober, layout, min(length.seconds, ALONE_SECONDS), stop)
        power = seen.power
        yield TimedRun(
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
    """One measurement; None if it was stopped."""
    return next(iter(prober.measure((probe,), lambda _: None, stop)), None)


def _require_timed(seen: Observation | None, devices: Sequence[Device]) -> Timed | None:
    """The timing, None if it was stopped; NoLayoutError if the batch doesn't fit or the training failed."""
    if isinstance(seen, OutOfMemory):
        values = {"devices": [devices[i].label for i in seen.devices], "why": seen.detail[:200]}
        remedy = Finding("remedy.smaller_passes")
        raise make_fault(NoLayoutError, Finding("fault.out_of_memory", values), remedy=remedy)
    if isinstance(seen, Failed):
        failed = Finding("fault.training", {"cause": seen.cause, "why": seen.detail[:300]})
        raise make_fault(NoLayoutError, failed, remedy=Finding("remedy.again"))
    return seen


def _measure_alone(prober: Prober, layout: Layout, seconds: float, stop: threading.Event) -> tuple[float | None, ...]:
    """Each device by itself at its share."""
    figures: list[float | None] = []
    for position, share in enumerate(layout.shares):
        sizes = (layout.shares, layout.pass_rows)
        own = (tuple(rows * (i == position) for i, rows in enumerate(each)) for each in sizes)
        probe = Probe(layout_of(*own), "solo", seconds)
        seen = _measure(prober, probe, stop) if share and not stop.is_set() else None
        figures.append(seen.samples_per_second if isinstance(seen, Timed) else None)
    return tuple(figures)
