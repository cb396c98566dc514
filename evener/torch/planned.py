"""One rank's training by a plan, the base of the adapters to every trainer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from ..errors import RequestError
from ..training.dealing import make_dealer
from ..training.ending import end_when_stuck
from ..training.launched import launched_device
from .ranks.others import explain_at_exit, watch_others
from .ranks.own_work import StepReporter, make_timer
from .ranks.ranks import RankShares, claim_device, join
from .ranks.waits import time_waits
from .rebalancing import Rebalancing
from .rows.loader import LoaderStates
from .rows.sampler import LengthSampler, UnevenBatchSampler
from .step.checks import OPTIMIZER_CHECK
from .step.part import OfPart, Part
from .step.recovery import free_before_update
from .step.step import Passes, take_parts, train_batch
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
    """One rank's training by a plan, the base of the adapters to every trainer.

    It sets up this process for its device. It has the samplers of rows, the check of the loss, the
    weighted sum of gradients, passes that survive running out of memory, the step times and their
    report, and shares that follow each rank's compute time (own work). `weigh` says what weights a
    batch by its rows: with "gradients" the sum of gradients does, with "loss" a call of `scale`,
    and with "trainer" an adapter, which multiplies each pass's loss by (its fraction of the global
    batch * the number of ranks). An adapter calls `begin` for each global batch and `report` once
    the batch is trained. Every rank has to call every method.
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
        free_before_update(self.device)
        self.listeners: list[Callable[[tuple[int, ...]], None]] = []
        self._samplers: weakref.WeakSet[UnevenBatchSampler] = weakref.WeakSet()
        self.audits = TrainingAudits(self)
        self._release = OPTIMIZER_CHECK.hooks.hold(self)
        self.ahead = 0  # the most batches that a loader draws before their turn
        self.rebalancing: Rebalancing | None = None
        if rebalance and self.world > 1:
            self.rebalancing = Rebalancing(self)
            self.timer.time_all()
            self.reporter.pending = self.rebalancing.describe_pending
        explain_at_exit(weakref.WeakMethod(self.passes.recovery.advise))
        if self.world > 1:
            watch_others(self.device, self.timer.now)
            if not launched_device():  # else evener's launcher does it
                end_when_stuck()

    @property
    def ranks(self) -> RankShares:
        """The shares of all ranks that are in force, by the plan or by the last rebalancing."""
        return self.weights.shares

    @ranks.setter
    def ranks(self, now: RankShares) -> None:
        self.weights.shares = self.reporter.shares = now

    def close(self) -> None:
        """Stop reporting, and remove the process-wide hooks that this training has registered."""
        self.reporter.close()
        self.timer.release()
        self.audits.release()
        self._release()

    # ------------------------------------------------------------------ rows

    def sampler(
        self, rows: int, *, lengths: Any = None, shares: Sequence[int] = (), **options: Any
    ) -> UnevenBatchSampler:
        """Return a sampler of this rank's row numbers in each global batch.

        `rows` is the number of rows in the data set. With `lengths`, the number of tokens of each
        row, rows are assigned so that ranks finish together. `shares` replaces the shares in force,
        for a validation; `options` are those of UnevenBatchSampler.
        """
        chosen = tuple(shares) or self.ranks.batches
        if lengths is None:
            if not all(self.ranks.batches):
                options["without_rows"] = True
            return UnevenBatchSampler(rows, chosen, self.rank, **options)
        now = self.ranks
        dealer = make_dealer(now.batches, now.micros, now.shares)
        return LengthSampler(rows, chosen, self.rank, lengths=lengths, dealer=dealer, **options)

    def follow(self, sampler: UnevenBatchSampler, ahead: int) -> None:
        """Change this sampler's shares whenever the shares of the training change.

        The sampler draws at most `ahead` batches before their turn.
        """
        sampler.changes |= self.rebalancing is not None
        self._samplers.add(sampler)
        self.ahead = max(self.ahead, ahead)

    def change_shares(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        """Change to these shares after the `ahead` batches that have been drawn already."""
        self.ranks = msgspec.structs.replace(self.ranks, batches=shares, micros=micros)
        for each in self._samplers:
            each.change_shares(shares, ahead)

    def stay_even(self) -> None:
        """Give each rank an equal number of rows from now on, and stop rebalancing.

        In every loop, the change comes once the batches drawn ahead have been trained.
        """
        if self.rebalancing is not None:
            self.rebalancing.stop()
            self.rebalancing = None
        even = (self.ranks.global_batch // self.world,) * self.world
        self.change_shares(even, even, self.ahead)

    # ------------------------------------------------------------------ models

    def wrap(self, model: Any, **options: Any) -> Any:
        """Wrap a model on this process's device so that its gradients are summed over the ranks.

        Returns the wrapped model; on one device, the model itself. Each rank's gradients are
        weighted by its rows. `options` are those of DistributedDataParallel, of which only
        `bucket_cap_mb`, `broadcast_buffers` and `process_group` have an effect. A model that is in
        DistributedDataParallel already, or that FSDP shards (with `weigh="loss"`), isn't wrapped
        again: the model itself is returned.

        Raises RequestError if the model's gradients can't be weighted.
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
        """Train a model by weighted losses if another library averages its gradients over ranks.

        Ranks wait for each other within passes, so a rank's compute time (own work) is the time of
        a pass without that waiting.
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
        """Raise RequestError if the plan has each device hold a part of the model."""
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
        """Begin a global batch, and end the one before; `sizes` are the rows of each rank.

        It is for adapters: a Split's loader begins its batches without it.
        """
        self.end()
        self.timer.begin(tuple(sizes))
        self.weights.begin(sizes)

    def end(self) -> None:
        """End a global batch; if it was trained, call `listeners` with its sizes.

        A listener may change the shares.
        """
        if self.timer.finish():
            for each in self.listeners:
                each(self.timer.sizes)

    def report(self, rows: int | None = None, tokens: tuple[int, int] = (0, 0)) -> None:
        """Report to the monitor that a step on this rank's rows is done.

        A Split's loader calls it itself. `rows` are by default this rank's rows in the current
        batch. `tokens` are the numbers of tokens in these rows, without and with padding.
        """
        self.reporter.report(self.weights.sizes[self.rank] if rows is None else rows, tokens)

    def step(
        self, batch: Any, compute: OfPart, count: OfPart | None = None, check: bool = True
    ) -> Any:
        """Compute forward and backward of a batch in the plan's passes.

        Returns this rank's mean loss, to give to `Split.mean`. `compute(part)` returns the mean
        loss of part.batch, over rows or over what `count(part)` counts: `split.step(batch, lambda
        part: criterion(model(part.batch[0]), part.batch[1]))`. Gradients are exchanged once. A pass
        that runs out of memory is computed again in smaller ones. Every rank has to call it for
        every batch. `check=False` skips the audits.
        """
        total = train_batch(self, batch, compute, count)
        if check:
            self.audits.after_step(batch, compute, count)
        return total

    def parts(
        self, batch: Any, count: OfPart | None = None, models: Sequence[Any] | None = None
    ) -> Iterator[Part]:
        """Yield this rank's batch in the plan's passes.

        Compute the loss of each part.batch, and call part.backward(loss). The last pass exchanges
        the gradients of `models`, by default of all wrapped models. `count(part)` is the divisor of
        a mean that isn't over rows, such as the number of tokens that aren't ignored. If the loop's
        body is in `with part:`, a part that runs out of memory comes again in smaller ones. Every
        rank has to call it for every batch.
        """
        parts = take_parts(self, batch, count, models)
        try:
            for part in parts:
                self.audits.watch_part(part, count)
                yield part
            self.audits.end_parts()
        finally:
            parts.close()
            self.audits.close()

    def add_up(self, value: Any) -> torch.Tensor:
        """Return the sum of a value over the ranks."""
        return add_up(value, self.device, self.world, self.timer)
