"""The next steps with a plan: write it, train by it, or measure more."""

from __future__ import annotations

from evener.plan.file import Plan

from ..types import Finding


def find_next_steps(run: str, plan: Plan, path: str, interrupted: bool, measured: bool) -> list[Finding]:
    """The steps after a search; `path` is the plan's file, if it was written. `measured`: this session measured any."""
    write = Finding("next.written", {"path": path}) if path else Finding("next.export", {"run": run})
    steps = [write, *find_training_step(plan, path or "plan.toml")]
    if interrupted:
        return [*steps, Finding("next.resume", {"run": run})]
    return steps if measured else [*steps, Finding("next.extend", {"run": run})]


def find_training_step(plan: Plan, path: str) -> list[Finding]:
    """The command that trains by a plan in this file; none without a script to launch."""
    active, (script, _, _) = plan.layout.active, plan.workload.rpartition(":")
    simulated = any(share.device.startswith("sim-") for share in active)
    if not plan.layout.traits.by_shares or simulated or not script:
        return []
    hosts = [host for host in dict.fromkeys(share.host for share in active) if host]
    return [Finding("next.train", {"command": ["evener", "launch", path, script], "hosts": hosts})]
