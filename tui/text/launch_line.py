"""The command line that starts a training by a plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from evener.plan import Plan


def launch_hint(plan: Plan, path: str) -> str:
    """How to train by a plan in this file, as a part of a sentence; empty where there is nothing to launch."""
    active = plan.layout.active
    if plan.layout.kind not in ("solo", "split") or any(share.device.startswith("sim-") for share in active):
        return ""
    script, colon, _ = plan.workload.rpartition(":")
    line = write_line([path, script if colon else "train.py"])
    where = ", on each of its hosts" if active[0].host else ""
    return f"to train by it{where}: {line}"


def write_line(words: Sequence[str]) -> str:
    """`evener launch` with these arguments, as a shell reads it."""
    return shlex.join(["evener", "launch", *words])
