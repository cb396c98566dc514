"""What a training step in PyTorch pays for gradients that are looked at, and for times: evener's
own code, timed alone.

    python -m benchmarks.torch_hooks [--device cuda]

A batch is taken, a wrapped model computes it, an optimizer steps, and each of them is marked. With
rebalancing, the rule also looks at every fifth step, as it does where steps are long, and changes
nothing; what ranks exchange for it is left out. The bar is 30 µs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from evener.plan.file import Share
from evener.torch_rows.loader import Epoch
from evener.torch_split import planned as rebalancing
from evener.torch_split.checks import OPTIMIZER_CHECK
from evener.torch_split.planned import PlannedTraining
from evener.torch_split.ranks import RankShares

BAR_MICROSECONDS = 30.0
SHARES = (6, 2)
TURNS = 15
CASES = {"equal batches": (None, False), "short tail": (1, False), "rebalancing": (None, True)}


class Exchanged:
    """In place of what ranks exchange: every rank says the same."""

    def wait(self) -> None:
        """Nothing is under way."""


def microseconds(step: Callable[[], None], steps: int) -> float:
    """A step's time in the fastest turn: what other programs took isn't evener's."""
    times = []
    for _ in range(TURNS):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - started) / steps * 1e6)
    return min(times)


def make_step(device: torch.device, tail: int | None, rebalances: bool) -> Callable[[], None]:
    """One step as a loop makes it; the pass ends in a batch of `tail` rows if that weighs
    otherwise.
    """
    share = Share(str(device), 0, "", 0, 0.0)
    training = PlannedTraining(
        RankShares(0, SHARES, SHARES, (1, 1), (share, share), "", "", device=device)
    )
    timer, weights, origin = training.timer, training.weights, Epoch(tail=tail)
    if rebalances:
        rebalancing.Rebalancing(training)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    OPTIMIZER_CHECK._known[optimizer] = hash(tuple(map(id, model.parameters())))  # seen before
    batch = torch.zeros(6, 4), torch.zeros(6)

    def step() -> None:
        timer.begin(SHARES)
        weights.take(origin, SHARES, batch)
        weights.forward(model, ((batch[0],), {}))
        timer.note_gradients()
        OPTIMIZER_CHECK._before_step(optimizer, (optimizer,), {})
        timer.note_update()
        training.end()

    return step


def step_costs(device: torch.device, steps: int) -> dict[str, float]:
    """Microseconds of a step in each case."""
    rebalancing.MOST_STEPS = rebalancing.FEWEST_STEPS
    exchange: Any = lambda *_, **__: Exchanged()  # noqa: E731
    group, join = (
        mock.patch.object(dist, "new_group"),
        mock.patch.object(rebalancing, "join", return_value=False),
    )
    with group, join, mock.patch.object(dist, "all_gather_into_tensor", exchange):
        return {name: microseconds(make_step(device, *case), steps) for name, case in CASES.items()}


def main() -> None:
    """Print the cost of a step; exit with 1 if it is above the bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5_000, help="in each turn")
    parser.add_argument(
        "--device", type=torch.device, default="cpu", help="cuda: times are a GPU's events"
    )
    given = parser.parse_args()
    costs = step_costs(given.device, given.steps)
    for name, cost in costs.items():
        print(f"{name}: {cost:.1f} µs a step (bar {BAR_MICROSECONDS:.0f})")
    raise SystemExit(max(costs.values()) > BAR_MICROSECONDS)


if __name__ == "__main__":
    main()
