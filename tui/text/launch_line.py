"""The command line that starts a training by a plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from evener.plan.file import Plan


def launch_hint(plan: Plan, path: str) -> str:
    """The command that trains by a plan in this file, as a part of a sentence; empty without a script to launch."""
    active, (script, _, _) = plan.layout.active, plan.workload.rpartition(":")
    simulated = any(share.device.startswith("sim-") for share in active)
    if not plan.layout.traits.by_shares or simulated or not script:
        return ""
    line = write_line([path, script])
    where = ", on each of its hosts" if active[0].host else ""
    return f"to train by it{where}: {line}"


def write_line(words: Sequence[str]) -> str:
    """`evener launch` with these arguments, as a shell reads it."""
    return shlex.join(["evener", "launch", *words])
