"""Compare training by a plan with training without it.

  python -m benchmarks.trainers variants

The variants are `plan`; `even`, plain training with equal rows on each device; `grouped` and
`balanced`, the same with transformers' group_by_length and batch_rebalance; `alone`, plain training
on each device with its rows of the plan, all at the same time; `once`, the plan's largest shares
that need only one pass; `whole`, equal shares without the plan's limits.
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
    """The speed of a training run, over all its processes."""

    samples: float
    tokens: float
    steps: int  # steps after the warm-up


class Group(msgspec.Struct, frozen=True):
    """The processes of a training run, its rows per step, and its options."""

    ranks: Ranks
    rows: int
    words: list[str]


def print_rates(options: argparse.Namespace) -> None:
    """Print a row for each training run, and what the plan gains."""
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
    """Start the processes of all training runs, then let the runs train one after the other."""
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
    """Return the training runs of a variant that run at the same time."""
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
    """Return the plan's shares reduced to one pass each, with the same global batch.

    The device with the most memory takes the remaining rows, perhaps in several passes.
    """
    layout = plan.layout
    batches = [min(share.batch, share.most or share.batch) for share in layout.share]
    largest = max(range(len(batches)), key=lambda i: layout.share[i].most)
    batches[largest] += layout.global_batch - sum(batches)
    return msgspec.structs.replace(
        plan, layout=make_layout(layout.kind, layout.share, tuple(batches))
    )


def train(groups: Sequence[Group], seconds: float) -> Rate:
    """Train the groups at the same time for about `seconds` after their warm-up."""
    for group in groups:
        group.ranks.start(group.words)
    for group in groups:
        group.ranks.send_line(str(max(2, round(seconds * read_block(group.ranks, 1).wall))))
    rate = Rate(0.0, 0.0, 0)
    for group in groups:
        seen = group.ranks.read()
        samples = group.rows * min(each["steps_per_second"] for each in seen)
        tokens = sum(each["tokens_per_second"] for each in seen)
        rate = Rate(rate.samples + samples, rate.tokens + tokens, max(rate.steps, seen[0]["steps"]))
    for group in groups:
        group.ranks.close()  # frees the memory for the next run
    return rate


def pick_figure(rate: Rate, plan: Plan) -> float:
    """Return the rate that the plan optimizes: tokens/s if rows have lengths, else samples/s."""
    return rate.tokens if plan.throughput.tokens_per_second else rate.samples


def promised(plan: Plan) -> float:
    """Return the rate that the plan promises."""
    return plan.throughput.tokens_per_second or plan.throughput.samples_per_second


def compare(trainer: str, number: int, rates: dict[tuple[str, str], Rate], plan: Plan) -> str:
    """Describe the plan's speed relative to the other variants.

    If `even` and `alone` were measured, this includes the fraction of the gain over equal shares
    that both devices alone would allow.
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
        words.append(f"{part:.0%} of the gain that alone allows over equal shares")
    return f"{trainer}, round {number + 1}: {', '.join(words)}."
