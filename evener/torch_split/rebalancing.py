"""Shares that follow the ranks' own work while a training runs: what `Split(rebalance=True)` does.

After every few steps each rank says how long its own work took. All ranks hear the same figures one step later, decide
the same by `evener.rebalance`, and take new shares from the same batch on: the first that none of them has fetched.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from evener.live_files import ShareChange
from evener.plan import Share
from evener.rebalance import GROWTH, Rebalancer
from evener.share_solver import read_curves
from evener.torch_split.batch_weights import BatchWeights
from evener.torch_split.rank_shares import RankShares
from evener.torch_split.sampler import UnevenBatchSampler
from evener.torch_split.step_reporter import StepReporter

WINDOW_STEPS = 5  # whose median is one figure


class Rebalancing:
    """Changes the shares of this rank's samplers, as all other ranks do; made on every rank."""

    def __init__(self, reporter: StepReporter, weights: BatchWeights) -> None:
        self._reporter = reporter
        self._weights = weights
        self._planned = reporter.shares
        self._rule: Any = None  # made with the first figures, when it is seen how the loop computes
        self._group = dist.new_group(backend="gloo")
        self._samplers: weakref.WeakSet[UnevenBatchSampler] = weakref.WeakSet()
        self._ahead = 0  # the most batches that a loader draws before their turn
        self._step = 0  # batches that were trained on
        self._window = 0  # of them, whole ones with the shares in force since the last window
        self._gathered: tuple[Any, list[torch.Tensor]] | None = None  # under way

    def add(self, sampler: UnevenBatchSampler, ahead: int) -> None:
        """A loader draws batches by this sampler, so many before their turn at most."""
        sampler.changes = True
        self._samplers.add(sampler)
        self._ahead = max(self._ahead, ahead)

    def after_step(self, sizes: Sequence[int]) -> None:
        """A batch of these rows was trained on; every rank calls it, and the ranks come to agree in every few calls."""
        self._step += 1
        if self._gathered is not None:
            work, figures = self._gathered
            self._gathered = None
            work.wait()
            self._decide(*torch.stack(figures).T.tolist())
        self._window += sizes == self._reporter.shares.batches
        if self._window == WINDOW_STEPS:
            self._window = 0
            own = torch.tensor([self._own_work(), self._ahead], dtype=torch.float64)
            figures = [torch.empty_like(own) for _ in sizes]
            self._gathered = dist.all_gather(figures, own, self._group, async_op=True), figures

    def state_dict(self) -> dict[str, Any]:
        """The shares in force, and those of the plan, under which alone they make sense."""
        shares = self._reporter.shares
        return {"shares": shares.batches, "micros": shares.micros, "planned": self._planned.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of `state`, if it is of the same plan."""
        if tuple(state["planned"]) == self._planned.batches:
            self._rule = None
            self._change(tuple(state["shares"]), tuple(state["micros"]), 0)

    def _own_work(self) -> float:
        """The median of the window; 0 where no step of it has been computed yet."""
        shares = self._reporter.shares.batches
        steps = [step.own_work_s for step in self._reporter.timer.last() if step.sizes == shares]
        return median(steps[-WINDOW_STEPS:]) if steps else 0.0

    def _decide(self, own_work_s: Sequence[float], ahead: Sequence[float]) -> None:
        before = self._reporter.shares.batches
        if self._rule is None:
            self._rule = self._make_rule()
        change = self._rule.observe(self._step, own_work_s, before)
        if change is None:
            return
        batches = int(max(ahead))
        self._change(change.shares, change.micros, batches)
        self._reporter.changes.append(
            ShareChange(self._step + batches + 1, time.time(), before, change.shares, change.reason)
        )
        if self._planned.rank == 0:
            shown = " -> ".join("+".join(map(str, shares)) for shares in (before, change.shares))
            print(f"{change.reason}: {shown}\n", end="", file=sys.stderr, flush=True)

    def _make_rule(self) -> Rebalancer:
        planned, now = self._planned, self._reporter.shares.batches
        shares = [
            msgspec.structs.replace(each, batch=own) for each, own in zip(planned.shares, planned.batches, strict=True)
        ]
        most = [share.most or math.ceil(GROWTH * micro) for share, micro in zip(shares, planned.micros, strict=True)]
        return Rebalancer(now, read_curves(shares), most, not self._weights.computes_at_once, _name_devices(planned))

    def _change(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        reporter = self._reporter
        reporter.shares = msgspec.structs.replace(reporter.shares, batches=shares, micros=micros)
        self._weights.change(shares, micros)
        for sampler in self._samplers:
            sampler.change_shares(shares, ahead)
        self._window = 0


def _name_devices(shares: RankShares) -> tuple[str, ...]:
    """As the monitor has them; by rank where no plan names them."""
    if len({(share.host, share.device) for share in shares.shares}) < shares.world:
        return ()
    return tuple(map(_name, shares.shares))


def _name(share: Share) -> str:
    device = f"GPU:{share.index}" if share.device.startswith("GPU-") else share.device
    return f"{share.host}/{device}" if share.host else device
