"""`evener probe`: time training at batch sizes that a person chooses, in the words of jinkos/multi-gpus' test_GPUs.py.

Per-device figures are measured where a device's own part of a step can be told apart from waiting (CPU slices,
simulated devices); elsewhere each device is timed alone at its share, and the line says so.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence

import msgspec

from evener.balancer.probes.prober import Prober
from evener.balancer.request import Request
from evener.balancer.resolve import Bench, make_prober, understand
from evener.balancer.result import explain
from evener.balancer.store import runs
from evener.balancer.store.locks import MachineLock
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Probe, Stage, Timed, Warned, layout_of, solo
from evener.devices.types import Device
from evener.errors import NoLayoutError, RequestError
from evener.tui.cli.commands.balance import stopped_by_signals
from evener.tui.text.formatting import parse_duration, plain
from evener.tui.text.safe_documents import json_text

SECONDS = 10.0  # of a run, unless said; a run of so many steps may warm up for half of it
LONGEST_SECONDS = 86_400.0
ALONE_SECONDS = 3.0  # of each device by itself


class Length(msgspec.Struct, frozen=True):
    """How long each run lasts, warm-up not counted: its seconds, or so many optimizer steps if that is not 0."""

    seconds: float
    steps: int = 0


class Turn(msgspec.Struct, frozen=True):
    """One run: samples and seconds so far over all runs, and each device's own samples/s, None where unknown."""

    samples: int
    samples_per_second: float
    own: tuple[float | None, ...]
    alone: bool  # `own` was measured with each device by itself
    steps: int  # timed in this run
    memory_bytes: tuple[int | None, ...]  # peak of each device in this run; None: unknown, or left out
    warnings: tuple[Warned, ...]  # doubts about this run


def length_of(seconds: str | None, steps: int | None) -> Length:
    """What `--seconds` or `--steps` asks for; RequestError if both are given, or no such time can be measured."""
    if steps is not None:
        if seconds is not None:
            raise RequestError("--seconds and --steps both say how long a run lasts.", "Give one of them.")
        return Length(SECONDS, steps)
    if seconds is None:
        return Length(SECONDS)
    span = parse_duration(seconds, "--seconds")
    if not 0 < span <= LONGEST_SECONDS:
        raise RequestError(f"A run can't last --seconds {seconds}.", "Give more than 0s, and at most 24h.")
    return Length(span)


def run_probe(
    request: Request,
    gpus: Sequence[str] | None,
    batches: tuple[int, ...],
    *,
    repeat: int,
    length: Length,
    as_json: bool,
) -> int:
    """Measure `repeat` runs and print each; 1 if it does not fit or fails, 130 if interrupted."""
    spec, positions = _chosen(request.devices, gpus)
    found = understand(msgspec.structs.replace(request, devices=spec))
    layout = _layout(len(found.devices), positions, batches)
    with _held([] if request.share else [found.devices[position] for position in layout.active]):
        return _run(found, layout, repeat, length, gpus is not None or len(batches) > 1, as_json)


@contextlib.contextmanager
def _held(devices: Sequence[Device]) -> Iterator[None]:
    """No other evener measures on these devices meanwhile; DeviceError if one does. Simulated ones are nobody's."""
    with contextlib.ExitStack() as locks:
        if any(device.kind != "sim" for device in devices):
            locks.callback(runs.DeviceLock("", devices).release)
            locks.callback(MachineLock(devices).release)
        yield


def _run(found: Bench, layout: Layout, repeat: int, length: Length, by_gpu: bool, as_json: bool) -> int:
    prober = make_prober(found)
    stop = threading.Event()
    if not as_json:
        _announce(found, layout, repeat, length)
    turns = []
    try:
        with stopped_by_signals(stop.set, "stopping") as caught:
            for turn in _measured(prober, layout, found.devices, repeat, length, stop):
                turns.append(msgspec.to_builtins(turn))
                if not as_json:
                    _say_turn(turn, layout, found.devices, by_gpu, length)
    finally:
        prober.close()
    interrupted = stop.is_set()
    if as_json:
        labels = [device.label for device in found.devices]
        answer = {"devices": labels, "batches": layout.shares, "runs": turns, "interrupted": interrupted}
        print(json_text(answer))
    elif not interrupted:
        print("Done!")
    if interrupted:
        return caught[0] if caught else 130
    return 0


def _announce(found: Bench, layout: Layout, repeat: int, length: Length) -> None:
    """How long it will take; beside the answer, notes, and what the seed's word GPU stands for where there is none."""
    devices = [found.devices[position] for position in layout.active]
    others = [f"GPU:{device.index} is {device.label}" for device in devices if device.kind != "gpu"]
    _say((*found.notes, *([f"In the lines below {', '.join(others)}."] if others else ())))
    lasts = f"{length.steps} steps" if length.steps else f"about {length.seconds:.0f} seconds"
    print(f"Each of the {repeat} training runs should take {lasts}...", flush=True)


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"evener: {plain(line)}", file=sys.stderr, flush=True)


