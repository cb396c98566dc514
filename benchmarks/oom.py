"""Trainings of two and three ranks whose passes run out of memory, until there were 1,000 of them.

    python -m benchmarks.oom [--failures 1000]

Each case of tests/support/torch_oom_programs.py is trained with seed after seed: at random layers, forward or backward,
in any pass, on any rank, also after buckets have been sent, and before the optimizer's first step; and once by one
process that takes the same passes. The bar is 1e-12 in float64. Where there are two GPUs, two ranks train on them over
NCCL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.support import torch_oom_programs as programs
from tests.support.rank_server import RankServer, place_ranks, run_on_gpus

GPUS = torch.cuda.device_count() > 1
SHARES = ((24, 8), (20, 12)) if GPUS else ((24, 12, 8), (20, 12))
TRAIN = f"{programs.__name__}.train_all"
BAR = 1e-12
SEEDS = 2 if GPUS else 4  # in one start of ranks


def find_worst(ranks: list[Any], shares: tuple[int, ...]) -> float:
    """The largest difference of a weight, a buffer or a loss from one process."""
    worst = 0.0
    for name, seed in ranks[0]:
        case = msgspec.structs.replace(programs.CASES[name], seed=seed)
        kept = [rank[name, seed]["kept"] for rank in ranks]
        expected = programs.reference(case, shares, kept, "cuda" if GPUS else "cpu")
        for rank in (each[name, seed] for each in ranks):
            assert all(sum(sizes) in shares for sizes in rank["kept"])
            pairs = zip(rank["state"], expected["state"], strict=True)
            worst = max(worst, *(float((mine - its).abs().max()) for mine, its in pairs))
            worst = max(worst, *(abs(mine - its) for mine, its in zip(rank["losses"], expected["losses"], strict=True)))
    return worst


def main() -> None:
    """Print what was found; exit with 1 above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=1000)
    wanted = parser.parse_args().failures
    torch.set_num_threads(1)
    failures, steps, seed, worst, began = 0, 0, 1, 0.0, time.monotonic()
    with RankServer("tests.support.torch_oom_programs") as server, tempfile.TemporaryDirectory() as folder:
        while failures < wanted:
            for shares in SHARES:
                seeds, out = list(range(seed, seed + SEEDS)), Path(folder, f"{seed}-{len(shares)}")
                if GPUS:
                    run_on_gpus(TRAIN, out, shares, seeds)
                else:
                    server.run(TRAIN, out, shares, seeds, ranks=place_ranks(len(shares)))
                ranks = [torch.load(out / f"{rank}.pt") for rank in range(len(shares))]
                failures += sum(each["burst"] for rank in ranks for each in rank.values())
                steps += sum(len(each["losses"]) for each in ranks[0].values())
                worst = max(worst, find_worst(ranks, shares))
                said = f"{failures} out-of-memory errors in {steps} steps, {time.monotonic() - began:.0f} s"
                print(f"{said}: at most {worst:.1e} from one process", flush=True)
            seed += SEEDS
    sys.exit(worst > BAR)


if __name__ == "__main__":
    main()
