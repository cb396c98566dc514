"""Rows for a Trainer with a plan: checks of its settings, samplers, and the order of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import RequestError
from ..plan.file import Share
from ..shares.whole_rows import bounds
from ..torch.planned import PlannedTraining
from ..torch.rebalancing import raise_no_shares
from ..torch.rows.loader import StepSampler, count_rows
from ..torch.rows.sampler import LengthSampler, RowOrder, UnevenBatchSampler
from ..torch.step.wrapped import can_time_compute, is_sharded
from ..training.passes import divide_rows
from . import private
from .gathering import make_undivided

CHECKPOINT = "evener.json"  # beside trainer_state.json


def check_trainer_class(trainer_class: Any) -> None:
    """Raise RequestError if Trainers of this class can't train with a plan."""
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise RequestError(
            f"{trainer_class!r} isn't a Trainer class.",
            "Give the class: with_plan(Trainer, plan)(model=...).",
        )
    if private.generates_rows(trainer_class):
        raise RequestError(
            f"{trainer_class.__name__} generates the rows that it trains on, and a plan can't "
            f"share them out exactly.",
            "Train it without a plan.",
        )


def check_setup(trainer: Any) -> None:
    """Raise RequestError if the Trainer's settings conflict with a plan."""
    args = trainer.args
    if args.n_gpu > 1:
        raise RequestError(
            f"One process has {args.n_gpu} GPUs, and DataParallel shares rows out equally.",
            f"Start one process for each: torchrun --nproc-per-node {args.n_gpu} train.py.",
        )
    if isinstance(trainer.model, DistributedDataParallel):
        raise RequestError(
            "The model is in DistributedDataParallel already, and gradients would be "
            "exchanged and weighted twice.",
            "Give the trainer the bare model, without split.wrap.",
        )
    if args.include_num_input_tokens_seen not in ("no", False) and not hasattr(
        Trainer, "_track_num_input_tokens"
    ):
        raise RequestError(
            "With a plan, include_num_input_tokens_seen needs transformers 5.",
            "Leave it out, or update.",
        )
    if args.auto_find_batch_size:
        raise RequestError("auto_find_batch_size=True changes the plan's batches.", "Leave it out.")
    if trainer.is_deepspeed_enabled:
        raise RequestError(
            "DeepSpeed averages gradients over ranks itself.",
            "Use DistributedDataParallel or FSDP2 with a plan.",
        )
    if (
        trainer.is_fsdp_enabled
        and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2
    ):
        raise RequestError(
            "FSDP1 isn't supported with a plan.",
            "Use FSDP2: fsdp_version 2 in the FSDP configuration.",
        )
    sizes = (
        getattr(trainer, name, int)() for name in ("get_tp_size", "get_cp_size", "get_sp_size")
    )
    if max(sizes) > 1:  # older versions of transformers don't have all of them
        raise RequestError(
            "Tensor, context and sequence parallelism put several ranks on one row.",
            "Use data parallelism with a plan.",
        )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise RequestError(
            "train_sampling_strategy='batch_rebalance' makes the ranks' batches equally long, and "
            "the plan makes a fast rank's longer.",
            "Use 'random' or 'group_by_length'.",
        )


def check_rebalance(trainer: Any, share: Share) -> None:
    """Raise RequestError if this Trainer's shares can't be changed during training."""
    can_time_compute(trainer.model, rebalances=True)
    if trainer.is_fsdp_enabled:
        raise RequestError(
            "FSDP's ranks meet in layers, so none has times of its own to rebalance by.",
            "Leave rebalance out.",
        )
    if share.cost is not None:
        raise_no_shares()


def needs_equal_passes(trainer: Any) -> bool:
    """Return whether all ranks have to compute the same number of gradient-accumulation passes.

    This is the case for sharded models, and for TRL's trainers, which communicate in every pass.
    """
    if trainer.is_fsdp_enabled or is_sharded(trainer.model):
        return True
    return any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def check_checkpoint(folder: Path, rows: int, step_rows: int, epoch_steps: float) -> None:
    """Raise RequestError if the checkpoint was written with a different batch size or data set.

    `rows` is the row count of the current data set, `step_rows` that of an optimizer step, and
    `epoch_steps` is the number of optimizer steps in an epoch.
    """
    try:
        state = json.loads((folder / CHECKPOINT).read_text())
    except FileNotFoundError:  # written without a plan, whose rows have the same order
        _check_bare_checkpoint(folder / "trainer_state.json", step_rows, epoch_steps)
        return
    # a position in the epoch is counted in steps
    if state != {"rows": rows, "step_rows": step_rows}:
        raise RequestError(
            f"The checkpoint was made with {state['step_rows']} of {state['rows']} rows in "
            f"each optimizer step, this"
            f" training has {step_rows} of {rows}.",
            (
                f"Give with_plan(..., global_batch=N) the number that makes {state['step_rows']}, "
                f"and the same data set."
            ),
        )


