"""Slow ranks down and record each step's end, in programs that benchmarks.gpu_run starts.

Each Python process of such a program imports this module. SLOWED is "PERCENTAGES KIND", such as
"100,60 gpu" for two ranks: MPS limits a rank to its percentage of its GPU, or on a CPU a clock
process stops it for the rest of each 25 ms. CORES are the cores of each rank if its launcher
chooses none. STEPS is the file in which the first rank saves the end times of its optimizer's
steps, and its CPU times; they aren't saved without it. GATE is the file for which a rank waits once
it has imported benchmarks/run_jobs/model.py and the trainers.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

LONGEST_WAIT = 300.0  # seconds; longer than the previous training run may take
CLOCK = """
import os, signal, sys, time
process, percent, period = int(sys.argv[1]), int(sys.argv[2]), 0.025
while True:
    for number, seconds in ((signal.SIGSTOP, period * (100 - percent) / 100), (signal.SIGCONT, period * percent / 100)):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            sys.exit()
        time.sleep(seconds)
"""  # noqa: E501


def _note(_: Any) -> None:
    ends: list[tuple[float, float]] = []  # wall-clock time, and CPU time of this process
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(
        lambda *_: ends.append((time.monotonic(), time.process_time()))
    )

    def save() -> None:
        lines = [" ".join(f"{each:.6f}" for each in one) for one in zip(*ends, strict=True)]
        if lines:  # a launcher takes no steps
            Path(os.environ["STEPS"]).write_text("\n".join(lines))

    atexit.register(save)


def _wait(_: Any) -> None:
    if Path(sys.argv[0]).stem == "sft":
        import_module("trl.trainer.sft_trainer")
    import_module("transformers.trainer")
    ends = time.monotonic() + LONGEST_WAIT
    while not Path(os.environ["GATE"]).exists():
        if time.monotonic() > ends:
            sys.exit("the benchmark that started this program has gone")
        time.sleep(0.02)


if "LOCAL_RANK" in os.environ:
    register_post_import_hook(_wait, "model")
    if cores := os.environ.get("CORES"):
        os.sched_setaffinity(
            0, map(int, cores.split(";")[int(os.environ["LOCAL_RANK"])].split(","))
        )
    percentages, kind = os.environ.get("SLOWED", "100 cpu").split()
    each_rank = percentages.split(",")
    percent = each_rank[int(os.environ["RANK"]) % len(each_rank)]
    if os.environ["RANK"] == "0" and "STEPS" in os.environ:
        register_post_import_hook(_note, "torch")
    if percent != "100" and kind == "gpu":
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
    elif percent != "100" and "CLOCKED" not in os.environ:
        os.environ["CLOCKED"] = "1"
        clean = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
        subprocess.Popen([sys.executable, "-c", CLOCK, str(os.getpid()), percent], env=clean)
