"""TensorFlow's profiler: copies on GPUs, and what is sent between devices or reduced between processes on CPUs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ..profiling import Event

COPIES = ("Memcpy", "nccl")
SENT = re.compile(r":_(Host)?Send$")
REDUCED = re.compile(r":Collective\w+$")
SIZE = re.compile(r"size:(\d+)")


def transfers(run: Callable[[], None]) -> Iterator[Event]:
    """(name, seconds, bytes) of each copy, send or collective while `run` ran."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        for path in Path(folder).rglob("*.xplane.pb"):
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
            if on_device and name.startswith(COPIES):
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
