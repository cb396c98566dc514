"""Measure the CPU time that `evener run` takes in the steps of an unchanged program.

  python -m benchmarks.unchanged_cost [--steps 3000] [--device cpu] [--milliseconds 10]

A small network trains in one process, in a plain loop over a DataLoader. Blocks of steps that are
timed alternate with blocks that aren't. The cost is the difference in the thread's CPU time, per
step. The wrapped functions are called in both, so a microsecond or two isn't counted.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.step_cost import (
    BLOCK_STEPS,
    ROWS,
    STEP_SECONDS,
    SWITCHED_STEPS,
    WARM_STEPS,
    find_width,
    time_steps,
)
from evener.program import install
from evener.program.unchanged import UNCHANGED


def hook() -> None:
    """Install the hooks of a program of one process."""
    os.environ.pop("WORLD_SIZE", None)
    install._wrap({"torch": install._TIMED}, torch)
    install._time_updates(torch)


def train(device: torch.device, step_s: float) -> Iterator[None]:
    """Train; yield between two steps, before the next batch is requested."""
    width = find_width(device, step_s)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(100 * ROWS, width)), ROWS)
    while True:
        for (inputs,) in loader:
            model(inputs.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


class Switch:
    """Switches the timing of an unchanged program's steps on or off between two steps."""

    def __init__(self) -> None:
        timer: Any = UNCHANGED._timer
        self._timer, self._thread = timer, timer.thread

    def turn(self, on: bool) -> None:
        """Switch it on or off."""
        if not on:
            self._timer.pause()
            UNCHANGED._has_batch = False
        UNCHANGED._timer = self._timer if on else None
        UNCHANGED._is_over = not on
        self._timer.thread = self._thread if on else 0


def main() -> None:
    """Train and print the cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--milliseconds", type=float, default=1e3 * STEP_SECONDS)
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    hook()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENER_LIVE_DIR"] = folder
        steps = train(torch.device(given.device), given.milliseconds / 1e3)
        time_steps(steps, WARM_STEPS, time.thread_time)
        switch = Switch()
        taken = {True: list[float](), False: list[float]()}
        began = time.perf_counter()
        for place in range(given.steps // (BLOCK_STEPS + SWITCHED_STEPS)):
            on = place % 4 in (0, 3)
            switch.turn(on)
            time_steps(steps, SWITCHED_STEPS, time.thread_time)
            taken[on].append(time_steps(steps, BLOCK_STEPS, time.thread_time))
        wall_s = (time.perf_counter() - began) / (place + 1) / (BLOCK_STEPS + SWITCHED_STEPS)
        switch.turn(on=True)
    pairs = [one - other for one, other in zip(taken[True], taken[False], strict=False)]
    cut = len(pairs) // 10
    kept = sorted(pairs)[cut : len(pairs) - cut]
    error = 2 * stdev(kept) / math.sqrt(len(kept))
    print(
        f"steps of {1e3 * wall_s:.2f} ms, {1e3 * median(taken[False]):.2f} ms of CPU untimed; "
        f"{1e6 * fmean(kept):+.1f} us of CPU a step, ± {1e6 * error:.1f}; "
        f"median {1e6 * median(pairs):+.1f} ({100 * fmean(kept) / wall_s:+.2f} % of a step)"
    )


if __name__ == "__main__":
    main()
