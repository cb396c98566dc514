"""Training programs as users write them, each run by one process and by several ranks of a
RankServer.

A program returns tensors that must be the same in both, or is refused with a sentence. A rank takes
the shares as ratios for the programs, and then trains the cases of torch_ranks.py by a plan of
them.
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
    """One rank: every program with a data set of `rows` rows, and every case if `cases`.

    Where there are cases, only first steps are audited.
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
