"""A training of two ranks for the monitor to watch: rank 1 is slow in its backward pass."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from evener.devices.discover import discover, open_source
from evener.live import reporter as live
from evener.torch import Split
from evener.tui.cli.monitor import snapshot_document
from evener.tui.text.formatting import json_text
from tests.support import torch_rebalance_programs
from tests.support.torch_program_parts import data
from tests.support.torch_rebalance_programs import SlowBackward


def watched(folder: Path, rank: int, sleep_seconds: float) -> None:
    """Train; at the end rank 0 saves what the monitor says as JSON, and its snapshot."""
    torch.set_num_threads(1)
    torch_rebalance_programs.SLEEP_SECONDS = sleep_seconds
    live.INTERVAL_SECONDS, live.COST_LIMIT = 0.0, 1.0
    split = Split(ratios=(3, 1), global_batch=8)
    model = split.wrap(SlowBackward())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in split.loader(data(96)):
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # until then, the other rank has written its last report
    said = {}
    if rank == 0:
        with closing(open_source(discover("cpu/2"))) as source:
            snapshot = source.sample()
        said = {
            "json": json_text(snapshot_document(snapshot)),
            "snapshot": msgspec.json.encode(snapshot),
        }
    dist.barrier()
    torch.save(said, folder / f"{rank}.pt")
