"""Train a PyTorch model with a plan.

Each process computes its share of every batch, and the model learns the same as on one device.

    split = Split("plan.toml")
    loader = split.loader(dataset, seed=0)
    model = split.wrap(model)

The training loop stays unchanged, with losses that are means over the batch. Start the script with
`evener launch plan.toml train.py`; `Split()` then finds the plan itself. A plan for one device also
works with plain python.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Literal, TypeVar, cast, overload

import torch

from ..errors import RequestError
from ..plan.file import Plan
from ..shares.whole_rows import count_passes, shares_to_evaluate
from ..training.noise_scale import NoiseScale
from .planned import PlannedTraining
from .ranks.peers import leave_group
from .ranks.ranks import find_shares
from .ranks.stop_signal import StopSignal
from .rebalancing import raise_no_shares
from .rows.loader import Loader, check_options, count_rows
from .rows.sampler import Order, RowOrder, UnevenBatchSampler
from .step.part import OfPart
from .step.step import LoaderSteps
from .sums.collectives import gather_rows

__all__ = ["Loader", "Split", "UnevenBatchSampler"]

Weigh = Literal["gradients", "loss"]
Model = TypeVar("Model")


def _check_by_length(training: bool, strategy: Any, rebalancing: Any) -> None:
    """Raise RequestError if a loader can't assign rows by length."""
    if not training:
        raise RequestError(
            "Rows of a validation aren't assigned by length, as its batches have one pass on "
            "each rank.",
            "Leave lengths out.",
        )
    if rebalancing is not None:
        raise_no_shares()
    if strategy is not None:
        raise RequestError(
            "Lightning takes as many passes on every rank and in every step, and rows "
            "assigned by length don't.",
            "Leave lengths out, or write the loop with split.parts.",
        )


def _checkpoints() -> Any:
    return import_module("evener.torch.shards.checkpoint")  # which builds on this package


