"""Trainings by a plan beside trainings without it, for `python -m benchmarks.trainers variants`.

`plan`; `even`, the bare trainer with as many rows on each device; `grouped` and `balanced`, that
with transformers' group_by_length and batch_rebalance; `alone`, the bare trainer on each device
with its rows of the plan, all at the same time; `once`, the plan's largest shares that need no
passes; `whole`, even shares without the plan's limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.trainer_plans import read_block, search
from benchmarks.trainer_processes import BrokenTrainingError, Ranks
from evener.plan.file import Plan, load_plan, make_layout, to_toml

SAMPLINGS = {
    "even": "random",
    "whole": "random",
    "grouped": "group_by_length",
    "balanced": "batch_rebalance",
}
VARIANTS = ("plan", "once", "alone", *SAMPLINGS)
HEADS = (
    "trainer",
    "round",
    "variant",
    "rows",
    "steps",
    "samples/s",
    "tokens/s",
    "of the plan's figure",
)


class Rate(msgspec.Struct, frozen=True):
    """What a training did each second, over all its processes."""

    samples: float
    tokens: float
    steps: int  # after the warm-up


class Group(msgspec.Struct, frozen=True):
    """The processes of one training, the rows of its steps, and what it is to train."""

    ranks: Ranks
    rows: int
    words: list[str]


def print_rates(options: argparse.Namespace) -> None:
    """A row for each training, and what the plan gains."""
    print(f"| {' | '.join(HEADS)} |\n| --- | ---: | --- | --- |{' ---: |' * 4}")
    together = [options.trainers] if options.plan else [[trainer] for trainer in options.trainers]
    gains = []
    for trainers in together:
        for number in range(options.repeat):
            path = options.plan or search(options, trainers[0])
            rates = measure(options, trainers, path, number)
            gains += [compare(trainer, number, rates, load_plan(path)) for trainer in trainers]
    print("\n" + "\n".join(gains), flush=True)


def measure(
    options: argparse.Namespace, trainers: Sequence[str], path: Path, number: int
) -> dict[tuple[str, str], Rate]:
    """Start the processes of all trainings, then let one training run after the other."""
    plan, rates = load_plan(path), {}
    with ExitStack() as stack:
        cases = {}
        for trainer in trainers:
            for variant in options.variants.split(","):
                cases[trainer, variant] = make_groups(options, trainer, variant, plan, path)
        groups = [group for case in cases.values() for group in case]
        for group in groups:
            stack.callback(group.ranks.close)
        for group in groups:
            group.ranks.read()  # ready
        for (trainer, variant), case in cases.items():
            row = (
                f"| {trainer} | {number + 1} | {variant} | "
                f"{' + '.join(str(group.rows) for group in case)} |"
            )
            try:
                rate = train(case, options.seconds if variant == "plan" else options.beside)
            except BrokenTrainingError as error:
                print(f"{row} | {error} | | |", flush=True)
                continue
            rates[trainer, variant] = rate
            part = pick_figure(rate, plan) / promised(plan)
            print(
                f"{row} {rate.steps} | {rate.samples:,.1f} | {rate.tokens:,.0f} | {part:.3f} |",
                flush=True,
            )
    return rates


def make_groups(
    options: argparse.Namespace, trainer: str, variant: str, plan: Plan, path: Path
) -> list[Group]:
    """The trainings of a variant that run at the same time."""
    active, batch = plan.layout.active, plan.layout.global_batch
    words = [
        trainer,
        "--size",
        options.size,
        *["--bf16"] * options.bf16,
        *["--texts"] * options.texts,
    ]
    if variant == "once":
        path = options.folder / "once.toml"
        path.write_bytes(to_toml(without_passes(plan)))
    words += ["--plan", str(path)]
    every = range(len(active))
    if variant == "alone":
        return [
            Group(Ranks(active, [i]), active[i].batch, [*words, "--bare", str(active[i].batch)])
            for i in every
        ]
    if variant not in SAMPLINGS:
        return [Group(Ranks(active, every), batch, words)]
    own, free = batch // len(active), variant == "whole"
    words += ["--bare", str(own), "--sampling", SAMPLINGS[variant], *["--free"] * free]
    return [Group(Ranks(active, every, free), own * len(active), words)]


def without_passes(plan: Plan) -> Plan:
    """The same global batch, with what would need a pass more on the device with the most
    memory.
    """
    layout = plan.layout
    batches = [min(share.batch, share.most or share.batch) for share in layout.share]
    largest = max(range(len(batches)), key=lambda i: layout.share[i].most)
    batches[largest] += layout.global_batch - sum(batches)
    return msgspec.structs.replace(
        plan, layout=make_layout(layout.kind, layout.share, tuple(batches))
    )


def train(groups: Sequence[Group], seconds: float) -> Rate:
    """About so many seconds of trainings at the same time, after their warm-up."""
    for group in groups:
        group.ranks.start(group.words)
    for group in groups:
        group.ranks.say(str(max(2, round(seconds * read_block(group.ranks, 1).wall))))
    rate = Rate(0.0, 0.0, 0)
    for group in groups:
        seen = group.ranks.read()
        samples = group.rows * min(each["steps_per_second"] for each in seen)
        tokens = sum(each["tokens_per_second"] for each in seen)
        rate = Rate(rate.samples + samples, rate.tokens + tokens, max(rate.steps, seen[0]["steps"]))
    for group in groups:
        group.ranks.close()  # their memory is free for the next
    return rate


def pick_figure(rate: Rate, plan: Plan) -> float:
    """What the plan counts: tokens where rows have lengths."""
    return rate.tokens if plan.throughput.tokens_per_second else rate.samples


def promised(plan: Plan) -> float:
    """The plan's figure."""
    return plan.throughput.tokens_per_second or plan.throughput.samples_per_second


def compare(trainer: str, number: int, rates: dict[tuple[str, str], Rate], plan: Plan) -> str:
    """The plan against the other variants, and its part of the gain over even shares that both
    alone would make.
    """
    own = {
        variant: pick_figure(rate, plan)
        for (name, variant), rate in rates.items()
        if name == trainer
    }
    if "plan" not in own:
        return f"{trainer}, round {number + 1}: no training by the plan."
    between = (plan.throughput.high - plan.throughput.low) / 2 / plan.throughput.samples_per_second
    words = [f"{own['plan'] / promised(plan):.3f} of its figure (± {between:.1%})"]
    words += [
        f"{own['plan'] / figure:.3f} of {variant}"
        for variant, figure in own.items()
        if variant != "plan"
    ]
    if {"even", "alone"} <= own.keys() and own["alone"] > own["even"]:
        part = (own["plan"] - own["even"]) / (own["alone"] - own["even"])
        words.append(f"{part:.0%} of the gain that alone allows over even")
    return f"{trainer}, round {number + 1}: {', '.join(words)}."
