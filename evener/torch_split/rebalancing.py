"""Shares that follow the ranks' own work while a training runs: what `Split(rebalance=True)` does.

After every two windows of a few steps each rank says how long its own work took. All ranks hear the same figures one
step later, decide the same by `evener.training.rebalance`, and take new shares from the same batch on: the first that
none of them has fetched.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from operator import mul
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..live.files import ShareChange
from ..plan.solver import read_curves
from ..training.rebalance import GROWTH, Rebalancer, name_devices
from .batch_weights import BatchWeights
from .own_work import KEPT_STEPS
from .sampler import UnevenBatchSampler
from .step_reporter import StepReporter

WINDOW_SECONDS = 0.05  # of steps whose median is one figure: more often than that, agreeing would cost too much
FEWEST_STEPS, MOST_STEPS = 5, KEPT_STEPS  # of a window
EXCHANGED_WINDOWS = 2  # at once: an exchange takes longer than all else, and the rule needs two for a change


class Rebalancing:
    """Changes the shares of this rank's samplers, as all other ranks do; made on every rank.

    Without `weights`, by whom a split's loops train, `fix_passes` says how shares are computed.
    """

    def __init__(self, reporter: StepReporter, weights: BatchWeights | None = None) -> None:
        reporter.on_step = self.after_step
        self._reporter = reporter
        self._weights = weights
        self._passes: tuple[int, ...] = ()  # of each rank, where they are the same for any share
        self._planned = reporter.shares
        self._rule: Any = None  # made with the first figures, when it is seen how the loop computes
        self._group = dist.new_group(backend="gloo")
        self._samplers: weakref.WeakSet[UnevenBatchSampler] = weakref.WeakSet()
        self._ahead = 0  # the most batches that a loader draws before their turn
        self._step = 0  # batches that were trained on
        self._window = 0  # of them, whole ones with the shares in force since the last window
        self._window_steps = FEWEST_STEPS  # until the next window ends
        self._windows: dict[int, float] = {}  # to be exchanged: own work by the last step
        self._exchange: tuple[Any, torch.Tensor] | None = None  # under way, of `_windows`

    def add(self, sampler: UnevenBatchSampler, ahead: int) -> None:
        """Add the sampler of a loader, which draws batches at most `ahead` batches before their turn."""
        sampler.changes = True
        self._samplers.add(sampler)
        self._ahead = max(self._ahead, ahead)

    def fix_passes(self, passes: Sequence[int]) -> None:
        """Fix the number of passes of each rank, whatever the shares."""
        self._passes = tuple(passes)

    def after_step(self, sizes: Sequence[int]) -> None:
        """A batch of these rows was trained on; every rank calls it, and the ranks come to agree in every few calls."""
        self._step += 1
        if self._exchange is not None:
            self._end_exchange(*self._exchange)
        self._window += sizes == self._reporter.shares.batches
        if self._window >= self._window_steps:
            self._window = 0
            self._windows[self._step], step_s = self._medians()
            if len(self._windows) == EXCHANGED_WINDOWS:
                self._exchange = self._begin_exchange(step_s)

    def state_dict(self) -> dict[str, Any]:
        """The shares in force, and those of the plan, under which alone they make sense."""
        shares = self._reporter.shares
        return {"shares": shares.batches, "micros": shares.micros, "planned": self._planned.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of `state`, if it is of the same plan."""
        if tuple(state["planned"]) == self._planned.batches:
            self._rule = self._exchange = None
            self._change(tuple(state["shares"]), tuple(state["micros"]), 0)

    def _medians(self) -> tuple[float, float]:
        """The median seconds of own work and of steps in the window, 0 before any was computed."""
        shares = self._reporter.shares.batches
        steps = [step for step in self._reporter.timer.last(self._window_steps) if step.sizes == shares]
        whole = [step.step_s for step in steps if not math.isnan(step.step_s)]
        own = [step.own_work_s for step in steps if not math.isnan(step.own_work_s)]
        return median(own) if own else 0.0, median(whole) if whole else 0.0

    def _begin_exchange(self, step_s: float) -> tuple[Any, torch.Tensor]:
        """Begin to exchange this rank's windows, seconds of a step and batches drawn ahead; zeros for the others."""
        own = [*self._windows.values(), step_s, self._ahead]
        before = self._planned.rank * len(own)
        behind = (self._planned.world - 1) * len(own) - before
        figures = torch.tensor([*[0.0] * before, *own, *[0.0] * behind], dtype=torch.float64)
        return self._group.allreduce([figures]), figures  # dist.all_reduce takes twice as long to start it

    def _end_exchange(self, work: Any, figures: torch.Tensor) -> None:
        work.wait()
        self._exchange = None
        ends = tuple(self._windows)
        self._windows.clear()
        every, each = figures.tolist(), len(ends) + 2
        *windows, step_s, ahead = (every[i::each] for i in range(each))
        self._window_steps = int(min(max(FEWEST_STEPS, WINDOW_SECONDS / max(*step_s, 1e-6)), MOST_STEPS))
        for end, own_work_s in zip(ends, windows, strict=True):
            if self._decide(end, own_work_s, int(max(ahead))):
                break

    def _decide(self, end: int, own_work_s: Sequence[float], batches: int) -> bool:
        """Decide on shares by a window that ended at step `end`; True if they change, `batches` batches later."""
        before = self._reporter.shares.batches
        if self._rule is None:
            self._rule = self._make_rule()
        change = self._rule.observe(end, own_work_s, before)
        if change is None:
            return False
        self._change(change.shares, change.micros, batches)
        self._reporter.changes.append(
            ShareChange(self._step + batches + 1, time.time(), before, change.shares, change.reason)
        )
        if self._planned.rank == 0:
            print(f"{change.describe(before)}\n", end="", file=sys.stderr, flush=True)
        return True

    def _make_rule(self) -> Rebalancer:
        planned, now = self._planned, self._reporter.shares.batches
        shares = [
            msgspec.structs.replace(each, batch=own) for each, own in zip(planned.shares, planned.batches, strict=True)
        ]
        in_pass = [share.most or math.ceil(GROWTH * micro) for share, micro in zip(shares, planned.micros, strict=True)]
        by_parts = not self._passes and self._weights is not None and not self._weights.computes_at_once
        most = list(map(mul, in_pass, self._passes or [1] * planned.world))
        return Rebalancer(now, read_curves(shares), most, by_parts, name_devices(planned.shares))

    def _change(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        reporter = self._reporter
        if self._passes:
            micros = tuple(-(-share // passes) for share, passes in zip(shares, self._passes, strict=True))
        reporter.shares = msgspec.structs.replace(reporter.shares, batches=shares, micros=micros)
        if self._weights is not None:
            self._weights.change(shares, micros)
        for sampler in self._samplers:
            sampler.change_shares(shares, ahead)
        self._window = 0
        self._windows.clear()