def _chosen(spec: str, gpus: Sequence[str] | None) -> tuple[str, tuple[int, ...] | None]:
    """What `--gpus 0 1` means: the devices, and the positions among them that compute; None: the first.

    Beside `--devices` they are positions in it; alone, indices of the kind that this machine has.
    """
    if gpus is None:
        return spec, None
    if not all(gpu.isascii() and gpu.isdigit() and len(gpu) < 7 for gpu in gpus) or len(set(gpus)) != len(gpus):
        raise RequestError(f"--gpus {' '.join(gpus)} are not different indices.", "Write it like --gpus 0 1.")
    if spec != "auto":
        return spec, tuple(int(gpu) for gpu in gpus)
    from evener.devices.discover import discover

    kind = discover(spec).devices[0].kind
    return f"{kind}:{','.join(gpus)}", tuple(range(len(gpus)))


def _layout(devices: int, positions: tuple[int, ...] | None, batches: tuple[int, ...]) -> Layout:
    """The shares that were asked for: one batch a position, or on the first so many devices."""
    if any(batch < 1 for batch in batches):
        raise RequestError(f"A batch of {min(batches)} can't be trained.", "Give 1 or more for each device.")
    if positions is None:
        positions = tuple(range(len(batches)))
        if len(batches) > devices:
            told = f"--batches gives {len(batches)} batches for {devices} device{'' if devices == 1 else 's'}."
            raise RequestError(told, "Give at most one for each device, or more --devices.")
    if len(positions) != len(batches):
        raise RequestError(f"{len(positions)} GPUs have {len(batches)} batches.", "Give one batch for each GPU.")
    if max(positions) >= devices:
        there = f"There are {devices} devices, from 0 to {devices - 1}." if devices > 1 else "There is one device, 0."
        raise RequestError(f"--gpus names {max(positions)}.", there)
    shares = dict(zip(positions, batches, strict=True))
    return layout_of(tuple(shares.get(i, 0) for i in range(devices)))


def _measured(
    prober: Prober, layout: Layout, devices: Sequence[Device], repeat: int, length: Length, stop: threading.Event
) -> Iterator[Turn]:
    """The runs, each as it ends."""
    samples, spent = 0, 0.0
    stage: Stage = "split" if layout.kind == "split" else "solo"
    alone: tuple[float | None, ...] = ()
    for turn in range(repeat):
        seen = _timed(_one(prober, Probe(layout, stage, length.seconds, turn, True, length.steps), stop), devices)
        if seen is None:
            return
        samples += seen.steps * layout.global_batch
        spent += seen.steps * seen.step_seconds
        own: tuple[float | None, ...] = tuple(
            share / part if share and part else None
            for share, part in zip(layout.shares, seen.device_seconds, strict=True)
        )
        if layout.kind == "split" and not any(own):
            alone = own = alone or _alone(prober, layout, min(length.seconds, ALONE_SECONDS), stop)
        yield Turn(samples, samples / spent, own, bool(alone), seen.steps, seen.memory_bytes, seen.warnings)


def _one(prober: Prober, probe: Probe, stop: threading.Event) -> Observation | None:
    """One measurement; None if it was stopped."""
    return next(iter(prober.measure((probe,), lambda _: None, stop)), None)


def _timed(seen: Observation | None, devices: Sequence[Device]) -> Timed | None:
    """What was timed; NoLayoutError if the batch doesn't fit, with where if that is known, or fails."""
    if isinstance(seen, OutOfMemory):
        where = f" on {', '.join(devices[i].label for i in seen.devices)}" if seen.devices else ""
        raise NoLayoutError(f"Out of memory{where}: {plain(seen.detail, 200)}.", "Take smaller batches.")
    if isinstance(seen, Failed):
        raise NoLayoutError(f"The training failed: {plain(seen.detail, 300)}.", "Mend that and try again.")
    return seen


def _alone(prober: Prober, layout: Layout, seconds: float, stop: threading.Event) -> tuple[float | None, ...]:
    """Each device by itself at its share: what it can do, where a step doesn't tell the devices apart."""
    figures: list[float | None] = []
    for position, share in enumerate(layout.shares):
        probe = Probe(solo(len(layout.shares), position, share), "solo", seconds)
        seen = _one(prober, probe, stop) if share and not stop.is_set() else None
        figures.append(seen.samples_per_second if isinstance(seen, Timed) else None)
    return tuple(figures)


def _say_turn(turn: Turn, layout: Layout, devices: Sequence[Device], by_gpu: bool, length: Length) -> None:
    """Its lines, and beside the answer what lessens it."""
    print("\n".join(_lines(turn, layout, devices, by_gpu)), flush=True)
    _say(explain.warnings(turn.warnings, devices, "more --steps" if length.steps else "a longer --seconds"))


def _lines(turn: Turn, layout: Layout, devices: Sequence[Device], by_gpu: bool) -> list[str]:
    total = f"{turn.samples_per_second:5.0f}"
    if not by_gpu:
        return [f"After {turn.samples} samples default GPU: {total}sps"]
    if layout.kind == "solo":
        (position,) = layout.active
        return [f"After {turn.samples} samples GPU:{devices[position].index} {total}sps"]
    lines = [f"After {turn.samples} samples"]
    for position in layout.active:
        own = turn.own[position]
        figure = "    ?" if own is None else f"{own:5.0f}"
        note = " alone" if turn.alone else ""
        lines.append(f"\t GPU:{devices[position].index}[{layout.shares[position]}] {figure}sps{note}")
    return [*lines, f"\t Total:[{layout.global_batch}] {total}sps"]
