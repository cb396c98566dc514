"""A plan's figure beside trainings by the plan: `python -m benchmarks.trainers plan`.

A virtual machine's own speed changes by a fifth from one minute to the next. So the plan's layout is probed again, as
`evener probe` does it, right before and after each block of training steps; the other side's processes wait meanwhile.
A block's samples/s over the mean of the two probes around it doesn't depend on how fast the machine is at that time.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.trainer_processes import Ranks, name_build
from benchmarks.training import balance
from evener.balancer.manual_run import RunLength, choose_layout, timed_runs
from evener.balancer.request import Request
from evener.balancer.resolve import resolve_request
from evener.plan import Plan, load_plan

PAIRED = ("training / probe", "middle half")
HEADS = ("trainer", "shares", "plan", "probes", "training", *PAIRED, "first probes / plan", "training / plan")
FIRST = 3  # probes, within a minute of the search's own check


class Rates(msgspec.Struct, frozen=True):
    """Samples/s, in the order in which they were measured: a block between each two probes."""

    probes: list[float]
    blocks: list[float]

    @property
    def ratios(self) -> list[float]:
        """Of each block to the probes around it."""
        return [block / statistics.fmean(pair) for block, pair in zip(self.blocks, pairwise(self.probes), strict=True)]


def print_figures(options: argparse.Namespace) -> None:
    """A row for each trainer."""
    print(f"| {' | '.join(HEADS)} |\n| --- | --- |{' ---: |' * 4} --- |{' ---: |' * 2}", flush=True)
    for trainer in options.trainers:
        path = options.plan or search(options, trainer)
        plan = load_plan(path)
        print(write_row(trainer, plan, alternate(options, trainer, plan, path)), flush=True)


def search(options: argparse.Namespace, trainer: str) -> Path:
    """Find the plan of a trainer, as a file."""
    request = make_request(options, trainer)
    options.workload, options.framework = request.workload, request.framework
    settings = [word for name, value in request.settings.items() for word in ("--set", f"{name}={value}".lower())]
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


def alternate(options: argparse.Namespace, trainer: str, plan: Plan, path: Path) -> Rates:
    """Probe, train, probe, train, ..., probe; each side's processes stay."""
    resolved, active = resolve_request(make_request(options, trainer)), plan.layout.active
    places = [i for i, share in enumerate(plan.layout.share) if share.batch]
    sizes = [share.batch for share in active], [share.micro or share.batch for share in active]
    layout = choose_layout(len(resolved.devices), places, *sizes)
    seconds = options.seconds / options.blocks
    rates, ranks = Rates([], []), Ranks(active, range(len(active)))
    length, stop = RunLength(seconds), threading.Event()
    with closing(ranks), timed_runs(resolved, layout, options.blocks + 1, length, stop) as probes:
        ranks.read()  # ready
        ranks.start([trainer, "--plan", str(path), "--size", options.size, *["--bf16"] * options.bf16])
        steps = max(2, round(seconds * read_rate(ranks)))
        for number, probe in enumerate(probes):
            rates.probes.append(probe.this_run.value)
            if number < options.blocks:
                ranks.say(str(steps))
                rates.blocks.append(read_rate(ranks) * plan.layout.global_batch)
    return rates


def read_rate(ranks: Ranks) -> float:
    """Steps/s of a block that ends."""
    rate: float = min(each["steps_per_second"] for each in ranks.read())
    return rate


def write_row(trainer: str, plan: Plan, seen: Rates) -> str:
    """Samples/s and their ratios: medians of the probes, of the blocks of training, and of the pairs."""
    said, shares = plan.throughput.samples_per_second, " + ".join(str(share.batch) for share in plan.layout.active)
    probed, trained = statistics.median(seen.probes), statistics.median(seen.blocks)
    low, middle, high = statistics.quantiles(seen.ratios, n=4)
    rates = f"{said:,.1f} | {probed:,.1f} | {trained:,.1f}"
    paired, first = f"{middle:.3f} | {low:.3f} to {high:.3f}", statistics.median(seen.probes[:FIRST])
    return f"| {trainer} | {shares} | {rates} | {paired} | {first / said:.3f} | {trained / said:.3f} |"
