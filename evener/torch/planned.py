"""The training of one rank by a plan: what every trainer's adapter is made of, and shares that
follow own work.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from ..errors import RequestError
from ..live.files import PendingShares, ShareChange
from ..plan.solver import read_curves
from ..training.bottleneck import RankFigures, fewest_windows, find_bottleneck
from ..training.dealing import make_dealer
from ..training.ending import end_when_stuck
from ..training.launched import launched_device
from ..training.rebalance import FEWEST_WINDOWS, GROWTH, Rebalancer, name_devices
from .ranks.others import explain_at_exit, watch_others
from .ranks.own_work import KEPT_STEPS, StepReporter, make_timer
from .ranks.ranks import RankShares, claim_device, join
from .ranks.waits import time_waits
from .rows.loader import LoaderStates
from .rows.sampler import LengthSampler, UnevenBatchSampler
from .step.checks import OPTIMIZER_CHECK
from .step.memory import MemoryGauge
from .step.part import OfPart, Part, make_parts, weigh_by_count
from .step.retry import Passes
from .step.weights import BatchWeights, Weigh
from .step.wrapped import (
    check_exchange,
    check_model,
    check_normalization,
    has_own_work,
    is_sharded,
    take_on,
)
from .sums.collectives import add_up
from .sums.noise import RankNoise, refuse_noise
from .training_audits import TrainingAudits


class PlannedTraining:
    """One rank's training by a plan: what the adapter of every trainer is made of.

    It settles this process on its device, and has the samplers of rows, the check of the loss, the
    weighted sum of gradients, passes that survive out-of-memory, the times of steps and their
    report, and shares that follow own work. `weigh` says who weighs a batch: the sum of
    "gradients"; `scale`, by the "loss"; or the "trainer", whose adapter multiplies each pass's loss
    by (its part of the global batch * the number of ranks). A loop calls `begin` for each global
    batch and `report` once it is trained; every rank calls everything.
    """

    def __init__(
        self,
        found: RankShares,
        weigh: Weigh = "gradients",
        *,
        strict: bool = False,
        journal: bool = False,
        rebalance: bool = False,
        noise: bool = False,
        backend: str | None = None,
    ) -> None:
        self.rank, self.world, self.device = found.rank, found.world, found.device
        self.plan, self.strict = found.plan, strict
        claim_device(self.device, found.share, found.plan.layout.processes if found.plan else 1)
        if self.world > 1:
            join(self.device, backend)
        self.noise: RankNoise | None = None
        if noise and self.world > 1:
            self.noise = RankNoise()
        elif noise:
            warnings.warn(
                "noise=True compares the gradients of ranks, and this training has one: no noise "
                "scale is measured.",
                stacklevel=3,
            )
        self.timer = make_timer(self.device, alone=self.world == 1)
        if self.noise is not None:
            self.timer.begun = self.noise.begin
        self.reporter = StepReporter(found, self.timer, journal, self.noise)
        self.weights, self.loaders = (
            BatchWeights(found, weigh, self.timer, self.noise),
            LoaderStates(),
        )
        self.passes = Passes(self.rank, self.device, self.reporter.note_retreat)
        self.listeners: list[Callable[[tuple[int, ...]], None]] = []
        self._samplers: weakref.WeakSet[UnevenBatchSampler] = weakref.WeakSet()
        self.audits = TrainingAudits(self)
        self._release = OPTIMIZER_CHECK.hooks.hold(self)
        self.ahead = 0  # the most batches that a loader draws before their turn
        self.rebalancing: Rebalancing | None = None
        if rebalance and self.world > 1:
            self.rebalancing = Rebalancing(self)
            self.reporter.pending = self.rebalancing.describe_pending
        explain_at_exit(weakref.WeakMethod(self.passes.advise))
        if self.world > 1:
            watch_others(self.device, self.timer.now)
            if not launched_device():  # else evener's launcher has seen to it
                end_when_stuck()

    @property
    def ranks(self) -> RankShares:
        """The shares of all ranks that are in force: the plan's, or those that it was rebalanced to
        last.
        """
        return self.weights.shares

    @ranks.setter
    def ranks(self, now: RankShares) -> None:
        self.weights.shares = self.reporter.shares = now

    def close(self) -> None:
        """Stop reporting, and take the hooks of the process that this training has brought."""
        self.reporter.close()
        self.timer.release()
        self._release()

    # ------------------------------------------------------------------ rows

    def sampler(
        self, rows: int, *, lengths: Any = None, shares: Sequence[int] = (), **options: Any
    ) -> UnevenBatchSampler:
        """This rank's row numbers of each global batch, of a data set with this number of rows.

        With `lengths`, the tokens of each row, they are dealt so that ranks finish together.
        `shares` are other ones, for a validation; `options` are UnevenBatchSampler's.
        """
        chosen = tuple(shares) or self.ranks.batches
        if lengths is None:
            return UnevenBatchSampler(rows, chosen, self.rank, **options)
        now = self.ranks
        dealer = make_dealer(now.batches, now.micros, now.shares)
        return LengthSampler(rows, chosen, self.rank, lengths=lengths, dealer=dealer, **options)

    def follow(self, sampler: UnevenBatchSampler, ahead: int) -> None:
        """Change this sampler's shares with all others'; it draws at most `ahead` batches before
        their turn.
        """
        sampler.changes |= self.rebalancing is not None
        self._samplers.add(sampler)
        self.ahead = max(self.ahead, ahead)

    def change_shares(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        """Take these shares, in all loops once the batches `ahead` of their turn are trained."""
        self.ranks = msgspec.structs.replace(self.ranks, batches=shares, micros=micros)
        for each in self._samplers:
            each.change_shares(shares, ahead)

    def stay_even(self) -> None:
        """Give each rank as many rows again, in all loops once what was drawn ahead is trained, and
        leave it so.
        """
        if self.rebalancing is not None:
            self.rebalancing.stop()
            self.rebalancing = None
        even = (self.ranks.global_batch // self.world,) * self.world
        self.change_shares(even, even, self.ahead)

    # ------------------------------------------------------------------ models

    def wrap(self, model: Any, **options: Any) -> Any:
        """The model on this process's device, its gradients weighted and summed over the ranks; on
        one device itself.

        Options are `bucket_cap_mb`, `broadcast_buffers` and `process_group`, as
        DistributedDataParallel has them. A model that is in DistributedDataParallel already, or
        that FSDP shards (with `weigh="loss"`), comes back itself.
        """
        self.check_whole()
        weigh = self.weights.weigh
        check_normalization(model, weigh, self.world, self.ranks.pass_rows)
        check_model(model, self.plan, self.strict)
        if self.world == 1:
            model = model.to(self.device)
            self.weights.follow(model, self.device)
            return model
        check_exchange(model)
        self.timer.has_own_work = has_own_work(model, self.rebalancing is not None)
        if is_sharded(model):
            if weigh == "gradients":
                raise RequestError(
                    "FSDP shards the model, and its mean over ranks can't be weighted.",
                    (
                        "Use Split(..., weigh='loss') and split.scale(loss).backward(), which is "
                        "exact."
                    ),
                )
            if self.noise is not None:
                raise refuse_noise("FSDP")
            self.weights.follow(model, self.device)
            return model
        model, exchange = take_on(
            model, self.device, self.weights.forward, options, by_loss=weigh != "gradients"
        )
        self.weights.attach(model, exchange)
        if self.rebalancing is not None and not self.timer.has_own_work:
            raise RequestError(
                "DistributedDataParallel's communication hook or mixed_precision needs its "
                "own sums, which don't show a"
                " rank's own work.",
                "Leave rebalance out, or the hook.",
            )
        return model

    def follow_averaged(self, model: Any) -> None:
        """Train a model whose gradients a library averages over ranks, by losses that are weighted.

        Its ranks meet in passes; own work is what they compute between.
        """
        self.check_whole()
        check_normalization(model, self.weights.weigh, self.world, self.ranks.pass_rows)
        check_model(model, self.plan, self.strict)
        if self.noise is not None:
            raise refuse_noise("FSDP or DeepSpeed")
        time_waits(self.timer)
        self.weights.equal_passes = self.weights.are_averaged = True
        self.weights.follow(model, self.device)

    def check_whole(self) -> None:
        """RequestError if the plan has each device hold a part of the model."""
        if self.ranks.is_sharded:
            raise RequestError(
                "The plan has each device hold a part of the model, which doesn't fit as a whole.",
                (
                    "Use split.shard(model) in a loop of your own, or transformers' Trainer with "
                    "with_plan."
                ),
            )

    # ------------------------------------------------------------------ a global batch

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a global batch in which each rank has these rows; the loader of a Split does so
        itself.

        The one before is over.
        """
        self.end()
        self.timer.begin(tuple(sizes))
        self.weights.begin(sizes)

    def end(self) -> None:
        """End a global batch; if it was trained, `listeners` are called with its sizes, and shares
        may change.
        """
        if self.timer.finish():
            for each in self.listeners:
                each(self.timer.sizes)

    def report(self, rows: int | None = None, tokens: tuple[int, int] = (0, 0)) -> None:
        """Tell the monitor that a step on this rank's rows is done; the loader of a Split does so
        itself.

        `tokens` are those of the rows, without and with padding.
        """
        self.reporter.report(self.weights.sizes[self.rank] if rows is None else rows, tokens)

    def step(
        self, batch: Any, compute: OfPart, count: OfPart | None = None, check: bool = True
    ) -> Any:
        """Forward and backward of a batch, in the passes of the plan: this rank's mean loss, for
        `Split.mean`.

        `compute(part)` is the mean loss of part.batch, over rows or what `count(part)` counts:
        `split.step(batch, lambda part: criterion(model(part.batch[0]), part.batch[1]))`. Gradients
        are exchanged once. A pass that runs out of memory is computed again in smaller ones. Every
        rank calls it for every batch. `check=False` leaves audits out.
        """
        self.passes.check = partial(self.audits.audit_part, compute)
        total: Any = 0.0
        for part in self._parts(batch, count):
            with part:
                total = total + part.backward(compute(part))
        self.passes.check = None
        if check:
            self.audits.after_step(batch, compute, count)
        return total

    def parts(
        self, batch: Any, count: OfPart | None = None, models: Sequence[Any] | None = None
    ) -> Iterator[Part]:
        """This rank's batch in the passes of the plan: compute each part.batch, and call
        part.backward(loss).

        The last pass exchanges gradients, of all wrapped models or of `models`. `count(part)` is
        what a mean that isn't over rows is divided by, such as the tokens that aren't ignored. If
        the body is `with part:`, a part that runs out of memory comes again in smaller ones. Every
        rank calls it for every batch.
        """
        parts = self._parts(batch, count, models)
        try:
            for part in parts:
                self.audits.watch_part(part, count)
                yield part
            self.audits.end_parts()
        finally:
            parts.close()
            self.audits.close()

    def _parts(
        self, batch: Any, count: OfPart | None = None, models: Sequence[Any] | None = None
    ) -> Generator[Part]:
        weights = self.weights
        taken = weights.open_parts(batch)
        rows = taken.sizes[self.rank]
        try:
            most = max(1, rows) if taken.origin.dealt else self.ranks.micros[self.rank]
            scale = weights.scale if weights.by_loss else lambda loss: loss
            parts = make_parts(batch, rows, most, scale, weights.count_equal_passes(taken))
            if count is not None:
                weigh_by_count(parts, count, taken.sizes, self.rank, self.add_up)
            yield from self.passes.take(
                parts, weights.list_models(models, taken), weights.list_exchanges()
            )
        finally:
            weights.in_parts = None

    def add_up(self, value: Any) -> torch.Tensor:
        """The sum of a figure over the ranks."""
        return add_up(value, self.device, self.world, self.timer)


