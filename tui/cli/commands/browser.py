"""`evener --web`: the app in a browser on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from ...runtime.snapshot_publisher import open_publisher


def show_in_browser(devices: str, readonly: bool, port: int, look: Mapping[str, object]) -> int:
    """Serve the app until a signal; the exit code. `look`: options of the app, which True switches on.

    RequestError and DeviceError say at once what is wrong with a request that every visitor's app would refuse.
    """
    from ...serve.browser import serve_browser

    replay = look.get("--replay")
    publisher, _ = open_publisher(devices, replay if isinstance(replay, Path) else None)
    publisher.close()
    given = [
        word for name, value in look.items() if value for word in ([name] if value is True else [name, str(value)])
    ]
    options = [*given, *(["--readonly"] if readonly else [])]
    return serve_browser([sys.executable, "-P", "-m", "evener", "monitor", "--devices", devices, *options], port)
