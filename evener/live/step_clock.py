"""Report the steps of training loops whose batches evener doesn't divide among devices."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

from .files import Details
from .reporter import Devices, DeviceTimes, Reporter, middle, spread

KEPT_STEPS = 50  # number of steps stored for medians


class ClockedReports:
    """Times the steps of a training loop, and reports them.

    Call `begin` and `end` in each step. The time from the end of a step to the beginning of the
    next one is reported as waiting for input.
    """

    # In that time, the process waits for the loader or runs callbacks. Times are measured on the
    # host, which runs ahead of its GPU at first. Once the host has to wait for the GPU in each
    # step, the measured step times are the GPU's.

    def __init__(self, framework: str, workload: str = "", rank: int = -1, world: int = 0) -> None:
        self._framework = framework
        self._workload = workload
        self._rank = rank
        self._world = world
        self._steps: deque[float] = deque(maxlen=KEPT_STEPS)
        self._inputs: deque[float] = deque(maxlen=KEPT_STEPS)
        self._begun = self._ended = 0.0
        self._reporter = Reporter(self._describe)

    def begin(self) -> None:
        """Mark the beginning of a step's computation."""
        self._begun = time.perf_counter()

    def end(self, rows: int, devices: Devices = ()) -> None:
        """Mark the end of a step, and report how many rows it had."""
        now = time.perf_counter()
        if self._ended and self._begun > self._ended:
            self._steps.append(now - self._ended)
            self._inputs.append(self._begun - self._ended)
        self._ended = now
        self._reporter.report(
            rows, devices=devices, framework=self._framework, workload=self._workload
        )

    def interrupt(self) -> None:
        """Exclude the time until the next step from the step times, for example for validation."""
        self._ended = 0.0

    def close(self) -> None:
        """Stop reporting steps."""
        self._reporter.close()

    def _describe(self) -> tuple[Details, Sequence[DeviceTimes]]:
        details = Details(
            training=find_group(self._world),
            rank=self._rank,
            world=self._world,
            step_s=middle(self._steps),
            step_spread=spread(self._steps),
            input_s=middle(self._inputs),
        )
        return details, ()


def find_group(world: int) -> str:
    """Return a name that all processes of this training run share, or "" for a single process.

    `world` is the number of processes.
    """
    # the name consists of the environment variables of the processes' rendezvous
    place = (
        os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    )
    return ":".join(filter(None, place)) if world > 1 else ""
