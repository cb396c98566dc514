"""Compare plans for plain training loops with training runs that follow them.

  python -m benchmarks.gpu_loops --devices gpu:0,gpu:1@60%,gpu:2@40%,gpu:3@25% [--kinds decoder]
  python -m benchmarks.gpu_loops --devices cpu/2 --small

For each model, `evener balance` finds a plan at its global batch, and `evener launch` trains this
file by the plan: with `split.step` and, like the loop of a plain DDP program, with `split.wrap`
alone. With `--sweep`, DistributedDataParallel then trains by the plan's shares, by equal shares and
by the shares around the plan's, in turns; evener takes no part in that. A percentage of a GPU needs
a running MPS daemon, and also holds during training (benchmarks/slowed).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.gpu_steps import LENGTH, Decoder
from evener.devices.terms import parse_limit
from evener.plan.file import Plan, load_plan
from evener.torch import Split
from evener.workloads.torch_backend.models import maxer
from tests.support.torch_start import free_port

RATE = re.compile(r"trained ([\d.]+) samples/s")
GPU = torch.cuda.is_available()
WORDS = 8192 if GPU else 64
WARM_UP = 10  # steps
BY_HAND_STEPS = (3, 10)  # steps by hand after a change of shares: before and during the measurement
NEAR = 0.01  # of the global batch: rows that a neighbour of a plan moves between two devices
PAIRS = 5  # comparisons of the plan with its fastest neighbour
Shares = tuple[int, ...]


class Kind(NamedTuple):
    """A model's build function, its global batch, and its global batch for a try on CPUs."""

    build: Callable[[], Any]
    batch: int
    small: int


