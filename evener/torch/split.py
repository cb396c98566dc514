"""Apply a plan in PyTorch: each process computes its share of a batch, and what is learned stays
the same.

    split = Split("plan.toml")
    loader = split.loader(dataset, seed=0)
    model = split.wrap(model)

The training loop stays as it was, with losses that are means over the batch. Start it with
`evener launch plan.toml train.py`: then `Split()` does. For one device, plain python does too.
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
from .ranks.notice import Notice
from .ranks.others import leave_group
from .ranks.ranks import find_shares
from .rebalancing import raise_no_shares
from .rows.loader import Loader, check_options, count_rows
from .rows.sampler import Order, RowOrder, UnevenBatchSampler
from .step.part import OfPart
from .step.step import LoaderSteps
from .sums.collectives import gather_rows

__all__ = ["Loader", "Split", "UnevenBatchSampler"]

Weigh = Literal["gradients", "loss"]
Model = TypeVar("Model")


def _check_dealt(training: bool, strategy: Any, rebalancing: Any) -> None:
    """RequestError where rows can't be dealt by length."""
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
    """This process's part of a plan: `rank`, `world`, `device`, `shares` (samples of each rank in a
    full step).

    `plan` is a Plan or its file; evener launch has said it already. Without one, `ratios` and
    `global_batch` say how to split. `weigh="gradients"` changes nothing in the loop; `"loss"` needs
    `split.scale(loss).backward()` and leaves the model's communication hook free. PlanError,
    RequestError or DeviceError before anything starts if the plan can't be applied here; with
    `strict`, also if it was measured on other devices or with another model, a warning else. With
    `rebalance`, shares follow the ranks' own work while they train; global batches stay. With
    `noise`, `noise_scale` is measured while they train: what a larger batch would cost
    (docs/learning.md). With `journal`, `evener runs` has the training's steps/s, changes of shares
    and restarts.
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
        self._strategy: Any = None  # of Lightning, once it was asked for
        self._notice: Notice | None = None  # made when the loop first asks
        weakref.finalize(self, self.reporter.close)  # a training that is dropped reports no more

    def __repr__(self) -> str:
        return (
            f"Split(shares={self.shares}, rank={self.rank}, device={self.device}, "
            f"weigh={self.weigh!r})"
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows of each rank in a full step: the plan's, or those that it was rebalanced to last."""
        return self.ranks.batches

    @property
    def micros(self) -> tuple[int, ...]:
        """The most of them in one pass."""
        return self.ranks.micros

    @property
    def global_batch(self) -> int:
        """Samples of a full optimizer step, over all ranks."""
        return sum(self.shares)

    @property
    def rows(self) -> int:
        """The rows that count of this rank's current batch; 0 if it only keeps step. RequestError
        outside a loop.
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
        """The noise scale of the gradient so far, in rows, with its interval; None before enough
        steps.
        """
        return None if self.noise is None else self.noise.scale()

    @property
    def weight(self) -> float:
        """This rank's part of the current batch, 0 to 1; after a loop, of its last batch."""
        return self.weights.weight

    @property
    def ending(self) -> bool:
        """True once this machine, or that of any rank, is about to be taken away: SIGTERM has come.

        Every rank reads it after each step, and gets the same answer: then save a checkpoint and
        leave the loop. From the first time on SIGTERM no longer ends the process by itself. It is
        answered at the end of the step, or within a quarter of a second where steps are shorter.
        """
        if self._notice is None:
            self._notice = Notice(self.world)
        return self._notice.has_come()

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
        """Batches of this rank's rows of `dataset`, each row once per epoch over all ranks;
        `options` are DataLoader's.

        `order` is a sampler of rows, a list of them or a function of the epoch that returns one,
        instead of `shuffle`. On a GPU, batches are fetched `prefetch` ahead (2 unless said) and
        come on the device; under a plan with passes they stay in pinned memory, and `parts` sends
        each part. With `training=False` (validation) steps aren't reported to the monitor, and a
        last batch too short to give each rank a row joins the one before. With `lengths`, the
        tokens of each row, batches are dealt so that ranks finish together: use `parts`.
        RequestError for a data set without a length, for options that the plan decides, and for
        wrong lengths.
        """
        check_options(options)
        rows = count_rows(dataset)
        chosen = None if order is None else RowOrder(order, rows, seed)
        now = self.ranks
        shares = now.batches if training else shares_to_evaluate(now.batches, now.micros)
        if lengths is not None:
            _check_dealt(training, self._strategy, self.rebalancing)
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
        on_host = training and (
            now.in_passes or sampler.is_dealt
        )  # a part is sent as its turn comes
        steps = LoaderSteps(self, training)
        made = Loader(dataset, sampler, steps, options, self.device, prefetch, training, on_host)
        if not training:
            return made
        self.follow(sampler, made.drawn_ahead)
        return self.loaders.add(made)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint needs of the split: each training loader's position after the
        current batch.

        It is the same on every rank, and fit for JSON.
        """
        state, rebalancing = self.loaders.state_dict(), self.rebalancing
        return state if rebalancing is None else {**state, **rebalancing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the training loaders, in the order in which they are made, go on at `state`; also
        under another plan.
        """
        if self.rebalancing is not None and "planned" in state:
            self.rebalancing.load_state_dict(state)
        self.loaders.load_state_dict(state)

    def strategy(self, count: OfPart | None = None, check: bool = True, **options: Any) -> Any:
        """A strategy for `lightning.Trainer`: DistributedDataParallel with these shares; options as
        DDPStrategy has.

        Make the training's `split.loader` after it. `count(part)` is as in `parts`. RequestError
        before the first step unless the loss of a few rows is a mean over rows, or what is counted;
        `check=False` leaves that out.
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
        """The model itself, its parameters, gradients and optimizer state cut over the ranks, in
        place of `wrap`.

        With `shard="state"` each rank has the optimizer's state of its part, and parameters and
        gradients whole while a batch is computed: they are gathered and summed once, also in passes
        and accumulated under `split.no_sync`. A unit's parameters are gathered before it computes
        and freed after: blocks of ModuleLists, or the classes or modules in `units`. `state` is the
        part that each rank holds, by default the plan's, or what its GPU has room for. With
        `dtype`, such as torch.bfloat16, the model computes in it, and shards keep their type. Make
        the optimizer after it. RequestError for what can't be sharded.
        """
        made = import_module("evener.torch.shards.make")  # which builds on this package
        return cast(Model, made.shard(self, model, shard, units, state, dtype))

    def model_state(self, model: Any) -> dict[str, torch.Tensor]:
        """On rank 0 a sharded model's whole parameters and buffers in the host's memory, as
        `state_dict` has them.

        {} on the other ranks. Every rank calls it; it takes no more of a device than a unit.
        """
        return cast("dict[str, torch.Tensor]", _checkpoints().model_state(model))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """On rank 0 the whole state of a sharded model's optimizer, as its `state_dict` has it; {}
        on the others.
        """
        return cast("dict[str, Any]", _checkpoints().optimizer_state(optimizer))

    def save(
        self, folder: str | os.PathLike[str], model: Any, optimizer: Any = None, extra: Any = None
    ) -> None:
        """Write a sharded model, its optimizer and `extra` (what JSON holds) to a folder; every
        rank calls it.

        A unit at a time, as safetensors that transformers' from_pretrained reads too. RequestError
        on every rank where that fails; an older checkpoint in the folder is whole until this one
        is.
        """
        _checkpoints().save(folder, model, optimizer, extra)

    def load(self, folder: str | os.PathLike[str], model: Any, optimizer: Any = None) -> Any:
        """Load what `save` wrote into a sharded model and its optimizer, under any shares; returns
        its `extra`.

        Rank 0 reads, and every rank calls it. RequestError if it is of another model.
        """
        return _checkpoints().load(folder, model, optimizer)

    def scale(self, loss: Any) -> Any:
        """The mean loss of this rank's rows, weighted so that DDP's mean over ranks is exact; for
        `weigh="loss"`.
        """
        self.weights.refuse_in_parts("scale")
        if self.weights.weigh != "loss":
            raise RequestError(
                "The gradients are weighted already.",
                "Call loss.backward(), or Split(weigh='loss').",
            )
        return self.weights.scale(loss)

    def loss(self, total: Any, count: Any) -> Any:
        """The loss `total / count` over the global batch, for a mean that isn't over rows; every
        rank calls it.

        `total` is this rank's sum of losses, `count` of what it is to be divided by: tokens that
        aren't ignored, or the sum of class weights. `loss.backward()`, `scale` and `mean` then do
        what they do with a mean over rows.
        """
        self.weights.refuse_in_parts("loss")
        if not self.weights.sizes[self.rank]:
            total, count = total * 0, torch.as_tensor(count) * 0
        counted = self.add_up(count)
        return total / (counted * (self.weight or 1.0)).to(
            torch.promote_types(total.dtype, torch.float32)
        )

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows of the current batch, in its order: (n_i, ...) of each rank as (N, ...);
        every rank calls it.

        Rows that only keep step are left out. Gradients flow back to the rank that computed a row,
        so that a loss over the whole batch is exact: every rank computes it and calls backward().
        """
        self.weights.refuse_in_parts("gather")
        if self.world == 1:
            return rows
        return gather_rows(rows, self.weights.sizes, self.rank, self.weights.by_loss, self.timer)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """The model's `no_sync`, for all but the last step of an accumulation; nothing where there
        is no other rank.
        """
        return cast(
            AbstractContextManager[None],
            model.no_sync() if hasattr(model, "no_sync") else nullcontext(),
        )

    def mean(self, value: Any) -> float:
        """The mean over the current global batch of a figure that each rank has as the mean over
        its rows.
        """
        self.weights.refuse_in_parts("mean")
        return float(self.total(value * self.weight if self.weights.sizes[self.rank] else 0.0))

    @overload
    def total(self, value: float) -> float: ...
    @overload
    def total(self, value: torch.Tensor) -> Any: ...
    def total(self, value: Any) -> Any:
        """The sum over the ranks: of a number a float, of a tensor with dimensions a tensor. Every
        rank calls it.
        """
        self.weights.refuse_in_parts("total")
        figure = self.add_up(value)
        return figure if figure.ndim else float(figure)

    def close(self) -> None:
        """Leave the process group and stop reporting; done at exit if the group was made here."""
        super().close()
        if self._notice is not None:
            self._notice.close()
        if self.world > 1:
            leave_group()
