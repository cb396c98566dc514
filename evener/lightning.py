"""Train by a plan with Lightning: `L.Trainer(strategy=split.strategy(), use_distributed_sampler=False)`.

The trainer's batch is this rank's share of a global batch, so what it counts is global batches. The strategy weighs the
loss before its backward pass, in automatic and in manual optimization, and cuts a share that doesn't fit into passes:
as many on all ranks, because they meet in every pass where they log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .errors import RequestError
from .shares.whole_rows import bounds, even, gradient_weight
from .torch_split.batch_weights import BatchWeights
from .torch_split.gather import add_up
from .torch_split.kept_state import kept_state
from .torch_split.model_checks import check_normalization
from .torch_split.nested_batch import cut_rows
from .torch_split.parts import Part, weigh_by_count
from .torch_split.pass_loader import PassLoader
from .torch_split.pass_sampler import PassSampler
from .torch_split.rebalancing import Rebalancing
from .torch_split.sampler import UnevenBatchSampler
from .torch_split.step_reporter import StepReporter

try:
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics import Metric

    from .lightning_loss import check_module_loss
except ImportError as error:
    raise RequestError(
        f"lightning can't be imported ({error}).", 'Install it: pip install "evener[lightning]".'
    ) from error


class ShareLoader(PassLoader):
    """This rank's share of each global batch, for the trainer of one strategy."""

    def __init__(self, strategy: PlanStrategy, dataset: Any, rows: UnevenBatchSampler, options: dict[str, Any]) -> None:
        super().__init__(dataset, PassSampler(rows, 1), **options)
        self.strategy = strategy

    def __iter__(self) -> Any:
        """The batches; the first one raises RequestError if another strategy trains, which would weigh nothing."""
        if not self.strategy.trains:
            return iter(_refuse_other_strategy, None)
        rows = self.batch_sampler.sampler
        if self.strategy.lightning_module.trainer.overfit_batches and rows.order is None:
            rows.shuffle = False  # as Lightning does with a loader of its own
        return super().__iter__()


