"""The command line that starts a training by a plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from evener.plan import Plan


def launch_line(plan: Plan, path: str) -> str:
    """What to type for a plan in this file; empty where there is nothing to launch."""
    active = plan.layout.active
    if plan.layout.kind not in ("solo", "split") or any(share.device.startswith("sim-") for share in active):
        return ""
    script, colon, _ = plan.workload.rpartition(":")
    return write_line([path, script if colon else "train.py"])


def write_line(words: Sequence[str]) -> str:
    """`evener launch` with these arguments, as a shell reads it."""
    return shlex.join(["evener", "launch", *words])
