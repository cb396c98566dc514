"""The private methods of transformers' Trainer that evener calls, all in one place.

tests/evener/test_huggingface_private.py checks that each exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def prepare_inputs(trainer: Any, batch: Any) -> Any:
    """Move a batch to the trainer's device, and return it."""
    return trainer._prepare_inputs(batch)


def count_items(trainer: Any, batches: Sequence[Any], device: Any) -> Any:
    """Return the trainer's `num_items_in_batch` for the batches; None if it doesn't count items."""
    return trainer._get_num_items_in_batch(list(batches), device)


def output_folder(trainer: Any, trial: Any) -> str:
    """Return the folder for checkpoints.

    In a hyperparameter search, each `trial` has its own folder; outside a search, `trial` is None.
    """
    return str(trainer._get_output_dir(trial=trial))


def pass_rows(trainer: Any) -> int:
    """Return the batch size of one training pass on this device."""
    return int(trainer._train_batch_size)


def generates_rows(trainer_class: type) -> bool:
    """Return whether the class generates its own training rows, as TRL's GRPO trainer does."""
    return hasattr(trainer_class, "_generate_and_score_completions")
