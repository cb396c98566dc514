"""Measure evener on NVIDIA GPUs, in sections.

  python -m benchmarks.gpu --out DIR --framework torch [--gpus 0,1] SECTION...

Two limits make equal GPUs unequal: a percentage of the multiprocessors, under an MPS daemon that
this command starts and stops, and the framework's memory limit. `python -m benchmarks.gpu_table
JOURNAL...` makes the tables of docs/benchmarks/gpu.md. On four GPUs, two of these commands can run
at the same time, with different `--gpus` and `--out`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu_bench import WORKLOADS, GpuBench
from benchmarks.gpu_exchanges import (
    exchange,
    failures,
    memory_neighbour,
    one_gpu_caps,
    plans,
    tests,
    trusted,
)
from benchmarks.gpu_keras import keras_passes, keras_training
from benchmarks.gpu_layouts import layouts, scaling
from benchmarks.gpu_screen import draw
from benchmarks.gpu_searches import caps, control, engines, neighbour, regret, unequal
from benchmarks.gpu_trainings import (
    adapters,
    cost,
    memory,
    memory_grid,
    sharded,
    texts,
    texts_on_equal,
    trainers,
    training,
)
from benchmarks.gpu_watch import compare_monitors, loaded


def look(bench: GpuBench) -> None:
    """1. Describe the machine."""
    bench.run("doctor", "doctor", "--json")
    bench.run("devices", "devices", "--devices", "gpu", "--json")


def watch(bench: GpuBench) -> None:
    """1. Run evener's monitor and others under load."""
    with loaded(bench.gpus, 90.0):
        bench.keep("watch", compare_monitors(30.0, bench.environment))


def screen(bench: GpuBench) -> None:
    """8. Draw the app on a pseudo-terminal, as pictures."""
    bench.keep("screen", draw(bench.pair, bench.out, bench.framework, bench.environment))


SECTIONS = {
    section.__name__: section
    for section in (
        look,
        watch,
        control,
        unequal,
        neighbour,
        engines,
        caps,
        regret,
        training,
        screen,
        layouts,
        scaling,
        trainers,
        adapters,
        texts,
        texts_on_equal,
        memory,
        memory_grid,
        sharded,
        cost,
        keras_training,
        keras_passes,
        exchange,
        failures,
        memory_neighbour,
        one_gpu_caps,
        tests,
        plans,
        trusted,
    )
}


def main() -> None:
    """Run the named sections in their order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--framework", choices=list(WORKLOADS), required=True)
    parser.add_argument(
        "--gpus",
        default="0,1",
        help="unequal are the first two; one is enough from exchange on",
    )
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--budget", default="90s", help="for each search")
    parser.add_argument(
        "--small",
        action="store_true",
        help="try the commands with small models on slices of the CPU",
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that the MPS daemon is stopped then, too
    gpus = tuple(int(gpu) for gpu in arguments.gpus.split(","))
    bench = GpuBench(
        arguments.out, arguments.framework, gpus, arguments.match, arguments.budget, arguments.small
    )
    chosen = list(SECTIONS) if "all" in arguments.sections else arguments.sections
    try:
        for section in chosen:
            try:
                SECTIONS[section](bench)
            except Exception as error:  # the other sections still run
                bench.keep(f"{section} broke", {"error": f"{type(error).__name__}: {error}"})
                print(f"{section} broke: {type(error).__name__}: {error}", flush=True)
    finally:
        bench.pack_journals()


if __name__ == "__main__":
    main()
