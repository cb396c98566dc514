"""The rows that a Trainer trains on, and their order: its data set's, or those of its own training loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import RequestError
from ..torch_split.length_sampler import LengthSampler
from ..torch_split.loader import count_rows
from ..torch_split.rank_shares import RankShares
from ..torch_split.row_order import RowOrder
from ..torch_split.sampler import UnevenBatchSampler
from ..training.dealing import make_dealer
from .checks import needs_equal_passes
from .dealt_rows import find_lengths


def training_rows(trainer: Any, make_loader: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """The training data, their collator, and their sampler if the trainer's class makes a loader of its own."""
    if _has_own_loader(trainer):
        return _own_rows(trainer, make_loader)
    dataset = trainer.train_dataset
    if dataset is None:
        raise RequestError("The trainer has no train_dataset.", "Give one.")
    if hasattr(dataset, "column_names"):  # of the library datasets
        return trainer._remove_unused_columns(dataset, description="training"), trainer.data_collator, None
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description="training"), None


def _has_own_loader(trainer: Any) -> bool:
    kinds = (kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("evener."))
    return next(kind for kind in kinds if "get_train_dataloader" in vars(kind)) is not Trainer


def _own_rows(trainer: Any, make_loader: Callable[[], Any]) -> tuple[Any, Any, Any]:
    prepare = trainer.accelerator.prepare
    trainer.accelerator.prepare = lambda loader: loader  # which would share the rows out
    try:
        loader = make_loader()
    finally:
        trainer.accelerator.prepare = prepare
    plain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not plain or type(loader.batch_sampler) is not BatchSampler:
        name = type(trainer).__bases__[-1].__name__
        raise RequestError(
            f"{name}.get_train_dataloader gives a {type(loader).__name__} that makes its batches itself, and the plan"
            " decides which rows are in a batch.",
            "Return a DataLoader with a sampler, or leave the method out.",
        )
    return loader.dataset, loader.collate_fn, loader.sampler


def make_sampler(trainer: Any, shares: RankShares, dataset: Any, order: Any) -> UnevenBatchSampler:
    """This rank's rows of each global batch, in the trainer's own order, or in that of a sampler of its class."""
    rows = count_rows(dataset)
    order = trainer._get_train_sampler(dataset) if order is None else order
    if isinstance(order, LengthGroupedSampler):
        order.batch_size = shares.global_batch
    options: dict[str, Any] = {
        "shuffle": False,
        "drop_last": trainer.args.dataloader_drop_last,
        "order": _make_order(trainer, order, rows),
    }
    lengths = find_lengths(trainer) if shares.share.cost is not None and not needs_equal_passes(trainer) else None
    if lengths is None:
        return UnevenBatchSampler(rows, shares.batches, shares.rank, **options)
    dealer = make_dealer(shares.batches, shares.micros, shares.shares)
    return LengthSampler(rows, shares.batches, shares.rank, lengths=lengths, dealer=dealer, **options)


def _make_order(trainer: Any, sampler: Any, rows: int) -> RowOrder | None:
    """The rows of each epoch as the bare trainer draws them in one process; None for their own order.

    The seed of a random order is `data_seed`, else the one that the process was seeded with last, on the first rank.
    """
    if sampler is None or type(sampler) is SequentialSampler:
        return None
    seed = trainer.args.data_seed
    if seed is None:
        seed = int(trainer.accelerator.gather(torch.tensor([torch.initial_seed()], device=trainer.args.device))[0])
    if type(sampler) is RandomSampler and sampler.generator is None:
        sampler = SeedableRandomSampler(
            sampler.data_source, replacement=sampler.replacement, num_samples=sampler._num_samples, data_seed=seed
        )
    return RowOrder(sampler, rows, seed)
