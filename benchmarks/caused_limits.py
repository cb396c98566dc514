"""Check the limits and gains that evener names for training runs with one known cause.

  python -m benchmarks.caused_limits [--turns 2] [--steps 600] [--parts] [--causes plain loader]

The training runs of tests/support/caused_trainings.py run on two CPU ranks each, on four cores of
their own; as many run at once as there are cores. Prints one line per run: "ok" if its cause is
named first (or, for a plain run, if no limit is named), else "MISS". Then compares the promised
gain of each remedy with its real gain, taken from the same run without the cause or, if the remedy
halves the cause's time, with half of that time. The gains are medians over the turns. At last it
prints how many intervals of all runs hold the real gain. `--parts` prints the parts of a step of
each rank. The benchmark needs four or more idle cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import median
from typing import NamedTuple

import torch
import torch.multiprocessing as mp

from evener.launch.summary import TrainingSummary, summarize_training
from evener.live.files import LiveRecord
from evener.training.limits import TrainingLimit
from tests.support.caused_trainings import (
    CAUSES,
    FIRST,
    PLAIN,
    SHORT_EPOCHS,
    read_record,
    train,
)
from tests.support.rank_server import place_ranks

CLOSE = 0.15  # largest relative error of a gain that counts as right
NARROW = 0.2  # largest half-width of an interval, relative to the speed that it promises
CORES = 4  # of a training run
# the fraction of a cause's time that its remedy saves
SAVED = {"optimizer": 0.5, "checkpoints": 0.5, "validation": 0.5, "validation between epochs": 0.5}
# causes whose remedy divides the rows differently: without the cause, both ranks would be fast
OTHERWISE = ("unequal",)
# the training run without a cause, where it isn't a plain one
WITHOUT = {"validation between epochs": SHORT_EPOCHS}
RECORD = "{rank}.record"


class CausedRun(NamedTuple):
    """A training run with one known cause: its summary and the last record of each rank."""

    summary: TrainingSummary
    records: tuple[LiveRecord, ...]

    @property
    def measured_s(self) -> float:
        """The mean duration of a step by the clock, in seconds, including the time between steps.

        It doesn't depend on how well the parts of steps are measured.
        """
        return self.summary.seconds / self.summary.steps


def run_rank(
    rank: int, cause: str, folder: str, steps: int, places: Sequence[Mapping[str, str]]
) -> None:
    """Train with one cause as one rank, and save the rank's last record in `folder`."""
    os.environ |= {**places[rank], "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    content = train(cause, Path(folder), rank, steps)
    Path(folder, RECORD.format(rank=rank)).write_bytes(content)


def run_cause(cause: str, steps: int, port: str, cores: Sequence[int]) -> CausedRun:
    """Train with one cause on two ranks, in processes that use only these cores."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--cause", cause, "--folder", folder, "--steps", str(steps), "--port", port]
        subprocess.run(
            [
                *("taskset", "-c", ",".join(map(str, cores))),
                *(sys.executable, "-m", "benchmarks.caused_limits", *words),
            ],
            env={**os.environ, "EVENER_LIVE_DIR": f"{folder}/live"},
            check=True,
        )
        contents = [Path(folder, RECORD.format(rank=rank)).read_bytes() for rank in range(2)]
    records = tuple(map(read_record, contents))
    summary = summarize_training(records, "", "finished", {})
    assert summary is not None
    return CausedRun(summary, records)


def run_all(causes: Sequence[str], turns: int, steps: int) -> list[dict[str, CausedRun]]:
    """Train with each cause, once in each turn, and return the runs of each turn by cause."""
    cores = sorted(os.sched_getaffinity(0))
    free: Queue[list[int]] = Queue()
    for first in range(0, max(1, len(cores) - CORES + 1), CORES):
        free.put(cores[first : first + CORES])
    count = free.qsize()

    def run_one(cause: str, port: str) -> CausedRun:
        own = free.get()
        try:
            return run_cause(cause, steps, port, own)
        finally:
            free.put(own)

    ports = _find_ports(turns * len(causes))
    with ThreadPoolExecutor(count) as pool:
        runs = iter(list(pool.map(run_one, [*causes] * turns, ports)))
    return [{cause: next(runs) for cause in causes} for _ in range(turns)]


def _find_ports(count: int) -> list[str]:
    """Return this number of different free ports."""
    ports: dict[str, None] = {}
    while len(ports) < count:
        ports[place_ranks(1)[0]["MASTER_PORT"]] = None
    return list(ports)


def print_parts(turn: Mapping[str, CausedRun]) -> None:
    """Print the mean parts of a step of each rank in ms, for each cause."""
    for cause, run in turn.items():
        by_clock = f"{1e3 * run.measured_s:.2f} by the clock"
        print(f"{cause}: {1e3 * run.summary.step_s:.2f} ms a step, {by_clock}")
        for record in run.records:
            whole, work = record.whole, record.devices[0]
            names = [name for name in whole.__struct_fields__[1:] if whole.mean(name) >= 5e-6]
            parts = ", ".join(f"{name[:-2]} {1e3 * whole.mean(name):.2f}" for name in names)
            least = 1e3 * work.least_waiting_s
            print(f"  {whole.steps}: {parts}; least {least:.2f}, medians: own "
                  f"{1e3 * work.own_work_s:.2f}, waiting {1e3 * work.waiting_s:.2f}; starved "
                  f"{record.starved_so_far:.3f}", flush=True)  # fmt: skip


def judge_causes(turn: Mapping[str, CausedRun]) -> None:
    """Print for each training run whether the limit named first is its cause."""
    for cause, run in turn.items():
        if cause == SHORT_EPOCHS:
            continue
        limits = run.summary.limits
        expected = "host_starved" if cause == "cores" else FIRST.get(cause, "")
        named = limits[0].kind.value if limits else ""
        said = "; ".join(
            f"{each.kind.value} {100 * each.share:.0f} %, +{100 * each.gain:.0f} %"
            for each in limits
        )
        right = named == expected and (cause in PLAIN or bool(named))
        print(f"{'ok  ' if right else 'MISS'} {cause}: {said or 'nothing over 5 %'}", flush=True)


def judge_gains(turns: Sequence[Mapping[str, CausedRun]]) -> None:
    """Print the promised and the true gain of each cause, and how many intervals hold it.

    Gains are medians over the turns.
    """
    intervals: list[tuple[bool, float]] = []  # whether it holds the true gain; its half-width
    for cause in turns[0]:
        plain = (WITHOUT[cause],) if cause in WITHOUT else PLAIN
        known = [turn[name].measured_s for turn in turns for name in plain if name in turn]
        if cause in (*PLAIN, SHORT_EPOCHS, *OTHERWISE) or not known:
            continue
        plain_s = median(known)
        summaries = [turn[cause].summary for turn in turns]
        limits = [each.limits[0] for each in summaries if each.limits]
        step_s = median(turn[cause].measured_s for turn in turns)
        true = step_s / (step_s - SAVED.get(cause, 1.0) * (step_s - plain_s)) - 1
        if not limits:
            print(f"MISS {cause}: not named; the remedy gives {100 * true:+.0f} %")
            continue
        promised = median(each.gain for each in limits)
        widths = [_half_width(each) for each in limits]
        held = [each.gain_low <= true <= each.gain_high for each in limits]
        intervals += zip(held, widths, strict=True)
        off = (1 + promised) / (1 + true) - 1
        print(
            f"{'ok  ' if abs(off) <= CLOSE else 'MISS'} {cause}: promised "
            f"{100 * promised:+.0f} %, the remedy gives {100 * true:+.0f} %: off by "
            f"{100 * off:+.1f} %; interval ± {100 * median(widths):.0f} %, holds in {sum(held)} "
            f"of {len(held)}",
            flush=True,
        )
    narrow = [held for held, width in intervals if width <= NARROW]
    print(
        f"{sum(held for held, _ in intervals)} of {len(intervals)} intervals hold the true gain; "
        f"of the {len(narrow)} of at most ± {100 * NARROW:.0f} %, {sum(narrow)} do"
    )


def _half_width(limit: TrainingLimit) -> float:
    """Return half of a gain's interval, relative to the speed that the gain promises."""
    return (limit.gain_high - limit.gain_low) / 2 / (1 + limit.gain)


def main() -> None:
    """Train the cases, and print their limits and gains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--parts", action="store_true")
    every = (*CAUSES, SHORT_EPOCHS)
    parser.add_argument("--causes", nargs="*", default=every, choices=every)
    parser.add_argument("--cause", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cause:
        places = [{**place, "MASTER_PORT": given.port} for place in place_ranks(2)]
        arguments = (given.cause, given.folder, given.steps, places)
        mp.start_processes(run_rank, arguments, nprocs=2, start_method="fork")
        return
    turns = run_all(given.causes, given.turns, given.steps)
    for turn in turns:
        judge_causes(turn)
        if given.parts:
            print_parts(turn)
    judge_gains(turns)


if __name__ == "__main__":
    main()
