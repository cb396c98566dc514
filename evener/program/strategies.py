"""Hooks of Lightning's fit loop that give a Trainer with DDP the plan's unequal shares."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from .. import lightning_private as private
from ..errors import RequestError
from ..lightning import DDPStrategy, PlanStrategy
from ..torch.audit.state import kept_state
from ..torch.rows.loader import LOADER_OPTIONS
from ..torch.rows.sampler import RowOrder
from ..torch.step.unowned import trains_others
from .advice import advise_lightning
from .loops import draw_ranks, join_ranks
from .program import PROGRAM, share_state, stays_if_refused
from .views import OUTSIDE, find_fault


class ProgramStrategy(PlanStrategy):
    """Strategy that replaces DDP in the user's Lightning Trainer to give ranks unequal shares."""

    # so that the program can resume from its checkpoints without evener
    loaders_in_checkpoints = False

    def teardown(self) -> None:
        """Give the Trainer its own strategy back after training."""
        _forget_metrics(self)
        trainer = self.lightning_module.trainer
        super().teardown()
        private.set_strategy(trainer, self.program_strategy)
        del self.program_strategy


def run(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of the fit loop's `run` that prints how to use DDP if only one device trains."""
    if PROGRAM.is_single_rank:
        PROGRAM.report_single_device(advise_lightning())
    with PROGRAM.left_unchanged():
        return wrapped(*arguments, **keywords)


def begin_epoch(wrapped: Any, loop: Any, arguments: Any, keywords: Any) -> Any:
    """Hook at the start of an epoch: switch the Trainer to unequal shares, if that is possible.

    If it already uses them but has created a new loader, the new loader's rows are divided too.
    """
    loop.setup_data()  # called again in case the trainer reloads its loaders each epoch
    if dist.is_initialized() and dist.get_world_size() > 1 and not loop.restarted_mid_epoch:
        strategy, (loader, *others) = loop.trainer.strategy, private.loaders(loop)
        if isinstance(strategy, ProgramStrategy):
            if getattr(loader, "strategy", None) is not strategy:
                with kept_state():
                    _use_loader(loop, _make_sharing_loader(strategy, loader))
        elif not PROGRAM.notebook.why:
            _switch_to_shares(loop, strategy, loader, _find_fault(strategy, loader, others))
    return wrapped(*arguments, **keywords)


def _find_fault(strategy: Any, loader: Any, others: Any) -> str:
    """Return why this Trainer can't train with unequal shares, or "" if it can.

    `others` are training loaders after the first.
    """
    if type(strategy) is not DDPStrategy:
        return f"its strategy is {type(strategy).__name__}"
    if fault := find_fault(strategy.model):
        return fault
    if not strategy.lightning_module.automatic_optimization:
        return "it optimizes manually, so its loss can't be compared before shares differ"
    if any(trains_others(optimizer, [strategy.model]) for optimizer in strategy.optimizers):
        return OUTSIDE
    if others:
        return "it has several loaders"
    known = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    if not (known and type(loader.sampler) is DistributedSampler):
        return "its rows aren't shared out by a DistributedSampler"
    return ""


def _switch_to_shares(loop: Any, strategy: Any, loader: Any, fault: str) -> None:
    """Give the Trainer a strategy for unequal shares, if no rank has a reason to keep shares equal.

    `fault` is this rank's reason, or "". Every rank has to call this.
    """
    if fault := next(filter(None, PROGRAM.exchange(fault)), ""):
        PROGRAM.stay_even(fault)
        return
    trainer = loop.trainer
    with stays_if_refused(strategy), _use_unless_refused(trainer, strategy) as chosen:
        planned = PROGRAM.plan([strategy.model], _count_rows(loader), device=strategy.root_device)
        chosen.set_plan(planned, 1, None, True)
        chosen.prepare_metrics()
        made = _make_sharing_loader(chosen, loader)
        PROGRAM.audit(planned)
        _refuse_difference(chosen, made)
        chosen.sum_by_shares()
        _forget_metrics(chosen)
        _use_loader(loop, made)
        PROGRAM.begin_even(planned, "lightning.Trainer")


def _refuse_difference(strategy: ProgramStrategy, loader: Any) -> None:
    """Raise RequestError on every rank if, on any of them, unequal shares would change the loss.

    Every rank has to call this.
    """
    # an audit in the first step would reach all ranks two steps after the shares are unequal
    found = PROGRAM.exchange(strategy.find_difference(loader))
    if differing := next(filter(None, found), ""):
        raise RequestError(differing, "")


@contextmanager
def _use_unless_refused(trainer: Any, strategy: Any) -> Iterator[Any]:
    """Context manager that makes the Trainer use a ProgramStrategy, and yields the new strategy.

    `strategy` is the Trainer's original strategy, which is restored if the body raises an error.
    """
    # the ProgramStrategy shares the attributes of `strategy`, which is the Trainer's own strategy
    chosen = share_state(strategy, ProgramStrategy)
    chosen.program_strategy = strategy
    private.set_strategy(trainer, chosen)
    try:
        yield chosen
    except BaseException:
        private.set_strategy(trainer, strategy)
        raise


def _count_rows(loader: Any) -> int:
    """Return the row count of a global batch, over all ranks."""
    return int(loader.batch_size * dist.get_world_size())


def _forget_metrics(strategy: Any) -> None:
    """Delete the metrics logged so far, which Lightning would reduce with the old strategy."""
    loop = strategy.lightning_module.trainer.fit_loop.epoch_loop
    for each in (loop, loop.val_loop):
        private.logged(each).clear()


def _make_sharing_loader(strategy: ProgramStrategy, loader: Any) -> Any:
    """Return a loader with the same global batches that gives each rank its share of the rows.

    Raises RequestError if the global batch size has changed.
    """
    if _count_rows(loader) != strategy.planned.ranks.global_batch:
        raise RequestError(
            f"A new loader has {_count_rows(loader)} rows a step, after "
            f"{strategy.planned.ranks.global_batch}.",
            "Train it with its own launcher.",
        )

    def draw(epoch: int) -> Any:
        batches = copy.copy(loader.batch_sampler)
        batches.sampler = copy.copy(loader.sampler)
        batches.sampler.set_epoch(epoch)
        return join_ranks(draw_ranks(batches))

    options = {name: getattr(loader, name) for name in LOADER_OPTIONS if hasattr(loader, name)}
    rows = len(loader.dataset)
    return strategy.make_loader(
        loader.dataset, strategy.planned.sampler(rows, order=RowOrder(draw, rows, 0)), options
    )


def _use_loader(loop: Any, loader: Any) -> None:
    """Make Lightning's fit loop use `loader`, without advancing any random generator."""
    with kept_state():
        private.replace_loader(loop, loader)
