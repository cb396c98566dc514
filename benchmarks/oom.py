"""Train until 1,000 passes have run out of memory, and check the results.

  python -m benchmarks.oom [--failures 1000] [--at-once 3] [--out DIR]

Each case of tests/support/torch_oom_programs.py is trained by several ranks with many seeds.
Memory runs out at random layers, in forward or backward passes, in any pass, on any rank, also
after buckets have been sent, and before the optimizer's first step. One process that takes the same
passes gives the expected result. The tolerance is 1e-12 in float64, unless rounding alone exceeds
it. Without GPUs, two or three ranks train over gloo. With two GPUs, two ranks train on them over
NCCL, and with four, four ranks; `--at-once` is for GPUs. DIR gets the results after each start of
ranks, and the ranks' output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.support import torch_oom_programs as programs
from tests.support.rank_server import RankServer, place_ranks, run_on_gpus

GPUS = torch.cuda.device_count() > 1
SHARES: tuple[tuple[int, ...], ...] = ((24, 12, 8), (20, 12))
if GPUS:
    SHARES = ((24, 8), (20, 12))
if torch.cuda.device_count() > 3:
    SHARES = ((16, 12, 8, 6), (20, 10, 8, 8))
TRAIN = f"{programs.__name__}.train_all"
BAR = 1e-12
SEEDS = 1 if GPUS else 2  # seeds per start of ranks
APART = 1000  # distance between the seeds of processes that train at the same time


def find_worst(ranks: list[Any], shares: tuple[int, ...]) -> dict[str, float]:
    """Return the largest difference from one process, also among those beyond rounding.

    Compares weights, buffers and losses. BatchNorm over a pass of two nearly equal rows can turn a
    gradient's last digit into a difference of 2e-11. Therefore a difference counts as beyond
    rounding only above ten times what that digit makes in one process, as ranks sum in another
    order.
    """
    worst = {"worst": 0.0, "beyond rounding": 0.0}
    for name, seed in ranks[0]:
        case = msgspec.structs.replace(programs.CASES[name], seed=seed)
        kept, device = [rank[name, seed]["kept"] for rank in ranks], "cuda" if GPUS else "cpu"
        expected = programs.reference(case, shares, kept, device)
        moved = _compare(programs.reference(case, shares, kept, device, 1.0 + 2.0**-52), expected)
        for rank in (each[name, seed] for each in ranks):
            assert all(sum(sizes) in shares for sizes in rank["kept"])
            found = _compare(rank, expected)
            worst["worst"] = max(worst["worst"], found)
            worst["beyond rounding"] = max(
                worst["beyond rounding"], found if found > 10 * moved else 0.0
            )
    return worst


def _compare(mine: dict[str, Any], its: dict[str, Any]) -> float:
    pairs = zip(mine["state"], its["state"], strict=True)
    losses = (abs(one - other) for one, other in zip(mine["losses"], its["losses"], strict=True))
    return float(max(*losses, *(float((one - other).abs().max()) for one, other in pairs)))


def train(wanted: int, first: int, folder: Path) -> dict[str, Any]:
    """Train until there have been this many failures."""
    found: dict[str, Any] = {
        "failures": 0,
        "steps": 0,
        "worst": 0.0,
        "beyond rounding": 0.0,
        "seconds": 0.0,
    }
    began = time.monotonic()
    with ExitStack() as stack:
        server = None if GPUS else stack.enter_context(RankServer(programs.__name__))
        number = 0
        while found["failures"] < wanted:
            shares, seed = SHARES[number % len(SHARES)], first + number // len(SHARES) * SEEDS
            seeds, out = (
                list(range(seed, seed + SEEDS)),
                folder / f"{seed}-{'-'.join(map(str, shares))}",
            )
            if server is None:
                run_on_gpus(TRAIN, out, shares, seeds, world=len(shares))
            else:
                server.run(TRAIN, out, shares, seeds, ranks=place_ranks(len(shares)))
            ranks = [torch.load(out / f"{rank}.pt") for rank in range(len(shares))]
            found["failures"] += sum(each["burst"] for rank in ranks for each in rank.values())
            found["steps"] += sum(len(each["losses"]) for each in ranks[0].values())
            found |= {
                name: max(found[name], each) for name, each in find_worst(ranks, shares).items()
            }
            found["seconds"] = round(time.monotonic() - began, 1)
            (folder / f"found-{first}.json").write_text(json.dumps(found))
            print(describe(found), flush=True)
            number += 1
    return found


def train_at_once(wanted: int, times: int, folder: Path) -> dict[str, Any]:
    """Train in several processes at the same time, each with other seeds."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.oom",
        "--failures",
        str(-(-wanted // times)),
        "--out",
        str(folder),
    ]
    firsts = [1 + APART * number for number in range(times)]
    children = [subprocess.Popen([*command, "--first", str(first)]) for first in firsts]
    codes = [child.wait() for child in children]
    every = [json.loads((folder / f"found-{first}.json").read_text()) for first in firsts]
    total = {name: sum(each[name] for each in every) for name in ("failures", "steps")}
    most = {
        name: max(each[name] for each in every) for name in ("worst", "beyond rounding", "seconds")
    }
    assert not any(codes), codes
    return total | most


def describe(found: dict[str, Any]) -> str:
    """Describe the results in one line."""
    said = (
        f"{found['failures']} out-of-memory errors in {found['steps']} steps, "
        f"{found['seconds']:.0f} s"
    )
    beyond = f"{found['beyond rounding']:.1e} where rounding doesn't explain it"
    return f"{said}: at most {found['worst']:.1e} from one process, {beyond}"


def main() -> None:
    """Print the results; exit with 1 above the tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--failures", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = options.out or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if options.at_once > 1:
            found = train_at_once(options.failures, options.at_once, folder)
            print(describe(found), flush=True)
        else:
            found = train(options.failures, options.first, folder)
    sys.exit(found["beyond rounding"] > BAR)


if __name__ == "__main__":
    main()
