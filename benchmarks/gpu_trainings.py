"""Sections of benchmarks.gpu: compare training runs with the plans that they follow."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_bench import GpuBench
from benchmarks.trainer_processes import name_build

START_SECONDS = 60.0  # longest start of a search, or of several training runs


def training(bench: GpuBench) -> None:
    """6. Train the example scripts by their plans.

    Compares the samples/s of the plan, of the training run and in the monitor.
    """
    common = (
        "--framework",
        bench.framework,
        "--devices",
        bench.pair,
        "--budget",
        bench.budget,
        "--repeat",
        "1",
    )
    for batch, seconds in ((32768, 60), (4096, 60)):
        if bench.match not in f"training at {batch}":
            continue
        more = (
            "--rows",
            "1048576",
            "--seconds",
            str(seconds),
            "--balance",
            "global-batch",
            str(batch),
        )
        command = [sys.executable, "-m", "benchmarks.training", *common, *more]
        live: list[Any] = []
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=bench.environment,
        )
        while child.poll() is None:
            time.sleep(5.0)
            seen = bench.run(
                f"live of training at {batch}", "monitor", "--once", "--devices", "gpu", "--json"
            )
            live.append(
                [device["samples_per_second"]["value"] for device in seen.get("devices", [])]
            )
        out, _ = child.communicate()
        bench.keep(
            f"training at {batch}",
            {
                "command": command[1:],
                "exit_code": child.returncode,
                "output": out[-8000:],
                "live": live,
            },
        )
        print(out[-2000:], live[-2:], flush=True)


def trainers(bench: GpuBench) -> None:
    """Train transformers' Trainer with the second GPU at 60 %.

    Compares a plan, equal shares, and each GPU alone.
    """
    with bench.mps() as variables:
        train(
            bench, "trainers", bench.limited("", "60%"), 192, "plan,even,alone", 30, env=variables
        )


def adapters(bench: GpuBench) -> None:
    """Train with Lightning and accelerate by the plan of `trainers`.

    The plan is searched for if it isn't in the folder.
    """
    others = ("--trainers", "lightning", "accelerate")
    with bench.mps() as variables:
        train(
            bench,
            "trainers",
            bench.limited("", "60%"),
            192,
            "plan,even,alone",
            10,
            *others,
            env=variables,
        )


def texts(bench: GpuBench) -> None:
    """Train on texts of unequal length with the second GPU at 60 %.

    Compares a plan with transformers' own samplers at equal shares.
    """
    with bench.mps() as variables:
        variants = "plan,balanced,grouped,even"
        train(bench, "texts", bench.limited("", "60%"), 256, variants, 15, "--texts", env=variables)


def texts_on_equal(bench: GpuBench) -> None:
    """Train on texts of unequal length on two equal GPUs."""
    train(bench, "texts on equal GPUs", bench.pair, 256, "plan,even,balanced", 15, "--texts")


def memory(bench: GpuBench) -> None:
    """Train 500 steps with a quarter of the memory on the second GPU.

    Compares training in passes, without passes, and two full GPUs.
    """
    train(bench, "memory", _quarter(bench), 96, "plan,once,whole", 55)


def memory_grid(bench: GpuBench) -> None:
    """Compare the plan of `memory` with other shares and passes, in turns."""
    plan, steps = (
        bench.out / "memory.toml",
        ("--steps", "2", "--width", "0.05", "--turns", "2", "--pairs", "2"),
    )
    where = (
        "--devices",
        _quarter(bench),
        "--workload",
        name_build("huggingface"),
        "--framework",
        "torch",
    )
    settings = ("--set", *_settings(bench, texts=False), "--seconds", "1.5")
    if plan.exists():
        bench.script(
            "memory, grid",
            "benchmarks.grid",
            str(plan),
            *where,
            *settings,
            *steps,
            seconds=3 * START_SECONDS,
        )


def sharded(bench: GpuBench) -> None:
    """Train with FSDP2 at unequal shares a model larger than the second GPU's memory limit."""
    devices = (
        "--devices",
        bench.limited("", "8GiB"),
        "--rows",
        "2",
        "--size",
        _size(bench, "huge"),
    )
    bench.script("sharded", "benchmarks.trainers", "sharded", *devices, seconds=2 * START_SECONDS)


def cost(bench: GpuBench) -> None:
    """Measure the cost of a plan at equal shares: steps of two pairs of processes in turns."""
    devices = ("--devices", bench.pair, "--rows", "32", "--size", _size(bench, "large"))
    pairs = ("--pairs", "100", "--trainers", "huggingface", *_half(bench))
    bench.script("cost", "benchmarks.trainers", "cost", *devices, *pairs, seconds=3 * START_SECONDS)


def train(
    bench: GpuBench,
    name: str,
    devices: str,
    batch: int,
    variants: str,
    seconds: float,
    *more: str,
    env: dict[str, str] | None = None,
) -> None:
    """Train with transformers' Trainer by a plan and by other variants.

    The plan is searched for unless one of this name exists.
    """
    plan = bench.out / f"{name.replace(' ', '-')}.toml"
    if not plan.exists():
        settings = [
            word for each in _settings(bench, "--texts" in more) for word in ("--set", each)
        ]
        fixed = ("--global-batch", str(batch), "--export", str(plan))
        bench.balance(name, devices, name_build("huggingface"), *settings, *fixed, env=env)
    if plan.exists():
        lengths = ("--seconds", str(seconds), "--beside", str(min(seconds, 8)), "--repeat", "1")
        words = (
            "variants",
            "--plan",
            str(plan),
            "--size",
            _size(bench, "large"),
            "--variants",
            variants,
            *lengths,
        )
        trainer = () if "--trainers" in more else ("--trainers", "huggingface")
        limit = 4 * START_SECONDS + 2 * seconds
        title = f"{name}, {' '.join(more) or 'trained'}"
        bench.script(
            title,
            "benchmarks.trainers",
            *words,
            *trainer,
            *_half(bench),
            *more,
            seconds=limit,
            env=env,
        )


def _quarter(bench: GpuBench) -> str:
    return bench.limited("1GiB", "500MiB") if bench.small else bench.limited("40GiB", "10GiB")


def _settings(bench: GpuBench, texts: bool) -> Sequence[str]:
    return (
        f"size={_size(bench, 'large')}",
        f"bf16={not bench.small}".lower(),
        f"texts={texts}".lower(),
    )


def _size(bench: GpuBench, size: str) -> str:
    return "small" if bench.small else size


def _half(bench: GpuBench) -> Sequence[str]:
    return () if bench.small else ("--bf16",)
