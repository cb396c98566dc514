"""Compare a plan's speed with training runs that follow it.

  python -m benchmarks.trainers plan

A virtual machine's own speed changes by a fifth from one minute to the next. Therefore the plan's
layout is probed again, like `evener probe` does it, right before and after each block of training
steps; the processes of the other side wait meanwhile. A block's samples/s relative to the mean of
the two probes around it doesn't depend on the machine's current speed.

Two sets of processes that do the same differ by 3 % in CPU time. Therefore each of the `--repeat`
rounds starts new processes on both sides, and the result is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.trainer_processes import Ranks, name_build
from benchmarks.training import balance
from evener.balancer.jobs import make_job
from evener.balancer.request import Request
from evener.balancer.trials import ProbeLength, ProbeRepeat, choose_layout, repeat_probe
from evener.balancer.types import Layout
from evener.plan.file import Plan, load_plan

PAIRED = ("training / probe", "middle half", "in CPU time")
HEADS = (
    "trainer",
    "shares",
    "plan",
    "±",
    "probes",
    "training",
    *PAIRED,
    "first probes / plan",
    "training / plan",
)
FIRST = 3  # number of probes within a minute of the search's own check


class Rate(msgspec.Struct, frozen=True):
    """Samples per second, and per second of all ranks' CPU time; 0 if unknown, as on GPUs."""

    wall: float
    cpu: float


def print_figures(options: argparse.Namespace) -> None:
    """Print a row per round and trainer, and the median of each trainer's rounds."""
    print(f"| {' | '.join(HEADS)} |\n| --- | --- |{' ---: |' * 5} --- |{' ---: |' * 3}", flush=True)
    for trainer in options.trainers:
        path = options.plan or search(options, trainer)
        plan, ratios = load_plan(path), list[float]()
        for _ in range(options.repeat):
            probes, blocks = alternate(options, trainer, plan, path)
            ratios.append(statistics.median(pair_walls(probes, blocks)))
            print(write_row(trainer, plan, probes, blocks), flush=True)
        print(
            f"\n{trainer}, training / probe, median of {options.repeat} rounds: "
            f"{statistics.median(ratios):.3f}\n"
        )


def search(options: argparse.Namespace, trainer: str) -> Path:
    """Search for the plan of a trainer; return its file."""
    request = make_request(options, trainer)
    options.workload, options.framework = request.workload, request.framework
    settings = [
        word
        for name, value in request.settings.items()
        for word in ("--set", f"{name}={value}".lower())
    ]
    options.more = ["--precision", request.precision, *settings]
    path: Path = options.folder / f"{trainer}.toml"
    balance(options, path)
    return path


def make_request(options: argparse.Namespace, trainer: str) -> Request:
    """Return the request for steps of this trainer.

    transformers' Trainer sets its precision itself.
    """
    settings: dict[str, Any] = {"size": options.size}
    whole = options.bf16 and trainer != "huggingface"
    if trainer == "huggingface":
        settings |= {"bf16": options.bf16, "texts": options.texts}
    return Request(
        devices=options.devices,
        workload=name_build(trainer),
        framework="torch",
        settings=settings,
        precision="mixed_bfloat16" if whole else "float32",
    )


def alternate(
    options: argparse.Namespace, trainer: str, plan: Plan, path: Path
) -> tuple[Sequence[Rate], Sequence[Rate]]:
    """Return the speeds of probes, and of the training blocks between them.

    The processes of both sides live as long as all of them.
    """
    resolved, active = make_job(make_request(options, trainer)), plan.layout.active
    places = [i for i, share in enumerate(plan.layout.share) if share.batch]
    sizes = [share.batch for share in active], [share.micro or share.batch for share in active]
    layout = choose_layout(len(resolved.devices), places, *sizes)
    seconds = options.seconds / options.blocks
    probes, blocks, ranks = list[Rate](), list[Rate](), Ranks(active, range(len(active)))
    length, stop = ProbeLength(seconds), threading.Event()
    with closing(ranks), repeat_probe(resolved, layout, options.blocks + 1, length, stop) as runs:
        ranks.read()  # ready
        ranks.start(
            [trainer, "--plan", str(path), "--size", options.size, *["--bf16"] * options.bf16]
        )
        rows = plan.layout.global_batch
        steps = max(2, round(seconds * read_block(ranks, rows).wall / rows))
        for run in runs:
            probes.append(read_probe(run, layout))
            if len(blocks) < options.blocks:
                ranks.send_line(str(steps))
                blocks.append(read_block(ranks, rows))
    return probes, blocks


def read_probe(run: ProbeRepeat, layout: Layout) -> Rate:
    """Return the speed of a finished probe.

    The CPU rate is known for several ranks that weren't measured alone.
    """
    seconds = [share / own for share, own in zip(layout.shares, run.own, strict=True) if own]
    known = len(seconds) > 1 and not run.alone
    return Rate(run.this_run.value, layout.global_batch / sum(seconds) if known else 0.0)


def read_block(ranks: Ranks, rows: int) -> Rate:
    """Wait for the end of a block of steps and return its speed; a step has `rows` rows."""
    seen = ranks.read()
    return Rate(
        rows * min(each["steps_per_second"] for each in seen),
        rows / sum(each["cpu_seconds"] for each in seen),
    )


def pair(probes: Sequence[float], blocks: Sequence[float]) -> list[float]:
    """Return the ratio of each block to the mean of the probes around it."""
    return [
        block / statistics.fmean(around)
        for block, around in zip(blocks, pairwise(probes), strict=True)
    ]


def pair_walls(probes: Sequence[Rate], blocks: Sequence[Rate]) -> list[float]:
    """Return the samples/s ratio of each block to the mean of the probes around it."""
    return pair([rate.wall for rate in probes], [rate.wall for rate in blocks])


def write_row(trainer: str, plan: Plan, probes: Sequence[Rate], blocks: Sequence[Rate]) -> str:
    """Return a row with median samples/s of probes and blocks, and their median ratio."""
    said, shares = (
        plan.throughput.samples_per_second,
        " + ".join(str(share.batch) for share in plan.layout.active),
    )
    wall_rates = [rate.wall for rate in probes]
    probed, trained = statistics.median(wall_rates), statistics.median(rate.wall for rate in blocks)
    low, middle, high = statistics.quantiles(pair_walls(probes, blocks), n=4)
    cpu = [rate.cpu for rate in probes]
    work = f"{statistics.median(pair(cpu, [rate.cpu for rate in blocks])):.3f}" if all(cpu) else "-"
    between = (plan.throughput.high - plan.throughput.low) / 2 / said
    figures = (
        f"{said:,.1f} | {between:.1%} | {probed:,.1f} | {trained:,.1f} | {middle:.3f} | "
        f"{low:.3f} to {high:.3f}"
    )
    of_plan = f"{statistics.median(wall_rates[:FIRST]) / said:.3f} | {trained / said:.3f}"
    return f"| {trainer} | {shares} | {figures} | {work} | {of_plan} |"
