"""Train with a plan in Lightning, by means of a strategy.

Write `L.Trainer(strategy=split.strategy(), use_distributed_sampler=False)`. Each batch of the
trainer is this rank's share of a global batch. Losses are weighted before the backward pass, in
automatic and in manual optimization. All ranks have the same number of passes per batch, because
each pass that logs a metric communicates with the other ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from . import lightning_private as private
from .errors import RequestError
from .shares.whole_rows import even, gradient_weight
from .torch.planned import PlannedTraining
from .torch.rows.loader import StepLoader, StepSampler
from .torch.rows.sampler import UnevenBatchSampler
from .torch.step.checks import check_memory
from .torch.step.part import OfPart, Part, make_parts, weigh_by_count
from .torch.step.wrapped import check_normalization
from .torch.sums.collectives import own_collectives
from .torch.sums.exchange import Exchange

try:
    from .lightning_audits import ModuleAudit
    from .lightning_passes import (
        LIGHTNING,
        PassMetrics,
        check_module_part,
        extract_loss,
        has_argument,
    )
    from .lightning_report import Report as Report

    DDPStrategy: Any = import_module(f"{LIGHTNING}.strategies").DDPStrategy
except ImportError as error:
    raise RequestError(
        f"lightning can't be imported ({error}).", 'Install it: pip install "evener[lightning]".'
    ) from error


class PlanStrategy(DDPStrategy):  # type: ignore[misc]  # lightning isn't followed
    """Strategy for a Lightning Trainer that trains with the shares and passes of a plan.

    It extends DDPStrategy. Losses are weighted so that the gradient is that of the global batch.

    - `passes`: number of gradient-accumulation passes per batch.
    - `count`: function that returns the denominator of the mean loss of some rows, such as their
      number of tokens; None means the number of rows.
    - `check`: audit the gradients of some batches.
    """

    loaders_in_checkpoints = True

    def __init__(
        self,
        planned: PlannedTraining,
        passes: int,
        count: OfPart | None,
        check: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.set_plan(planned, passes, count, check)

    def set_plan(
        self, planned: PlannedTraining, passes: int, count: OfPart | None, check: bool
    ) -> None:
        """Store the plan, and reset the state of the current batch.

        `passes` is the number of passes per batch. `count` returns the denominator of the mean loss
        of some rows; None means the number of rows. `check` turns on audits.
        """
        # code that creates a strategy without `__init__` calls this too
        self._planned, self._passes, self._count, self._checks = planned, passes, count, check
        planned.weights.weigh = "trainer"
        self._audit = ModuleAudit(self)
        self._newest = 0  # number of the latest batch in the epoch
        self._rows = 0  # rows of the current global batch
        self._parts: list[Part] = []  # the passes of this rank's share
        self._arguments: tuple[Any, ...] = ()  # arguments of training_step
        self._begins = False  # no pass of the batch has been computed yet
        self._turns: Iterator[Part] = iter(())  # the remaining passes of the batch
        self._part: Part | None = None  # the part being computed
        self._put_back: Callable[[], None] = lambda: None  # restores what the part has logged
        self._recovery = planned.passes.recovery
        self._exchanges: list[Exchange] = []  # exchanges of gradients; empty if DDP sums them
        self._metrics: PassMetrics
        self._has_metrics = False  # True once `setup` has created `_metrics`

    @property
    def trains(self) -> bool:
        """Whether this strategy's trainer is running `fit`."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is None or trainer.strategy is not self:
            return False
        return bool(trainer.state.fn == "fit" and trainer.state.status == "running")

    @property
    def planned(self) -> PlannedTraining:
        """The training run that uses the plan, with this rank's shares and timers."""
        return self._planned

    @property
    def count(self) -> OfPart | None:
        """User function that returns the denominator of a mean loss, such as the number of tokens.

        None means the number of rows.
        """
        return self._count

    @property
    def root_device(self) -> Any:
        """Device of this rank."""
        return self._planned.device

    def make_loader(
        self, dataset: Any, rows: UnevenBatchSampler, options: dict[str, Any]
    ) -> StepLoader:
        """Return a DataLoader with this rank's rows of each global batch.

        `options` are DataLoader arguments.
        """
        loader = StepLoader(
            dataset,
            StepSampler(rows),
            on_begin=partial(self._begin_loop, rows),
            before_fetch=self._end_batch,
            **options,
        )
        loader.strategy = self
        if not self.loaders_in_checkpoints:
            loader.__dict__.update(state_dict=None, load_state_dict=None)
        if self._planned.rebalancing is not None and self._passes > 1:
            self._planned.rebalancing.passes = (self._passes,) * self._planned.world
        # Lightning may fetch one more batch to find the epoch's end
        self._planned.follow(rows, loader.drawn_ahead + 1)
        if self._checks:
            self._planned.compare_data(dataset, loader.collate_fn, rows)
        return loader

    def _begin_loop(self, rows: UnevenBatchSampler) -> None:
        """Turn off shuffling if the trainer's option `overfit_batches` is set, as Lightning does.

        The loader calls this when an iteration begins. If the user has given an order for the rows,
        nothing changes.
        """
        if self.trains and self.lightning_module.trainer.overfit_batches and rows.order is None:
            rows.shuffle = False  # as Lightning does with its own loaders

    def _end_batch(self) -> None:
        """End the step, before the next batch is drawn.

        Raises RequestError if the trainer uses another strategy, which wouldn't weight losses.
        """
        if not self.trains:
            raise _other_strategy()
        self._planned.end()

    def setup(self, trainer: Any) -> None:
        """Check the trainer's options, and prepare the model for weighted gradients.

        Raises RequestError for an option that can't be combined with a plan.
        """
        if self.trains:
            self._check(trainer)
        super().setup(trainer)
        self.prepare_metrics()
        if self.trains:  # only now does the model have its final layers
            self.sum_by_shares()

    def prepare_metrics(self) -> None:
        """Create the object that averages metrics over passes, and prepare retries of passes.

        If a pass runs out of memory, `check_module_part` is called before the pass is divided. It
        raises RequestError if smaller passes would change the gradient.
        """
        self._metrics = PassMetrics(
            self.lightning_module, self.root_device, super().reduce, self._planned.timer
        )
        self._has_metrics = True
        self._recovery.check = partial(check_module_part, self)

    def sum_by_shares(self) -> None:
        """Replace DDP's all-reduce with evener's weighted sum of gradients."""
        # DistributedDataParallel's all-reduce can't be resumed after an error
        rows = (rows for share in self._planned.ranks.batches for rows in even(share, self._passes))
        check_normalization(self.model, "loss", self._planned.world, rows)
        self._exchanges = self._planned.weights.make_exchanges(self.model)
        self._disable_retries_for_searches()
        if self._planned.world > 1:
            self._share_sigterm()

    def _share_sigterm(self) -> None:
        """Let all ranks stop after the same batch if the first rank gets SIGTERM."""
        # If another rank receives SIGTERM but the first doesn't, that rank stops by itself one
        # batch later. Lightning's own handler would synchronize with the other ranks immediately,
        # while they may be in a step's all-reduce; the one installed here only records the signal.
        # The ranks meet over gloo, on their hosts, so that Lightning's loop doesn't wait for its
        # GPU.
        loop, trainer, group = (
            self._trainer.fit_loop.epoch_loop,
            self._trainer,
            dist.new_group(backend="gloo"),
        )
        stop, connector = getattr(loop, private.ASKS), private.signal_connector(trainer)
        own = private.sigterm_handler(trainer)
        noted = list[None]()  # one entry for SIGTERM, and one for each later check

        def ask() -> None:
            handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
            handlers[:] = [
                (lambda *_: noted.append(None)) if handler == own else handler
                for handler in handlers
            ]
            sent = torch.tensor([bool(noted or trainer.received_sigterm)])
            with own_collectives():
                dist.broadcast(sent, 0, group=group)
            noted.extend([None] * bool(noted))
            connector.received_sigterm |= bool(sent) or len(noted) > 2
            if sent:
                stop()

        setattr(loop, private.ASKS, ask)

    def configure_ddp(self) -> None:
        """Wrap the model in DistributedDataParallel, unless there is a single rank."""
        if self._planned.world > 1:
            super().configure_ddp()

    def teardown(self) -> None:
        """Drop references to the model and its passes at the end of a run."""
        self._exchanges, self._turns, self._part = [], iter(()), None
        vars(self._trainer.fit_loop.epoch_loop).pop(private.ASKS, None)
        self.model = self.lightning_module
        super().teardown()

    def _check(self, trainer: Any) -> None:
        if private.divides_rows(trainer):
            raise RequestError(
                "Lightning would share the rows of split.loader out again, equally.",
                "Write L.Trainer(..., use_distributed_sampler=False).",
            )
        if not self.lightning_module.automatic_optimization:
            self._planned.weights.computes_at_once = True  # passes can't be computed again
        if self._passes > 1 and not self.lightning_module.automatic_optimization:
            raise RequestError(
                f"The plan takes {self._passes} passes for a step, which manual optimization "
                f"doesn't know of.",
                (
                    "Use automatic optimization, or a plan without passes (evener balance --micro "
                    "off)."
                ),
            )

    def on_train_start(self) -> None:
        """Check that all batches come from a single loader, which this strategy has made.

        Raises RequestError if they don't, or if training_step takes batches from the loader itself.
        Also raises it for LBFGS or a learning-rate finder if there are several passes.
        """
        self._disable_retries_for_searches()
        given = private.loaders(self._trainer.fit_loop)
        if len(given) != 1 or getattr(given[0], "strategy", None) is not self:
            raise RequestError(
                "The training data don't come from split.loader, or from more than one loader.",
                "Call split.loader(dataset) once, after split.strategy(), and give it to "
                "trainer.fit or return it from"
                " train_dataloader().",
            )
        if has_argument(self.lightning_module.training_step, "dataloader_iter", explicit=True):
            raise RequestError(
                "training_step(dataloader_iter) takes batches itself, so evener can't know "
                "which one a loss is of.",
                "Write training_step(batch, batch_idx).",
            )
        if self._passes > 1 and self._searches:
            who = "LBFGS" if self._has_lbfgs else "The search for a learning rate"
            other = "another optimizer" if self._has_lbfgs else "search on one device alone"
            raise RequestError(
                f"{who} needs the loss of the whole batch, and a plan with passes has only a "
                f"pass's at a time.",
                f"Use a plan without passes (evener balance --micro off), or {other}.",
            )

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def _has_lbfgs(self) -> bool:
        return any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers)

    @property
    def _searches(self) -> bool:
        """Whether the learning-rate finder or LBFGS is in use.

        Both make decisions that depend on the loss, so all ranks must then see the same loss.
        """
        finds_rate = any(map(private.searches_rate, self._trainer.callbacks))
        return finds_rate or self._has_lbfgs

    def _disable_retries_for_searches(self) -> None:
        """Turn off retries of failed passes if the learning-rate finder or LBFGS is used."""
        if self._searches:
            self._planned.weights.computes_at_once = True

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, unless it is divided into passes."""
        # passes are moved when they are computed
        if self._passes > 1 and self._trainer.training:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Run a validation step, whose time doesn't count as part of a training step."""
        self._planned.timer.note_validation()
        return super().validation_step(*arguments, **keywords)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a step: divide the batch into passes, and report the previous step."""
        loader: StepLoader = private.loaders(self._trainer.fit_loop)[0]
        loader.done = batch_idx + 1
        self._newest = batch_idx
        sizes = loader.take(batch_idx)
        self._planned.begin(sizes)
        self._planned.weights.look_for_tensors()
        self._planned.weights.note_lengths(batch)
        self._planned.report()
        private.logged(self._trainer).batch_size = sizes[self._planned.rank]
        self._rows, self._parts, self._begins = sum(sizes), self._cut_batch(batch, sizes), True

    def _cut_batch(self, batch: Any, sizes: tuple[int, ...]) -> list[Part]:
        """Divide a batch into passes, and set each pass's weight in the loss of the global batch.

        `sizes` are the ranks' row counts. A pass without rows gets one row with weight 0.
        """
        rank = self._planned.rank
        parts = make_parts(batch, sizes[rank], max(1, sizes[rank]), lambda loss: loss, self._passes)
        if self._count is not None:
            weigh_by_count(parts, self._count_rows, sizes, rank, self._planned.add_up)
        for part in parts:
            part.weight = part.weight * gradient_weight(sizes, rank)  # weight in the global batch
        return parts

    def _count_rows(self, part: Part) -> Any:
        return self._count(part) if part.rows and self._count else 0

    def training_step(self, *arguments: Any) -> Any:
        """Compute the loss of the batch's first pass; `backward` computes the other passes."""
        # each pass is computed after the previous one's memory is freed
        self._arguments = arguments
        self._metrics.begin()
        again = self._exchanges  # the gradient exchanges whose passes can be retried
        if not self.lightning_module.automatic_optimization:
            again, self._recovery.final = [], _MANUAL
        self._turns = self._planned.passes.take(
            self._parts, [self.model], again, begins=self._begins, move=False
        )
        self._begins = False
        result = self._compute_next_pass()
        if not self.lightning_module.automatic_optimization:
            self._audit_step()
        return result

    def find_difference(self, loader: Any) -> str:
        """Compare the gradients of shares and of the whole batch, for the loader's first batch.

        Returns how they differ, or "" if they agree or if checks are off.
        """
        return self._audit.find_difference(loader) if self._checks else ""

    def _audit_step(self) -> None:
        """Audit the gradients of the step that was just computed, if checks are on."""
        if self._checks and self.trains:
            loader = private.loaders(self._trainer.fit_loop)[0]
            self._audit.after_step(loader, self._newest, self._arguments[1:])

    def _compute_next_pass(self) -> Any:
        """Run training_step on the next pass, with retries, and return its result.

        The result is None if there are no more passes.
        """
        for part in self._turns:
            self._part, self._put_back = part, self._metrics.save_state()
            with part:
                result = self._compute(part)
            if not part.error:
                return result
            self._put_back()
        self._part = None
        return None

    def _compute(self, part: Part) -> Any:
        _, *others = self._arguments
        batch = part.batch if self._passes == 1 else super().batch_to_device(part.batch)
        rows = part.rows if self._count is None else part.weight * self._rows
        self._planned.weights.in_pass = self._passes > 1 or part.rows < part.turn.planned
        try:
            with self._metrics.counting(part, rows):
                result = super().training_step(batch, *others)
                return self._share_loss(result) if self._searches else result
        finally:
            self._planned.weights.in_pass = False

    def _share_loss(self, result: Any) -> Any:
        """Set the loss's value to the mean over ranks, without changing its gradient.

        Code that makes decisions based on the loss then makes the same ones on all ranks.
        """
        loss = extract_loss(result)
        loss = self.reduce(loss.detach().clone()) + (loss - loss.detach())
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass, and then forward and backward for the batch's other passes.

        Each loss is weighted so that the mean of the ranks' gradients is the global batch's
        gradient. In manual optimization, only one backward pass runs. Raises RequestError if
        training_step returns None after an earlier pass of the batch had a loss.
        """
        loss, result = closure_loss, None
        while self._part is not None:
            part = self._part
            with part:
                result = self._go_backward(part, loss, *args, **kwargs)
            if part.error:
                loss = closure_loss.detach_()  # otherwise the trainer would keep the pass's memory
                self._put_back()
            elif not self.lightning_module.automatic_optimization:
                return result
            loss = extract_loss(self._compute_next_pass())
            if self._part is not None:
                if loss is None:
                    raise RequestError(
                        "training_step returned None for some rows of a batch, and the "
                        "others are learned already.",
                        "Return a loss for every batch, or None before anything is computed.",
                    )
                loss = loss / self._trainer.accumulate_grad_batches
        return result

    def _go_backward(self, part: Part, loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        weighed = loss * (part.weight * self._planned.world)
        part.computed = True
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(weighed)
        weighed = precision.pre_backward(weighed, module)
        self._planned.passes.open()
        precision.backward(weighed, module, optimizer, *args, **kwargs)
        self._planned.passes.close()
        self._metrics.end(part)
        return precision.post_backward(weighed, module)

    def pre_backward(self, closure_loss: Any) -> None:
        """Prepare the exchange of gradients between ranks, before a backward pass."""
        # needed only in manual optimization, whose backward pass runs within training_step
        if not self._exchanges:
            super().pre_backward(closure_loss)
        elif not self.lightning_module.automatic_optimization and self._planned.world > 1:
            for exchange in self._exchanges:
                exchange.watch([closure_loss], self.model.require_backward_grad_sync)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Take an optimizer step, and audit the gradients before it if an audit is due.

        Raises DeviceError before the first step if the optimizer's state won't fit in memory.
        """

        # has an entry after this step's audit, because LBFGS calls the closure several times
        audited = list[None]()

        def compute() -> Any:
            result = closure()
            if not audited and self.lightning_module.automatic_optimization:
                audited.append(None)
                self._audit_step()
            trained = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            if trained:
                check_memory(optimizer, trained)
            return result

        return super().optimizer_step(optimizer, compute, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; in training, a mean is weighted by rows."""
        if not self._has_metrics:
            return super().reduce(tensor, group, reduce_op)
        return self._metrics.reduce(tensor, group, reduce_op)


_MANUAL = (  # why a failed pass isn't computed again, and the remedy
    "training_step takes the steps of its optimizers itself",
    "Use automatic optimization, or split.step in a loop of your own.",
)


def _other_strategy() -> RequestError:
    return RequestError(
        "split.strategy() was called, but the trainer doesn't use the strategy that it returned.",
        "Write L.Trainer(strategy=split.strategy(), use_distributed_sampler=False); for a "
        "loop of your own, leave"
        " split.strategy() out.",
    )
