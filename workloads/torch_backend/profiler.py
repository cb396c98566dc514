"""PyTorch's profiler: copies between GPUs and with the host, and the collectives of NCCL and Gloo."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..profiling import Event

MOVES = ("Memcpy", "ncclDevKernel", "ncclKernel", "gloo:")


def transfers(run: Callable[[], None]) -> Iterator[Event]:
    """(name, seconds, bytes) of each copy or collective while `run` ran."""
    for event in _trace(run):
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and name.startswith(MOVES):
            size = event.get("args", {}).get("bytes")
            yield _named(name), float(event.get("dur", 0.0)) / 1e6, None if size is None else int(size)


def _trace(run: Callable[[], None]) -> list[dict[str, Any]]:
    """All events, in the form of Chrome's traces."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


def _named(name: str) -> str:
    """`Memcpy PtoP (Device -> Device)` as it is; a kernel's name without its arguments."""
    return name if name.startswith("Memcpy") else name.split("(")[0]
