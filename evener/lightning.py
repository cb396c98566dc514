"""Train by a plan with Lightning: `L.Trainer(strategy=split.strategy(), use_distributed_sampler=False)`.

The strategy weighs the loss of each pass before its backward pass, in automatic and in manual optimization, and makes a
global batch of as many passes as the plan's slowest-memory share needs: ranks meet in every pass where they log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evener.errors import RequestError
from evener.torch_split.model_checks import check_normalization
from evener.torch_split.pass_loader import PassLoader
from evener.torch_split.pass_sampler import PassSampler
from evener.torch_split.rebalancing import Rebalancing
from evener.torch_split.sampler import UnevenBatchSampler
from evener.torch_split.step_reporter import StepReporter

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise RequestError(
        f"lightning can't be imported ({error}).", 'Install it: pip install "evener[lightning]".'
    ) from error


class PlanStrategy(DDPStrategy):  # type: ignore[misc]  # lightning isn't followed
    """DistributedDataParallel with uneven shares; `options` are DDPStrategy's. Made by `Split.strategy`."""

    def __init__(
        self, split: Any, passes: int, reporter: StepReporter, rebalancing: Rebalancing | None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._split, self._passes, self._reporter, self._rebalancing = split, passes, reporter, rebalancing
        self._loader: PassLoader | None = None
        self._accumulated = 0  # global batches of an optimizer step, by the trainer; 0 before the first training

    @property
    def root_device(self) -> Any:
        """The device of this rank's share."""
        return self._split.device

    def make_loader(self, dataset: Any, rows: UnevenBatchSampler, options: dict[str, Any]) -> PassLoader:
        """The training data of this rank, a batch for each pass."""
        self._loader = PassLoader(dataset, PassSampler(rows, self._passes), **options)
        if self._rebalancing is not None:
            self._rebalancing.fix_passes([self._passes] * self._split.world)
            self._rebalancing.add(rows, self._loader.drawn_ahead + 1)  # Lightning may look for the epoch's end
        return self._loader

    def setup(self, trainer: Any) -> None:
        """Refuse what would share rows out again; passes are accumulated beside the trainer's own accumulation."""
        if trainer.state.fn == "fit":
            self._check(trainer)
            self._accumulated = self._accumulated or trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = self._accumulated * self._passes
        super().setup(trainer)
        if trainer.state.fn == "fit":  # layers are those that train only now
            rows = max(-(-share // self._passes) for share in self._split.shares)
            check_normalization(self.model, "loss", self._split.world, rows if self._passes > 1 else None)

    def _check(self, trainer: Any) -> None:
        if trainer._accelerator_connector.use_distributed_sampler:
            raise RequestError(
                "Lightning would share the rows of split.loader out again, evenly.",
                "Write L.Trainer(..., use_distributed_sampler=False).",
            )
        if self._loader is None:
            raise RequestError(
                "The training data don't come from split.loader.",
                "Write split.loader(dataset) after split.strategy(), and give it to trainer.fit.",
            )
        if self._passes > 1 and not self.lightning_module.automatic_optimization:
            raise RequestError(
                f"The plan takes {self._passes} passes for a step, which manual optimization doesn't know of.",
                "Use automatic optimization, or a plan without passes (evener balance --micro off).",
            )

    @property
    def _loaded(self) -> PassLoader:
        assert self._loader is not None  # checked as the training is set up
        return self._loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One pass of the loader's."""
        trainer = self.lightning_module.trainer
        self._loaded.done = trainer.fit_loop.epoch_loop.batch_idx + 1
        if self._loaded.done % self._passes == 1 % self._passes:
            self._reporter.finish()
            self._reporter.timer.begin(self._loaded.take((self._loaded.done - 1) // self._passes))
        if not self._pass_rows():
            trainer._results.batch_size = 0  # a row that only keeps step counts in no logged mean
        result = super().training_step(*args, **kwargs)
        if self._loaded.done % self._passes == 0:
            self._reporter.report(sum(self._step_sizes()[0]))
        return result

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss by its pass's rows of the global batch, so that the mean over ranks and passes is the batch's."""
        loss = closure_loss * (self._pass_rows() * self._passes * self._split.world / self._step_sizes()[1])
        self._reporter.timer.end_pass(loss)
        return super().backward(loss, *args, **kwargs)

    def _pass_rows(self) -> int:
        """Rows that count of the pass in hand."""
        return self._step_sizes()[0][(self._loaded.done - 1) % self._passes]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy, but a mean of whole numbers isn't cut off: Lightning divides by the mean number of rows."""
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        with self._reporter.timer.meeting():
            return super().reduce(tensor.double() if whole else tensor, group, reduce_op)

    def _step_sizes(self) -> tuple[Sequence[int], int]:
        """The rows of each of this rank's passes in the global batch in hand, and of all ranks."""
        step = (self._loaded.done - 1) // self._passes
        passes: PassSampler = self._loaded.batch_sampler
        return passes.pass_sizes(step), passes.global_rows(step)
