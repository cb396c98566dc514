"""Sections of benchmarks.gpu: TensorFlow with one process per GPU."""

from __future__ import annotations

from benchmarks.gpu_bench import GpuBench
from benchmarks.training import EXAMPLES


def keras_training(bench: GpuBench) -> None:
    """Train for a minute by a plan for batch 256 with the second GPU at 60 %.

    The plan is searched for unless there is one.
    """
    plan = bench.out / "keras-training.toml"
    seconds, rows = ("5", "4096") if bench.small else ("60", "262144")
    with bench.mps() as variables:
        if not plan.exists():
            fixed = ("--global-batch", "256", "--export", str(plan))
            bench.balance(
                "keras training: plan",
                bench.limited("", "60%"),
                _network(bench),
                *fixed,
                env=variables,
            )
        if plan.exists():
            words = (
                "launch",
                str(plan),
                str(EXAMPLES / "keras_train.py"),
                "--seconds",
                seconds,
                "--rows",
                rows,
            )
            bench.script(
                "keras training", "evener", *words, seconds=float(seconds) + 90, env=variables
            )


def keras_passes(bench: GpuBench) -> None:
    """Time steps in several passes under memory limits."""
    devices = bench.limited("1GiB", "500MiB") if bench.small else bench.limited("8GiB", "5GiB")
    sizes = ("60", "30", "30", "15", "5") if bench.small else ("1200", "600", "600", "300", "500")
    first, second, first_pass, second_pass, steps = sizes
    where = (
        "--devices",
        devices,
        "--framework",
        "tensorflow",
        "--workload",
        _network(bench),
        "--gpus",
        "0",
        "1",
    )
    shares = ("--batches", first, second, "--micro", first_pass, second_pass)
    bench.run(
        f"{steps} steps in passes",
        "probe",
        *where,
        *shares,
        "--repeat",
        "1",
        "--steps",
        steps,
        "--json",
    )


def _network(bench: GpuBench) -> str:
    return "keras_mnist" if bench.small else "keras_maxer"
