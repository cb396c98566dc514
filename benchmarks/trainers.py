"""What a plan costs in each trainer, and whether trainings meet its figure: `python -m benchmarks.trainers cost`.

`cost` trains with even shares, bare and by a plan, in two pairs of processes that take turns, a step each; `probe`
steps as a probe does instead of bare. `plan` finds a plan for each trainer and trains by it; `--variants
plan,even,alone` also trains without, `--one-plan` probes one plan again before each training: on a machine that others
use too, both are slowed equally. On GPUs, `--percent 100,60` holds the process of each device to so much of its GPU's
multiprocessors (a running MPS daemon is needed).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.training import balance, probe
from evener.plan import Plan, load_plan, to_toml
from tests.support.huggingface_programs import make_plan
from tests.support.torch_start import free_port

TRAINERS = ("huggingface", "lightning", "accelerate", "torch")
RANKS = Path(__file__).with_name("trainer_ranks.py")
Ranks = Sequence[Any]  # processes with text pipes
Times = tuple[float, float]  # wall, CPU


def main() -> None:
    """Print the table that was asked for."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        (print_rates if options.table == "plan" else print_pairs)(options)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("cost", "probe", "plan"))
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rows", type=int, default=2, help="cost, probe: of each process")
    parser.add_argument("--pairs", type=int, default=200, help="cost, probe: of steps")
    parser.add_argument("--devices", default="cpu/2", help="plan: as evener balance takes them")
    parser.add_argument("--budget", default="60s", help="plan: of each search")
    parser.add_argument("--balance", nargs="*", default=[], metavar="WORD", help="plan: for evener balance, without --")
    parser.add_argument("--one-plan", action="store_true", help="plan: search once, probe before each training")
    parser.add_argument("--seconds", type=float, default=60.0, help="plan: of each training")
    parser.add_argument("--repeat", type=int, default=3, help="plan: searches and trainings of each trainer")
    parser.add_argument("--variants", default="plan", help="plan: of plan, even, alone")
    parser.add_argument("--percent", default="", help="plan: of each GPU's multiprocessors: 100,60")
    return parser.parse_args()


# ---------------------------------------------------------------------- cost and probe


def print_pairs(options: argparse.Namespace) -> None:
    """A step by a plan of even shares beside a bare one, or beside a probe's, in wall time and CPU time."""
    plan, other = options.folder / "even.toml", "bare" if options.table == "cost" else "probe"
    plan.write_bytes(to_toml(make_plan((options.rows,) * 2)))
    print(f"| trainer | time | {other} step, ms | by the plan, ms | median ratio of pairs | middle half |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for trainer in options.trainers:
        words = [trainer, "--plan", str(plan), "--size", options.size]
        with started([*words, f"--{other}", str(options.rows)], 2) as others, started(words, 2) as planned:
            for rank in (*others, *planned):
                rank.stdout.readline()  # the first step is made at once
            pairs = [measure_pair(others, planned, number) for number in range(-10, options.pairs)][10:]
        for i, name in enumerate(("wall", "CPU")):
            times = [(without[i], by_plan[i]) for without, by_plan in pairs]
            medians = " | ".join(f"{1000 * statistics.median(each):.1f}" for each in zip(*times, strict=True))
            low, middle, high = statistics.quantiles([by_plan / without for without, by_plan in times], n=4)
            print(f"| {trainer} | {name} | {medians} | {middle:.4f} | {low:.3f} to {high:.3f} |", flush=True)


def measure_pair(others: Ranks, planned: Ranks, number: int) -> tuple[Times, Times]:
    """A step of each, in turns the one or the other first."""
    if number % 2:
        by_plan = measure_step(planned)
        return measure_step(others), by_plan
    return measure_step(others), measure_step(planned)


def measure_step(ranks: Ranks) -> Times:
    """Let all ranks make a step: (the slowest one's seconds, CPU seconds of all)."""
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    wall, cpu = zip(*(map(float, rank.stdout.readline().split()) for rank in ranks), strict=True)
    return max(wall), sum(cpu)


# ---------------------------------------------------------------------- plan


def print_rates(options: argparse.Namespace) -> None:
    """Trainings by a plan beside what it says, and beside trainings without it."""
    print("| trainer | round | variant | shares | plan, samples/s | training, samples/s | training / plan |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: |")
    for trainer in options.trainers:
        path = options.folder / f"{trainer}.toml"
        ratios = [ratio for number in range(options.repeat) for ratio in print_round(options, trainer, path, number)]
        print(f"\nMedian of {trainer} by the plan: {statistics.median(ratios):.3f}.\n", flush=True)


def print_round(options: argparse.Namespace, trainer: str, path: Path, number: int) -> Iterator[float]:
    """A row for each variant; training / plan of those by the plan."""
    options.workload, options.framework, options.rows = f"{RANKS}:build_{trainer}", "torch", None
    if number == 0 or not options.one_plan:
        balance(options, path)
    plan = load_plan(path)
    said = probe(options, plan) if options.one_plan else plan.throughput.samples_per_second
    shares = " + ".join(map(str, plan.layout.batches))
    for variant in options.variants.split(","):
        rate = train(options, trainer, path, plan, variant, said)
        words = f"| {trainer} | {number + 1} | {variant} | {shares} | {said:,.1f} | {rate:,.1f} | {rate / said:.3f} |"
        print(words, flush=True)
        if variant == "plan":
            yield rate / said


def train(options: argparse.Namespace, trainer: str, path: Path, plan: Plan, variant: str, said: float) -> float:
    """Samples/s of a training by the plan, by even shares of its batch, or by the first device alone."""
    places = [share.index for share in plan.layout.active][: 1 if variant == "alone" else None]
    batch = plan.layout.global_batch
    steps = max(2, round(options.seconds * said / batch))
    words = [trainer, "--plan", str(path), "--size", options.size, "--steps", str(steps)]
    words += ["--bf16"] if options.bf16 else []
    if variant != "plan":
        words += ["--bare", str(batch // len(places))]
        batch = batch // len(places) * len(places)
    with started(words, len(places), options.percent, places) as ranks:
        answers = [rank.stdout.readline() for rank in ranks]
    return float(answers[0]) * batch


# ---------------------------------------------------------------------- ranks


@contextmanager
def started(words: Sequence[str], world: int, percent: str = "", visible: Sequence[int] = ()) -> Iterator[Ranks]:
    """The processes of a training, as torchrun starts them, until they end."""
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible)), "PYTHONWARNINGS": "ignore"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": sys.stderr}
    ranks: list[Any] = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if percent:
            place["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent.split(",")[visible[rank]]
        command = [sys.executable, "-m", "benchmarks.trainer_ranks", *words]
        ranks.append(subprocess.Popen(command, env={**common, **place}, text=True, **pipes))
    yield ranks
    for each in ranks:
        each.stdin.close()
    codes = [each.wait() for each in ranks]
    if any(codes):
        raise SystemExit(f"The training {' '.join(words)} failed.")


if __name__ == "__main__":
    main()
