"""The command `probe`, which measures one given layout."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from evener.balancer.jobs import make_job
from evener.balancer.number_format import duration, half_width, rate, size
from evener.balancer.request import Job, Request
from evener.balancer.result.measurements import describe_doubts
from evener.balancer.result.sentences import write_doubt
from evener.balancer.trials import ProbeLength, ProbeRepeat, choose_layout, repeat_probe
from evener.balancer.types import Layout, MeasurementDoubt, Power
from evener.devices.types import Device
from evener.errors import RequestError
from evener.printable import print_notice

from ..text.formatting import Table, energy_cells, json_text
from ..text.parsing import parse_duration
from ..text.summaries import share_text
from .options import BATCH, LENGTH, TRAINING, WHAT, JsonOption, takes_request
from .output import terminal_columns
from .session_runner import stopped_by_signals

LONGEST_SECONDS = 86_400.0
TOGETHER = "together"
app = typer.Typer()


@app.command()
@takes_request(*TRAINING, "seed")
def probe(
    request: Request,
    batches: Annotated[
        list[int], BATCH("--batches", help="Samples per step for each device, like 820 568.")
    ],
    micro: Annotated[
        list[int] | None, BATCH("--micro", help="Rows of one pass on each device, like 410 568.")
    ] = None,
    gpus: Annotated[
        list[str] | None, WHAT("--gpus", help="Which devices, like 0 1. Default: the first ones.")
    ] = None,
    repeat: Annotated[int, LENGTH("--repeat", min=1, help="Number of runs.")] = 3,
    seconds: Annotated[
        str | None, LENGTH("--seconds", help="Length of each run without warm-up. Default: 10s.")
    ] = None,
    steps: Annotated[
        int | None,
        LENGTH("--steps", min=1, help="Length in optimizer steps, instead of --seconds."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Time training at batch sizes that you choose: `evener probe --batches 820 568 --micro 410
    568`.
    """
    length = _parse_length(seconds, steps)
    spec, positions = _parse_gpus(request.devices, gpus)
    resolved = make_job(msgspec.structs.replace(request, devices=spec))
    layout = choose_layout(len(resolved.devices), positions, batches, micro or ())
    finished: list[ProbeRepeat] = []
    stop = threading.Event()
    with (
        stopped_by_signals(stop.set, "stopping; runs that have ended are printed") as caught,
        repeat_probe(resolved, layout, repeat, length, stop) as turns,
    ):
        _announce(resolved, repeat, length)
        for run in turns:
            finished.append(run)
            _print_run(run, len(finished), repeat, resolved.devices, length)
    labels = [device.label for device in resolved.devices]
    if as_json:
        sizes = {"batches": layout.shares, "micro": layout.pass_rows}
        doubts = [
            line
            for run in finished
            for line in _format_doubts(run.warnings, resolved.devices, length)
        ]
        said = {"warnings": doubts}
        print(
            json_text(
                {"devices": labels, **sizes, "runs": finished, "interrupted": stop.is_set(), **said}
            )
        )
    elif finished:
        print(
            "\n".join(_make_table(finished, layout, labels).lines(terminal_columns())[:-1]),
            flush=True,
        )
    if not stop.is_set():
        return 0
    return caught[0] if caught else 130


def _parse_length(seconds: str | None, steps: int | None) -> ProbeLength:
    """Return the length of each run from the options `--seconds` and `--steps`.

    Raises RequestError if both are given, or if the time is out of range.
    """
    if steps is not None:
        if seconds is not None:
            raise RequestError(
                "--seconds and --steps both set the length of a run.", "Give one of them."
            )
        return ProbeLength(steps=steps)
    if seconds is None:
        return ProbeLength()
    span = parse_duration(seconds, "--seconds")
    if not 0 < span <= LONGEST_SECONDS:
        raise RequestError(
            f"A run can't last --seconds {seconds}.", "Give more than 0s, and at most 24h."
        )
    return ProbeLength(span)


