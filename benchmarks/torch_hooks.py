"""What a training step in PyTorch pays for gradients that are looked at, and for times: evener's own code, timed alone.

    python -m benchmarks.torch_hooks

A batch is taken, a wrapped model computes it, an optimizer steps, and each of them is marked. The bar is 30 µs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from evener.torch_split.batch_tracker import Epoch
from evener.torch_split.batch_weights import BatchWeights
from evener.torch_split.optimizer_check import OPTIMIZER_CHECK
from evener.torch_split.own_work import make_timer

BAR_MICROSECONDS = 30.0
SHARES = (6, 2)
TURNS = 15


def microseconds(step: Callable[[], None], steps: int) -> float:
    """A step's time in the fastest turn: what other programs took isn't evener's."""
    times = []
    for _ in range(TURNS):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - started) / steps * 1e6)
    return min(times)


def make_step(tail: int | None) -> Callable[[], None]:
    """One step as a loop makes it; the pass ends in a batch of `tail` rows if that weighs otherwise."""
    timer = make_timer(torch.device("cpu"), alone=False)
    weights, origin = BatchWeights(SHARES, 0, False, timer), Epoch(tail=tail)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    OPTIMIZER_CHECK._counts[optimizer] = 2  # seen before
    batch = torch.zeros(6, 4), torch.zeros(6)

    def step() -> None:
        timer.begin(SHARES)
        weights.take(origin, SHARES, batch)
        weights.forward(model, ((batch[0],), {}))
        weights._weights.waiting = None  # as the communication hook does
        timer.note_gradients()
        OPTIMIZER_CHECK._before_step(optimizer, (optimizer,), {})
        timer.note_update()
        timer.finish()

    return step


def main() -> None:
    """Print the cost of a step; exit with 1 if it is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5_000, help="in each turn")
    steps = parser.parse_args().steps
    costs = {name: microseconds(make_step(tail), steps) for name, tail in (("equal batches", None), ("short tail", 1))}
    for name, cost in costs.items():
        print(f"{name}: {cost:.1f} µs a step (bar {BAR_MICROSECONDS:.0f})")
    raise SystemExit(max(costs.values()) > BAR_MICROSECONDS)


if __name__ == "__main__":
    main()
