"""The app on a pseudo-terminal with real GPUs: after each key, what it has written so far, as ANSI."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.monitor import Screen

APP = "import sys; from evener.tui.app.app import run_app; sys.exit(run_app({devices!r}, workload={workload!r}))"
# keys, seconds to wait, name of the picture
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
    """Drive the app through its screens and write what it drew after each key to NAME-SCREEN.ansi in `folder`."""
    screen = Screen(APP.format(devices=devices, workload=workload), environment, kept_bytes=1 << 24)
    try:
        for keys, seconds, called in SCRIPT:
            screen.press(keys)
            time.sleep(seconds)
            (folder / f"{name}-{called}.ansi").write_bytes(bytes(screen.seen))
    finally:
        code = screen.close()
    return {"devices": devices, "workload": workload, "exit_code": code, "bytes": screen.written_bytes}