def next_word(made: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of next-word prediction."""
    return nn.functional.cross_entropy(made[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def build_decoder() -> Any:
    """Return a decoder of 34 million parameters in TF32 (a small one on CPUs)."""
    torch.set_float32_matmul_precision("high")
    model = Decoder(512, 8, WORDS) if GPU else Decoder(64, 2, WORDS)
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


KINDS = {"decoder": Kind(build_decoder, 512, 16), "maxer": Kind(build_maxer, 4096, 8)}


def main() -> None:
    """Print the figures of each model, or train as a rank."""
    options = parse()
    if options.train:
        train(KINDS[options.train], options.seconds, options.ways[0])
        return
    if options.by_hand:
        train_by_hand(KINDS[options.kinds[0]], json.loads(options.by_hand), options.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.kinds:
            compare(name, (options.keep or Path(folder)) / f"{name}.toml", options)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--devices", default="gpu:0,gpu:1@60%")
    parser.add_argument("--batch", type=int, help="global batch; the model's own by default")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training")
    parser.add_argument("--rounds", type=int, default=1, help="trainings by each plan")
    parser.add_argument("--ways", nargs="*", choices=("step", "wrap"), default=["step", "wrap"])
    parser.add_argument("--sweep", action="store_true", help="time the plan's neighbours by hand")
    parser.add_argument("--turns", type=int, default=3, help="of a sweep")
    parser.add_argument("--keep", type=Path, help="a folder for the plans")
    parser.add_argument("--small", action="store_true", help="small batches, to try it on CPUs")
    parser.add_argument(
        "--train", choices=list(KINDS), help="train this one as a rank of evener launch"
    )
    parser.add_argument("--by-hand", help="train by these lists of shares as a rank of DDP")
    return parser.parse_args()


def compare(name: str, path: Path, options: argparse.Namespace) -> None:
    """Search for a plan, train with it, and compare."""
    plan = search(name, path, options)
    figure = plan.throughput.samples_per_second
    words = ("-m", "benchmarks.gpu_loops", "--train", name, "--seconds", f"{options.seconds:g}")
    launch = (sys.executable, "-m", "evener", "launch", str(path), *words, "--ways")
    for _ in range(options.rounds):
        for way in options.ways:
            text = run(*launch, way, **slow(plan))
            rate = float(RATE.findall(text)[-1])
            print(
                f"trained by split.{way}: {rate:,.0f} samples/s, {rate / figure:.3f} of the plan",
                flush=True,
            )
    if options.sweep and len(plan.layout.active) > 1:
        sweep(name, plan, options)


def search(name: str, path: Path, options: argparse.Namespace) -> Plan:
    """Search for a plan and print it beside what else the search measured."""
    kind, began = KINDS[name], time.monotonic()
    batch = options.batch or (kind.small if options.small else kind.batch)
    workload = f"{__file__}:{kind.build.__name__}"
    run(
        *(sys.executable, "-m", "evener", "balance", "--devices", options.devices),
        *("--workload", workload, "--framework", "torch", "--global-batch", str(batch)),
        *("--budget", options.budget, "--export", str(path)),
    )
    plan = load_plan(path)
    said = plan.throughput
    wide = (said.high - said.low) / 2 / said.samples_per_second
    print(
        f"{name}, {batch} rows on {options.devices}: {write(plan.batches)}, "
        f"{said.samples_per_second:,.0f} samples/s ± {wide:.1%}, search "
        f"{plan.search.seconds:.0f} s, command {time.monotonic() - began:.0f} s",
        flush=True,
    )
    for other in plan.evidence:
        gain = said.samples_per_second / other.throughput.samples_per_second - 1
        print(
            f"  {other.name}, {write(other.layout.batches)}: "
            f"{other.throughput.samples_per_second:,.0f} samples/s, the plan {gain:+.1%}"
            + (f" ({other.gain:+.1%} in turns)" if other.paired and other.gain else ""),
            flush=True,
        )
    return plan


def write(shares: Sequence[int]) -> str:
    """Return shares as text."""
    return " + ".join(map(str, shares))


def slow(plan: Plan) -> dict[str, str]:
    """Return the variables that limit each rank to the percentage of its device."""
    limits = [parse_limit(share.limit) if share.limit else None for share in plan.layout.active]
    percentages = [limit.percent or 100.0 if limit else 100.0 for limit in limits]
    if min(percentages) == 100:
        return {}
    paths = (str(Path(__file__).with_name("slowed")), os.environ.get("PYTHONPATH", ""))
    return {
        "SLOWED": f"{','.join(f'{percent:g}' for percent in percentages)} gpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def run(*command: str, **variables: str) -> str:
    """Return a command's output; raise SystemExit with the end of its errors if it fails."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env={**os.environ, **variables}, **pipes)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return str(done.stdout)


def train(kind: Kind, seconds: float, way: str) -> None:
    """Train for some seconds; rank 0 prints the median samples/s of windows of ten steps.

    With `way` "step" a step is `split.step`; with "wrap" it is written as for DDP.
    """
    split = Split()
    model, optimizer, criterion, data = kind.build()
    model = split.wrap(model)
    loader = split.loader(data, seed=0)
    rates, until, began, steps = list[float](), time.monotonic() + seconds, 0.0, 0

    def compute(part: Any) -> torch.Tensor:
        inputs, targets = (each.to(split.device, non_blocking=True) for each in part.batch)
        loss: torch.Tensor = criterion(model(inputs), targets)
        return loss

    while split.total(time.monotonic() < until):
        for batch in loader:
            optimizer.zero_grad()
            if way == "step":
                split.step(batch, compute)
            else:
                inputs, targets = (each.to(split.device, non_blocking=True) for each in batch)
                criterion(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps % WARM_UP == 0:
                synchronize()
                now = time.monotonic()
                if steps > 2 * WARM_UP:
                    rates.append(WARM_UP * split.global_batch / (now - began))
                began = now
    if split.rank == 0:
        print(f"trained {statistics.median(rates):.1f} samples/s", flush=True)
    split.close()


def synchronize() -> None:
    """Wait until the GPU has finished its work, if there is one."""
    if GPU:
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- by hand


def sweep(name: str, plan: Plan, options: argparse.Namespace) -> None:
    """Time the plan's shares, equal shares and the plan's neighbours in DDP without evener."""
    shares = tuple(share.batch for share in plan.layout.active)
    total, world = sum(shares), len(shares)
    even = tuple(total * (i + 1) // world - total * i // world for i in range(world))
    every = list(dict.fromkeys([shares, even, *list_neighbours(shares)]))
    visible = [share.index for share in plan.layout.active if not share.device.startswith("cpu-")]
    text = run(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)),
        *("--master-port", str(free_port()), "-m", "benchmarks.gpu_loops", "--kinds", name),
        *("--turns", str(options.turns), "--by-hand", json.dumps(every)),
        **slow(plan),
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))} if visible else {}),
    )
    print(text[text.index("by hand") :].rstrip(), flush=True)


