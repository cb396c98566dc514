"""Functions that benchmarks.trainer_matrix runs in processes.

They train the cases of tests/support/matrix_parts.py one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - imported before the ranks are forked
import lightning.pytorch  # noqa: F401 - the same
import torch
import torch._dynamo
import transformers

import tests.support.trl_programs  # noqa: F401 - the same
from benchmarks.chunks import append_result
from tests.support.matrix_trainings import train_bare, train_planned

transformers.logging.set_verbosity_error()


def reference_all(folder: Path, _: int, names: Sequence[str], __: Any) -> None:
    """Train the cases without evener in this process."""
    torch.set_num_threads(1)
    for name in names:
        append_result(folder / "reference_all0.jsonl", name, partial(keep, folder, name))


def keep(folder: Path, name: str) -> dict[str, Any]:
    """Train a case without evener and save its results."""
    torch.save(train_bare(name), folder / f"{name}.pt")
    return {}


def plan_all(folder: Path, rank: int, names: Sequence[str], references: dict[str, str]) -> None:
    """Train the cases by a plan as one rank; `references` names the bare run of each case."""
    torch.set_num_threads(1)
    for name in names:
        kept = folder / f"{references[name]}.pt"
        append_result(
            folder / f"plan_all{rank}.jsonl", name, partial(train_planned, name, torch.load(kept))
        )