def _check_bare_checkpoint(path: Path, step_rows: int, epoch_steps: float) -> None:
    try:
        state = json.loads(path.read_text())
        steps = state["max_steps"] / state["num_train_epochs"]
    except (FileNotFoundError, KeyError, ZeroDivisionError):
        return
    if abs(steps - epoch_steps) > 0.5:
        raise RequestError(
            f"An epoch has {steps:g} steps in the checkpoint's training, {epoch_steps:g} of "
            f"{step_rows} rows here.",
            (
                "Give with_plan(..., global_batch=N) the rows of the checkpoint's steps, and the "
                "same data set."
            ),
        )


class PassSampler(StepSampler):
    """Sampler that yields the row indices of each gradient-accumulation pass, step by step.

    A pass without rows gets one filler row, which doesn't count.
    """

    def __init__(self, sampler: UnevenBatchSampler, passes: int) -> None:
        super().__init__(sampler)
        self.passes = passes

    def steps(self) -> Iterator[Any]:
        """Yield a list of passes for each step; a pass is a tuple of row indices."""
        if isinstance(self.sampler, LengthSampler):
            return ([tuple(rows.tolist()) for rows in step] for step in self.sampler.steps())
        return (self._cut(step, rows) for step, rows in enumerate(self.sampler))

    def _cut(self, step: int, rows: list[int]) -> list[tuple[int, ...]]:
        return [
            tuple(rows[start:stop] or rows[:1]) for start, stop in bounds(self.pass_sizes(step))
        ]

    def pass_sizes(self, step: int) -> tuple[int, ...]:
        """Return this rank's row count in each pass of a step.

        Filler rows don't count.
        """
        rows = self.sampler
        if isinstance(rows, LengthSampler):
            return rows.pass_sizes(step * rows.global_batch, rows.epoch)
        own = rows.sizes_at(step * rows.global_batch)[rows.rank]
        return divide_rows(own, max(1, own), self.passes)


class PassRows(Dataset):  # type: ignore[misc]  # torch is not followed
    """Data set that is indexed by tuples of row indices; an item is a pass's collated rows."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: tuple[int, ...]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(list(rows)))
        return self._collate([self._dataset[row] for row in rows])


def find_lengths(trainer: Any) -> list[int] | None:
    """Return the length of each row in tokens, or None if rows have no token ids."""
    dataset, name = trainer.train_dataset, trainer.args.length_column_name
    if name in (getattr(dataset, "column_names", None) or ()):
        return list(dataset[name])
    names = (
        ("input_ids",)
        if trainer.processing_class is None
        else trainer.processing_class.model_input_names[:1]
    )
    if len(dataset) == 0 or not hasattr(dataset[0], "keys") or names[0] not in dataset[0]:
        return None
    # iterating over the data set itself might never finish
    return [len(dataset[row][names[0]]) for row in range(len(dataset))]


def makes_batches(trainer: Any, make_loader: Callable[[], Any]) -> bool:
    """Return whether the trainer's data loader uses a batch sampler other than PyTorch's own."""
    loader = make_undivided(trainer, make_loader)
    kind = type(getattr(loader, "batch_sampler", None))
    return isinstance(loader, DataLoader) and kind not in (BatchSampler, type(None))


def training_rows(trainer: Any, make_loader: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Return the data set, collate function and row sampler of the trainer's data loader.

    Raises RequestError unless the loader is a DataLoader with PyTorch's own BatchSampler.
    """
    loader = make_undivided(trainer, make_loader)
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        name = type(trainer).__bases__[-1].__name__
        raise RequestError(
            f"{name}.get_train_dataloader gives a {type(loader).__name__} that makes its "
            f"batches itself, and the plan"
            " decides which rows are in a batch.",
            "Return a DataLoader with a sampler, or leave the method out.",
        )
    return loader.dataset, loader.collate_fn, loader.sampler


def make_sampler(
    trainer: Any, planned: PlannedTraining, dataset: Any, order: Any
) -> UnevenBatchSampler:
    """Return the sampler that gives each rank its share of the trainer's rows.

    `order` is the trainer's own sampler, whose order of rows is kept. Every rank has to call this,
    because ranks without a data seed exchange one.
    """
    rows, shares = count_rows(dataset), planned.ranks
    if isinstance(order, LengthGroupedSampler):
        order.batch_size = shares.global_batch
    return planned.sampler(
        rows,
        lengths=find_lengths(trainer)
        if shares.share.cost is not None and not needs_equal_passes(trainer)
        else None,
        shuffle=False,
        drop_last=trainer.args.dataloader_drop_last,
        order=_make_order(trainer, order, rows),
    )


def _make_order(trainer: Any, sampler: Any, rows: int) -> RowOrder | None:
    """Return the order in which a single process without a plan would draw the rows.

    The result is None for the data set's own order. Every rank has to call this.
    """
    if type(sampler) is SequentialSampler:
        return None
    seed = trainer.args.data_seed
    if seed is None:
        # the seed with which the first rank's process was last seeded
        seed = int(
            trainer.accelerator.gather(
                torch.tensor([torch.initial_seed()], device=trainer.args.device)
            )[0]
        )
    if type(sampler) is RandomSampler and sampler.generator is None:
        sampler = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            data_seed=seed,
        )
    return RowOrder(sampler, rows, seed)
