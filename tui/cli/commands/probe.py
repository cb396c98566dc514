"""`evener probe`: time training at chosen batch sizes, printed in the format of jinkos/multi-gpus' test_GPUs.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import msgspec

from evener.balancer.manual_run import RunLength, TimedRun, choose_layout, timed_runs
from evener.balancer.request import Request, ResolvedRequest
from evener.balancer.resolve import resolve_request
from evener.balancer.result.explain_measurements import explain_doubts
from evener.balancer.types import Layout
from evener.devices.types import Device
from evener.errors import RequestError
from evener.tui.cli.session_runner import stopped_by_signals
from evener.tui.text.formatting import plain
from evener.tui.text.parsing import parse_duration
from evener.tui.text.safe_documents import json_text

LONGEST_SECONDS = 86_400.0


def parse_length(seconds: str | None, steps: int | None) -> RunLength:
    """What `--seconds` or `--steps` means; RequestError if both are given, or the time is out of range."""
    if steps is not None:
        if seconds is not None:
            raise RequestError("--seconds and --steps both set the length of a run.", "Give one of them.")
        return RunLength(steps=steps)
    if seconds is None:
        return RunLength()
    span = parse_duration(seconds, "--seconds")
    if not 0 < span <= LONGEST_SECONDS:
        raise RequestError(f"A run can't last --seconds {seconds}.", "Give more than 0s, and at most 24h.")
    return RunLength(span)


def run_probe(
    request: Request,
    gpus: Sequence[str] | None,
    batches: tuple[int, ...],
    *,
    repeat: int,
    length: RunLength,
    as_json: bool,
) -> int:
    """Time `repeat` runs and print each; 1 if the batch doesn't fit or fails, a signal's code if interrupted."""
    spec, positions = _parse_gpus(request.devices, gpus)
    resolved = resolve_request(msgspec.structs.replace(request, devices=spec))
    layout = choose_layout(len(resolved.devices), positions, batches)
    by_gpu = gpus is not None or len(batches) > 1
    finished: list[TimedRun] = []
    stop = threading.Event()
    with (
        stopped_by_signals(stop.set, "stopping") as caught,
        timed_runs(resolved, layout, repeat, length, stop) as turns,
    ):
        if not as_json:
            _announce(resolved, layout, repeat, length)
        for run in turns:
            finished.append(run)
            if not as_json:
                _print_run(run, layout, resolved.devices, by_gpu, length)
    if as_json:
        labels = [device.label for device in resolved.devices]
        print(json_text({"devices": labels, "batches": layout.shares, "runs": finished, "interrupted": stop.is_set()}))
    elif not stop.is_set():
        print("Done!")
    return (caught[0] if caught else 130) if stop.is_set() else 0


def _parse_gpus(spec: str, gpus: Sequence[str] | None) -> tuple[str, tuple[int, ...] | None]:
    """What `--gpus 0 1` means: the devices, and the positions among them that compute; None: the first ones.

    With `--devices` they are positions in it; without, indices of the kind of device that this machine has.
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


def _announce(resolved: ResolvedRequest, layout: Layout, repeat: int, length: RunLength) -> None:
    """Print how long it will take; notes, and what "GPU" stands for where there is none, go to stderr."""
    devices = [resolved.devices[position] for position in layout.active]
    others = [f"GPU:{device.index} is {device.label}" for device in devices if device.kind != "gpu"]
    _print_notes((*resolved.notes, *([f"In the lines below {', '.join(others)}."] if others else ())))
    lasts = f"{length.steps} steps" if length.steps else f"about {length.seconds:.0f} seconds"
    print(f"Each of the {repeat} training runs should take {lasts}...", flush=True)


def _print_notes(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"evener: {plain(line)}", file=sys.stderr, flush=True)


def _print_run(run: TimedRun, layout: Layout, devices: Sequence[Device], by_gpu: bool, length: RunLength) -> None:
    """Print results to stdout and warnings to stderr."""
    print("\n".join(_run_lines(run, layout, devices, by_gpu)), flush=True)
    remedy = "more --steps" if length.steps else "a longer --seconds"
    _print_notes(explain_doubts(run.warnings, devices, remedy))


def _run_lines(run: TimedRun, layout: Layout, devices: Sequence[Device], by_gpu: bool) -> list[str]:
    total = f"{run.samples_per_second:5.0f}"
    if not by_gpu:
        return [f"After {run.samples} samples default GPU: {total}sps"]
    if layout.kind == "solo":
        (position,) = layout.active
        return [f"After {run.samples} samples GPU:{devices[position].index} {total}sps"]
    lines = [f"After {run.samples} samples"]
    for position in layout.active:
        own = run.own[position]
        figure = "    ?" if own is None else f"{own:5.0f}"
        note = " alone" if run.alone else ""
        lines.append(f"\t GPU:{devices[position].index}[{layout.shares[position]}] {figure}sps{note}")
    return [*lines, f"\t Total:[{layout.global_batch}] {total}sps"]
