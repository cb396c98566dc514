"""Draw the app on a pseudo-terminal with real GPUs, and keep its ANSI output after each key.

`python -m benchmarks.gpu_screen FOLDER --devices gpu` draws the Monitor and the Trainings screen,
beside what computes on this machine, as FOLDER/gpu-monitor.svg and FOLDER/gpu-trainings.svg.
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


async def draw_screens(devices: str, seconds: float) -> dict[str, str]:
    """Return the Monitor and the Trainings screen as SVG, after reading for some seconds."""
    from evener.devices.sampler import open_sampler
    from evener.tui.app import EvenerApp

    publisher, trainable = open_sampler(devices)
    publisher.start()
    app = EvenerApp(publisher, devices=devices, trainable=trainable)
    drawn = {}
    async with app.run_test(size=(120, 40)) as pilot:
        for key, name, wait in (("1", "monitor", seconds), ("4", "trainings", 4.0)):
            await pilot.press(key)
            await asyncio.sleep(wait)
            app.clear_notifications()
            await pilot.pause()
            drawn[name] = app.export_screenshot(title="evener")
    app.close_threads()
    return drawn


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[-1])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", default="gpu")
    parser.add_argument("--seconds", type=float, default=25.0, help="to watch before")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, drawn in asyncio.run(draw_screens(given.devices, given.seconds)).items():
        (given.folder / f"gpu-{name}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
