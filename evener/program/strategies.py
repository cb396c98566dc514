"""A lightning.Trainer, whose own DistributedDataParallel and loader become those of shares as its training begins."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ..errors import RequestError
from ..lightning import DDPStrategy, PlanStrategy, ShareLoader
from ..torch_loss.measure import kept_state
from ..torch_rows.loader import LOADER_OPTIONS
from ..torch_rows.sampler import RowOrder
from ..torch_split.planned import PlannedTraining
from ..torch_split.ranks import find_shares
from .program import PROGRAM, taken_over
from .views import find_fault


class ProgramLoader(ShareLoader):
    """A loader of shares that isn't in checkpoints, so that the program goes on from them without evener too."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class ProgramStrategy(PlanStrategy):
    """A program's DDPStrategy, for one training."""

    loader_class = ProgramLoader

    def teardown(self) -> None:
        """The training is over."""
        _forget_figures(self)
        super().teardown()
        self.__class__ = DDPStrategy


def run(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Leave the loops of a Trainer to this file."""
    with PROGRAM.left_alone():
        return wrapped(*arguments, **keywords)


def begin_epoch(wrapped: Any, loop: Any, arguments: Any, keywords: Any) -> Any:
    """Have a Trainer train by shares."""
    loop.setup_data()  # again, where the trainer wants a new loader for this epoch
    if dist.is_initialized() and dist.get_world_size() > 1 and not loop.restarted_mid_epoch:
        strategy, (loader, *others) = loop.trainer.strategy, loop._combined_loader.flattened
        if isinstance(strategy, ProgramStrategy):
            if not isinstance(loader, ProgramLoader):
                _take_rows(loop, strategy, _Rows(loader))
        elif not PROGRAM.notebook.why:
            _take_over(loop, strategy, loader, _find_fault(strategy, loader, others))
    return wrapped(*arguments, **keywords)


class _Rows:
    """The global batches of a loader whose rows a DistributedSampler shares out."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.world = loader, dist.get_world_size()
        self._rows, self._steps = loader.batch_size, len(loader.batch_sampler)
        self.order = RowOrder(self._draw, len(loader.dataset), 0)

    @property
    def global_batch(self) -> int:
        return int(self._rows * self.world)

    def _draw(self, epoch: int) -> list[int]:
        """The rows of an epoch, those of each global batch together, rank by rank."""
        twin = copy.copy(self.loader.sampler)
        twin.set_epoch(epoch)
        every = []
        for twin.rank in range(self.world):
            every.append(list(twin))
        firsts = range(0, self._steps * self._rows, self._rows)
        return [row for first in firsts for rows in every for row in rows[first : first + self._rows]]


def _find_fault(strategy: Any, loader: Any, others: Any) -> str:
    """Why this training stays as it is; empty if it can be taken over."""
    if type(strategy) is not DDPStrategy:
        return f"its strategy is {type(strategy).__name__}"
    if fault := find_fault(strategy.model):
        return fault
    if not strategy.lightning_module.automatic_optimization:
        return "it optimizes manually, so its loss can't be compared before shares leave even"
    if others:
        return "it has several loaders"
    known = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    if not (known and type(loader.sampler) is DistributedSampler):
        return "its rows aren't shared out by a DistributedSampler"
    return ""


def _take_over(loop: Any, strategy: Any, loader: Any, fault: str) -> None:
    """Train by shares from now on, if all ranks can; else say why not."""
    if fault := next(filter(None, PROGRAM.exchange(fault)), ""):
        PROGRAM.stay(fault)
        return
    settings, rows = PROGRAM.notebook.settings, _Rows(loader)
    follows = settings.rebalance
    with taken_over(strategy):
        found = find_shares(None, None, rows.global_batch, {"rebalance": follows}, device=strategy.root_device)
        planned = PlannedTraining(found, rebalance=follows, noise=settings.noise, journal=True)
        strategy.__class__ = ProgramStrategy
        strategy.take_plan(planned, 1, None, True)
        strategy.prepare_figures()
        made = _make_loader(strategy, rows)
        strategy.check_loss(made)
        strategy.sum_by_shares()
        _forget_figures(strategy)
        strategy.trains = True
        _give(loop, made)
        PROGRAM.notebook.watch(planned, "lightning.Trainer")


def _forget_figures(strategy: Any) -> None:
    """Forget how figures were logged so far: Lightning remembers by which strategy they are joined."""
    loop = strategy.lightning_module.trainer.fit_loop.epoch_loop
    for results in (loop._results, loop.val_loop._results):
        results.clear()


def _make_loader(strategy: ProgramStrategy, rows: _Rows) -> Any:
    options = {name: getattr(rows.loader, name) for name in LOADER_OPTIONS if hasattr(rows.loader, name)}
    length = len(rows.loader.dataset)
    return strategy.make_loader(rows.loader.dataset, strategy.planned.sampler(length, order=rows.order), options)


def _take_rows(loop: Any, strategy: ProgramStrategy, rows: _Rows) -> None:
    """Share out the rows of a new loader, for another epoch."""
    if rows.global_batch != strategy.planned.shares.global_batch:
        raise RequestError(
            f"The batches of a new loader are others: {rows.global_batch} rows, after"
            f" {strategy.planned.shares.global_batch}.",
            "Train it with its own launcher.",
        )
    with kept_state():
        _give(loop, _make_loader(strategy, rows))


def _give(loop: Any, loader: Any) -> None:
    """Put a loader in place of the trainer's own, of which nothing was taken yet."""
    with kept_state():
        loop._combined_loader.flattened = [loader]
        loop._data_fetcher.setup(loop._combined_loader)
        iter(loop._data_fetcher)
