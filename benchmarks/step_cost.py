"""Measure the CPU time of evener's instruments in training steps.

  python -m benchmarks.step_cost [--steps 1500] [--device cpu] [--milliseconds 10]

A small network trains by `Split` with steps of about 10 ms. First, blocks with and without the
instruments alternate: their cost is the difference in the process's CPU time, which includes
everything. Then each instrument's call is timed by its thread's CPU time, minus that of an empty
call at the same point. Prints the microseconds per step and the fraction of a step.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import fmean, median, stdev
from typing import Any

import torch

from evener.torch import Split
from evener.torch.ranks import own_work
from evener.torch.ranks.own_work import StepReporter, StepTimer

CALLS: dict[Any, tuple[str, ...]] = {
    StepTimer: (
        "begin",
        "finish",
        "note_gradients",
        "note_sent",
        "note_backward",
        "pause",
    ),
    StepReporter: ("report",),
    own_work: ("_notify_timers_of_update", "_note_updated"),
}
WARM_STEPS = 50
BLOCK_STEPS = 40  # steps with the instruments, then as many without them
SWITCHED_STEPS = 10  # steps after a switch until the interpreter has specialized its code again
ROWS, STEP_SECONDS = 64, 0.01
LEAST, MOST = 32, 8192  # limits of the network's width


class Empty:
    """An object whose call does nothing."""

    def call(self) -> None:
        """Do nothing."""


class Instruments:
    """The instruments' calls, which can be switched off."""

    def __init__(self) -> None:
        self._plain = [
            (owner, name, getattr(owner, name)) for owner, names in CALLS.items() for name in names
        ]
        self._is_on = True
        self._off_at = 0.0

    def switch(self, on: bool, timer: StepTimer) -> None:
        """Switch all instruments on or off between two steps."""
        if on == self._is_on:
            return
        self._is_on = on
        hooks = own_work._OPTIMIZER_HOOKS
        now = time.perf_counter()
        if not on:
            timer.pause()
            self._off_at = now
            for each in hooks._handles:
                each.remove()
        for owner, name, plain in self._plain:
            setattr(owner, name, plain if on else _do_nothing)
        if on:
            hooks._handles = list(hooks._register())
            if timer._choice is not None:  # so that no time seems to have passed
                timer._choice._block_at += now - self._off_at


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class CallTimes:
    """The CPU times of calls in ns by name; nested calls are included in the outer ones."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = defaultdict(list)
        self._within = False

    def watch(self, owner: Any, name: str) -> None:
        """Time each call of a method or function."""
        plain, times, clock = getattr(owner, name), self, time.thread_time_ns
        seen = self.seen[f"{owner.__name__.rpartition('.')[2]}.{name}"]

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


class Training:
    """Trains a network whose steps take about the requested time."""

    def __init__(self, device: torch.device, step_s: float) -> None:
        self._device = device
        self._split = Split(ratios=(1,), global_batch=ROWS)
        width = find_width(device, step_s)
        self._model = self._split.wrap(_make(width).to(device))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01)
        self._data = torch.utils.data.TensorDataset(torch.randn(100 * ROWS, width))
        self._empty = Empty()

    @property
    def timer(self) -> StepTimer:
        """The timer of its steps."""
        return self._split.timer

    def iterate(self) -> Iterator[None]:
        """Train; yield between two steps, before the next batch is requested."""
        while True:
            for (inputs,) in self._split.loader(self._data):
                self._model(inputs.to(self._device)).square().mean().backward()
                self._empty.call()
                self._optimizer.step()
                self._optimizer.zero_grad()
                yield

    def close(self) -> None:
        """End the training."""
        self._split.close()


def find_width(device: torch.device, step_s: float) -> int:
    """Return the network width at which a step takes about `step_s` on this device."""
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
        if median(taken) > 0.7 * step_s:
            break
        width = int(width * 1.25)
    return width


def _make(width: int) -> Any:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])


def time_steps(steps: Iterator[None], count: int, clock: Callable[[], float]) -> float:
    """Return the mean time of a step in seconds on a clock."""
    began = clock()
    for _ in range(count):
        next(steps)
    return (clock() - began) / count


def compare(training: Training, count: int) -> None:
    """Print the cost of the instruments from alternating blocks with and without them."""
    instruments, steps = Instruments(), training.iterate()
    time_steps(steps, WARM_STEPS, time.process_time)
    began, taken = time.perf_counter(), {True: list[float](), False: list[float]()}
    for place in range(count // (BLOCK_STEPS + SWITCHED_STEPS)):
        on = place % 4 in (0, 3)
        instruments.switch(on, training.timer)
        time_steps(steps, SWITCHED_STEPS, time.process_time)
        taken[on].append(time_steps(steps, BLOCK_STEPS, time.process_time))
    wall_s = (time.perf_counter() - began) / (place + 1) / (BLOCK_STEPS + SWITCHED_STEPS)
    instruments.switch(True, training.timer)
    pairs = [one - other for one, other in zip(taken[True], taken[False], strict=False)]
    kept = sorted(pairs)[len(pairs) // 10 : -(len(pairs) // 10) or None]
    error = 2 * stdev(kept) / math.sqrt(len(kept))
    print(f"steps of {1e3 * wall_s:.1f} ms, {1e3 * median(taken[False]):.2f} ms of CPU without")
    print(
        f"with and without: {1e6 * fmean(kept):+.1f} us of CPU a step, ± {1e6 * error:.1f} "
        f"({100 * fmean(kept) / STEP_SECONDS:+.2f} % of 10 ms); median {1e6 * median(pairs):+.1f}"
    )


def time_calls(training: Training, count: int) -> None:
    """Print the CPU time of each call of an instrument."""
    times = CallTimes()
    times.watch(Empty, "call")
    for owner, names in CALLS.items():
        for name in names:
            times.watch(owner, name)
    hooks = own_work._OPTIMIZER_HOOKS
    for each in hooks._handles:
        each.remove()
    hooks._handles = list(hooks._register())
    steps = training.iterate()
    time_steps(steps, WARM_STEPS, time.thread_time)
    for seen in times.seen.values():
        seen.clear()
    time_steps(steps, count, time.thread_time)
    nothing = median(times.seen.pop("Empty.call"))
    total = 0.0
    for name, seen in times.seen.items():
        own = (sum(seen) - nothing * len(seen)) / count / 1e3
        total += own
        middle = (median(seen) - nothing) / 1e3 if seen else 0.0
        print(
            f"{name:28} {own:6.1f} us of a step, in {len(seen) / count:.2f} calls, "
            f"median {middle:.1f}"
        )
    part = 100 * total / 1e6 / STEP_SECONDS
    print(f"all calls {total:.1f} us of a step: {part:.2f} % of 10 ms; an empty one {nothing} ns")


def main() -> None:
    """Train and print the costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--milliseconds", type=float, default=1e3 * STEP_SECONDS)
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENER_LIVE_DIR"] = folder
        training = Training(torch.device(given.device), given.milliseconds / 1e3)
        compare(training, given.steps)
        time_calls(training, given.steps // 2)
        training.close()


if __name__ == "__main__":
    main()
