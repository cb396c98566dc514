"""Shares of a group that follow its processes' own work: what `Split(rebalance=True)` does in Keras.

All processes know the same figures after the same step, decide the same, and cut the next batch by the new shares.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from ..live.files import MOST_CHANGES, ShareChange
from ..plan.file import Share
from ..plan.solver import proportional_curves, read_curves
from ..training.rebalance import Rebalancer, name_devices
from .changing_cut import ChangingCut
from .work_times import WorkTimes

WINDOW_STEPS = 5  # whose median is one figure
FEWEST_STEPS = 3  # of whole batches in a window


class GroupRebalancer:
    """Changes the cut of a group's batches; `shares` are those of the plan in the order of ranks, if there is one."""

    def __init__(self, cut: ChangingCut, shares: Sequence[Share], rank: int) -> None:
        curves = read_curves(shares) if shares else proportional_curves(cut.weights)
        most = [share.most for share in shares] or [0] * len(cut.weights)
        self._rule = Rebalancer(cut.weights, curves, most, cut.in_passes, name_devices(shares))
        self._cut = cut
        self._rank = rank
        self._steps = 0  # since the last window
        self._next = 0  # the first step of the next window
        self.changes: deque[ShareChange] = deque(maxlen=MOST_CHANGES)

    def after_steps(self, steps: int, times: WorkTimes) -> None:
        """Note that this number of steps was trained; every process calls it after the same ones."""
        self._steps += steps
        if self._steps < WINDOW_STEPS:
            return
        self._steps = 0
        seen = times.read()
        window = [step for step in seen if step.number >= self._next and step.rows == self._cut.total]
        self._next = seen[-1].number + 1
        if len(window) < FEWEST_STEPS:
            return
        before = self._cut.weights
        own = [median(each) for each in zip(*(step.own_work_s for step in window), strict=True)]
        change = self._rule.observe(seen[-1].number, own, before)
        if change is None:
            return
        self._cut.change(change.shares, change.micros)
        self.changes.append(ShareChange(self._next, time.time(), before, change.shares, change.reason))
        if self._rank == 0:
            print(f"{change.describe(before)}\n", end="", file=sys.stderr, flush=True)
