"""Measure a plan's cost in each trainer, and whether training reaches its speed.

  python -m benchmarks.trainers cost

`cost` trains with equal shares, plainly and by a plan, in two pairs of processes that take turns
step by step; `probe` runs a probe's steps instead of plain training. `plan` finds a plan for each
trainer, trains by it and probes it again in turns (benchmarks/trainer_plans.py). `variants` trains
by a plan and without it (benchmarks/trainer_rates.py). `sharded` trains with FSDP2 by even and
unequal shares and compares the losses. Training on GPUs keeps the limits of its plan; a percentage
needs a running MPS daemon.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.trainer_plans import print_figures
from benchmarks.trainer_processes import Ranks
from benchmarks.trainer_rates import print_rates
from evener.devices.terms import parse_request, write_limit
from evener.plan.file import Share, load_plan, make_layout, to_toml
from tests.support.launched_plan import make_plan

TRAINERS = ("huggingface", "lightning", "accelerate", "torch")
Times = tuple[float, float]  # wall time, CPU time


def main() -> None:
    """Print the requested table."""
    options = parse()
    root = str(Path(__file__).parents[1])  # child processes import the models from there
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        tables = {"plan": print_figures, "variants": print_rates, "sharded": print_losses}
        tables.get(options.table, print_pairs)(options)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("cost", "probe", "plan", "variants", "sharded"))
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--size", choices=("small", "middle", "large", "huge"), default="small")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(
        "--rows", type=int, default=2, help="cost, probe, sharded: of each process, at equal shares"
    )
    parser.add_argument("--pairs", type=int, default=200, help="cost, probe: of steps")
    parser.add_argument(
        "--devices",
        default="cpu/2",
        help="as evener balance takes them; cost, probe, sharded: two, as gpu:0,1@8GiB",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        help="plan, variants: a file for all trainers; without it, a search each",
    )
    parser.add_argument("--budget", default="60s", help="of each search")
    parser.add_argument(
        "--balance", nargs="*", default=[], metavar="WORD", help="for evener balance, without --"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="plan, variants: of each training by the plan"
    )
    parser.add_argument("--blocks", type=int, default=12, help="plan: that a training is cut into")
    parser.add_argument(
        "--variants", default="plan,even,alone", help="variants: separated by commas"
    )
    parser.add_argument(
        "--texts", action="store_true", help="variants: rows of unequal length, in transformers"
    )
    parser.add_argument(
        "--beside", type=float, default=20.0, help="variants: seconds of each other training"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="plan, variants: rounds of each trainer"
    )
    return parser.parse_args()


def make_up_plan(options: argparse.Namespace, batches: tuple[int, ...]) -> Path:
    """Write a plan with these shares of the devices, without a search; return its file."""
    terms = parse_request(options.devices)
    if terms[0].kind == "gpu":
        named = [(f"GPU-{term.pick}", int(term.pick), write_limit(term.limit)) for term in terms]
    else:
        named = [(f"cpu-{i}-of-{len(batches)}", i, "") for i in range(len(batches))]
    shares = tuple(
        Share(device, index, "a device", 0, 0.0, limit) for device, index, limit in named
    )
    path: Path = options.folder / f"{'-'.join(map(str, batches))}.toml"
    path.write_bytes(to_toml(make_plan(make_layout("split", shares, batches))))
    return path


@contextmanager
def trained_beside(
    trainer: str, options: argparse.Namespace, *pair: tuple[Path, list[str]]
) -> Iterator[list[Ranks]]:
    """Start two training runs at the same time; yield their processes.

    Each run has its made-up plan and its options.
    """
    every = [Ranks(load_plan(path).layout.active, (0, 1)) for path, _ in pair]
    try:
        for ranks in every:
            ranks.read()  # ready
        for ranks, (path, words) in zip(every, pair, strict=True):
            ranks.start([trainer, "--plan", str(path), "--made-up", "--size", options.size, *words])
        yield every
    finally:
        for ranks in every:
            ranks.close()


# ---------------------------------------------------------------------- cost and probe


def print_pairs(options: argparse.Namespace) -> None:
    """Compare steps by a plan of equal shares with plain or probe steps, in wall and CPU time."""
    plan, other = (
        make_up_plan(options, (options.rows,) * 2),
        "bare" if options.table == "cost" else "probe",
    )
    print(
        f"| trainer | time | {other} step, ms | by the plan, ms | median ratio of pairs | "
        f"middle half |"
    )
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for trainer in options.trainers:
        words = ["--turns", *["--bf16"] * options.bf16]
        without = [*words, f"--{other}", str(options.rows)]
        with trained_beside(trainer, options, (plan, without), (plan, words)) as (others, planned):
            for ranks in (others, planned):
                ranks.read()  # the first step runs at once
            pairs = [measure_pair(others, planned, number) for number in range(-10, options.pairs)][
                10:
            ]
        for i, name in enumerate(("wall", "CPU")):
            times = [(other[i], by_plan[i]) for other, by_plan in pairs]
            medians = " | ".join(
                f"{1000 * statistics.median(each):.1f}" for each in zip(*times, strict=True)
            )
            low, middle, high = statistics.quantiles(
                [by_plan / other for other, by_plan in times], n=4
            )
            print(
                f"| {trainer} | {name} | {medians} | {middle:.4f} | {low:.3f} to {high:.3f} |",
                flush=True,
            )


def measure_pair(others: Ranks, planned: Ranks, number: int) -> tuple[Times, Times]:
    """Time a step of each; every second time, the plan's step comes first."""
    if number % 2:
        by_plan = measure_step(planned)
        return measure_step(others), by_plan
    return measure_step(others), measure_step(planned)


def measure_step(ranks: Ranks) -> Times:
    """Run a step on all ranks; return the slowest rank's seconds, and all ranks' CPU seconds."""
    ranks.send_line("")
    wall, cpu = zip(*ranks.read(), strict=True)
    return max(wall), sum(cpu)


# ---------------------------------------------------------------------- FSDP2


def print_losses(options: argparse.Namespace) -> None:
    """Print the losses of transformers' Trainer with FSDP2 at equal shares and at 3 : 1.

    Both train at the same time.
    """
    rows = options.rows
    print(
        "| shares | losses | largest difference | most memory of each process, GiB |\n| --- | "
        "--- | ---: | --- |"
    )
    shares = ((rows, rows), (2 * rows - rows // 2, rows // 2))
    even, uneven = (make_up_plan(options, batches) for batches in shares)
    with trained_beside("sharded", options, (even, []), (uneven, [])) as every:
        seen = [ranks.read() for ranks in every]
    expected = seen[0][0]["losses"]
    for batches, answers in zip(shares, seen, strict=True):
        losses = answers[0]["losses"]
        gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        memory = " + ".join(f"{each['most_bytes'] / 2**30:.2f}" for each in answers)
        words = f"| {' + '.join(map(str, batches))} | {' '.join(f'{loss:.5f}' for loss in losses)}"
        print(f"{words} | {gap:.1e} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
