"""Limit a rank to a part of its GPU before CUDA starts, and record its steps.

PARTS are the percentages of all ranks, to which MPS limits them; on a CPU, a rank computes for
correspondingly longer. In FOLDER each rank saves the end times of its optimizer's steps and its
memory. GATE is a file that the benchmark creates when a program may begin, so that it imports its
libraries while another one trains.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path

PART = float(os.environ["PARTS"].split(",")[int(os.environ["LOCAL_RANK"])])
if PART < 100:
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{PART:g}"

import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

CUDA = torch.cuda.is_available()
ROW_SECONDS = 1e-3  # on a CPU: of a whole device, beside the model's own
SIZES = {
    name: int(os.environ[name]) for name in ("WIDTH", "LAYERS", "LENGTH", "ROWS", "COUNT", "WORDS")
}
torch.set_float32_matmul_precision("high")  # TF32
LONGEST_WAIT = 400.0  # seconds; longer than the programs before this one may take
_ends: list[float] = []


def wait_for_start() -> None:
    """Wait for the file GATE; exit if it doesn't appear."""
    ends = time.monotonic() + LONGEST_WAIT
    while not Path(os.environ["GATE"]).exists():
        if time.monotonic() > ends:
            sys.exit("The benchmark that started this program has gone.")
        time.sleep(0.02)


def slow_down(rows: int) -> None:
    """Compute for as much longer as this device would take than a whole one, on a CPU."""
    if not CUDA and PART < 100:
        until = time.perf_counter() + rows * ROW_SECONDS * (100 / PART - 1)
        while time.perf_counter() < until:
            pass


def _leave() -> None:
    found: dict[str, object] = {"ends": _ends, "part": PART}
    if CUDA:
        torch.cuda.synchronize()
        _, total = torch.cuda.mem_get_info()
        found |= {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "total": total,
        }
    path = Path(os.environ["FOLDER"], f"{os.environ['RANK']}.json")
    path.write_text(json.dumps(found))


register_optimizer_step_post_hook(lambda *_: _ends.append(time.monotonic()))
atexit.register(_leave)