# of steps whose median is one figure: more often than that, agreeing would cost too much
WINDOW_SECONDS = 0.05
FEWEST_STEPS, MOST_STEPS = 5, KEPT_STEPS  # of a window
SETTLING_WINDOWS = 2  # the one in which memory ran out, and one for the allocator to fill again
# at once: an exchange takes longer than all else, and the rule needs two for a change
EXCHANGED_WINDOWS = 2
UNKNOWN = -1.0  # in an exchange, for NaN


def raise_no_shares() -> NoReturn:
    """RequestError: rows are dealt by length."""
    raise RequestError(
        "Rows assigned by length have no shares to rebalance.",
        "Leave rebalance out, or make a new plan.",
    )


class Rebalancing:
    """Changes the shares of this rank's samplers, as all other ranks do; made on every rank."""

    def __init__(self, training: PlannedTraining) -> None:
        self._training = training
        training.listeners.append(self.after_step)
        self.passes: tuple[
            int, ...
        ] = ()  # of each rank, where a trainer takes as many for any share
        self._planned = training.ranks
        self._rule: Any = None  # made with the first figures, when it is seen how the loop computes
        self._group = dist.new_group(backend="gloo")
        self._step = 0  # batches that were trained on
        self._window = 0  # of them, whole ones with the shares in force since the last window
        self._window_steps = FEWEST_STEPS  # until the next window ends
        self._windows: dict[
            int, tuple[float, int]
        ] = {}  # to exchange: own work, rows of a pass; by the last step
        self._memory = MemoryGauge(training.device, training.world)
        self._largest = training.ranks.batches[training.rank]  # share that this rank has had
        self._grows_after = -1  # step, before which this rank's share was never as large
        self._retreats = 0  # of this rank that were seen
        self._limit = 0  # rows of a pass since memory ran out; 0: it didn't
        self._settling = 0  # windows until memory is as it stays
        self._exchange: tuple[Any, torch.Tensor] | None = None  # under way, of `_windows`
        self._fewest = FEWEST_WINDOWS  # that a change needs; 0: own work isn't what limits steps

    def describe_pending(self) -> PendingShares | None:
        """How far this has come with the next change; None where it would change nothing."""
        if self._rule is None:
            return PendingShares(0, FEWEST_WINDOWS)
        if not self._fewest:
            return None
        needed = max(self._fewest, self._rule.windows_needed)
        return PendingShares(self._rule.windows_seen, needed)

    def stop(self) -> None:
        """Change no shares any more, once no exchange is under way."""
        if self._exchange is not None:
            self._exchange[0].wait()
        self._training.listeners.remove(self.after_step)

    def after_step(self, sizes: Sequence[int]) -> None:
        """A batch of these rows was trained on; every rank calls it, and the ranks come to agree in
        every few calls.
        """
        self._step += 1
        if self._exchange is not None:
            self._end_exchange(*self._exchange)
        if self._step == self._grows_after:
            self._memory.make_room()
        self._window += sizes == self._training.ranks.batches
        if self._window >= self._window_steps:
            self._window = 0
            figures = self._summarize()
            self._windows[self._step] = figures.own_work_s, self._limit
            if len(self._windows) == EXCHANGED_WINDOWS:
                self._exchange = self._begin_exchange(figures)

    def state_dict(self) -> dict[str, Any]:
        """The shares in force, and those of the plan, under which alone they make sense."""
        shares = self._training.ranks
        return {"shares": shares.batches, "micros": shares.micros, "planned": self._planned.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of `state`, if it is of the same plan."""
        if tuple(state["planned"]) == self._planned.batches:
            self._rule = self._exchange = None
            self._change(tuple(state["shares"]), tuple(state["micros"]), 0)

    def _summarize(self) -> RankFigures:
        """The medians of this rank's steps in the window, without disturbed ones.

        Own work is 0, which counts for nothing, before any was computed, and for some windows after
        memory ran out: the allocator is empty then, so steps take far longer than those that
        follow. It is so in a window in which passes became larger again, too.
        """
        retreats, limit = self._training.reporter.retreats, self._training.passes.limit.most or 0
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

        return RankFigures(
            middle("own_work_s", 0.0) if self._settling < 0 else 0.0,
            middle("idle_input_s", 0.0),
            middle("step_s", 0.0),
            middle("behind", math.nan),
            middle("computing", math.nan),
        )

    def _rows_that_fit(self) -> int:
        """The rows of a share that this rank's memory is predicted to hold; 0 where nothing tells.

        A pass that runs out of memory can be computed again in smaller ones, except in a loop that
        computes a batch at once.
        """
        training = self._training
        rank, shares = training.rank, training.ranks
        passes = self.passes[rank] if self.passes else 1
        self._memory.at_risk = training.weights.computes_at_once or training.weights.lengths_vary
        rows = self._memory.measure(-(-shares.batches[rank] // passes))
        return rows * passes

    def _begin_exchange(self, figures: RankFigures) -> tuple[Any, torch.Tensor]:
        """Begin to exchange this rank's windows, the figures of the last of them, the rows that its
        memory holds, and batches drawn ahead; zeros for the others.
        """
        own = [
            *(figure for window in self._windows.values() for figure in window),
            *(UNKNOWN if math.isnan(each) else each for each in figures),
            self._rows_that_fit(),
            self._training.ahead,
        ]
        before = self._planned.rank * len(own)
        behind = (self._planned.world - 1) * len(own) - before
        exchanged = torch.tensor([*[0.0] * before, *own, *[0.0] * behind], dtype=torch.float64)
        return self._group.allreduce(
            [exchanged]
        ), exchanged  # dist.all_reduce takes twice as long to start it

    def _end_exchange(self, work: Any, exchanged: torch.Tensor) -> None:
        work.wait()
        self._exchange = None
        ends = tuple(self._windows)
        self._windows.clear()
        length = len(exchanged) // self._planned.world
        every = [part.tolist() for part in exchanged.split(length)]
        windows = 2 * len(ends)
        figures = [_read_figures(each[windows:-2]) for each in every]
        fits = [int(each[-2]) for each in every]
        batches = int(max(each[-1] for each in every))
        step_s = max(each.step_s for each in figures)
        window_s = self._window_steps * step_s
        self._window_steps = int(
            min(max(FEWEST_STEPS, WINDOW_SECONDS / max(step_s, 1e-6)), MOST_STEPS)
        )
        fewest = self._fewest = fewest_windows(find_bottleneck(figures), window_s)
        for place, end in enumerate(ends):
            own_work_s = [each[2 * place] for each in every]
            limits = [int(each[2 * place + 1]) for each in every]
            seen = {"limits": limits, "fits": fits, "step_s": step_s, "fewest": fewest}
            if self._decide(end, own_work_s, seen, batches):
                break

    def _decide(
        self, end: int, own_work_s: Sequence[float], seen: Mapping[str, Any], batches: int
    ) -> bool:
        """Decide on shares by a window that ended at step `end`; True if they change, `batches`
        batches later.
        """
        before = self._training.ranks.batches
        if self._rule is None:
            self._rule = self._make_rule()
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
        by_parts = not self.passes and not self._training.weights.computes_at_once
        most = []
        for rank, (share, micro) in enumerate(zip(shares, planned.micros, strict=True)):
            passes = self.passes[rank] if self.passes else 1
            cut = by_parts and micro < share.batch  # by the plan, which doesn't say what fits
            most.append(passes * (share.most or (math.ceil(GROWTH * micro) if cut else 0)))
        return Rebalancer(now, read_curves(shares), most, by_parts, name_devices(planned.shares))

    def _change(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        if self.passes:
            micros = tuple(
                -(-share // passes) for share, passes in zip(shares, self.passes, strict=True)
            )
        self._training.change_shares(shares, micros, ahead)
        own = shares[self._planned.rank]
        if own > self._largest:
            self._largest, self._grows_after = own, self._step + ahead
        self._window = 0
        self._windows.clear()


def _read_figures(exchanged: Sequence[float]) -> RankFigures:
    """A rank's figures, in which what isn't known came as UNKNOWN."""
    return RankFigures(*(math.nan if each == UNKNOWN else each for each in exchanged))
