"""A plan's figure beside trainings by the plan: `python -m benchmarks.trainers plan`.

A virtual machine's own speed changes by a fifth from one minute to the next. So the plan's layout
is probed again, as `evener probe` does it, right before and after each block of training steps; the
other side's processes wait meanwhile. A block's samples/s over the mean of the two probes around it
doesn't depend on how fast the machine is at that time.

Two sets of processes that do the same differ by 3 % in CPU time, so each of the `--repeat` rounds
starts new ones of both sides; what counts is the median of the rounds.
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
FIRST = 3  # probes, within a minute of the search's own check


class Rate(msgspec.Struct, frozen=True):
    """Samples per second, and per second of CPU time of all ranks; 0: unknown, as on GPUs."""

    wall: float
    cpu: float


def print_figures(options: argparse.Namespace) -> None:
    """A row for each round of each trainer, and the median of its rounds."""
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
    """Find the plan of a trainer, as a file."""
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
    """Steps of this trainer on the devices; transformers has a precision of its own."""
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
    """The rates of probes, and of the blocks between each two of them; each side's processes
    stay.
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
                ranks.say(str(steps))
                blocks.append(read_block(ranks, rows))
    return probes, blocks


def read_probe(run: ProbeRepeat, layout: Layout) -> Rate:
    """Of a probe that has ended; several ranks' own rates are by their CPU time, if they weren't
    measured alone.
    """
    seconds = [share / own for share, own in zip(layout.shares, run.own, strict=True) if own]
    known = len(seconds) > 1 and not run.alone
    return Rate(run.this_run.value, layout.global_batch / sum(seconds) if known else 0.0)


def read_block(ranks: Ranks, rows: int) -> Rate:
    """Of a block that ends, in steps of so many rows."""
    seen = ranks.read()
    return Rate(
        rows * min(each["steps_per_second"] for each in seen),
        rows / sum(each["cpu_seconds"] for each in seen),
    )


def pair(probes: Sequence[float], blocks: Sequence[float]) -> list[float]:
    """The ratio of each block to the mean of the probes around it."""
    return [
        block / statistics.fmean(around)
        for block, around in zip(blocks, pairwise(probes), strict=True)
    ]


def pair_walls(probes: Sequence[Rate], blocks: Sequence[Rate]) -> list[float]:
    """The ratio of samples/s of each block to the mean of the probes around it."""
    return pair([rate.wall for rate in probes], [rate.wall for rate in blocks])


def write_row(trainer: str, plan: Plan, probes: Sequence[Rate], blocks: Sequence[Rate]) -> str:
    """Samples/s and their ratios: medians of the probes, of the blocks of training, and of the
    pairs.
    """
    said, shares = (
        plan.throughput.samples_per_second,
        " + ".join(str(share.batch) for share in plan.layout.active),
    )
    walls = [rate.wall for rate in probes]
    probed, trained = statistics.median(walls), statistics.median(rate.wall for rate in blocks)
    low, middle, high = statistics.quantiles(pair_walls(probes, blocks), n=4)
    cpu = [rate.cpu for rate in probes]
    work = f"{statistics.median(pair(cpu, [rate.cpu for rate in blocks])):.3f}" if all(cpu) else "-"
    between = (plan.throughput.high - plan.throughput.low) / 2 / said
    figures = (
        f"{said:,.1f} | {between:.1%} | {probed:,.1f} | {trained:,.1f} | {middle:.3f} | "
        f"{low:.3f} to {high:.3f}"
    )
    of_plan = f"{statistics.median(walls[:FIRST]) / said:.3f} | {trained / said:.3f}"
    return f"| {trainer} | {shares} | {figures} | {work} | {of_plan} |"
