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
    """Raise RequestError if the rows of a loader can't be assigned by length.

    This is the case in validation, with rebalancing, and with Lightning's strategy.
    """
    if not training:
        raise RequestError(
            "Validation rows aren't assigned by length: their batches have one pass on each rank.",
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
    """One process of a training run with unequal shares.

    It provides this rank's rows of each batch, and weights gradients so that their sum over ranks
    is the gradient of the whole batch. `rank`, `world` and `device` are this process's rank, the
    number of ranks and this rank's device.

    Arguments:

    - `plan`: a plan or its path; None takes it from `evener launch`.
    - `ratios`: relative shares of the ranks, in place of a plan.
    - `global_batch`: rows per batch over all ranks; None takes the plan's.
    - `weigh`: "gradients" weights gradients in the all-reduce; "loss" expects the script to
      scale each loss by `scale`, for example with FSDP.
    - `strict`: whether to raise an error, instead of a warning, if the plan was made for
      another model or on other devices, or if a late audit fails.
    - `backend`: backend of the process group; None chooses NCCL or gloo by device.
    - `rebalance`: whether shares follow the measured speed of the ranks; the global batch
      doesn't change.
    - `noise`: whether to measure the gradient noise scale.
    - `journal`: whether to record the training run for `evener runs`.

    Raises PlanError, RequestError or DeviceError if the plan can't be applied on this machine.
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
        """Number of rows that each rank computes of a global batch."""
        return self.ranks.batches

    @property
    def micros(self) -> tuple[int, ...]:
        """Maximum number of rows per gradient-accumulation pass, for each rank."""
        return self.ranks.micros

    @property
    def global_batch(self) -> int:
        """Number of rows in a global batch, over all ranks."""
        return sum(self.shares)

    @property
    def rows(self) -> int:
        """Number of this rank's rows in the current batch.

        In a short last batch it can be 0, although the loader yields one filler row. Raises
        RequestError outside of a loop over the loader.
        """
        batch = self.weights.current
        if batch is None:
            raise RequestError(
                "There is no current batch: split.rows belongs to the loader's batch.",
                "Read it inside the loop.",
            )
        return batch.sizes[self.rank]

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Gradient noise scale measured so far, in rows, with its confidence interval.

        It is None without `noise=True`, and until enough steps have been measured.
        """
        return None if self.noise is None else self.noise.scale()

    @property
    def weight(self) -> float:
        """This rank's fraction of the rows in the current batch, from 0 to 1.

        This is the weight of its gradients in the sum over ranks. After a loop, it refers to the
        last batch.
        """
        return self.weights.weight

    @property
    def ending(self) -> bool:
        """Whether any rank has received SIGTERM, for example before its machine is taken away.

        Read it on all ranks after each step, and save a checkpoint and leave the loop when it is
        True. All ranks get the same value. From the first read on, SIGTERM no longer ends the
        process. With short steps, the value changes up to a quarter of a second late.
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
        """Return a data loader that yields this rank's rows of each global batch.

        Arguments:

        - `dataset`: a map-style data set.
        - `shuffle`: whether to permute the rows in each epoch.
        - `seed`: seed of the permutations, the same on all ranks.
        - `drop_last`: whether to leave out a last batch that isn't full.
        - `training`: False for validation, whose steps aren't reported; a last batch with
          fewer rows than ranks is joined to the one before.
        - `prefetch`: number of batches to fetch and copy to the GPU ahead; None for 2 on a
          GPU and 0 on a CPU.
        - `order`: a sampler, a list of row indices or a function of the epoch that returns
          one, in place of permutations.
        - `lengths`: number of tokens of each row, to assign rows to passes by length; the
          loop then has to use `parts`.
        - `options`: further keyword arguments of DataLoader.

        Each row is computed once per epoch, on one rank. With several passes, batches stay in host
        memory, and `parts` sends each part. Raises RequestError for data sets without a length, and
        for options that the plan decides. It is also raised for `lengths` that don't fit the data
        set, and for any `lengths` in validation, with `rebalance` or with `strategy`.
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
        """Return the positions of all training loaders, for a checkpoint.

        With `rebalance`, it also has the current shares. The result is the same on every rank, and
        can be stored as JSON.
        """
        state, rebalancing = self.loaders.state_dict(), self.rebalancing
        return state if rebalancing is None else {**state, **rebalancing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of the loaders, and the shares if the plan is the same.

        Create the loaders in the same order as when the state was saved. The checkpoint may come
        from another number of ranks.
        """
        if self.rebalancing is not None and "planned" in state:
            self.rebalancing.load_state_dict(state)
        self.loaders.load_state_dict(state)

    def strategy(self, count: OfPart | None = None, check: bool = True, **options: Any) -> Any:
        """Return a strategy for Lightning's Trainer that trains with the plan.

        Call this before `loader`. `count` returns the denominator of a part's mean loss, such as
        its token count; None means its row count. `check` says whether to audit the loss; an audit
        raises RequestError if the loss isn't such a mean. `options` are passed to DDPStrategy.
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
        """Shard a model that doesn't fit on each GPU, and return it.

        Arguments:

        - `shard`: how parameters are gathered. With "all", it is one unit at a time. With
          "state", parameters and gradients are whole while a batch is computed: they are
          gathered and reduced once per batch, even with several passes.
        - `units`: with "all", the modules whose parameters are gathered together, or their
          classes; None means repeated blocks and large layers.
        - `state`: relative size of each rank's part of the model; by default it is from the
          plan, or else in proportion to free GPU memory.
        - `dtype`: dtype of computation; None leaves each parameter its own.

        Use it instead of `wrap`, and create the optimizer afterwards. Every rank has to call this.
        Raises RequestError if the model can't be sharded.
        """
        made = import_module("evener.torch.shards.make")  # which builds on this package
        return cast(Model, made.shard(self, model, shard, units, state, dtype))

    def model_state(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the unsharded state dict of a sharded model, on the CPU.

        Every rank has to call this. Ranks other than 0 get an empty dict. Only one unit at a time
        takes device memory.
        """
        return cast("dict[str, torch.Tensor]", _checkpoints().model_state(model))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the unsharded state dict of a sharded model's optimizer, on the CPU.

        Every rank has to call this. Ranks other than 0 get an empty dict.
        """
        return cast("dict[str, Any]", _checkpoints().optimizer_state(optimizer))

    def save(
        self, folder: str | os.PathLike[str], model: Any, optimizer: Any = None, extra: Any = None
    ) -> None:
        """Write a checkpoint of a model, its optimizer and `extra` to a folder.

        Every rank has to call this. Without `optimizer`, only the model is written. The files are
        safetensors, which `from_pretrained` of transformers can read. `extra` is any value that
        JSON can store. The previous checkpoint is kept until the new one is complete. Raises
        RequestError on every rank if writing fails.
        """
        _checkpoints().save(folder, model, optimizer, extra)

    def load(self, folder: str | os.PathLike[str], model: Any, optimizer: Any = None) -> Any:
        """Load a checkpoint that `save` wrote, and return its `extra`.

        Every rank has to call this. The shares may have changed since it was saved. Without
        `optimizer`, the optimizer's state isn't loaded. Raises RequestError if the checkpoint is
        missing or is for another model.
        """
        return _checkpoints().load(folder, model, optimizer)

    def scale(self, loss: Any) -> Any:
        """Return this rank's mean loss, scaled for libraries that average over ranks.

        The mean over ranks is then the mean over all rows. Use it with `weigh="loss"`, and call
        `backward` on the result. Raises RequestError with `weigh="gradients"`, or inside `parts`.
        """
        self.weights.refuse_in_parts("scale")
        if self.weights.weigh != "loss":
            raise RequestError(
                "The gradients are weighted already.",
                "Call loss.backward(), or Split(weigh='loss').",
            )
        return self.weights.scale(loss)

    def loss(self, total: Any, count: Any) -> Any:
        """Return a loss that is a mean over something other than rows, such as tokens.

        Arguments:

        - `total`: this rank's sum of losses.
        - `count`: the number of items that `total` sums over, such as tokens.

        The weighted sum of all ranks' gradients is then the gradient of the mean over the whole
        batch.

        Every rank has to call this. Raises RequestError inside `parts`. Use the result like a mean
        over rows, with `backward`, `scale` and `mean`.
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
        """Return the rows of all ranks in the current batch, in rank order.

        Tensors of shape (n_i, ...) become one of shape (N, ...). Filler rows are left out.
        Gradients flow back to the rank that computed a row, so a loss over the whole batch, such as
        a contrastive one, is exact if every rank computes it and calls `backward`. Every rank has
        to call this. Raises RequestError inside `parts`, and if the number of rows isn't that of
        this rank's batch.
        """
        self.weights.refuse_in_parts("gather")
        if self.world == 1:
            return rows
        return gather_rows(rows, self.weights.sizes, self.rank, self.weights.by_loss, self.timer)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Context manager in which the model's gradients are accumulated without an all-reduce.

        Use it for all but the last step of gradient accumulation. It has no effect on a model
        without a `no_sync` method, for example with a single rank.
        """
        return cast(
            AbstractContextManager[None],
            model.no_sync() if hasattr(model, "no_sync") else nullcontext(),
        )

    def mean(self, value: Any) -> float:
        """Return the mean over the global batch of a value that is a mean over this rank's rows.

        Every rank has to call this. Raises RequestError inside `parts`.
        """
        self.weights.refuse_in_parts("mean")
        return float(self.total(value * self.weight if self.weights.sizes[self.rank] else 0.0))

    @overload
    def total(self, value: float) -> float: ...
    @overload
    def total(self, value: torch.Tensor) -> Any: ...
    def total(self, value: Any) -> Any:
        """Return the sum of a value over all ranks.

        The result is a float, or a tensor if `value` has dimensions. Every rank has to call this.
        Raises RequestError inside `parts`.
        """
        self.weights.refuse_in_parts("total")
        total = self.add_up(value)
        return total if total.ndim else float(total)

    def close(self) -> None:
        """Stop reporting and auditing, and leave the process group.

        Without this call, all of this happens when the process exits.
        """
        super().close()
        if self._stop_signal is not None:
            self._stop_signal.close()
        if self.world > 1:
            leave_group()
