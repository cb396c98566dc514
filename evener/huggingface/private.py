"""The private parts of transformers, accelerate and TRL that evener uses, with their purposes.

tests/evener/test_huggingface_private.py checks each name, so it fails first if a new version
changes one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def prepare_inputs(trainer: Any, batch: Any) -> Any:
    """Return a batch as the trainer passes it to its loss: on the device, with the right types."""
    return trainer._prepare_inputs(batch)


def count_items(trainer: Any, batches: Sequence[Any], device: Any) -> Any:
    """Return the number of items that a loss of these batches is a mean over; None if unknown."""
    return trainer._get_num_items_in_batch(list(batches), device)


def output_folder(trainer: Any, trial: Any) -> str:
    """Return the folder of a trainer's checkpoints; each hyperparameter trial has its own."""
    return str(trainer._get_output_dir(trial=trial))


def pass_rows(trainer: Any) -> int:
    """Return a process's rows per pass, which `auto_find_batch_size` may have changed."""
    return int(trainer._train_batch_size)


def generates_rows(trainer_class: type) -> bool:
    """True if the class is a trainer of TRL that generates its training rows."""
    return hasattr(trainer_class, "_generate_and_score_completions")
