"""A notice that this machine is about to be taken away: SIGTERM, which SLURM, Kubernetes and spot
machines send some time before they kill a job.

Possibly only one rank gets it, and ranks that stop at different steps wait for each other forever.
So the ranks ask each other four times a second, by an all-reduce of 16 bytes over gloo on the host.
Steps between two questions cost nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from ..sums.collectives import own_collectives

ASK_SECONDS = 0.25  # between two questions; longer steps have one question each
MOST_STEPS = 1000  # between two questions, however short steps are


class Notice:
    """Whether a notice has reached any rank; all ranks get the same answer at the same step.

    Every rank has to make one, and to call `has_come` equally often, after each step.
    """

    def __init__(self, world: int) -> None:
        self._received = False  # by this process
        self._agreed = False
        self._group: Any = None
        if world > 1:
            with own_collectives():
                self._group = dist.new_group(backend="gloo")
        self._steps_left = 1  # until the next question
        self._steps_between = 1
        self._asked_at = time.monotonic()
        self._earlier: Any = None
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        """Record the signal, and call the handler from before.

        The signal may come more than once, from the launcher and from whatever ended the launcher.
        """
        self._received = True
        if callable(self._earlier):
            self._earlier(number, frame)

    def close(self) -> None:
        """Restore the earlier handler of SIGTERM."""
        if signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, self._earlier)

    def has_come(self) -> bool:
        """True once any rank has received a notice."""
        if self._agreed or self._group is None:
            self._agreed = self._agreed or self._received
            return self._agreed
        self._steps_left -= 1
        if self._steps_left == 0:
            self._ask()
        return self._agreed

    def _ask(self) -> None:
        """Ask all ranks for a notice, and agree on the number of steps until the next question."""
        now = time.monotonic()
        step_seconds = max(now - self._asked_at, 1e-9) / self._steps_between
        steps = max(1, min(MOST_STEPS, 2 * self._steps_between, int(ASK_SECONDS / step_seconds)))
        # the maximum of both: any notice counts, and the rank with the fewest steps decides
        figures = torch.tensor([float(self._received), -float(steps)], dtype=torch.float64)
        with own_collectives():
            dist.all_reduce(figures, dist.ReduceOp.MAX, group=self._group)
        self._agreed = bool(figures[0])
        self._steps_between = self._steps_left = int(-figures[1])
        self._asked_at = now
