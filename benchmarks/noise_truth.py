"""The noise scale beside the truth, which is known from the gradient of each row by itself, at
weights that stay.

    python -m benchmarks.noise_truth [ranks] [gpus] [passes] [windows] [draws] [--steps N] [--json
    FILE]

`ranks`: real trainings over gloo, 1:1, 6:2, 5:2:1 and 820:568:64:8 rows, by the samples of every
step; `gpus`: those of them that this machine has a GPU for each rank of; `passes`: of one process,
by the passes of a step; `windows`: a long training of two ranks, on GPUs where there are two, cut
into windows of 200 and of 1,500 steps. `draws`: batches drawn from the rows' own gradients; the
part of windows whose 95 % interval holds the truth, and the standard deviation of one step's
estimate of the noise, over the truth, beside those of AdaptDL (arXiv 2008.12260: the plain mean of
the ranks' squared norms, as if their shares were equal) and of Cannikin (arXiv 2402.05302: each
rank's own estimate, by weights that depend on the shares alone).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from evener.training.noise_scale import BLOCK, NoiseScale, NoiseWindow, Sample, separate
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
LONGER = 16  # times the steps, in `windows`


def one_case(folder: Path, rank: int, shares: list[int], steps: int) -> None:
    """Train by these shares; run in each rank."""
    torch.set_num_threads(1)
    torch.save(programs.measure({"shares": tuple(shares)}, steps=steps), folder / f"{rank}.pt")


def all_samples(folder: Path, rank: int, shares: list[int], steps: int) -> None:
    """As `one_case`; the samples of all steps."""
    torch.set_num_threads(1)
    recorder = programs.Recorder()
    programs.measure({"shares": tuple(shares)}, steps=steps, window=recorder)
    torch.save(recorder.samples, folder / f"{rank}.pt")


def compare_windows(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """How many windows' intervals hold the truth in real trainings of two ranks."""
    truth = programs.true_noise_scale(programs.network(), programs.data())
    for number, shares in enumerate(SHARES[:2]):
        own, words = (
            folder / f"windows{number}",
            ("benchmarks.noise_truth.all_samples", list(shares), LONGER * steps),
        )
        if torch.cuda.device_count() > 1:
            run_on_gpus(words[0], own, *words[1:])
        else:
            with RankServer("torch._dynamo") as server:
                server.run(words[0], own, *words[1:], ranks=place_ranks(2))
        samples = torch.load(own / "0.pt", weights_only=False)
        for size in (200, steps):
            windows = [
                judge_window(samples[at : at + size])
                for at in range(0, len(samples) - size + 1, size)
            ]
            held = sum(each.low <= truth <= each.high for each in windows)
            off = [each.rows / truth - 1 for each in windows]
            row = {
                "shares": shares,
                "steps": size,
                "windows": len(windows),
                "held": held,
                "mean_off": statistics.mean(off),
            }
            row |= {
                "within_5_percent": sum(abs(each) <= 0.05 for each in off),
                "whole": judge_window(samples).rows / truth - 1,
            }
            print(row, file=sys.stderr, flush=True)
            yield row


def judge_window(samples: Sequence[Sample]) -> NoiseScale:
    """The noise scale by these steps."""
    window = NoiseWindow(1)
    for sample in samples:
        window.add(sample)
    scale = window.scale()
    assert scale is not None
    return scale


def compare_ranks(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """The noise scale of real trainings on CPUs."""
    with RankServer("torch._dynamo") as server:
        for number, shares in enumerate(SHARES):
            own = folder / str(number)
            server.run(
                "benchmarks.noise_truth.one_case",
                own,
                list(shares),
                steps,
                ranks=place_ranks(len(shares)),
            )
            yield _judge(f"{shares}", torch.load(own / "0.pt")[0], steps)


def compare_gpus(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """The noise scale of real trainings on as many GPUs as there are."""
    for number, shares in enumerate(SHARES):
        if len(shares) <= torch.cuda.device_count():
            own = folder / f"gpu{number}"
            run_on_gpus(
                "benchmarks.noise_truth.one_case", own, list(shares), steps, world=len(shares)
            )
            yield _judge(f"{shares} on GPUs", torch.load(own / "0.pt")[0], steps)


def compare_passes(steps: int) -> Iterator[dict[str, Any]]:
    """The noise scale of trainings in this process; a step is two batches where they are
    accumulated.
    """
    for name, case in PASSES.items():
        yield _judge(
            name, programs.measure(case, steps=steps * case.get("accumulate", 1))[0], steps
        )


def _judge(name: str, scale: Any, steps: int) -> dict[str, Any]:
    truth = programs.true_noise_scale(programs.network(), programs.data())
    print(
        f"{name}: {scale['rows']:.2f} rows ({scale['low']:.2f} - {scale['high']:.2f}) after "
        f"{steps} steps,"
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
        row |= {
            name: float(each.std()) / noise
            for name, each in estimate(norms, wholes, shares).items()
        }
        found.append(row)
        shown = ", ".join(f"{name} {row[name]:.4f}" for name in row if name != "shares")
        print(f"{shares}: {shown}", file=sys.stderr, flush=True)
    return found


def draw(
    gradients: torch.Tensor, shares: tuple[int, ...], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
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


def estimate(
    norms: torch.Tensor, wholes: torch.Tensor, shares: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The noise of each draw, three ways."""
    sizes, rows, parts = torch.tensor(shares, dtype=norms.dtype), sum(shares), len(shares)
    own = ((norms * sizes).sum(1) - rows * wholes) / (parts - 1)
    plain = (norms.mean(1) - wholes) * rows / (parts - 1)
    each = (
        sizes * rows / (rows - sizes) * (norms - wholes[:, None])
    )  # a rank's own estimate, without bias
    pairs, left = sizes[:, None] * sizes, rows - sizes
    covariances = pairs * (rows - sizes[:, None] - sizes) / (left[:, None] * left)
    covariances.diagonal().copy_(rows * sizes / left)
    weights = torch.linalg.solve(covariances, torch.ones(parts, dtype=norms.dtype))
    return {
        "analysis of variance": own,
        "AdaptDL": plain,
        "Cannikin": each @ (weights / weights.sum()),
    }


def cover(
    norms: torch.Tensor, wholes: torch.Tensor, shares: tuple[int, ...], truth: float
) -> float:
    """The part of windows of 25 blocks whose interval holds the truth; steps are taken again in
    other orders.
    """
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
    parser.add_argument("what", nargs="*", choices=("ranks", "gpus", "passes", "windows", "draws"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "draws": compare_draws,
            "passes": lambda: compare_passes(given.steps),
            "windows": lambda: compare_windows(Path(folder), given.steps),
            "ranks": lambda: compare_ranks(Path(folder), given.steps),
            "gpus": lambda: compare_gpus(Path(folder), given.steps),
        }
        found = {
            name: list(compare()) for name, compare in ways.items() if name in (given.what or ways)
        }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
