"""The private parts of transformers, accelerate and TRL that evener uses, each with its purpose.

tests/evener/test_huggingface_private.py checks each name. That test fails first if a new version
changes one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def prepare_inputs(trainer: Any, batch: Any) -> Any:
    """Return a batch as the trainer passes it to `compute_loss`.

    The batch is on the trainer's device, in the trainer's dtypes.
    """
    return trainer._prepare_inputs(batch)


def count_items(trainer: Any, batches: Sequence[Any], device: Any) -> Any:
    """Return num_items_in_batch for these batches together; None if the trainer counts no items."""
    return trainer._get_num_items_in_batch(list(batches), device)


def output_folder(trainer: Any, trial: Any) -> str:
    """Return the folder of a trainer's checkpoints.

    `trial` is the current trial of a hyperparameter search, which has its own folder, or None.
    """
    return str(trainer._get_output_dir(trial=trial))


def pass_rows(trainer: Any) -> int:
    """Return the number of rows per forward pass of one process.

    It can differ from the trainer's arguments, because `auto_find_batch_size` may have reduced it.
    """
    return int(trainer._train_batch_size)


def generates_rows(trainer_class: type) -> bool:
    """True if the class is a trainer of TRL that generates its training rows."""
    return hasattr(trainer_class, "_generate_and_score_completions")
