"""Rebalancing: change the shares during training when the measured speed of ranks changes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from ..errors import RequestError
from ..live.files import PendingShares, ShareChange
from ..plan.solver import read_curves
from ..training.bottleneck import RankTimes, fewest_windows, find_bottleneck
from ..training.rebalance import FEWEST_WINDOWS, GROWTH, Rebalancer, name_devices
from .ranks.own_work import KEPT_STEPS
from .step.memory import MemoryGauge

# minimum duration of a window of steps, because more frequent exchanges would cost too much
WINDOW_SECONDS = 0.05
FEWEST_STEPS, MOST_STEPS = 5, KEPT_STEPS  # minimum and maximum number of steps in a window
# a window in which memory ran out, and one in which the allocator's cache refills
SETTLING_WINDOWS = 2
# number of windows per exchange, which is the slowest part; a change needs two windows
EXCHANGED_WINDOWS = 2
UNKNOWN = -1.0  # stands for NaN in an exchange


def raise_no_shares() -> NoReturn:
    """Raise RequestError, because shares can't change if rows are assigned by length."""
    raise RequestError(
        "Rows assigned by length have no shares to rebalance.",
        "Leave rebalance out, or make a new plan.",
    )


class Rebalancing:
    """Measures the compute time of all ranks during training, and changes their shares accordingly.

    Every rank has to create one, because it creates a process group. `training` is the
    PlannedTraining to rebalance.
    """

    def __init__(self, training: Any) -> None:  # a PlannedTraining
        self._training = training
        training.listeners.append(self.after_step)
        # passes of each rank, if a trainer uses the same number for any share
        self.passes: tuple[int, ...] = ()
        self._planned = training.ranks
        # created after the first exchange, when it is known how the loop computes
        self._rule: Any = None
        self._group = dist.new_group(backend="gloo")
        self._step = 0  # number of trained batches
        self._window = 0  # number of full batches with the current shares since the last window
        self._window_steps = FEWEST_STEPS  # number of full batches in the current window
        # own work and pass limit to exchange, by the window's last step
        self._windows: dict[int, tuple[float, int]] = {}
        self._memory = MemoryGauge(training.device, training.world)
        # largest share that this rank has had
        self._largest = training.ranks.batches[training.rank]
        self._grows_after = -1  # the step after which this rank's share is larger than before
        # the step after which this rank's share fits at once again; -1 while it is divided
        self._whole_after = -1
        self._retreats = 0  # number of passes that ran out of memory before the last window
        self._limit = 0  # maximum rows per pass since memory ran out; 0 if it didn't
        self._settling = 0  # number of windows until the allocator is stable again
        self._exchange: tuple[Any, torch.Tensor] | None = None  # the running exchange of `_windows`
        # number of windows for a change; 0 if own work doesn't limit steps
        self._fewest = FEWEST_WINDOWS

    def describe_pending(self) -> PendingShares | None:
        """Return how many measurement windows have ended, and how many a change of shares requires.

        The result is None if something other than compute time limits the steps.
        """
        if self._rule is None:
            return PendingShares(0, FEWEST_WINDOWS)
        if not self._fewest:
            return None
        needed = max(self._fewest, self._rule.windows_needed)
        return PendingShares(self._rule.windows_seen, needed)

    def stop(self) -> None:
        """Wait for a running exchange of measurements, and stop observing steps."""
        if self._exchange is not None:
            self._exchange[0].wait()
        self._training.listeners.remove(self.after_step)

    def after_step(self, sizes: Sequence[int]) -> None:
        """Record a finished step, and change shares if the measurements call for it.

        `sizes` has the row count of each rank. After every two measurement windows, the ranks
        exchange their results, and all of them make the same change. Every rank has to call this.
        """
        self._step += 1
        if self._training.begins_even:
            return
        if self._exchange is not None:
            self._end_exchange(*self._exchange)
        if self._step == self._grows_after:
            self._memory.make_room()
        if self._step == self._whole_after:
            self._training.passes.recovery.limit.predicted = None
        self._window += sizes == self._training.ranks.batches
        if self._window >= self._window_steps:
            self._window = 0
            metrics = self._medians_of_window()
            self._windows[self._step] = metrics.own_work_s, self._limit
            if len(self._windows) == EXCHANGED_WINDOWS:
                self._exchange = self._begin_exchange(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the current and the planned shares, for a checkpoint."""
        shares = self._training.ranks
        return {"shares": shares.batches, "micros": shares.micros, "planned": self._planned.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shares from a checkpoint, unless it was saved under another plan."""
        if tuple(state["planned"]) == self._planned.batches:
            self._rule = self._exchange = None
            self._change(tuple(state["shares"]), tuple(state["micros"]), 0)

    def _medians_of_window(self) -> RankTimes:
        """Return the median step times of this rank in the last measurement window."""
        # Steps in which evener audited a loss, or memory ran out, are left out. own_work_s is 0 if
        # it is unknown: in a window in which the rows per pass changed, and in SETTLING_WINDOWS
        # windows after memory ran out. The allocator's cache is then empty, and steps take far
        # longer.
        retreats = self._training.reporter.retreats
        limit = self._training.passes.recovery.limit.most or 0
        if retreats != self._retreats:
            self._retreats, self._settling = retreats, SETTLING_WINDOWS
        elif limit != self._limit:
            self._settling = 1
        self._limit = limit
        self._settling -= 1
        shares = self._training.ranks.batches
        steps = [
            step
            for step in self._training.timer.last(self._window_steps)
            if step.sizes == shares and not step.disturbed
        ]

        def middle(name: str, unknown: float) -> float:
            known = [each for step in steps if not math.isnan(each := getattr(step, name))]
            return median(known) if known else unknown

        return RankTimes(
            middle("own_work_s", 0.0) if self._settling < 0 else 0.0,
            middle("idle_input_s", 0.0),
            middle("step_s", 0.0),
            middle("behind", math.nan),
            middle("computing", math.nan),
        )

    def _rows_that_fit(self) -> int:
        """Estimate the largest share, in rows, that fits in this rank's memory; 0 if unknown."""
        # More memory is left free if rows differ in length, because memory then runs out more
        # easily, and if the loop computes a batch at once, because that pass can't be repeated in
        # smaller ones.
        training = self._training
        rank, shares = training.rank, training.ranks
        passes = self.passes[rank] if self.passes else 1
        self._memory.at_risk = training.weights.computes_at_once or training.weights.lengths_vary
        most = -(-shares.batches[rank] // passes)
        rows = self._memory.measure(min(most, training.passes.recovery.limit.lowest or most))
        return rows * passes

    def _micro_batch_that_fits(self) -> int:
        """Estimate how many rows per pass fit in memory if a share is computed in several passes.

        The result is 0 if that is unknown, or if the share can't be divided into more passes.
        """
        # memory must then also hold the gradients of earlier passes
        if not self._may_divide or self._training.passes.recovery.uses_collectives:
            return 0
        weights = [
            parameter for model in self._training.weights.models for parameter in model.parameters()
        ]
        trained = [weight for weight in weights if weight.requires_grad]
        gradient_bytes = sum(each.numel() * each.element_size() for each in trained)
        return self._memory.most_in_several(gradient_bytes)

    @property
    def _may_divide(self) -> bool:
        """Whether ranks may divide their shares into more passes than they have now."""
        return not self.passes and not self._training.weights.computes_at_once

    def _begin_exchange(self, metrics: RankTimes) -> tuple[Any, torch.Tensor]:
        """Start to send this rank's measurements to all ranks.

        Return the handle to wait for, and the tensor that will have all ranks' measurements.
        """
        # Each rank sends its compute time and pass limit of each window, `metrics`, the rows that
        # fit in one and in several passes, and the batches drawn ahead. Each rank has its own
        # positions in the tensor, and sends zeros at the others.
        own = [
            *(value for window in self._windows.values() for value in window),
            *(UNKNOWN if math.isnan(metric) else metric for metric in metrics),
            self._rows_that_fit(),
            self._micro_batch_that_fits(),
            self._training.ahead,
        ]
        before = self._planned.rank * len(own)
        behind = (self._planned.world - 1) * len(own) - before
        exchanged = torch.tensor([*[0.0] * before, *own, *[0.0] * behind], dtype=torch.float64)
        return self._group.allreduce(
            [exchanged]
        ), exchanged  # dist.all_reduce would take twice as long to start it

    def _end_exchange(self, work: Any, exchanged: torch.Tensor) -> None:
        work.wait()
        self._exchange = None
        ends = tuple(self._windows)
        self._windows.clear()
        length = len(exchanged) // self._planned.world
        every = [part.tolist() for part in exchanged.split(length)]
        windows = 2 * len(ends)
        metrics = [_read_metrics(each[windows:-3]) for each in every]
        fits, passes_fit = ([int(each[place]) for each in every] for place in (-3, -2))
        batches = int(max(each[-1] for each in every))
        step_s = max(metric.step_s for metric in metrics)
        window_s = self._window_steps * step_s
        bottleneck = find_bottleneck(metrics)
        self._adapt_timing(step_s, bottleneck)
        fewest = self._fewest = fewest_windows(bottleneck, window_s)
        for place, end in enumerate(ends):
            own_work_s = [each[2 * place] for each in every]
            limits = [int(each[2 * place + 1]) for each in every]
            seen = {
                "limits": limits,
                "fits": fits,
                "passes_fit": passes_fit,
                "step_s": step_s,
                "min_windows": fewest,
            }
            if self._decide_shares(end, own_work_s, seen, batches):
                break

    def _adapt_timing(self, step_s: float, bottleneck: str) -> None:
        """Adapt the length of measurement windows, and how many steps are timed.

        `step_s` is the duration of a step, which determines the length. `bottleneck` is what limits
        the step. With FSDP or DeepSpeed, fewer steps are timed if the host is the bottleneck.
        """
        steps = WINDOW_SECONDS / max(step_s, 1e-6)
        self._window_steps = int(min(max(FEWEST_STEPS, steps), MOST_STEPS))
        if not self._training.weights.are_averaged:
            return
        if bottleneck == "host":
            self._training.timer.time_few()
        else:
            self._training.timer.time_all()

    def _decide_shares(
        self, end: int, own_work_s: Sequence[float], seen: Mapping[str, Any], batches: int
    ) -> bool:
        """Change the shares if the measurements call for it, and return whether they changed.

        `end` is the last step of the measurement window, and `own_work_s` has the compute time of
        each rank. `seen` has other measurements, as keyword arguments of `Rebalancer.observe`. A
        change takes effect after `batches` more batches.
        """
        before = self._training.ranks.batches
        if self._rule is None:
            self._rule = self._make_rule()
        # `seen` has the keyword arguments
        change = self._rule.observe(end, own_work_s, before, **seen)
        if change is None:
            return False
        self._change(change.shares, change.micros, batches)
        self._training.reporter.note_change(
            ShareChange(self._step + batches + 1, time.time(), before, change.shares, change.reason)
        )
        if self._planned.rank == 0:
            print(f"{change.describe(before)}\n", end="", file=sys.stderr, flush=True)
        return True

    def _make_rule(self) -> Rebalancer:
        planned, now = self._planned, self._training.ranks.batches
        shares = [
            msgspec.structs.replace(each, batch=own)
            for each, own in zip(planned.shares, planned.batches, strict=True)
        ]
        by_parts = self._may_divide
        most = []
        for rank, (share, micro) in enumerate(zip(shares, planned.micros, strict=True)):
            passes = self.passes[rank] if self.passes else 1
            # cut by the plan, so its share doesn't tell what fits
            cut = by_parts and micro < share.batch
            most.append(passes * (share.most or (math.ceil(GROWTH * micro) if cut else 0)))
        return Rebalancer(now, read_curves(shares), most, by_parts, name_devices(planned.shares))

    def _change(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        if self.passes:
            micros = tuple(
                -(-share // passes) for share, passes in zip(shares, self.passes, strict=True)
            )
        self._training.change_shares(shares, micros, ahead)
        own, most = shares[self._planned.rank], micros[self._planned.rank]
        if most < own and not self.passes:
            self._training.passes.recovery.limit.predicted = most
            self._whole_after = -1
        else:  # batches that are drawn already may have more rows
            self._whole_after = self._step + ahead
        if own > self._largest:
            self._largest, self._grows_after = own, self._step + ahead
        self._window = 0
        self._windows.clear()


def _read_metrics(exchanged: Sequence[float]) -> RankTimes:
    return RankTimes(*(math.nan if each == UNKNOWN else each for each in exchanged))
