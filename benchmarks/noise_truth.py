"""The noise scale beside the truth, which is known from the gradient of each row by itself, at weights that stay.

    python -m benchmarks.noise_truth [ranks] [gpus] [passes] [draws] [--steps N] [--json FILE]

`ranks`: real trainings over gloo, 1:1, 6:2, 5:2:1 and 820:568:64:8 rows, by the samples of every step; `gpus`: those of
them that this machine has a GPU for each rank of; `passes`: of one process, by the passes of a step. `draws`: batches
drawn from the rows' own gradients; the part of windows whose 95 % interval holds the truth, and the standard deviation
of one step's estimate of the noise, over the truth, beside those of AdaptDL (arXiv 2008.12260: the plain mean of the
ranks' squared norms, as if their shares were equal) and of Cannikin (arXiv 2402.05302: each rank's own estimate, by
weights that depend on the shares alone).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from evener.learning.noise_scale import BLOCK, NoiseWindow, separate
from tests.support import torch_noise_programs as programs
from tests.support.rank_server import RankServer, place_ranks, run_on_gpus

SHARES = ((32, 32), (48, 16), (40, 16, 8), (820, 568, 64, 8))
PASSES: dict[str, dict[str, Any]] = {
    "64 rows in passes of 16": {"shares": (64,), "micros": (16,)},
    "64 rows in passes of 30": {"shares": (64,), "micros": (30,)},
    "32 rows, accumulated by two": {"shares": (32,), "accumulate": 2},
    "the same in a loop with backward()": {"shares": (32,), "accumulate": 2, "weigh": "loss"},
}
STEPS, DRAWS, WINDOWS = 1500, 4000, 400


def one_case(folder: Path, rank: int, shares: list[int], steps: int) -> None:
    """Train by these shares; run in each rank."""
    torch.set_num_threads(1)
    torch.save(programs.measure({"shares": tuple(shares)}, steps=steps), folder / f"{rank}.pt")


def compare_ranks(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """The noise scale of real trainings on CPUs."""
    with RankServer("torch._dynamo") as server:
        for number, shares in enumerate(SHARES):
            own = folder / str(number)
            server.run("benchmarks.noise_truth.one_case", own, list(shares), steps, ranks=place_ranks(len(shares)))
            yield _judge(f"{shares}", torch.load(own / "0.pt")[0], steps)


def compare_gpus(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """The noise scale of real trainings on as many GPUs as there are."""
    for number, shares in enumerate(SHARES):
        if len(shares) <= torch.cuda.device_count():
            own = folder / f"gpu{number}"
            run_on_gpus("benchmarks.noise_truth.one_case", own, list(shares), steps, world=len(shares))
            yield _judge(f"{shares} on GPUs", torch.load(own / "0.pt")[0], steps)


def compare_passes(steps: int) -> Iterator[dict[str, Any]]:
    """The noise scale of trainings in this process; a step is two batches where they are accumulated."""
    for name, case in PASSES.items():
        yield _judge(name, programs.measure(case, steps=steps * case.get("accumulate", 1))[0], steps)


def _judge(name: str, scale: Any, steps: int) -> dict[str, Any]:
    truth = programs.true_noise_scale(programs.network(), programs.data())
    print(
        f"{name}: {scale['rows']:.2f} rows ({scale['low']:.2f} - {scale['high']:.2f}) after {steps} steps,"
        f" {scale['rows'] / truth - 1:+.1%} of the truth {truth:.2f}",
        file=sys.stderr,
        flush=True,
    )
    return {"name": name, "truth": truth, "steps": steps, **scale}


def compare_draws() -> list[dict[str, Any]]:
    """Coverage of the interval, and deviations of the noise in one step."""
    gradients = programs.row_gradients(programs.network(), programs.data())
    center = gradients.mean(0)
    noise, signal = float((gradients - center).square().sum(1).mean()), float(center.square().sum())
    found = []
    for shares in SHARES:
        norms, wholes = draw(gradients, shares, max(DRAWS, 25 * BLOCK * WINDOWS // 8))
        row = {"shares": shares, "holds": cover(norms, wholes, shares, noise / signal)}
        row |= {name: float(each.std()) / noise for name, each in estimate(norms, wholes, shares).items()}
        found.append(row)
        shown = ", ".join(f"{name} {row[name]:.4f}" for name in row if name != "shares")
        print(f"{shares}: {shown}", file=sys.stderr, flush=True)
    return found


def draw(gradients: torch.Tensor, shares: tuple[int, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of the parts' mean gradients, (count, K), and of the batch's, (count,)."""
    torch.manual_seed(2)
    rows = sum(shares)
    norms, wholes = [], []
    for _ in range(count):
        parts = gradients[torch.randint(len(gradients), (rows,))].split(list(shares))
        means = torch.stack([part.mean(0) for part in parts])
        whole = (means * torch.tensor(shares, dtype=means.dtype)[:, None]).sum(0) / rows
        norms.append(means.square().sum(1))
        wholes.append(whole.square().sum())
    return torch.stack(norms), torch.stack(wholes)


def estimate(norms: torch.Tensor, wholes: torch.Tensor, shares: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The noise of each draw, three ways."""
    sizes, rows, parts = torch.tensor(shares, dtype=norms.dtype), sum(shares), len(shares)
    own = ((norms * sizes).sum(1) - rows * wholes) / (parts - 1)
    plain = (norms.mean(1) - wholes) * rows / (parts - 1)
    each = sizes * rows / (rows - sizes) * (norms - wholes[:, None])  # a rank's own estimate, without bias
    pairs, left = sizes[:, None] * sizes, rows - sizes
    covariances = pairs * (rows - sizes[:, None] - sizes) / (left[:, None] * left)
    covariances.diagonal().copy_(rows * sizes / left)
    weights = torch.linalg.solve(covariances, torch.ones(parts, dtype=norms.dtype))
    return {"analysis of variance": own, "AdaptDL": plain, "Cannikin": each @ (weights / weights.sum())}


def cover(norms: torch.Tensor, wholes: torch.Tensor, shares: tuple[int, ...], truth: float) -> float:
    """The part of windows of 25 blocks whose interval holds the truth; steps are taken again in other orders."""
    weighted = (norms * torch.tensor(shares, dtype=norms.dtype)).sum(1).tolist()
    squares, held = wholes.tolist(), 0
    for _ in range(WINDOWS):
        window = NoiseWindow()
        for place in torch.randint(len(squares), (25 * BLOCK,)).tolist():
            window.add(separate(shares, weighted[place], squares[place]))
        scale = window.scale()
        assert scale is not None
        held += scale.low <= truth <= scale.high
    return held / WINDOWS


def main() -> None:
    """Compare what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=("ranks", "gpus", "passes", "draws"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "draws": compare_draws,
            "passes": lambda: compare_passes(given.steps),
            "ranks": lambda: compare_ranks(Path(folder), given.steps),
            "gpus": lambda: compare_gpus(Path(folder), given.steps),
        }
        found = {name: list(compare()) for name, compare in ways.items() if name in (given.what or ways)}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
