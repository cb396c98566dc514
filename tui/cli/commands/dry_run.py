"""`evener balance --dry-run`: what a search has ahead of it, from a few steps on one device."""

from __future__ import annotations

import sys
import threading

from evener.balancer.dry_run import DeviceOutlook, Outlook, dry_run
from evener.balancer.events import ProbeProgress
from evener.balancer.request import Request
from evener.tui.cli.session_runner import stopped_by_signals
from evener.tui.text.formatting import duration, plain, size
from evener.tui.text.safe_documents import json_text
from evener.tui.text.tables import align

MILLISECONDS_BELOW = 9.95  # seconds, up to which a step is given in milliseconds


def run_dry(request: Request, as_json: bool) -> int:
    """Build, step and print what a search would do; returns the exit code."""
    stop, phases = threading.Event(), set[str]()

    def report(progress: ProbeProgress) -> None:
        if progress.phase not in phases:
            phases.add(progress.phase)
            print(f"evener: {progress.phase}", file=sys.stderr, flush=True)

    with stopped_by_signals(stop.set, "stopping") as caught:
        outlook = dry_run(request, report, stop)
    if outlook is None:
        return caught[0] if caught else 1
    print(json_text(outlook) if as_json else "\n".join(outlook_lines(outlook)), flush=True)
    return 0


def outlook_lines(outlook: Outlook) -> list[str]:
    """What was tried, a row for each device, and how long a search should take."""
    steps = ", ".join(f"{batch} samples {_step(seconds)}" for batch, seconds in outlook.steps)
    built = f"built in {duration(outlook.start_seconds)} and stepped" if outlook.start_seconds else "stepped"
    framework = "" if outlook.framework == "none" else f" ({outlook.framework})"
    budget = outlook.budget_seconds
    limit = "" if budget is None else f" of its budget of {duration(budget)}"
    return [
        *(f"note: {plain(note)}" for note in outlook.notes),
        f"{plain(outlook.workload)}{framework} was {built} on {outlook.devices[0].label}: a step of {steps}.",
        "",
        *align([("device", "name", "memory", "fits at once"), *map(_row, outlook.devices)], numbers_from=2),
        "",
        f"A search should take about {duration(outlook.search_seconds)}{limit}. Nothing was kept.",
    ]


def _row(device: DeviceOutlook) -> tuple[str, str, str, str]:
    memory = "unknown" if device.memory_bytes is None else size(device.memory_bytes)
    most = "unknown" if device.largest_batch is None else f"about {device.largest_batch} samples"
    return (device.label, plain(device.name, 32), memory, most)


def _step(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < MILLISECONDS_BELOW else duration(seconds)
