"""Training programs as users write them, each run by one process and by several ranks; run as a script, it is one rank.

    RANK=0 WORLD_SIZE=2 ... python torch_programs.py result.pt 6 2

A program returns tensors that must be the same in both, or is refused with a sentence.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tests.support import torch_exact_loops, torch_refused_programs
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
    "torch_refused_programs",
    "weights",
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    shares = tuple(int(share) for share in sys.argv[2:])
    wanted = {**EXACT, **{name: program for name, (_, program) in REFUSED.items()}}
    wanted["mean_inside"] = mean_inside
    torch.save({(name, rows): run(wanted[name], shares, rows) for name in wanted for rows in ROWS}, sys.argv[1])
    dist.destroy_process_group()
