"""Transfers between devices in a step: the copies and exchanges that a framework's profiler saw."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.errors import RequestError

TORCH_MOVES = ("Memcpy", "ncclDevKernel", "ncclKernel", "gloo:")
TENSORFLOW_COPIES = ("Memcpy", "nccl")
SENT = re.compile(r":_(Host)?Send$")
REDUCED = re.compile(r":Collective\w+$")
SIZE = re.compile(r"size:(\d+)")


class Transfer(msgspec.Struct, frozen=True):
    """A kind of copy or exchange, over all profiled steps. `moved_bytes` is None where the profiler doesn't say."""

    name: str
    calls: int
    seconds: float
    shortest_seconds: float
    longest_seconds: float
    moved_bytes: int | None = None


Event = tuple[str, float, int | None]  # name, seconds, bytes


def profile(framework: str, run: Callable[[], None]) -> tuple[Transfer, ...]:
    """The copies between devices while `run` ran, the longest first; RequestError without a profiler for it."""
    trace = {"torch": trace_torch, "tensorflow": trace_tensorflow}.get(framework)
    if trace is None:
        raise RequestError(f"There is no profiler for framework {framework!r}.", "Profile tensorflow or torch.")
    return group_events(trace(run))


def group_events(events: Iterable[Event]) -> tuple[Transfer, ...]:
    """Events of one name as one row."""
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event[0], []).append(event)
    rows = [_row(name, same) for name, same in by_name.items()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))


def _row(name: str, events: list[Event]) -> Transfer:
    times = [seconds for _, seconds, _ in events]
    sizes = [size for _, _, size in events if size is not None]
    moved = sum(sizes) if len(sizes) == len(events) else None
    return Transfer(name, len(events), sum(times), min(times), max(times), moved)


def trace_torch(run: Callable[[], None]) -> Iterator[Event]:
    """Copies between GPUs and with the host, and the collectives of NCCL and Gloo, by PyTorch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities) as found:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    for event in events:
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and name.startswith(TORCH_MOVES):
            size = event.get("args", {}).get("bytes")
            short = name if name.startswith("Memcpy") else name.split("(")[0]  # a kernel's name without its arguments
            yield short, float(event.get("dur", 0.0)) / 1e6, None if size is None else int(size)


def trace_tensorflow(run: Callable[[], None]) -> Iterator[Event]:
    """Copies on GPUs, and what is sent between devices or reduced between processes on CPUs, by TensorFlow's."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        yield from _read_planes(Path(folder))


def _read_planes(folder: Path) -> Iterator[Event]:
    """The events in the files that TensorFlow's profiler wrote."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            yield from _of_plane(plane)


def _of_plane(plane: Any) -> Iterator[Event]:
    on_device = plane.name.startswith("/device:")
    for line in plane.lines:
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            seconds = event.duration_ps / 1e12
            if on_device and name.startswith(TENSORFLOW_COPIES):
                yield name.split("(")[0], seconds, _bytes(plane, event)
            elif not on_device and SENT.search(name):
                yield "send between devices", seconds, None
            elif not on_device and REDUCED.search(name):
                yield name.rpartition(":")[2], seconds, None


def _bytes(plane: Any, event: Any) -> int | None:
    """The size that a copy's details tell."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            found = SIZE.search(text)
            return int(found[1]) if found else None
    return None
