"""The app on a pseudo-terminal beside real GPUs: keys in, and what a terminal was sent by then, as ANSI."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.monitor import Screen

APP = "import sys; from evener.tui.app.app import run_app; sys.exit(run_app({devices!r}, workload={workload!r}))"
# keys, seconds to go on drawing, and what the picture is called
SCRIPT = (
    (b"", 8.0, "monitor"),
    (b"2", 2.0, "setup"),
    (b"\x13", 30.0, "balance"),
    (b"", 105.0, "found"),
    (b"1", 4.0, "after"),
    (b"3", 4.0, "runs"),
    (b"q", 4.0, "end"),
)


def draw(devices: str, workload: str, folder: Path, name: str, environment: dict[str, str]) -> dict[str, Any]:
    """Drive the app through its screens; the bytes after each key lie in `folder` as NAME-SCREEN.ansi."""
    screen = Screen(APP.format(devices=devices, workload=workload), environment, kept_bytes=1 << 24)
    try:
        for keys, seconds, called in SCRIPT:
            screen.press(keys)
            time.sleep(seconds)
            (folder / f"{name}-{called}.ansi").write_bytes(bytes(screen.seen))
    finally:
        code = screen.close()
    return {"devices": devices, "workload": workload, "exit_code": code, "bytes": screen.written_bytes}
