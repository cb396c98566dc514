"""One rank of a training run with unequal shares: its rows, its models and its steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from ..errors import RequestError
from ..training.ending import install_interrupt_watchdog
from ..training.launched import launched_device
from ..training.row_assignment import make_row_assigner
from .audit import same_data
from .audit.same_data import RankData
from .messages import gather_messages
from .ranks.own_work import StepReporter, make_timer
from .ranks.peers import explain_at_exit, watch_peers
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
    can_time_compute,
    check_exchange,
    check_model,
    check_normalization,
    is_sharded,
    wrap_model,
)
from .sums.collectives import add_up, own_collectives
from .sums.noise import RankNoise, refuse_noise
from .training_audits import TrainingAudits


class PlannedTraining:
    """One rank of a training run with unequal shares, for users' loops and for library trainers.

    Arguments:

    - `rank_shares`: the shares and this rank's device.
    - `weigh`: what is weighted. With "gradients", gradients are weighted in the all-reduce. With
      "loss", the user's loop calls `scale`. With "trainer", a library's adapter multiplies
      the loss of each pass by the pass's fraction of the global batch, times the number of
      ranks.
    - `strict`: whether to raise an error, instead of a warning, if the plan was made for
      another model or on other devices, or if a late audit fails.
    - `journal`: whether to record the training run.
    - `rebalance`: whether shares follow the measured speed of the ranks.
    - `noise`: whether to measure the gradient noise scale.
    - `backend`: backend of the process group; None chooses it by device.

    An adapter calls `begin` for each global batch, and `report` once it is trained. Every rank has
    to call every method.
    """

    def __init__(
        self,
        rank_shares: RankShares,
        weigh: Weigh = "gradients",
        *,
        strict: bool = False,
        journal: bool = False,
        rebalance: bool = False,
        noise: bool = False,
        backend: str | None = None,
    ) -> None:
        self.rank, self.world, self.device = rank_shares.rank, rank_shares.world, rank_shares.device
        self.plan, self.strict = rank_shares.plan, strict
        claim_device(
            self.device,
            rank_shares.share,
            rank_shares.plan.layout.processes if rank_shares.plan else 1,
        )
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
        self.timer = make_timer(self.device, single_rank=self.world == 1)
        if self.noise is not None:
            self.timer.begun = self.noise.begin
        self.reporter = StepReporter(rank_shares, self.timer, journal, self.noise)
        self.weights, self.loaders = (
            BatchWeights(rank_shares, weigh, self.timer, self.noise),
            LoaderStates(),
        )
        self.passes = Passes(self.rank, self.device, self.reporter.note_retreat)
        free_before_update(self.device)
        self.listeners: list[Callable[[tuple[int, ...]], None]] = []
        self._samplers: weakref.WeakSet[UnevenBatchSampler] = weakref.WeakSet()
        # The training data sets with their collators and samplers. None once they were compared.
        self._data: list[tuple[Any, Any, UnevenBatchSampler]] | None = []
        self.audits = TrainingAudits(self)
        self._release = OPTIMIZER_CHECK.hooks.hold(self)
        self.ahead = 0  # maximum number of batches that a loader draws ahead
        self._later: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # see begin_even
        self.rebalancing: Rebalancing | None = None
        if rebalance and self.world > 1:
            self.rebalancing = Rebalancing(self)
            self.timer.time_all()
            self.reporter.pending = self.rebalancing.describe_pending
        explain_at_exit(weakref.WeakMethod(self.passes.recovery.advise))
        if self.world > 1:
            watch_peers(self.device, self.timer.now)
            if not launched_device():  # otherwise evener's launcher does it
                install_interrupt_watchdog()

    @property
    def ranks(self) -> RankShares:
        """Current shares of all ranks."""
        return self.weights.shares

    @ranks.setter
    def ranks(self, now: RankShares) -> None:
        """The current shares of all ranks."""
        self.weights.shares = self.reporter.shares = now

    def close(self) -> None:
        """Stop reporting and auditing, and remove this run's hooks from PyTorch."""
        self.reporter.close()
        self.timer.release()
        self.audits.release()
        self._release()

    def leave(self) -> None:
        """End this training run and release its models, so that another run can train them.

        Every rank has to call this.
        """
        if self.rebalancing is not None:
            self.rebalancing.stop()
            self.rebalancing = None
        self.weights.leave()
        OPTIMIZER_CHECK.forget()
        self.close()

    # ------------------------------------------------------------------ rows

    def sampler(
        self, rows: int, *, lengths: Any = None, shares: Sequence[int] = (), **options: Any
    ) -> UnevenBatchSampler:
        """Return a batch sampler of this rank's rows.

        Arguments:

        - `rows`: number of rows in the data set.
        - `lengths`: number of tokens of each row, to assign rows by length, or None.
        - `shares`: rows of a global batch per rank; by default the current shares.
        - `options`: further arguments of UnevenBatchSampler.
        """
        chosen = tuple(shares) or self.ranks.batches
        if lengths is None:
            if not all(self.ranks.batches):
                options["without_rows"] = True
            return UnevenBatchSampler(rows, chosen, self.rank, **options)
        now = self.ranks
        assigner = make_row_assigner(now.batches, now.micros, now.shares)
        return LengthSampler(rows, chosen, self.rank, lengths=lengths, assigner=assigner, **options)

    def follow(self, sampler: UnevenBatchSampler, ahead: int) -> None:
        """Let shares change during a loop over this sampler.

        `ahead` is the maximum number of batches that the loader draws before the loop uses them.
        """
        sampler.changes |= self.rebalancing is not None or self.begins_even
        self._samplers.add(sampler)
        self.ahead = max(self.ahead, ahead)

    def compare_data(
        self, dataset: Any, collate: Callable[[list[Any]], Any], sampler: UnevenBatchSampler
    ) -> None:
        """Register a training data set, to check that all ranks have the same one.

        Ranks compare their data sets once, at the end of the first trained step. `sampler`
        determines the order of rows, and `collate` turns a list of rows into a batch.
        """
        if self._data is not None:
            others = [each for each in self._data if each[0] is not dataset]
            self._data = [*others, (dataset, collate, sampler)]

    def summarize_data(self) -> list[RankData]:
        """Return summaries of the data sets that ranks compare, and forget the data sets.

        They are compared only once, so later calls return [].
        """
        data, self._data = self._data, None
        return [same_data.summarize(*each) for each in data or ()]

    @property
    def _compares_data(self) -> bool:
        """Whether the ranks still have to compare their data sets."""
        # `evener run` (follows_launcher) compares data sets in its own way
        return self._data is not None and self.world > 1 and not self.audits.follows_launcher

    def _compare_data(self) -> None:
        """Raise RequestError on every rank if the ranks have different data sets.

        Every rank has to call this.
        """
        own = self.summarize_data()
        with own_collectives():
            every = gather_messages(own, list[RankData])
        # ranks with different numbers of loaders can't be compared
        if len(set(map(len, every))) > 1:
            return
        for loaded in zip(*every, strict=True):
            difference = same_data.find_difference(loaded)
            if difference:
                raise RequestError(difference, same_data.REMEDY)

    def change_shares(self, shares: tuple[int, ...], micros: tuple[int, ...], ahead: int) -> None:
        """Change the shares of all batches that come after the next `ahead` batches.

        `micros` has the maximum rows per pass of each rank.
        """
        self.ranks = msgspec.structs.replace(self.ranks, batches=shares, micros=micros)
        for sampler in self._samplers:
            sampler.change_shares(shares, ahead)

    def stay_even(self) -> None:
        """Use equal shares for the rest of the training run, and stop rebalancing.

        The change takes effect after the batches that loaders have already drawn.
        """
        self._later = None
        if self.rebalancing is not None:
            self.rebalancing.stop()
            self.rebalancing = None
        even = (self.ranks.global_batch // self.world,) * self.world
        self.change_shares(even, even, self.ahead)
        self.passes.recovery.limit.predicted = None

    @property
    def begins_even(self) -> bool:
        """Whether the training run is still in its first steps, which have equal shares."""
        return self._later is not None

    def begin_even(self) -> None:
        """Train with equal shares until `leave_even` is called.

        This has to be called before the first step.
        """
        self._later = self.ranks.batches, self.ranks.micros
        for sampler in self._samplers:
            sampler.changes = True
        even = (self.ranks.global_batch // self.world,) * self.world
        self.change_shares(even, even, 0)

    def leave_even(self, ahead: int) -> None:
        """Change from equal shares to the plan's shares after `ahead` more batches.

        Nothing happens unless `begin_even` was called.
        """
        if self._later is not None:
            shares, micros = self._later
            self._later = None
            self.change_shares(shares, micros, ahead)

    # ------------------------------------------------------------------ models

    def wrap(self, model: Any, **options: Any) -> Any:
        """Return the model on its device, wrapped so that gradients are weighted and summed.

        Every rank has to call this. With a single rank, the model is only moved to its device. A
        model that FSDP2 shards (with `weigh="loss"`), or that is already wrapped, isn't wrapped
        again. The only `options` of DistributedDataParallel that have an effect are
        `bucket_cap_mb`, `broadcast_buffers` and `process_group`. Raises RequestError if the model's
        gradients can't be weighted.
        """
        self.check_whole()
        weigh = self.weights.weigh
        check_normalization(model, weigh, self.world, self.ranks.pass_rows)
        check_model(model, self.plan, self.strict)
        if self.world == 1:
            model = model.to(self.device)
            self.weights.watch_forward(model, self.device)
            return model
        check_exchange(model)
        self.timer.can_time_compute = can_time_compute(model, self.rebalancing is not None)
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
            self.weights.watch_forward(model, self.device)
            return model
        model, exchange = wrap_model(
            model, self.device, self.weights.forward, options, by_loss=weigh != "gradients"
        )
        self.weights.weigh_exchange(model, exchange)
        if self.rebalancing is not None and not self.timer.can_time_compute:
            raise RequestError(
                "DistributedDataParallel's communication hook or mixed_precision needs its "
                "own sums, which don't show a"
                " rank's own work.",
                "Leave rebalance out, or the hook.",
            )
        return model

    def follow_averaged(self, model: Any) -> None:
        """Prepare to weight the losses of a model whose gradients FSDP or DeepSpeed averages.

        Raises RequestError if it can't be trained with unequal shares.
        """
        self.check_whole()
        check_normalization(model, self.weights.weigh, self.world, self.ranks.pass_rows)
        check_model(model, self.plan, self.strict)
        if self.noise is not None:
            raise refuse_noise("FSDP or DeepSpeed")
        time_waits(self.timer)
        self.weights.equal_passes = self.weights.are_averaged = True
        self.weights.watch_forward(model, self.device)

    def check_whole(self) -> None:
        """Raise a RequestError if the plan shards the model.

        Callers that don't support sharded models use this.
        """
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
        """End the previous global batch, and begin one; `sizes` has the row count of each rank.

        Adapters call this. The loader of a Split begins its batches itself.
        """
        self.end()
        self.timer.begin(tuple(sizes))
        self.weights.begin(sizes)

    def end(self) -> None:
        """End the current global batch.

        If it was trained, `listeners` are called with the row count of each rank, and may change
        the shares. Raises RequestError after the first step if ranks have different data sets.
        """
        is_over = self.timer.finish()
        if self._compares_data and self.timer.has_trained:
            self._compare_data()
        if is_over:
            for listener in tuple(self.listeners):
                listener(self.timer.sizes)

    def report(self, rows: int | None = None, tokens: tuple[int, int] = (0, 0)) -> None:
        """Report a finished step to the monitor. The loader of a Split does this itself.

        `rows` is the number of rows that this rank computed; None means those of the current batch.
        `tokens` says how many tokens they have, without and with padding; zeros mean unknown.
        """
        self.reporter.report(self.weights.sizes[self.rank] if rows is None else rows, tokens)

    def step(
        self, batch: Any, compute: OfPart, count: OfPart | None = None, check: bool = True
    ) -> Any:
        """Compute the loss and gradients of a batch, and return this rank's mean loss.

        Arguments:

        - `compute`: returns the mean loss of a part of the batch.
        - `count`: returns the denominator of this mean, such as the part's token count; None means
          its row count.
        - `check`: whether to audit the loss, by computing a few rows again in parts.

        For example: `split.step(batch, lambda part: criterion(model(part.batch[0]),
        part.batch[1]))`. Gradients are all-reduced once, and the result can be passed to
        `Split.mean`. If a pass runs out of memory, its rows are computed again in smaller passes.
        Every rank has to call this for each batch.
        """
        total = train_batch(self, batch, compute, count)
        if check:
            self.audits.after_step(batch, compute, count)
        return total

    def parts(
        self, batch: Any, count: OfPart | None = None, models: Sequence[Any] | None = None
    ) -> Iterator[Part]:
        """Yield the parts of this rank's batch, one for each pass of the plan.

        Compute the loss of each `part.batch`, and call `part.backward(loss)`; gradients are
        all-reduced in the last part. If the loop's body is inside `with part:`, a part that runs
        out of memory is yielded again in smaller parts.

        Arguments:

        - `count`: returns the denominator of a part's mean loss, such as its token count; None
          means its row count.
        - `models`: the models that are trained; None means all wrapped models.

        Every rank has to call this for each batch.
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
        """Return the sum of a value over all ranks.

        The sum is int64 for an integer tensor with dimensions, and float64 otherwise. Every rank
        has to call this.
        """
        return add_up(value, self.device, self.world, self.timer)
