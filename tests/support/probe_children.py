"""The children of probes that run below a process: each is forked by a server, which is no probe's child itself."""

from __future__ import annotations

from contextlib import suppress

import psutil

from evener.balancer.probes.forked_process import MODULE


def list_probe_children(pid: int | None = None) -> list[psutil.Process]:
    """Those of this process, or of another one, that haven't ended."""
    found: list[psutil.Process] = []
    for server in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if MODULE in server.cmdline():
                found += [child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE]
    return found