class Split(PlannedTraining):
    """This process's part of a plan: rank, device and all ranks' shares.

    Attributes: `rank` is this process's rank, `world` the number of ranks, and `device` this
    process's device. Arguments:

    - `plan`: a Plan or the path of its file; under `evener launch` it can be left out.
    - `ratios` and `global_batch`: the split if there is no plan.
    - `weigh`: "gradients" weights each rank's gradients when they are summed, so the loop needs no
      change. "loss" needs `split.scale(loss).backward()`, and leaves the model's communication hook
      free.
    - `strict`: raise PlanError, instead of printing a warning, if the plan was measured on other
      devices or with another model.
    - `backend`: backend of the process group; the default is NCCL for GPUs and gloo for CPUs.
    - `rebalance`: adapt shares to the compute time (own work) of each rank during training. The
      global batch keeps its size.
    - `noise`: measure `noise_scale` during training, which shows what a larger batch would cost
      (docs/learning.md).
    - `journal`: let `evener runs` list the run's steps per second, share changes and restarts.

    Raises PlanError, RequestError or DeviceError before anything starts if the plan can't be
    applied on this machine.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | None = None,
        *,
        ratios: Sequence[float] | None = None,
        global_batch: int | None = None,
        weigh: Weigh = "gradients",
        strict: bool = False,
        backend: str | None = None,
        rebalance: bool = False,
        noise: bool = False,
        journal: bool = False,
    ) -> None:
        if weigh not in ("gradients", "loss"):
            raise RequestError(f"weigh is {weigh!r}.", "Give 'gradients' or 'loss'.")
        same: dict[str, bool | str] = {"weigh": weigh, "rebalance": rebalance, "noise": noise}
        found = find_shares(plan, ratios, global_batch, same, strict=strict)
        super().__init__(
            found,
            weigh,
            strict=strict,
            journal=journal,
            backend=backend,
            rebalance=rebalance,
            noise=noise,
        )
        self.weigh = weigh
        self._strategy: Any = None  # Lightning's strategy, once `strategy` was called
        self._stop_signal: StopSignal | None = None  # created when the loop first reads `ending`
        weakref.finalize(self, self.reporter.close)  # runs when the split is garbage-collected

    def __repr__(self) -> str:
        return (
            f"Split(shares={self.shares}, rank={self.rank}, device={self.device}, "
            f"weigh={self.weigh!r})"
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """Each rank's rows in a full step, from the plan or the last rebalancing."""
        return self.ranks.batches

    @property
    def micros(self) -> tuple[int, ...]:
        """Each rank's maximum number of rows per pass."""
        return self.ranks.micros

    @property
    def global_batch(self) -> int:
        """The number of rows in a full optimizer step, over all ranks."""
        return sum(self.shares)

    @property
    def rows(self) -> int:
        """This rank's number of rows in the current batch.

        It is 0 if its only row is a filler row, which doesn't count in the gradient. Raises
        RequestError outside of a loop over a loader.
        """
        batch = self.weights.current
        if batch is None:
            raise RequestError(
                "No batch is in hand: split.rows is of the loader's batch.",
                "Read it inside the loop.",
            )
        return batch.sizes[self.rank]

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The measured gradient noise scale, in rows, with its confidence interval.

        None until enough steps are measured, and if `noise` is False.
        """
        return None if self.noise is None else self.noise.scale()

    @property
    def weight(self) -> float:
        """This rank's fraction of the current batch, from 0 to 1.

        After a loop, it is the fraction of the last batch.
        """
        return self.weights.weight

    @property
    def ending(self) -> bool:
        """True once any rank has received SIGTERM, for example before its machine is taken away.

        Read it on every rank after each step; all ranks get the same value. When it is True, save a
        checkpoint and leave the loop. From the first read on, SIGTERM no longer kills the process.
        The value changes at the end of a step. With short steps, it may change a quarter of a
        second later.
        """
        if self._stop_signal is None:
            self._stop_signal = StopSignal(self.world)
        return self._stop_signal.is_agreed()

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        training: bool = True,
        prefetch: int | None = None,
        order: Order | None = None,
        lengths: Any = None,
        **options: Any,
    ) -> Loader:
        """Return a loader of this rank's rows in each global batch of `dataset`.

        Each row is computed once per epoch, on one rank.

        - `shuffle`: draw the rows of each epoch in a random order that depends on `seed`.
        - `order`: replaces `shuffle`. It is a sampler of rows, a list of row indices, or a function
          of the epoch that returns such a list.
        - `drop_last`: leave out an epoch's last batch if it has fewer rows than the others.
        - `training`: False for validation. Steps then aren't reported to the monitor, and a last
          batch with fewer rows than ranks is joined to the previous one.
        - `prefetch`: number of batches that are prefetched and sent to a GPU, by default 2. Under a
          plan with several passes they stay in pinned memory, and `parts` sends each part.
        - `lengths`: number of tokens in each row. Rows are then assigned so that ranks finish
          together, and the loop has to use `parts`.
        - `options`: passed to DataLoader.

        Raises RequestError if the data set has no length, if the plan determines one of the
        options, or if `lengths` don't fit the data set.
        """
        check_options(options)
        rows = count_rows(dataset)
        chosen = None if order is None else RowOrder(order, rows, seed)
        now = self.ranks
        shares = now.batches if training else shares_to_evaluate(now.batches, now.micros)
        if lengths is not None:
            _check_by_length(training, self._strategy, self.rebalancing)
        sampler = self.sampler(
            rows,
            lengths=lengths,
            shares=shares,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            order=chosen,
            join_tail=not training,
        )
        if self.rank == 0:
            sampler.warn_of_short_batches(sum(shares) if self.plan and training else 0)
        if training and self._strategy is not None:
            return cast(Loader, self._strategy.make_loader(dataset, sampler, options))
        # each part is sent when it is computed
        on_host = training and (now.in_passes or sampler.is_by_length)
        steps = LoaderSteps(self, training)
        made = Loader(dataset, sampler, steps, options, self.device, prefetch, training, on_host)
        if not training:
            return made
        self.follow(sampler, made.drawn_ahead)
        self.compare_data(dataset, made.collate_fn, sampler)
        return self.loaders.add(made)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint.

        It has each training loader's position after the current batch and, with `rebalance`, the
        current shares. It is the same on every rank and JSON-serializable.
        """
        state, rebalancing = self.loaders.state_dict(), self.rebalancing
        return state if rebalancing is None else {**state, **rebalancing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the training loaders from a `state` that `state_dict` returned.

        Create the loaders in the same order as in the saved run. The plan may be another.
        """
        if self.rebalancing is not None and "planned" in state:
            self.rebalancing.load_state_dict(state)
        self.loaders.load_state_dict(state)

    def strategy(self, count: OfPart | None = None, check: bool = True, **options: Any) -> Any:
        """Return a DDP strategy for `lightning.Trainer` that uses these shares.

        Call this before creating the training loader with `split.loader`.

        - `count(part)`: means the same as in `parts`.
        - `check`: check the loss of a few rows. Raises RequestError if it isn't a mean over rows,
          or over the items that `count` counts.
        - `options`: passed to DDPStrategy.
        """
        self.check_whole()
        kind = import_module("evener.lightning").PlanStrategy  # which builds on this module
        passes = max(map(count_passes, self.shares, self.micros))
        self._strategy = kind(self, passes, count, check, **options)
        return self._strategy

    def shard(
        self,
        model: Model,
        *,
        shard: Literal["all", "state"] = "all",
        units: Sequence[Any] | type | None = None,
        state: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Model:
        """Shard a model's parameters, gradients and optimizer state over the ranks.

        Use this instead of `wrap`, and create the optimizer afterwards. The result is the model
        itself.

        - `shard="all"`: the parameters of each unit, a group of layers, are gathered before the
          unit computes and freed afterwards.
        - `shard="state"`: each rank holds its part of the optimizer state. While a batch is
          computed, it also holds whole parameters and gradients. They are gathered and reduced once
          per batch, even with several passes or gradient accumulation under `split.no_sync`.
        - `units`: the modules that are units, or their class; by default, the blocks of
          ModuleLists.
        - `state`: each rank's part of the state, by default from the plan or the memory of its GPU.
        - `dtype`: dtype in which the model computes, such as torch.bfloat16; shards keep theirs.

        Raises RequestError if the model can't be sharded.
        """
        made = import_module("evener.torch.shards.make")  # which builds on this package
        return cast(Model, made.shard(self, model, shard, units, state, dtype))

    def model_state(self, model: Any) -> dict[str, torch.Tensor]:
        """Return a sharded model's whole parameters and buffers, on rank 0 in host memory.

        Names are those of the model's `state_dict`. Other ranks get {}, but every rank has to call
        this. It needs device memory for one unit at a time.
        """
        return cast("dict[str, torch.Tensor]", _checkpoints().model_state(model))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of a sharded model's optimizer on rank 0, like its `state_dict`.

        Other ranks get {}, but every rank has to call this.
        """
        return cast("dict[str, Any]", _checkpoints().optimizer_state(optimizer))

    def save(
        self, folder: str | os.PathLike[str], model: Any, optimizer: Any = None, extra: Any = None
    ) -> None:
        """Write a sharded model, its optimizer and `extra` to a folder.

        Every rank has to call this. `extra` must be JSON-serializable. Without an optimizer, only
        the model is written. The files are safetensors, which transformers' from_pretrained can
        also read. An older checkpoint in the folder stays intact until the new one is complete.
        Raises RequestError on every rank if writing fails.
        """
        _checkpoints().save(folder, model, optimizer, extra)

    def load(self, folder: str | os.PathLike[str], model: Any, optimizer: Any = None) -> Any:
        """Load a checkpoint from `save` into a sharded model and its optimizer.

        Return the checkpoint's `extra`. The shares may have changed since it was saved. Every rank
        has to call this. Raises RequestError if the checkpoint belongs to another model.
        """
        return _checkpoints().load(folder, model, optimizer)

    def scale(self, loss: Any) -> Any:
        """Scale this rank's mean loss; DDP's mean over ranks is then the mean over rows.

        Raises RequestError if `weigh` isn't "loss", because gradients are then weighted already.
        """
        self.weights.refuse_in_parts("scale")
        if self.weights.weigh != "loss":
            raise RequestError(
                "The gradients are weighted already.",
                "Call loss.backward(), or Split(weigh='loss').",
            )
        return self.weights.scale(loss)

    def loss(self, total: Any, count: Any) -> Any:
        """Return this rank's loss for a mean over items, such as tokens.

        Every rank has to call this. Use the result like a mean over rows, with `loss.backward()`,
        `scale` and `mean`.

        - `total`: this rank's sum of losses.
        - `count`: its part of the divisor, such as its number of tokens that aren't ignored, or its
          sum of class weights.
        """
        # `scale` and `mean` multiply by this rank's fraction of the batch, so the result is divided
        # by it
        self.weights.refuse_in_parts("loss")
        if not self.weights.sizes[self.rank]:
            total, count = total * 0, torch.as_tensor(count) * 0
        counted = self.add_up(count)
        return total / (counted * (self.weight or 1.0)).to(
            torch.promote_types(total.dtype, torch.float32)
        )

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' rows of the current batch, in the batch's order.

        Every rank has to call this. Tensors of shape (n_i, ...) on the ranks become one of shape
        (N, ...), without filler rows. Gradients flow back to the rank that computed a row. So a
        loss over the whole batch is exact if every rank computes it and calls backward().
        """
        self.weights.refuse_in_parts("gather")
        if self.world == 1:
            return rows
        return gather_rows(rows, self.weights.sizes, self.rank, self.weights.by_loss, self.timer)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Don't all-reduce gradients in a `with` block, for gradient accumulation.

        Use it for all but the last step of an accumulation. It does nothing for a model without
        `no_sync`, as with a single rank.
        """
        return cast(
            AbstractContextManager[None],
            model.no_sync() if hasattr(model, "no_sync") else nullcontext(),
        )

    def mean(self, value: Any) -> float:
        """Return the mean of a metric over the current global batch.

        `value` is the mean over this rank's rows. Every rank has to call this.
        """
        self.weights.refuse_in_parts("mean")
        return float(self.total(value * self.weight if self.weights.sizes[self.rank] else 0.0))

    @overload
    def total(self, value: float) -> float: ...
    @overload
    def total(self, value: torch.Tensor) -> Any: ...
    def total(self, value: Any) -> Any:
        """Return the sum of a value over the ranks.

        Every rank has to call this. The result is a tensor if `value` is a tensor with dimensions,
        and otherwise a float.
        """
        self.weights.refuse_in_parts("total")
        total = self.add_up(value)
        return total if total.ndim else float(total)

    def close(self) -> None:
        """Stop reporting and leave the process group.

        Without this call, both happen at exit.
        """
        super().close()
        if self._stop_signal is not None:
            self._stop_signal.close()
        if self.world > 1:
            leave_group()
