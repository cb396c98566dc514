"""Compare plans for plain training loops with training runs that follow them.

  python -m benchmarks.gpu_loops --devices gpu:0,gpu:1@60% [--kinds decoder] [--rounds 2]
  python -m benchmarks.gpu_loops --devices cpu/2 --small

For each model, `evener balance` finds a plan at its global batch, and `evener launch` trains this
file by the plan with `split.step`, like the script in the README. A percentage of the second GPU
needs a running MPS daemon, and also holds during training (benchmarks/slowed).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.gpu_steps import LENGTH, WORDS, Decoder
from evener.devices.terms import parse_limit
from evener.plan.file import Plan, load_plan
from evener.torch import Split
from evener.workloads.torch_backend.models import maxer

RATE = re.compile(r"trained ([\d.]+) samples/s")
WARM_UP = 10  # steps


class Kind(NamedTuple):
    """A model's build function, its global batch, and its global batch for a try on CPUs."""

    build: Callable[[], Any]
    batch: int
    small: int
    precision: str = "float32"


def next_word(made: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of next-word prediction."""
    return nn.functional.cross_entropy(made[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def build_decoder() -> Any:
    """Return a decoder with 8 layers of width 512 and rows of 256 words (2 of width 64 on CPUs)."""
    model = Decoder(512, 8) if torch.cuda.is_available() else Decoder(64, 2)
    words = torch.randint(0, WORDS, (16_384, LENGTH), generator=torch.Generator().manual_seed(0))
    return (
        model,
        torch.optim.AdamW(model.parameters(), 1e-4),
        next_word,
        TensorDataset(words, words),
    )


def build_maxer() -> Any:
    """Return the wide convolutional network of torch_maxer, on grey noise."""
    model, made = maxer(), torch.Generator().manual_seed(0)
    pictures = torch.rand(65_536, 1, 28, 28, generator=made)
    data = TensorDataset(pictures, torch.randint(0, 10, (len(pictures),), generator=made))
    return model, torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), data


KINDS = {
    "decoder": Kind(build_decoder, 256, 16, "mixed_bfloat16"),
    "maxer": Kind(build_maxer, 4096, 8),
}


def main() -> None:
    """Print a row per model and round, or train by a plan as a rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--devices", default="gpu:0,gpu:1@60%")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training")
    parser.add_argument("--rounds", type=int, default=1, help="trainings by each plan")
    parser.add_argument("--small", action="store_true", help="small batches, to try it on CPUs")
    parser.add_argument(
        "--train", choices=list(KINDS), help="train this one as a rank of evener launch"
    )
    options = parser.parse_args()
    if options.train:
        train(KINDS[options.train], options.seconds)
        return
    heads = ("model", "shares", "plan, samples/s", "±", "training", "training / plan")
    print(f"| {' | '.join(heads)} |\n| --- | --- |{' ---: |' * 4}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.kinds:
            compare(name, Path(folder) / f"{name}.toml", options)


def compare(name: str, path: Path, options: argparse.Namespace) -> None:
    """Search for a plan, train by it, and compare."""
    kind, evener = KINDS[name], (sys.executable, "-m", "evener")
    batch = str(kind.small if options.small else kind.batch)
    where = (
        "--devices",
        options.devices,
        "--workload",
        f"{__file__}:{kind.build.__name__}",
        "--framework",
        "torch",
    )
    how = ("--global-batch", batch, "--precision", kind.precision, "--budget", options.budget)
    run(*evener, "balance", *where, *how, "--export", str(path))
    plan = load_plan(path)
    said, shares = plan.throughput, " + ".join(str(share.batch) for share in plan.layout.active)
    wide = (said.high - said.low) / 2 / said.samples_per_second
    words = ("-m", "benchmarks.gpu_loops", "--train", name, "--seconds", f"{options.seconds:g}")
    for _ in range(options.rounds):
        rate = float(
            RATE.findall(run(*evener, "launch", str(path), *words, **slow(plan, path.parent)))[-1]
        )
        row = (name, shares, f"{said.samples_per_second:,.0f}", f"{wide:.1%}", f"{rate:,.0f}")
        print(f"| {' | '.join(row)} | {rate / said.samples_per_second:.3f} |", flush=True)


def slow(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the variables that limit the second rank to the percentage of its device."""
    percent = (
        parse_limit(plan.layout.active[-1].limit).percent if plan.layout.active[-1].limit else None
    )
    paths = (str(Path(__file__).with_name("slowed")), os.environ.get("PYTHONPATH", ""))
    variables = {
        "SLOWED": f"{percent:g} gpu",
        "STEPS": str(folder / "steps"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return variables if percent and len(plan.layout.active) > 1 else {}


def run(*command: str, **variables: str) -> str:
    """Return a command's output; raise SystemExit with the end of its errors if it fails."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env={**os.environ, **variables}, **pipes)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return str(done.stdout)


def train(kind: Kind, seconds: float) -> None:
    """Train for some seconds; rank 0 prints the median samples/s of turns of ten steps."""
    split = Split()
    model, optimizer, criterion, data = kind.build()
    model = split.wrap(model)
    loader = split.loader(data, seed=0)
    rates, until, began, steps = list[float](), time.monotonic() + seconds, 0.0, 0

    def compute(part: Any) -> torch.Tensor:
        inputs, targets = (each.to(split.device, non_blocking=True) for each in part.batch)
        with torch.autocast(split.device.type, torch.bfloat16, enabled=kind.precision != "float32"):
            loss: torch.Tensor = criterion(model(inputs), targets)
        return loss

    while split.total(time.monotonic() < until):
        for batch in loader:
            optimizer.zero_grad()
            split.step(batch, compute)
            optimizer.step()
            steps += 1
            if steps % WARM_UP == 0:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                now = time.monotonic()
                if steps > 2 * WARM_UP:
                    rates.append(WARM_UP * split.global_batch / (now - began))
                began = now
    if split.rank == 0:
        print(f"trained {statistics.median(rates):.1f} samples/s", flush=True)
    split.close()


if __name__ == "__main__":
    main()
