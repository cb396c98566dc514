"""Apply a plan in PyTorch DistributedDataParallel: each process computes its share, and what is learned stays the same.

    split = Split("plan.toml")
    loader = split.loader(dataset, seed=0)
    model = split.wrap(model)

The training loop stays as it was, with losses that are means over the batch. Start it with
`torchrun --nproc-per-node N train.py`, N being the plan's active devices; for one device, plain python does.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from evener.errors import PlanError, RequestError
from evener.live import Reporter
from evener.plan import Plan, Share, load_plan
from evener.plan_check import check_fit, check_global_batch, describe
from evener.shares import apportion, check_ratios
from evener.torch_split.gradient_weights import GradientWeights
from evener.torch_split.loader import Loader, check_options, count_rows
from evener.torch_split.model_digest import model_digest
from evener.torch_split.process import Stand, choose_device, find_stand, join, present, settle, visible_gpus
from evener.torch_split.sampler import UnevenBatchSampler

__all__ = ["Loader", "Split", "UnevenBatchSampler"]

Weigh = Literal["gradients", "loss"]


class Split:
    """This process's part of a plan: `rank`, `world`, `device`, `shares` (samples of each rank in a full step).

    `plan` is a Plan or its file; without one, `ratios` and `global_batch` say how to split. `weigh="gradients"` changes
    nothing in the loop; `"loss"` needs `split.scale(loss).backward()` and leaves the model's communication hook free.
    PlanError, RequestError or DeviceError before anything starts if the plan can't be applied here; with `strict`, also
    if it was measured on other devices or with another model, which is a warning else.
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
    ) -> None:
        if weigh not in ("gradients", "loss"):
            raise RequestError(f"There is no weigh={weigh!r}.", "Say 'gradients' or 'loss'.")
        stand = find_stand()
        gpus = visible_gpus()
        self.plan = plan if isinstance(plan, Plan) or plan is None else load_plan(plan)
        if self.plan is not None:
            self.shares = _plan_shares(self.plan, ratios, global_batch)
            _check_plan(self.plan, stand, gpus, strict, global_batch)
        else:
            self.shares = _ratio_shares(ratios, global_batch, stand.world)
        share = self.plan.layout.active[stand.rank] if self.plan is not None else None
        self.rank, self.world = stand.rank, stand.world
        self.device = choose_device(share, stand, gpus)
        self.weigh = weigh
        self.strict = strict
        settle(self.device, share)
        if self.world > 1 and join(self.device, backend):
            atexit.register(self.close)
        self._weights = GradientWeights(self.shares, self.rank)
        self._rows = self.shares[self.rank]
        self._in_hand: dict[object, tuple[int, ...]] = {}  # pass of a loader -> the rows of its batch, the latest last
        self._reporter = Reporter()
        weakref.finalize(self, self._reporter.close)  # a split that is dropped reports no more
        self._live = (share or _unplanned(self.device, gpus),)
        self._workload = self.plan.workload if self.plan else os.path.basename(sys.argv[0])

    @property
    def global_batch(self) -> int:
        """Samples of a full optimizer step, over all ranks."""
        return sum(self.shares)

    @property
    def rows(self) -> int:
        """Rows of this rank's batch in hand that count; 0 if it only keeps step."""
        return self._rows

    @property
    def weight(self) -> float:
        """This rank's part of the batch in hand, 0 to 1."""
        return self._weights.current

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        training: bool = True,
        prefetch: int | None = None,
        **options: Any,
    ) -> Loader:
        """Batches of this rank's rows of `dataset`, each row once per epoch over all ranks; `options` are DataLoader's.

        On a GPU, batches are fetched `prefetch` ahead (2 unless said) and come on the device. With `training=False`
        (validation) steps are not reported to the monitor. RequestError for a data set without a length, and for
        options that the plan decides.
        """
        check_options(options)
        sampler = UnevenBatchSampler(
            count_rows(dataset), self.shares, self.rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        done, key = self.report if training else _ignore, object()
        begin, end = partial(self._take, key), partial(self._let_go, key)
        return Loader(dataset, sampler, begin, done, options, self.device, prefetch, end)

    def _take(self, key: object, sizes: Sequence[int]) -> None:
        self._in_hand.pop(key, None)
        self._in_hand[key] = tuple(sizes)
        self.begin(sizes)

    def _let_go(self, key: object) -> None:
        """A loader's pass is over: if it ran inside another one's step, as a validation does, that step goes on."""
        if self._in_hand.pop(key, None) is not None and self._in_hand:
            self.begin(next(reversed(self._in_hand.values())))

    def wrap(self, model: Any, **options: Any) -> Any:
        """The model on this process's device, in DistributedDataParallel (`options` are its own), gradients weighted.

        A model that is wrapped already gets the weights; on a single device it comes back as it is.
        """
        self._check_model(model)
        if self.world == 1:
            return model.to(self.device)
        _check_normalization(model, self.weigh)
        if not isinstance(model, DistributedDataParallel):
            devices = [self.device] if self.device.type == "cuda" else None
            model = DistributedDataParallel(model.to(self.device), **{"device_ids": devices, **options})
        if self.weigh == "gradients":
            self._weights.attach(model)
        return model

    def _check_model(self, model: Any) -> None:
        """Warn, or raise PlanError with `strict`, if the plan was measured with another model."""
        if self.plan is None:
            return
        digest = model_digest(model)
        for difference in check_fit(self.plan, devices=None, world=None, workload_digest=digest, strict=self.strict):
            warnings.warn(difference, stacklevel=3)

    def begin(self, sizes: Sequence[int]) -> None:
        """Say that what follows is a step in which each rank has these rows; the loader does so itself."""
        self._weights.begin(sizes)
        self._rows = sizes[self.rank]

    def scale(self, loss: Any) -> Any:
        """With `weigh="loss"`: the mean loss of this rank's rows, weighted so that DDP's mean over ranks is exact."""
        if self.weigh != "loss":
            raise RequestError("The gradients are weighted already.", "Call loss.backward(), or Split(weigh='loss').")
        return loss * (self.world * self.weight)

    def loss(self, total: Any, count: Any) -> Any:
        """The loss `total / count` over the global batch, for a mean that isn't over rows; every rank calls it.

        `total` is this rank's sum of losses, `count` of what it is to be divided by: tokens that aren't ignored, or the
        sum of class weights. `loss.backward()`, `scale` and `mean` then do what they do with a mean over rows.
        """
        counted = torch.as_tensor(count).detach().to(self.device, torch.float64, copy=True)
        if not self._rows:
            total, counted = total * 0, counted * 0
        if self.world > 1:
            dist.all_reduce(counted)
        return total / (counted * (self.weight or 1.0)).to(torch.promote_types(total.dtype, torch.float32))

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """The model's `no_sync`, for all but the last step of an accumulation; nothing where there is no other rank."""
        context: AbstractContextManager[None] = model.no_sync() if hasattr(model, "no_sync") else nullcontext()
        return context

    def mean(self, value: Any) -> float:
        """The mean over the global batch in hand of a figure that each rank has as the mean over its rows."""
        return self.total(value * self.weight if self._rows else 0.0)

    def total(self, value: Any) -> float:
        """The sum of a figure over the ranks; every rank calls it."""
        figure = torch.as_tensor(value).detach().to(self.device, torch.float64, copy=True)
        if self.world > 1:
            dist.all_reduce(figure)
        return float(figure)

    def report(self, rows: int | None = None) -> None:
        """Tell the monitor that a step on this rank's rows is done; the loader does so itself."""
        self._reporter.report(
            self._rows if rows is None else rows, devices=self._live, framework="torch", workload=self._workload
        )

    def close(self) -> None:
        """Leave the process group and stop reporting; done at exit if the group was made here."""
        self._reporter.close()
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _ignore(rows: int) -> None:
    pass


def _plan_shares(plan: Plan, ratios: Sequence[float] | None, global_batch: int | None) -> tuple[int, ...]:
    if ratios is not None:
        raise RequestError("Both a plan and ratios are given.", "Give one of them; the plan has its own ratios.")
    if plan.layout.kind == "place":
        raise PlanError(
            "The plan places parts of one model on several devices, which a split can't do.",
            "Make a plan with another layout, or place the parts in the script.",
        )
    if global_batch is not None:
        check_global_batch(global_batch, len(plan.layout.active))
    return tuple(size for size, share in zip(plan.shares(global_batch), plan.layout.share, strict=True) if share.batch)


def _check_plan(plan: Plan, stand: Stand, gpus: dict[str, int], strict: bool, global_batch: int | None) -> None:
    differences = check_fit(
        plan,
        devices=present(gpus, plan.layout.active),
        world=stand.world,
        workload_digest=None,
        strict=strict,
        global_batch=global_batch,
        framework="torch",
    )
    for difference in differences:
        warnings.warn(difference, stacklevel=3)
    held = ", ".join(f"{describe(share)} to {share.limit}" for share in plan.layout.active if share.limit)
    if held and stand.rank == 0:  # one process says it for all
        warnings.warn(f"The plan was measured with limits that a training doesn't have: {held}.", stacklevel=3)


def _ratio_shares(ratios: Sequence[float] | None, global_batch: int | None, world: int) -> tuple[int, ...]:
    if global_batch is None:
        raise RequestError("Neither a plan nor a global batch is given.", "Give Split(plan) or Split(global_batch=N).")
    chosen = [1.0] * world if ratios is None else list(ratios)
    check_ratios(chosen)
    if min(chosen) <= 0:
        raise RequestError(
            f"A ratio of {min(chosen)} leaves a process without work.", "Start no process for a device left out."
        )
    if len(chosen) != world:
        raise RequestError(
            f"There are {len(chosen)} ratios, but {world} processes take part.",
            f"Start the script with torchrun --nproc-per-node {len(chosen)}, or give {world} ratios.",
        )
    check_global_batch(global_batch, world)
    return apportion(global_batch, chosen)


def _check_normalization(model: Any, weigh: str) -> None:
    kinds = [type(module) for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    synchronized = any(issubclass(kind, torch.nn.SyncBatchNorm) for kind in kinds)
    if synchronized and weigh == "gradients":
        raise RequestError(
            "SyncBatchNorm mixes the ranks' gradients before they can be weighted.",
            "Use Split(..., weigh='loss') and split.scale(loss).backward(), which is exact.",
        )
    if kinds and not synchronized:
        warnings.warn(
            f"{kinds[0].__name__} normalizes over each device's own share, so training depends on the split; "
            "SyncBatchNorm (on GPUs), GroupNorm or LayerNorm don't. A short last batch can leave a device a single "
            "row, of which PyTorch takes no statistics: use drop_last=True.",
            stacklevel=3,
        )


def _unplanned(device: Any, gpus: dict[str, int]) -> Share:
    names = [identity for identity, number in gpus.items() if device.type == "cuda" and number == device.index]
    return Share(names[0] if names else str(device), device.index or 0, str(device), 0, 0.0)
