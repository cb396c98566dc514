"""What evener's instruments cost in a training's steps, by their own CPU time.

python -m benchmarks.step_cost [--steps 1500] [--device cpu]

A small network trains by `Split` with steps of about 10 ms. Each call of an instrument is timed by
the CPU time of its thread; what an empty call takes in the same place is left out. Prints the
microseconds of a step by call, and their part of 10 ms.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch

from evener.torch import Split
from evener.torch.ranks.own_work import StepReporter, StepTimer

CALLS: dict[type, tuple[str, ...]] = {
    StepTimer: (
        "begin",
        "finish",
        "note_gradients",
        "note_sent",
        "note_backward",
        "note_update",
        "note_updated",
        "pause",
    ),
    StepReporter: ("report",),
}
WARM_STEPS = 50
ROWS, STEP_SECONDS = 64, 0.01
LEAST, MOST = 32, 4096  # of the network's width


class Empty:
    """Whose call does nothing."""

    def call(self) -> None:
        """Do nothing."""


class CallTimes:
    """The CPU times of calls, in nanoseconds, by name; calls within others are part of those."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = defaultdict(list)
        self._within = False

    def watch(self, owner: type, name: str) -> None:
        """Time each call of a method."""
        plain, times, clock = getattr(owner, name), self, time.thread_time_ns
        seen = self.seen[f"{owner.__name__}.{name}"]

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if times._within:
                return plain(*arguments, **keywords)
            times._within = True
            began = clock()
            found = plain(*arguments, **keywords)
            ended = clock()
            times._within = False
            seen.append(ended - began)
            return found

        setattr(owner, name, timed)


def find_width(device: torch.device) -> int:
    """The width of a network whose step takes about 10 ms on this device."""
    width = LEAST
    while width < MOST:
        model, inputs = _make(width).to(device), torch.randn(ROWS, width, device=device)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            model(inputs).square().mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        if median(taken) > 0.7 * STEP_SECONDS:
            break
        width = int(width * 1.25)
    return width


def _make(width: int) -> Any:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])


def train(device: torch.device, steps: int, times: CallTimes) -> tuple[float, float]:
    """Train `steps` steps, and return a step's wall and CPU seconds without the warm-up."""
    width = find_width(device)
    split = Split(ratios=(1,), global_batch=ROWS)
    model = split.wrap(_make(width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(100 * ROWS, width))
    empty, done, began = Empty(), 0, (0.0, 0.0)
    while done < WARM_STEPS + steps:
        for (inputs,) in split.loader(data):
            model(inputs).square().mean().backward()
            empty.call()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == WARM_STEPS:
                for seen in times.seen.values():
                    seen.clear()
                began = time.perf_counter(), time.thread_time()
            if done == WARM_STEPS + steps:
                break
    wall, cpu = time.perf_counter() - began[0], time.thread_time() - began[1]
    split.close()
    return wall / steps, cpu / steps


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    times = CallTimes()
    times.watch(Empty, "call")
    for owner, names in CALLS.items():
        for name in names:
            times.watch(owner, name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENER_LIVE_DIR"] = folder
        wall, cpu = train(torch.device(given.device), given.steps, times)
    nothing = median(times.seen.pop("Empty.call"))
    total = 0.0
    for name, seen in times.seen.items():
        own = (sum(seen) - nothing * len(seen)) / given.steps / 1e3
        total += own
        print(f"{name:28} {own:6.1f} us of a step, in {len(seen) / given.steps:.2f} calls")
    part = 100 * total / 1e6 / STEP_SECONDS
    print(f"steps of {1e3 * wall:.1f} ms, {1e3 * cpu:.1f} ms of CPU; an empty call {nothing} ns")
    print(f"all instruments {total:.1f} us of a step: {part:.2f} % of 10 ms")


if __name__ == "__main__":
    main()
