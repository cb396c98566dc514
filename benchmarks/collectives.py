"""The time to sum gradients between TensorFlow's processes: `python -m benchmarks.collectives
[--processes 2]`.

Each process has a GPU, or none at all where there are none, and sums tensors of the sizes asked for
in a graph, as a training step does, each sum of what the one before gave. Rows: as evener does it,
as MultiWorkerMirroredStrategy does with the same choice (NCCL between GPUs), and as it does when it
chooses by itself (gRPC). Milliseconds a sum, the middle of several graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = (1_000, 78_923_530)  # floats: the second are keras_maxer's gradients
SUMS = {1_000: 100}  # in a graph; fewer for larger sizes
FEW = 4
GRAPHS, WARM_UPS = 5, 1  # run one after another; the first one allocates memory and loads kernels
WAYS = {
    "evener": "evener",
    "strategy": "the strategy, by evener's choice",
    "itself": "the strategy, by its own choice",
}


def main() -> None:
    """Print the table; with a rank, be one process of a group and print its times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="floats")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peers", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=list(WAYS), help="one row only")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(timed(options)))
        return
    print(f"| summed by | {' | '.join(f'{size:,} floats, ms' for size in options.sizes)} |")
    print(f"| --- |{' ---: |' * len(options.sizes)}")
    for way in [options.way] if options.way else WAYS:
        cells = (f"{1000 * seconds:,.2f}" for seconds in group(options, way))
        print(f"| {WAYS[way]} | {' | '.join(cells)} |", flush=True)


def group(options: argparse.Namespace, way: str) -> list[float]:
    """Seconds of a sum for each size, in the slowest process of a new group."""
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(options.processes)]
    peers = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    for door in doors:
        door.close()
    gpus = Path("/dev/nvidia0").exists()
    children = []
    for rank in range(options.processes):
        words = [
            "--rank",
            str(rank),
            "--peers",
            *peers,
            "--sizes",
            *map(str, options.sizes),
            "--way",
            way,
        ]
        environment = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": str(rank) if gpus else "-1",
        }
        command = [sys.executable, "-m", "benchmarks.collectives", *words]
        children.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        )
    answers = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("A process of the group failed; its message is above.")
    return [max(times) for times in zip(*map(json.loads, answers), strict=True)]


def timed(options: argparse.Namespace) -> list[float]:
    """Seconds of a sum for each size, in this process of a group."""
    import tensorflow as tf

    from evener.keras_split.group import Group

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    group = Group(options.peers, options.rank)
    add = adder(group, options.way)
    seconds = []
    for size in options.sizes:
        sums = SUMS.get(size, FEW)
        step = tf.function(chain(add, sums), autograph=False)
        took = []
        for _ in range(WARM_UPS + GRAPHS):
            began = time.perf_counter()
            float(step(tf.ones([size]))[0])
            took.append((time.perf_counter() - began) / sums)
        seconds.append(statistics.median(took[WARM_UPS:]))
    return seconds


def chain(add: Callable[[list[Any]], list[Any]], sums: int) -> Callable[[Any], Any]:
    """A chain of sums, each of half the result before it."""

    def chained(tensor: Any) -> Any:
        for _ in range(sums):
            (total,) = add([tensor])
            tensor = total * 0.5
        return tensor

    return chained


def adder(group: Any, way: str) -> Callable[[list[Any]], list[Any]]:
    """A function that sums tensors over the processes."""
    import tensorflow as tf

    if way == "evener":
        add: Callable[[list[Any]], list[Any]] = group.sum
        return add

    ways = tf.distribute.experimental.CommunicationImplementation
    chosen = ways.NCCL if group.device.startswith("GPU") and way != "itself" else ways.AUTO
    options = tf.distribute.experimental.CommunicationOptions(implementation=chosen)

    def reduce(tensors: list[Any]) -> Any:
        context = tf.distribute.get_replica_context()
        copies = [tf.identity(tensor) for tensor in tensors]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, copies, options=options)

    return lambda tensors: group.strategy.run(reduce, args=(tensors,))


if __name__ == "__main__":
    main()
