"""`evener monitor` without the app: plain text, JSON or CSV, once or every few seconds, recorded or replayed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from evener.devices.recording import Recorder, Recording
from evener.devices.types import DeviceSample, Reading, Snapshot, Source
from evener.errors import RequestError
from evener.tui.text.formatting import plain
from evener.tui.text.safe_documents import json_text
from evener.tui.text.tables import csv_text
from evener.tui.view.marks import ASCII, UNICODE, Marks
from evener.tui.view.plain import snapshot_text

SHORTEST_INTERVAL_SECONDS = 0.1
SETTLE_SECONDS = 0.05  # rates need two readings
GPU_SETTLE_SECONDS = 0.12  # the driver's profiler wants at least 0.1 s between two of its samples


def run_monitor(
    devices: str,
    *,
    once: bool = False,
    json: bool = False,
    csv: bool = False,
    interval_seconds: float | None = None,
    only: tuple[int, ...] | None = None,
    only_visible: bool = False,
    record: Path | None = None,
    replay: Path | None = None,
    ascii: bool = False,  # noqa: A002 - the option's name
    stdout: TextIO | None = None,
) -> int:
    """Print readings to `stdout` and return the exit code.

    Without `interval_seconds` or `record` there is one reading; a recording is replayed to its end. RequestError and
    DeviceError say what is wrong with the request, the files or the driver.
    """
    out = sys.stdout if stdout is None else stdout
    if json and csv:
        raise RequestError("--json and --csv are two forms of one answer.", "Give one of them.")
    _check_interval(interval_seconds)
    loops = not once and (interval_seconds is not None or record is not None)
    pause = interval_seconds if interval_seconds is not None else 1.0
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(_open(devices, only_visible, replay)))
        _check_indices(source, only)
        recorder = stack.enter_context(Recorder(record, os.uname().nodename)) if record is not None else None
        for number, snapshot in enumerate(_snapshots(source, pause, loops=loops)):
            kept = _keep(snapshot, only)
            text = f"{json_text(kept)}\n" if json else _csv(kept, headed=not number) if csv else _text(kept, out, ascii)
            out.write(text)
            out.flush()
            if recorder is not None and not recorder.write(kept):
                print(
                    f"evener: {plain(str(record))} is as large as a recording may get; recording ends.",
                    file=sys.stderr,
                )
                break
    return 0


def _check_interval(interval_seconds: float | None) -> None:
    if interval_seconds is not None and not SHORTEST_INTERVAL_SECONDS <= interval_seconds <= 86400:
        raise RequestError(
            f"-i {interval_seconds:g} is not a usable interval.",
            f"Give {SHORTEST_INTERVAL_SECONDS:g} seconds or more; reading more often would slow the devices down.",
        )


def _open(devices: str, only_visible: bool, replay: Path | None) -> Source:
    if replay is not None:
        return Recording(replay)
    from evener.devices.discover import discover, open_source

    return open_source(discover(devices, only_visible=only_visible))


def _check_indices(source: Source, only: tuple[int, ...] | None) -> None:
    known = [device.index for device in source.devices()]
    missing = [index for index in only or () if index not in known]
    if missing:
        there = ", ".join(map(str, known)) or "none"
        raise RequestError(f"There is no device {missing[0]}.", f"The indices here are: {there}.")


def _snapshots(source: Source, pause: float, *, loops: bool) -> Iterator[Snapshot]:
    """One settled reading, or one every `pause` seconds; a recording's last one, or all of them."""
    recorded = source if isinstance(source, Recording) else None
    if recorded is None:
        source.sample()
        time.sleep(GPU_SETTLE_SECONDS if any(each.kind == "gpu" for each in source.devices()) else SETTLE_SECONDS)
    elif not loops:
        yield recorded.snapshot(len(recorded) - 1)
        return
    due = time.monotonic()
    while True:
        yield source.sample()
        if not loops or (recorded is not None and recorded.ended):
            return
        due = max(due + pause, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _keep(snapshot: Snapshot, only: tuple[int, ...] | None) -> Snapshot:
    if only is None:
        return snapshot
    kept = tuple(sample for sample in snapshot.devices if sample.device.index in only)
    ids = {sample.device.id for sample in kept}
    processes = tuple(row for row in snapshot.processes if row.device_id in ids)
    return msgspec.structs.replace(snapshot, devices=kept, processes=processes)


def _csv(snapshot: Snapshot, *, headed: bool) -> str:
    """A line for each device: every metric under the key that it has in JSON, empty where there is no current value."""
    return csv_text([_record(snapshot.at_seconds, sample) for sample in snapshot.devices], headed)


def _record(at_seconds: float, sample: DeviceSample) -> dict[str, object]:
    values = msgspec.structs.asdict(sample)
    device = values.pop("device")
    record = {"at_seconds": round(at_seconds, 3), "device": device.label, "id": device.id, "name": device.name}
    return record | {key: each.current if isinstance(each, Reading) else each for key, each in values.items()}


def _text(snapshot: Snapshot, out: TextIO, ascii_only: bool) -> str:
    on_terminal = out.isatty()
    colour = on_terminal and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((132, 24)).columns
    return snapshot_text(snapshot, max(80, width), _marks(out, ascii_only), colour=colour)


def _marks(out: TextIO, ascii_only: bool) -> Marks:
    """Plain ASCII if requested, or if the stream's encoding has nothing else."""
    try:
        "━╸▸…".encode(getattr(out, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return ASCII if ascii_only else UNICODE
