"""Trainings that change their shares, against an oracle and against staying. `python -m
benchmarks.rebalance`.

Simulated trainings of ten minutes on 2 to 16 devices: one device, or all, change their speed as a
trace says. The oracle knows the trace and changes shares at once and at no cost; whoever stays
keeps the plan's shares. The rule sees medians of five steps, acts three steps later and pays 0.2 s
for new shapes. The table of docs/benchmarks/rebalance.md goes to stdout.

`python -m benchmarks.rebalance real` trains on two CPU slices in PyTorch, of which one is slower by
40 % for a while; `gpus` on two GPUs, of which another program uses one for a while (where there is
none, to try it, on the CPU).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from tests.support.share_traces import (
    Slowdown,
    Trace,
    at_rest,
    flipping,
    foresee,
    machine,
    rebalance,
    slower,
    stay,
)

SECONDS = 600.0
SIZES = (2, 4, 8, 16)
REAL = {"real": ("sleeping", (200, 600, 900)), "gpus": ("computing", (500, 1500, 2000))}
SETTLED_SECONDS = 5.0  # after a disturbance begins or ends


class Score(NamedTuple):
    """One trace on one machine."""

    of_oracle: float  # samples
    of_staying: float
    changes: float  # in 1,000 steps


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("simulated", *REAL), default="simulated")
    parser.add_argument("--seeds", type=int, default=3, help="machines of each size")
    parser.add_argument(
        "--steps", type=int, nargs=3, help="of a real training: disturbed from, until; all"
    )
    parser.add_argument("--json", type=Path, help="file for what came of a real training")
    options = parser.parse_args()
    if options.what == "simulated":
        print_simulated(options.seeds)
    else:
        job, steps = REAL[options.what]
        found = train_really(job, options.steps or steps)
        if options.json:
            options.json.write_text(json.dumps(found))
        print_real(found)


def train_really(job: str, steps: Sequence[int]) -> dict[str, Any]:
    """What rebalance_ranks.py says as JSON; the rest of what it says goes to stdout."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.rebalance_ranks", job, *map(str, steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ranks:
        assert ranks.stdout is not None
        for line in ranks.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
            print(line, end="", flush=True)
    raise SystemExit("The training failed.")


def print_real(found: dict[str, Any]) -> None:
    """When real shares changed, how fast the training was with them, and how fast with the best
    fixed ones.
    """
    start, end, steps, static = found["start"], found["end"], found["steps"], found["static"]
    best = min(static, key=static.get)
    for name, times in found["times"].items():
        for label, first, last, fastest in (
            ("disturbed", start, end, static[best]),
            ("after", end, steps, found["free"]),
        ):
            if len(times) <= first:
                continue
            settled = first + sum(
                time < times[first - 1] + SETTLED_SECONDS for time in times[first:last]
            )
            settled = min(settled, (first + min(last, len(times))) // 2)
            seconds = median(after - before for before, after in pairwise(times[settled:last]))
            print(
                f"{name}, {label}, from {SETTLED_SECONDS:.0f} s on: {seconds * 1e3:.1f} ms a step,"
                f" {found['batch'] / seconds:.0f} samples/s, {fastest / seconds:.3f} of the "
                f"best fixed shares' rate"
            )
    for step, shares in found["changes"]:
        since = start if step < end else end
        seconds = found["times"]["rebalance"][step - 1] - found["times"]["rebalance"][since - 1]
        print(f"step {step}: {'+'.join(map(str, shares))}, {seconds:.2f} s after step {since}")
    print(f"best fixed shares while disturbed: {best}, {static[best] * 1e3:.1f} ms a step")


def print_simulated(seeds: int) -> None:
    """The table of docs/benchmarks/rebalance.md."""
    print(
        "| trace | of the oracle's samples: least | mean | against staying: least | mean | "
        "changes in 1,000 steps |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, make in TRACES.items():
        scores = [
            run(make(random.Random(seed)), size, seed) for size in SIZES for seed in range(seeds)
        ]
        oracle, staying, changes = zip(*scores, strict=True)
        figures = (
            f"{min(oracle):.3f} | {fmean(oracle):.3f} | {min(staying):.3f} | {fmean(staying):.3f}"
        )
        print(f"| {name} | {figures} | {fmean(changes):.1f} |", flush=True)


def run(trace: Trace, devices: int, seed: int) -> Score:
    """All three ways to train on it."""
    some = machine(devices, seed)
    ruled, best, stayed = (train(some, trace, seed) for train in (rebalance, foresee, stay))
    changes = 1000 * len(ruled.changes) / ruled.steps
    return Score(ruled.samples / best.samples, ruled.samples / stayed.samples, changes)


def visited(numbers: random.Random) -> Slowdown:
    """A neighbour on the first device: away and there for random times, a minute in the mean, 20 to
    100 % slower.
    """
    visits = list(draw_visits(numbers))

    def slowdown(device: int, at: float) -> float:
        return (
            next((factor for start, end, factor in visits if start <= at < end), 1.0)
            if device == 0
            else 1.0
        )

    return slowdown


def draw_visits(numbers: random.Random) -> Iterator[tuple[float, float, float]]:
    """(start, end, slowdown) of each."""
    at = 0.0
    while at < SECONDS:
        start = at + numbers.expovariate(1 / 60)
        at = start + numbers.expovariate(1 / 60)
        yield start, at, numbers.uniform(1.2, 2.0)


def warming(numbers: random.Random) -> Slowdown:
    """Every device gets slower by up to 40 % and faster again, at its own pace."""
    paces = [
        (numbers.uniform(120, 600), numbers.uniform(0, 6), numbers.uniform(0, 0.4))
        for _ in range(max(SIZES))
    ]

    def slowdown(device: int, at: float) -> float:
        period, phase, depth = paces[device]
        return 1 + depth * (1 + math.sin(2 * math.pi * at / period + phase)) / 2

    return slowdown


def leak(device: int, at: float) -> float:
    """The first device loses a little all the time: 60 % in ten minutes."""
    return 1 + 0.6 * at / SECONDS if device == 0 else 1.0


TRACES: dict[str, Callable[[random.Random], Trace]] = {
    "nothing but 5 % noise": lambda _: Trace(SECONDS, at_rest, 0.05),
    "the plan was 30 % off for one device": lambda _: Trace(SECONDS, slower(1.3, 0, SECONDS), 0.03),
    "throttled by 40 % from 150 to 400 s": lambda _: Trace(SECONDS, slower(1.4, 150, 400), 0.03),
    "throttled by 40 % from 150 to 400 s, 5 % noise": lambda _: Trace(
        SECONDS, slower(1.4, 150, 400), 0.05
    ),
    "a neighbour at random, a minute at a time": lambda numbers: Trace(
        SECONDS, visited(numbers), 0.03
    ),
    "a neighbour every 40 s for 20 s": lambda _: Trace(SECONDS, flipping(40, 0.5), 0.03),
    "all warm up and cool down": lambda numbers: Trace(SECONDS, warming(numbers), 0.03),
    "a slow leak, 60 % in the end": lambda _: Trace(SECONDS, leak, 0.03),
    "stalls: 2 s of one rank every 150 steps, 10 s of input every 1,000": lambda _: Trace(
        SECONDS, at_rest, 0.05, stall_every=150, input_every=1000
    ),
    "a dead card after 300 s": lambda _: Trace(SECONDS, at_rest, 0.03, dead_at=300),
    "too fast to follow: 10 s in 20": lambda _: Trace(SECONDS, flipping(20, 0.5), 0.03),
    "too fast to follow: 2 s in 8": lambda _: Trace(SECONDS, flipping(8, 0.25), 0.03),
    "too fast to follow: 1 s in 3, 60 %": lambda _: Trace(SECONDS, flipping(3, 0.3, 1.6), 0.03),
    "too fast to follow: 3 s a minute, half speed": lambda _: Trace(
        SECONDS, flipping(60, 0.05, 2.0), 0.03
    ),
}

if __name__ == "__main__":
    main()