def _parse_gpus(spec: str, gpus: Sequence[str] | None) -> tuple[str, tuple[int, ...] | None]:
    """Return the device specification, and the positions of the devices that `--gpus` chooses.

    The positions are None without `--gpus`. Raises RequestError for indices that are repeated or
    aren't whole numbers.
    """
    if gpus is None:
        return spec, None
    numbers = [gpu for gpu in gpus if re.fullmatch("[0-9]{1,6}", gpu)]
    if len(set(numbers)) != len(gpus):
        raise RequestError(
            f"--gpus {' '.join(gpus)} are not different indices.", "Write it like --gpus 0 1."
        )
    if spec != "auto":
        return spec, tuple(int(gpu) for gpu in gpus)
    from evener.devices.discover import discover

    kind = discover(spec).devices[0].kind
    return f"{kind}:{','.join(gpus)}", tuple(range(len(gpus)))


def _announce(resolved: Job, repeat: int, length: ProbeLength) -> None:
    lasts = f"{length.steps} steps" if length.steps else f"about {duration(length.seconds)}"
    runs = f"{repeat} runs of {lasts} each" if repeat > 1 else f"one run of {lasts}"
    print_notice(*resolved.notes, f"{runs}, besides warm-up")


def _print_run(
    run: ProbeRepeat, number: int, repeat: int, devices: Sequence[Device], length: ProbeLength
) -> None:
    """Print the samples/s of a run with its error, and warnings about the run.

    The error is half of the 95 % interval.
    """
    interval = run.this_run
    error = half_width(interval.value, interval.low, interval.high)
    print_notice(f"run {number} of {repeat}: {rate(interval.value)} samples/s ± {error}")
    print_notice(*_format_doubts(run.warnings, devices, length))


def _format_doubts(
    doubts: Sequence[MeasurementDoubt], devices: Sequence[Device], length: ProbeLength
) -> list[str]:
    """Return the warnings about a measurement as sentences."""
    on_gpus = any(not device.on_cpu for device in devices)
    longer = "more --steps" if length.steps else "a longer --seconds"
    return [write_doubt(one, on_gpus, longer) for one in describe_doubts(doubts, devices)]


def _make_table(runs: Sequence[ProbeRepeat], layout: Layout, labels: Sequence[str]) -> Table:
    """Return the table of all runs, with columns for energy if that was measured."""
    note = "±: half of the 95 % interval."
    if len(layout.active) > 1:
        how = (
            "was measured alone at its share"
            if runs[-1].alone
            else "leaves out the time in which it waits for others"
        )
        note += f" The samples/s of one device {how}."
    energy = any(run.power for run in runs)
    heads = (
        "run",
        "device",
        "batch",
        "samples/s",
        "±",
        "memory",
        *(("samples/J", "W", "idle W") if energy else ()),
    )
    return Table("", [heads, *_table_rows(runs, layout, labels, energy)], 2, note)


def _table_rows(
    runs: Sequence[ProbeRepeat], layout: Layout, labels: Sequence[str], energy: bool
) -> Iterator[tuple[str, ...]]:
    # Each run has a row for each device and, if there are several devices, one for all of them
    # together. The last row is for all runs together.
    several = len(layout.active) > 1
    whole_batch = str(layout.global_batch)
    for number, run in enumerate(runs, 1):
        interval = run.this_run
        error = half_width(interval.value, interval.low, interval.high)
        for i in layout.active:
            share = share_text(layout, i)
            memory = run.memory_bytes[i]
            if several:
                cells = _measurement_cells(run.own[i], "-", memory, None, energy)
            else:
                cells = _measurement_cells(interval.value, error, memory, run.power, energy)
            yield (str(number), labels[i], share, *cells)
        if several:
            cells = _measurement_cells(interval.value, error, None, run.power, energy)
            yield (str(number), TOGETHER, whole_batch, *cells)
    if len(runs) > 1:
        powers = [run.power for run in runs if run.power]
        power = Power.mean(powers) if len(powers) == len(runs) else None
        where = TOGETHER if several else labels[layout.active[0]]
        cells = _measurement_cells(runs[-1].samples_per_second, "-", None, power, energy)
        yield ("all", where, whole_batch, *cells)


def _measurement_cells(
    speed: float | None, error: str, memory: int | None, power: Power | None, energy: bool
) -> tuple[str, ...]:
    """Return the table cells for a speed in samples/s, its error, and the memory in bytes.

    If `energy` is set, cells for samples per joule and power follow.
    """
    shown = "-" if speed is None else rate(speed)
    held = "-" if memory is None else size(memory)
    if not energy:
        return shown, error, held
    known = power or Power(0.0, 0.0)
    drawn = energy_cells(speed or 0.0, known.active_watts, known.idle_watts)
    return (shown, error, held, *drawn)
