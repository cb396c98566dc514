"""Stop all ranks at the same step when one of them receives SIGTERM.

SLURM, Kubernetes and spot machines send SIGTERM some time before they kill a job, perhaps to one
rank only. Ranks that stop at different steps would wait for each other forever. So the ranks check
four times a second whether one of them has received the signal. A check is an all-reduce of 16
bytes over gloo on the host. Steps between two checks aren't slowed down.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from ..sums.collectives import own_collectives

CHECK_SECONDS = 0.25  # seconds between two all-reduces; longer steps have one each
MOST_STEPS = 1000  # maximum number of steps between two all-reduces


class StopSignal:
    """Catches SIGTERM on each rank, and lets all ranks stop after the same step.

    Every rank has to create one. `world` is the number of ranks.
    """

    def __init__(self, world: int) -> None:
        self._received = False  # True once this process has received the signal
        self._agreed = False
        self._group: Any = None
        if world > 1:
            with own_collectives():
                self._group = dist.new_group(backend="gloo")
        self._steps_left = 1  # number of steps until the next all-reduce
        self._steps_between = 1
        self._checked_at = time.monotonic()
        self._earlier: Any = None
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        """Signal handler that records SIGTERM."""
        # the signal may arrive more than once: from the launcher, and from the program that stops
        # the launcher
        self._received = True
        if callable(self._earlier):
            self._earlier(number, frame)

    def close(self) -> None:
        """Restore the SIGTERM handler that was set before."""
        if signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, self._earlier)

    def is_agreed(self) -> bool:
        """Return whether any rank has received SIGTERM, with the same answer on all ranks.

        Every rank has to call this once per step. Ranks communicate only about four times a second.
        """
        if self._agreed or self._group is None:
            self._agreed = self._agreed or self._received
            return self._agreed
        self._steps_left -= 1
        if self._steps_left == 0:
            self._check_all()
        return self._agreed

    def _check_all(self) -> None:
        """Check whether any rank has received SIGTERM, and agree on the step of the next check.

        Every rank has to call this.
        """
        now = time.monotonic()
        step_seconds = max(now - self._checked_at, 1e-9) / self._steps_between
        steps = max(1, min(MOST_STEPS, 2 * self._steps_between, int(CHECK_SECONDS / step_seconds)))
        # the maximum of both: any rank's signal counts, and the rank with the fewest steps decides
        votes = torch.tensor([float(self._received), -float(steps)], dtype=torch.float64)
        with own_collectives():
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        self._agreed = bool(votes[0])
        self._steps_between = self._steps_left = int(-votes[1])
        self._checked_at = now
