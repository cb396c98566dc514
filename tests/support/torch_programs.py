"""Training programs as users write them, each run by one process and by several ranks; run as a script, it is one rank.

    RANK=0 WORLD_SIZE=2 ... python torch_programs.py result.pt plan.json

A program returns tensors that must be the same in both, or is refused with a sentence. A rank takes the plan's shares
as ratios for the programs, and then trains the cases of torch_ranks.py by the plan.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from evener.plan import load_plan
from tests.support import torch_exact_loops, torch_length_programs, torch_ranks, torch_refused_programs
from tests.support.torch_exact_batches import mean_inside
from tests.support.torch_program_parts import EXACT, REFUSED, ROWS, data, network, run, weights

__all__ = [
    "EXACT",
    "REFUSED",
    "ROWS",
    "data",
    "mean_inside",
    "network",
    "run",
    "torch_exact_loops",
    "torch_length_programs",
    "torch_refused_programs",
    "weights",
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    path, plan = sys.argv[1:3]
    shares = tuple(share for share in load_plan(plan).batches if share)
    wanted = {**EXACT, **{name: program for name, (_, program) in REFUSED.items()}, "mean_inside": mean_inside}
    ended = {(name, rows): run(wanted[name], shares, rows) for name in wanted for rows in ROWS}
    cases = {name: torch_ranks.train(case, plan) for name, case in torch_ranks.CASES.items()}
    torch.save((ended, cases), path)
    dist.destroy_process_group()