class PlanStrategy(DDPStrategy):  # type: ignore[misc]  # lightning isn't followed
    """DistributedDataParallel with uneven shares; `options` are DDPStrategy's. Made by `Split.strategy`."""

    def __init__(
        self,
        split: Any,
        passes: int,
        weights: BatchWeights,
        reporter: StepReporter,
        rebalancing: Rebalancing | None,
        count: Callable[[Part], Any] | None,
        check: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._split, self._passes, self._weights = split, passes, weights
        self._reporter, self._rebalancing, self._count, self._checks = reporter, rebalancing, count, check
        weights.weighed_by_trainer = True
        self.trains = False
        self._rows = 0  # of the current global batch
        self._parts: list[Part] = []  # of this rank's share of it
        self._arguments: tuple[Any, ...] = ()  # of its training_step
        self._open: Part | None = None  # the pass that is computed
        self._means: deque[tuple[Any, Any]] = deque()  # sum and weight over ranks, of each figure that a pass asks for

    @property
    def root_device(self) -> Any:
        """The device of this rank's share."""
        return self._split.device

    def make_loader(self, dataset: Any, rows: UnevenBatchSampler, options: dict[str, Any]) -> PassLoader:
        """The training data of this rank."""
        loader = ShareLoader(self, dataset, rows, options)
        if self._rebalancing is not None:
            self._rebalancing.fix_passes([self._passes] * self._split.world)
            self._rebalancing.add(rows, loader.drawn_ahead + 1)  # Lightning may look for the epoch's end
        return loader

    def setup(self, trainer: Any) -> None:
        """Refuse what would share rows out again, or step within a pass."""
        trains = trainer.state.fn == "fit"
        if trains:
            self._check(trainer)
        super().setup(trainer)
        self.trains = trains
        if trains:  # layers are those that train only now
            rows = [even(share, self._passes) for share in self._split.shares]
            largest = max(map(max, rows)) if self._passes > 1 else None
            check_normalization(self.model, "loss", self._split.world, largest, min(map(min, rows)))

    def teardown(self) -> None:
        """The training is over."""
        self.trains = False
        super().teardown()

    def _check(self, trainer: Any) -> None:
        if trainer._accelerator_connector.use_distributed_sampler:
            raise RequestError(
                "Lightning would share the rows of split.loader out again, evenly.",
                "Write L.Trainer(..., use_distributed_sampler=False).",
            )
        if self._passes > 1 and not self.lightning_module.automatic_optimization:
            raise RequestError(
                f"The plan takes {self._passes} passes for a step, which manual optimization doesn't know of.",
                "Use automatic optimization, or a plan without passes (evener balance --micro off).",
            )

    def on_train_start(self) -> None:
        """Before the first step, now that loaders and optimizers are there."""
        given = self._trainer.fit_loop._combined_loader.flattened
        if len(given) != 1 or getattr(given[0], "strategy", None) is not self:
            raise RequestError(
                "The training data don't come from split.loader, or from more than one loader.",
                "Call split.loader(dataset) once, after split.strategy(), and give it to trainer.fit or return it from"
                " train_dataloader().",
            )
        if isinstance(self._trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise RequestError(
                "training_step(dataloader_iter) takes batches itself, so nobody knows which one a loss is of.",
                "Write training_step(batch, batch_idx).",
            )
        if self._passes > 1 and self._searches:
            raise RequestError(
                "LBFGS goes by the loss of the whole batch, and a plan with passes has only a pass's at a time.",
                "Use a plan without passes (evener balance --micro off), or another optimizer.",
            )
        alone = self._split.world * self._passes == 1
        if self._checks and not alone and self.lightning_module.automatic_optimization:
            with self._weights.checking():
                check_module_loss(self, given[0], self._count)

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def _searches(self) -> bool:
        """True if an optimizer uses the loss's figure, not only its gradients."""
        return any(isinstance(each, torch.optim.LBFGS) for each in self.optimizers)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device as Lightning does; with several passes, each is moved when its turn comes."""
        if self._passes > 1 and self._trainer.training:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin the trainer's next batch."""
        loader: ShareLoader = self._trainer.fit_loop._combined_loader.flattened[0]
        loader.done = batch_idx + 1
        self._reporter.finish()
        sizes = loader.take(batch_idx)
        self._reporter.timer.begin(sizes)
        self._split.begin(sizes)
        self._reporter.report(self._split.rows)
        self._trainer._results.batch_size = self._split.rows
        self._rows, self._parts = sum(sizes), self._cut(batch, sizes)

    def _cut(self, batch: Any, sizes: tuple[int, ...]) -> list[Part]:
        """The passes of this rank's share; a pass without rows gets one row that counts nothing."""
        rank = self._split.rank
        rows = max(1, sizes[rank])
        parts = []
        for start, stop in bounds(even(sizes[rank], self._passes)):
            first, end = (start, stop) if start < stop else (0, 1)
            piece = batch if self._passes == 1 else cut_rows(batch, first, end, rows)
            parts.append(Part(piece, stop - start, (stop - start) / rows, lambda loss: loss))
        if self._count is not None:
            weigh_by_count(parts, self._count_rows, sizes, rank, self._add_up)
        for part in parts:
            part.weight = part.weight * gradient_weight(sizes, rank)  # of the global batch
        return parts

    def _count_rows(self, part: Part) -> Any:
        return self._count(part) if part.rows and self._count else 0

    def _add_up(self, own: torch.Tensor) -> torch.Tensor:
        return add_up(own, self.root_device, self._split.world, self._reporter.timer)

    def training_step(self, *arguments: Any) -> Any:
        """Compute the first pass of the batch; the others follow in `backward`, as each one's memory is free again."""
        self._arguments = arguments
        self._means.clear()
        return self._compute(self._parts[0])

    def _compute(self, part: Part) -> Any:
        batch, *others = self._arguments
        if self._passes > 1:
            batch = super().batch_to_device(part.batch)
        with nullcontext() if part is self._parts[-1] else self.block_backward_sync(), self._in_pass(part):
            result = super().training_step(batch, *others)
            return self._share_loss(result) if self._searches else result

    def _share_loss(self, result: Any) -> Any:
        """A loss with the same gradients but the whole batch's figure, so that all ranks take the same decisions."""
        loss = _loss_of(result)
        loss = self.reduce(loss.detach().clone()) + (loss - loss.detach())
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    @contextmanager
    def _in_pass(self, part: Part) -> Iterator[None]:
        """A context in which logged figures count by the pass's part of the global batch; not at all without rows."""
        module, results, own = self.lightning_module, self._trainer._results, self._split.rows
        hook, module._current_fx_name = module._current_fx_name, "training_step"
        results.batch_size = part.rows if self._count is None else part.weight * self._rows
        figures = [each for each in module.modules() if isinstance(each, Metric)]
        self._open, self._weights.in_pass = part, self._passes > 1
        try:
            with nullcontext() if part.weight else self._unlogged(results, figures):
                yield
        finally:
            self._open, results.batch_size, module._current_fx_name = None, own, hook
            self._weights.in_pass = False

    @contextmanager
    def _unlogged(self, results: Any, figures: list[Any]) -> Iterator[None]:
        """A context that leaves logged figures and metrics as before, but known to ranks that meet for them."""
        before = {name: dict(vars(figure)) for name, figure in results.items()}
        with kept_state(figures):
            yield
        for name, figure in results.items():
            for state, default in figure._defaults.items():
                setattr(figure, state, before[name][state] if name in before else default.clone())

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """The backward passes of the batch, each loss by its part of it, so that the mean over ranks is the batch's."""
        loss = closure_loss
        for part in self._parts:
            if part is not self._parts[0]:
                loss = _loss_of(self._compute(part)) / self._trainer.accumulate_grad_batches
            weighed = loss * (part.weight * self._split.world)
            self._reporter.timer.end_pass(weighed)
            result = super().backward(weighed, *args, **kwargs)
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as DDPStrategy does; in a pass, a mean is that of the global batch over the passes so far.

        A mean of whole numbers isn't cut off: Lightning divides by the mean number of rows.
        """
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        figure = tensor.double() if whole else tensor
        with self._reporter.timer.meeting():
            if self._open is None or reduce_op not in ("mean", "avg"):
                return super().reduce(figure, group, reduce_op)
            weight = torch.as_tensor(self._open.weight, dtype=torch.float64, device=self.root_device)
            figure = torch.as_tensor(figure, device=self.root_device)
            own = (figure * weight if weight else torch.zeros_like(figure), weight.clone())
            total, weights = (super(PlanStrategy, self).reduce(each, group, "sum") for each in own)
        if self._means and self._open is not self._parts[0]:  # each pass asks for the same, in the same order
            before = self._means.popleft()
            total, weights = total + before[0], weights + before[1]
        self._means.append((total, weights))
        return (total / weights).to(figure.dtype)


def _loss_of(result: Any) -> Any:
    return result["loss"] if isinstance(result, Mapping) else result


def _refuse_other_strategy() -> None:
    raise RequestError(
        "split.strategy() was called, but the trainer doesn't train by what it returned.",
        "Write L.Trainer(strategy=split.strategy(), use_distributed_sampler=False); for a loop of your own, leave"
        " split.strategy() out.",
    )
