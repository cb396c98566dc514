"""The app on a pseudo-terminal beside real GPUs: keys in, and what a terminal would show then, as text and as ANSI."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS, ROWS = 150, 44
# keys, seconds to go on drawing, and what the picture is called
SCRIPT = (
    (b"", 8.0, "monitor"),
    (b"2", 2.0, "setup"),
    (b"\x13", 30.0, "balance"),
    (b"", 45.0, "found"),
    (b"1", 4.0, "after"),
    (b"3", 4.0, "runs"),
    (b"q", 4.0, "end"),
)


def draw(devices: str, folder: Path, name: str, environment: dict[str, str]) -> dict[str, Any]:
    """Drive the app through its screens; the bytes after each key lie in `folder` as NAME-SCREEN.ansi."""
    import fcntl
    import pty
    import termios

    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "evener", "--devices", devices]
    variables = {**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    child = subprocess.Popen(
        command, stdin=secondary, stdout=secondary, stderr=secondary, env=variables, start_new_session=True
    )
    os.close(secondary)
    os.set_blocking(primary, False)
    drawn = bytearray()
    for keys, seconds, called in SCRIPT:
        with contextlib.suppress(OSError):
            os.write(primary, keys)
        end = time.monotonic() + seconds
        while time.monotonic() < end and child.poll() is None:
            with contextlib.suppress(OSError):
                drawn += os.read(primary, 1 << 16)
            time.sleep(0.02)
        (folder / f"{name}-{called}.ansi").write_bytes(drawn)
    if child.poll() is None:
        child.terminate()
    return {"command": command[1:], "exit_code": child.wait(timeout=20), "bytes": len(drawn)}
