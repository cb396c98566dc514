"""Measure the CPU time that `evener run` adds to a library's collective and the wait for it.

  python -m benchmarks.collective_cost [--trees /tmp/old] [--rounds 6]

DeepSpeed's ZeRO-3 calls some hundreds of collectives in each step. Here a module of that name calls
an all-reduce of one rank, without hooks and with them. Each variant has a process of its own for
each tree, which take turns. Prints the least thread CPU time of a call in microseconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import types
from collections import defaultdict
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

CALLS, TURNS = 1000, 6
REPO = Path(__file__).parents[1]
LIBRARY = """
import torch.distributed as dist
def start(tensor): return dist.all_reduce(tensor, async_op=True)
def reduce(tensor): start(tensor).wait()
"""


def install_hooks() -> None:
    """Install the hooks of `evener run`, and time waits as for a sharded model."""
    from evener.program.install import install
    from evener.program.notes import ProgramSettings
    from evener.torch.ranks.own_work import HostClock, StepTimer
    from evener.torch.ranks.waits import time_waits
    from evener.training import launched

    os.environ[launched.PROGRAM] = msgspec.json.encode(ProgramSettings("", "train.py")).decode()
    os.environ[launched.DEVICE] = "cpu-0-of-1"
    os.environ["WORLD_SIZE"] = "2"
    install()
    timer = StepTimer(HostClock(), single_rank=False)
    TIMERS.append(timer)
    time_waits(timer)
    timer.time_few()


TIMERS: list[object] = []  # their hooks hold them weakly


def measure(with_hooks: bool) -> float:
    """Return the least thread CPU time of a collective and its wait, in microseconds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if with_hooks:
        install_hooks()
    library = types.ModuleType("deepspeed.comm")
    exec(compile(LIBRARY, "deepspeed/comm.py", "exec"), vars(library))
    tensor, times = torch.ones(8), []
    for _ in range(TURNS):
        began = time.thread_time()
        for _ in range(CALLS):
            library.reduce(tensor)
        times.append((time.thread_time() - began) / CALLS * 1e6)
    return min(times)


def main() -> None:
    """Run the variants in turn, and print the least time of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--variant", choices=("bare", "hooks"))
    options = parser.parse_args()
    if options.variant:
        print(measure(options.variant == "hooks"))
        return
    found: defaultdict[str, list[float]] = defaultdict(list)
    variants = [("bare", REPO), *(("hooks", Path(tree)) for tree in (*options.trees, REPO))]
    for _ in range(options.rounds):
        for variant, tree in variants:
            command = [sys.executable, __file__, "--variant", variant]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            found[f"{variant} {tree}"].append(float(done.stdout.split()[-1]))
    for name, times in found.items():
        print(f"{min(times):6.1f} us  {name}")


if __name__ == "__main__":
    main()
