"""Training programs as users write them, each run by one process and by several ranks.

A program returns tensors that must be the same in both cases, or is refused with an error message.
A rank trains the programs with its shares as ratios, and then the cases of torch_ranks.py with a
plan of these shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support import (
    torch_exact_loops,
    torch_exchange_programs,
    torch_kept_programs,
    torch_length_programs,
    torch_ranks,
    torch_refused_programs,
    torch_tensor_programs,
    torch_unlike_programs,
)
from tests.support.fewer_audits import audit_first_step
from tests.support.torch_program_parts import (
    EXACT,
    REFUSED,
    SHORT_TAIL,
    TAIL,
    data,
    network,
    rows_for,
    run,
    weights,
)

__all__ = [
    "EXACT",
    "REFUSED",
    "SHORT_TAIL",
    "TAIL",
    "data",
    "network",
    "rows_for",
    "run",
    "run_all",
    "torch_exact_loops",
    "torch_exchange_programs",
    "torch_kept_programs",
    "torch_length_programs",
    "torch_refused_programs",
    "torch_tensor_programs",
    "torch_unlike_programs",
    "weights",
]


def run_all(folder: Path, rank: int, shares: Sequence[int], rows: int, cases: bool) -> None:
    """Run every program as one rank, on `rows` rows, and then every case if `cases`.

    If there are cases, only the first steps are audited.
    """
    torch.set_num_threads(1)
    if cases:
        audit_first_step()
    wanted = {**EXACT, **{name: program for name, (_, program) in REFUSED.items()}}
    ratios = tuple(filter(None, shares))
    ended = {
        (name, rows): run(program, ratios, rows)
        for name, program in wanted.items()
        if rows in rows_for(name)
    }
    trained = torch_ranks.train_cases(folder, rank, shares) if cases else {}
    torch.save((ended, trained), folder / f"{rank}.pt")
    dist.destroy_process_group()