def list_neighbours(shares: Shares) -> list[Shares]:
    """Return shares that differ from these by a hundredth of the batch between two devices.

    Rows move both ways between each device and the next one, and between the last and the first.
    """
    world, rows = len(shares), max(1, round(NEAR * sum(shares)))
    found = []
    for giver in range(world):
        for taker in ((giver + 1) % world, (giver - 1) % world):
            moved = list(shares)
            moved[giver] -= rows
            moved[taker] += rows
            if min(moved) > 0:
                found.append(tuple(moved))
    return list(dict.fromkeys(found))


class ByHand:
    """A model in DistributedDataParallel whose ranks take shares of unequal size."""

    def __init__(self, kind: Kind) -> None:
        rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", rank) if GPU else torch.device("cpu")
        if GPU:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if GPU else "gloo")
        self.rank = dist.get_rank()
        self._world = dist.get_world_size()
        model, _, self._criterion, data = kind.build()
        self._model = DistributedDataParallel(model.to(device))
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        self._data, self._device = data, device

    def measure(self, shares: Shares) -> float:
        """Return the samples/s of a few steps by these shares."""
        warm_up, steps = BY_HAND_STEPS
        own, total = shares[self.rank], sum(shares)
        inputs, targets = (
            values[:own].pin_memory() if GPU else values[:own] for values in self._data.tensors
        )
        began = 0.0
        for step in range(warm_up + steps):
            if step == warm_up:
                synchronize()
                dist.barrier()
                began = time.perf_counter()
            here = [each.to(self._device, non_blocking=True) for each in (inputs, targets)]
            self._optimizer.zero_grad()
            loss = self._criterion(self._model(here[0]), here[1])
            # DDP divides the sum of gradients by the number of ranks
            (loss * own * self._world / total).backward()
            self._optimizer.step()
        synchronize()
        dist.barrier()
        return steps * total / (time.perf_counter() - began)


def train_by_hand(kind: Kind, lists: list[list[int]], turns: int) -> None:
    """Time each of these shares in turns; the first ones are the plan's, the second ones even.

    Every second turn goes backwards. The fastest of many is also the luckiest; therefore it is
    timed again in pairs with the plan's shares.
    """
    trained = ByHand(kind)
    every = [tuple(each) for each in lists]
    own, even = every[:2]
    rates: dict[Shares, list[float]] = defaultdict(list)
    for shares in every:
        trained.measure(shares)
    for turn in range(turns):
        for shares in every if turn % 2 == 0 else reversed(every):
            rates[shares].append(trained.measure(shares))
    medians = {shares: statistics.median(each) for shares, each in rates.items()}
    found = [medians.get(shares, 0.0) for shares in every[2:]]
    # ranks must choose the same one
    chosen = torch.tensor(found.index(max(found)), device="cuda" if GPU else "cpu")
    dist.broadcast(chosen, 0)
    nearest = every[2:][int(chosen)]
    ratios = []
    for pair in range(PAIRS):
        order = (own, nearest) if pair % 2 == 0 else (nearest, own)
        speeds = {shares: trained.measure(shares) for shares in order}
        ratios.append(speeds[nearest] / speeds[own])
    if trained.rank == 0:
        print(f"by hand, the plan's {write(own)}: {medians[own]:,.0f} samples/s")
        gain = medians[own] / medians[even] - 1
        print(f"by hand, even {write(even)}: {medians[even]:,.0f}, the plan {gain:+.1%}")
        for shares in every[2:]:
            ratio = medians[shares] / medians[own]
            print(f"by hand, {write(shares)}: {medians[shares]:,.0f}, {ratio - 1:+.1%}")
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(
            f"by hand, fastest neighbour {write(nearest)} in {PAIRS} pairs: {middle - 1:+.2%} "
            f"({low - 1:+.2%} to {high - 1:+.2%})",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
