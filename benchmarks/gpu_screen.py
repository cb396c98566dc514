"""Draw the app on a pseudo-terminal with real GPUs, and keep its ANSI output after each key.

`python -m benchmarks.gpu_screen FILE.svg --devices gpu` draws the Trainings screen of the training
runs on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.monitor import Screen

APP = "import sys; from evener.tui.start import run_app; sys.exit(run_app({devices!r}))"
# keys to press, seconds to wait, name of the picture
SCRIPT = (
    (b"", 8.0, "monitor"),
    (b"2", 2.0, "setup"),
    (b"\x13", 30.0, "balance"),
    (b"", 105.0, "found"),
    (b"1", 4.0, "after"),
    (b"3", 4.0, "runs"),
    (b"q", 4.0, "end"),
)


def draw(devices: str, folder: Path, name: str, environment: dict[str, str]) -> dict[str, Any]:
    """Drive the app through its screens; write its output after each key to NAME-SCREEN.ansi."""
    screen = Screen(APP.format(devices=devices), environment, kept_bytes=1 << 24)
    try:
        for keys, seconds, called in SCRIPT:
            screen.press(keys)
            time.sleep(seconds)
            (folder / f"{name}-{called}.ansi").write_bytes(bytes(screen.seen))
    finally:
        code = screen.close()
    return {"devices": devices, "exit_code": code, "bytes": screen.written_bytes}


async def draw_trainings(devices: str, seconds: float) -> str:
    """Return the Trainings screen as SVG after reading for some seconds."""
    from evener.devices.sampler import open_sampler
    from evener.tui.app import EvenerApp

    publisher, trainable = open_sampler(devices)
    publisher.start()
    app = EvenerApp(publisher, devices=devices, trainable=trainable)
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("4")
        await asyncio.sleep(seconds)
        await pilot.pause()
        drawn: str = app.export_screenshot(title="evener")
    app.close_threads()
    return drawn


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[-1])
    parser.add_argument("file", type=Path)
    parser.add_argument("--devices", default="gpu")
    parser.add_argument("--seconds", type=float, default=25.0, help="to watch before")
    given = parser.parse_args()
    given.file.write_text(asyncio.run(draw_trainings(given.devices, given.seconds)))


if __name__ == "__main__":
    main()
