"""What a step of TensorFlow's processes takes with each way to sum gradients: `python -m
benchmarks.early_sums`.

Each process has a GPU, or one thread where there are none, and trains its share of each batch. The
ways take turns: all gradients in one sum after the backward pass (`after`), most of them behind it
(`behind`, as evener does it), in four equal sums behind it (`fourths`), or none at all, each
process for itself (`alone`). Of the solos: the samples/s of all over the sum of what each does
alone. On GPUs, `--percent 100,60` holds each process to so much of its GPU's multiprocessors (a
running MPS daemon is needed).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.keras_start import free_peers

Divide = Callable[[Sequence[tuple[int, Any]], int], list[list[int]]]
WAYS = ("after", "behind", "fourths", "alone")
WARM_UPS = 3


def main() -> None:
    """Print the table; with a rank, be one process of a group and print its times."""
    options = parse()
    if options.rank is not None:
        print(json.dumps(timed(options)))
        return
    print("| shares | sums | step, ms | samples/s | of the solos |")
    print("| --- | --- | ---: | ---: | ---: |")
    ranks = group(options)
    shares = " + ".join(map(str, options.shares))
    alone = sum(share / rank["alone"] for share, rank in zip(options.shares, ranks, strict=True))
    for way in WAYS[:-1]:
        seconds = max(rank[way] for rank in ranks)
        rate = sum(options.shares) / seconds
        print(f"| {shares} | {way} | {1000 * seconds:.2f} | {rate:,.0f} | {rate / alone:.3f} |")
    print("\nAlone, ms: " + ", ".join(f"{1000 * rank['alone']:.2f}" for rank in ranks))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default="keras_maxer")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of it, whole numbers"
    )
    parser.add_argument(
        "--shares", type=int, nargs="+", default=[161, 95], help="rows of each process"
    )
    parser.add_argument("--percent", default="", help="of each GPU's multiprocessors: 100,60")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peers", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def group(options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of a step by each way, from each process of a new group."""
    peers = free_peers(len(options.shares))
    gpus = Path("/dev/nvidia0").exists()
    percents = options.percent.split(",") if options.percent else []
    children = []
    for rank in range(len(peers)):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["CUDA_VISIBLE_DEVICES"] = str(rank) if gpus else "-1"
        if percents:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percents[rank]
        command = [
            sys.executable,
            "-m",
            "benchmarks.early_sums",
            *sys.argv[1:],
            "--rank",
            str(rank),
            "--peers",
            *peers,
        ]
        children.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        )
    answers = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("A process of the group failed; its message is above.")
    return list(map(json.loads, answers))


def timed(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step by each way, in this process of a group."""
    from evener.workloads.protocol import Place
    from evener.workloads.registry import build

    device, threads = (
        ("GPU:0", None) if os.environ["CUDA_VISIBLE_DEVICES"] != "-1" else ("CPU:0", 1)
    )
    place = Place((device,), rank=options.rank, peers=tuple(options.peers), threads=threads)
    settings = {
        name: int(value) for name, _, value in (each.partition("=") for each in options.set)
    }
    workload: Any = build(options.workload, place, settings)
    workload.prepare(options.shares)
    functions = {}
    for way in WAYS:
        with summed(workload, way):
            workload.model.make_train_function(force=True)
            functions[way] = workload.model.train_function
            run(workload, WARM_UPS)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.turns):
        for way in WAYS:
            workload.model.train_function = functions[way]
            run(workload, 1)
            began = time.perf_counter()
            run(workload, options.steps)
            took[way].append((time.perf_counter() - began) / options.steps)
    return {way: statistics.median(seconds) for way, seconds in took.items()}


def run(workload: Any, steps: int) -> None:
    """Some steps, and the wait for the last."""
    for _ in range(steps):
        workload.step()
    workload.synchronize()


@contextmanager
def summed(workload: Any, way: str) -> Iterator[None]:
    """What is traced meanwhile sums its gradients this way."""
    from evener.keras_split import group
    from evener.shares import divisions

    divide: dict[str, Divide] = {
        "after": lambda tensors, _: [list(range(len(tensors)))],
        "fourths": fourths,
    }
    with ExitStack() as stack:
        chosen = divide.get(way, divisions.divide_sums)
        stack.enter_context(patch(f"{group.__name__}.divide_sums", chosen))
        if way == "alone":
            stack.enter_context(patch.object(workload.steps.split.required_group, "sum", keep))
        yield


def keep(tensors: list[Any], **_: int) -> list[Any]:
    """No sum: each process' own."""
    return tensors


def fourths(tensors: Sequence[tuple[int, Any]], apart: int) -> list[list[int]]:
    """Four sums of about the same number of bytes, and what is apart; all tensors are of one
    type.
    """
    total, before, last = sum(size for size, _ in tensors), 0, len(tensors) - apart
    sums: dict[int, list[int]] = {}
    for place, (size, _) in enumerate(tensors):
        sums.setdefault(4 * before // max(1, total) if place < last else 4, []).append(place)
        before += size
    return list(sums.values())


if __name__ == "__main__":
    main()
