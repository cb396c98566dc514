"""`evener probe`: time training at batch sizes that a person chooses, in the words of jinkos/multi-gpus' test_GPUs.py.

Per-device figures are measured where a device's own part of a step can be told apart from waiting (CPU slices,
simulated devices); elsewhere each device is timed alone at its share, and the line says so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import msgspec

from balancer.bench import make_prober, understand
from balancer.probes.prober import Prober
from balancer.records import Failed, Layout, OutOfMemory, Probe, Timed, layout_of, solo
from balancer.request import Request
from devices.base import Device
from evener.errors import NoLayoutError, RequestError
from tui.commands.balance import stopped_by_signals
from tui.documents import json_text
from tui.words import plain


class Turn(msgspec.Struct, frozen=True):
    """One run: samples and seconds so far over all runs, and each device's own samples/s, None where unknown."""

    samples: int
    samples_per_second: float
    own: tuple[float | None, ...]


def run_probe(
    request: Request,
    gpus: Sequence[str] | None,
    batches: tuple[int, ...],
    *,
    repeat: int,
    seconds: float,
    as_json: bool,
) -> int:
    """Measure `repeat` runs of `seconds` and print each; 1 if it does not fit or fails, 130 if interrupted."""
    spec, positions = _chosen(request.devices, gpus)
    found = understand(msgspec.structs.replace(request, devices=spec))
    layout = _layout(len(found.devices), positions, batches)
    prober = make_prober(found)
    stop = threading.Event()
    if not as_json:
        _say_devices(found.notes, [found.devices[position] for position in layout.active])
    if not as_json:
        print(f"Each of the {repeat} training runs should take about {seconds:.0f} seconds...", flush=True)
    try:
        with stopped_by_signals(stop.set, "stopping") as caught:
            turns = _measure(
                prober, layout, found.devices, repeat, seconds, stop, None if as_json else gpus is not None
            )
    finally:
        prober.close()
    if stop.is_set():
        return caught[0] if caught else 130
    if as_json:
        labels = [device.label for device in found.devices]
        answer = {"devices": labels, "batches": layout.shares, "runs": [msgspec.to_builtins(turn) for turn in turns]}
        print(json_text(answer))
    else:
        print("Done!")
    return 0


def _say_devices(notes: Sequence[str], devices: Sequence[Device]) -> None:
    """Notes, and what the seed's word GPU stands for where there is none; beside the answer, not in it."""
    others = [f"GPU:{device.index} is {device.label}" for device in devices if device.kind != "gpu"]
    for line in (*notes, *([f"In the lines below {', '.join(others)}."] if others else ())):
        print(f"evener: {plain(line)}", file=sys.stderr, flush=True)


def _chosen(spec: str, gpus: Sequence[str] | None) -> tuple[str, tuple[int, ...] | None]:
    """What `--gpus 0 1` means: the devices, and the positions among them that compute; None: the first, with the sum.

    Beside `--devices` they are positions in it; alone, indices of the kind that this machine has.
    """
    if gpus is None:
        return spec, None
    if not all(gpu.isascii() and gpu.isdigit() and len(gpu) < 7 for gpu in gpus) or len(set(gpus)) != len(gpus):
        raise RequestError(f"--gpus {' '.join(gpus)} are not different indices.", "Write it like --gpus 0 1.")
    if spec != "auto":
        return spec, tuple(int(gpu) for gpu in gpus)
    from devices.discover import discover

    kind = discover(spec).devices[0].kind
    return f"{kind}:{','.join(gpus)}", tuple(range(len(gpus)))


def _layout(devices: int, positions: tuple[int, ...] | None, batches: tuple[int, ...]) -> Layout:
    """The shares that were asked for: one batch a position, or their sum on the first device."""
    if any(batch < 1 for batch in batches):
        raise RequestError(f"A batch of {min(batches)} can't be trained.", "Give 1 or more for each device.")
    if positions is None:
        return solo(devices, 0, sum(batches))
    if len(positions) != len(batches):
        raise RequestError(f"{len(positions)} GPUs have {len(batches)} batches.", "Give one batch for each GPU.")
    if max(positions) >= devices:
        there = f"There are {devices} devices, from 0 to {devices - 1}." if devices > 1 else "There is one device, 0."
        raise RequestError(f"--gpus names {max(positions)}.", there)
    shares = dict(zip(positions, batches, strict=True))
    return layout_of(tuple(shares.get(i, 0) for i in range(devices)))


def _measure(
    prober: Prober,
    layout: Layout,
    devices: Sequence[Device],
    repeat: int,
    seconds: float,
    stop: threading.Event,
    by_gpu: bool | None,
) -> list[Turn]:
    """The runs, each printed as it ends unless `by_gpu` is None."""
    turns: list[Turn] = []
    samples, spent = 0, 0.0
    alone: tuple[float | None, ...] | None = None
    for turn in range(repeat):
        seen = _one(prober, Probe(layout, "split" if layout.kind == "split" else "solo", seconds, turn), stop)
        if seen is None:
            return turns
        samples += seen.steps * layout.global_batch
        spent += seen.steps * seen.step_seconds
        own: tuple[float | None, ...] = tuple(
            share / part if share and part else None
            for share, part in zip(layout.shares, seen.device_seconds, strict=True)
        )
        if layout.kind == "split" and not any(own):
            alone = alone or _alone(prober, layout, seconds, stop)
            own = alone
        turns.append(Turn(samples, samples / spent, own))
        if by_gpu is not None:
            print("\n".join(_lines(turns[-1], layout, devices, by_gpu, alone is not None)), flush=True)
    return turns


def _one(prober: Prober, probe: Probe, stop: threading.Event) -> Timed | None:
    """One measurement; None if it was stopped, NoLayoutError if the batch doesn't fit or fails."""
    for seen in prober.measure((probe,), lambda _: None, stop):
        if isinstance(seen, OutOfMemory):
            raise NoLayoutError(f"Out of memory: {plain(seen.detail, 200)}.", "Take smaller batches.")
        if isinstance(seen, Failed):
            raise NoLayoutError(f"The training failed: {plain(seen.detail, 300)}.", "Mend that and try again.")
        return seen
    return None


def _alone(prober: Prober, layout: Layout, seconds: float, stop: threading.Event) -> tuple[float | None, ...]:
    """Each device by itself at its share: what it can do, where a step doesn't tell the devices apart."""
    figures: list[float | None] = []
    for position, share in enumerate(layout.shares):
        probe = Probe(solo(len(layout.shares), position, share), "solo", min(seconds, 3.0))
        seen = _one(prober, probe, stop) if share and not stop.is_set() else None
        figures.append(seen.samples_per_second if seen else None)
    return tuple(figures)


def _lines(turn: Turn, layout: Layout, devices: Sequence[Device], by_gpu: bool, alone: bool) -> list[str]:
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
        note = " alone" if alone else ""
        lines.append(f"\t GPU:{devices[position].index}[{layout.shares[position]}] {figure}sps{note}")
    return [*lines, f"\t Total:[{layout.global_batch}] {total}sps"]
