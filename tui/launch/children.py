"""The processes of this host as children of this one: a single one, or those of Keras that TF_CONFIG joins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from evener.balancer.probes.launch_plan import find_free_ports
from evener.training.start_rank import STARTS

from ..signals import caught_signals
from .ending import Ending
from .job import HostJob

POLL_SECONDS = 0.1
END_SECONDS = 30.0  # that a process has to end after SIGTERM


def run_children(job: HostJob) -> Ending:
    """Start the processes and wait for their end; if one fails, the others are ended."""
    with caught_signals() as caught:
        running = _start(job)
        codes: dict[int, int] = {}
        try:
            codes = _wait(running, caught)
        finally:
            _end(running, caught[0] if caught else signal.SIGTERM)
    if caught:
        return Ending(caught[0])
    first = job.plan.layout.active.index(job.own[0])
    failures = {first + i: code for i, code in codes.items() if code}
    return Ending(failures=failures, left=tuple(first + i for i, code in codes.items() if not code))


def _start(job: HostJob) -> list[subprocess.Popen[bytes]]:
    environment = job.environment(_cluster(job))
    starts = json.loads(environment[STARTS])
    command = [sys.executable, "-m", "evener.training.start_rank", *job.command]
    return [subprocess.Popen(command, env={**environment, STARTS: json.dumps([start])}) for start in starts]


def _cluster(job: HostJob) -> list[dict[str, str]]:
    """TF_CONFIG of each process of this host, where there are several in all; their order is the plan's."""
    active = job.plan.layout.active
    if len(active) == 1 or job.plan.layout.engine != "multiworker":
        return []
    if len(job.hosts) == 1:
        peers = [f"127.0.0.1:{port}" for port in find_free_ports(len(active))]
    else:
        peers = [f"{share.host}:{job.meeting[1] + i}" for i, share in enumerate(active)]
    own = [i for i, share in enumerate(active) if share.host == job.host]
    configs = ({"cluster": {"worker": peers}, "task": {"type": "worker", "index": i}} for i in own)
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


def _wait(running: Sequence[subprocess.Popen[bytes]], caught: list[int]) -> dict[int, int]:
    """Wait until all have ended well, one hasn't, or a signal comes; the exit codes of those that have ended."""
    while not caught:
        codes = {i: code for i, process in enumerate(running) if (code := process.poll()) is not None}
        if any(codes.values()) or len(codes) == len(running):
            return codes
        time.sleep(POLL_SECONDS)
    return {}


def _end(running: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """End those that still run, by force if they don't end by themselves; Ctrl-C on a terminal they get from it."""
    for process in running:
        if process.poll() is None and not (number == signal.SIGINT and _is_in_foreground()):
            process.send_signal(number)
    deadline = time.monotonic() + END_SECONDS
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def _is_in_foreground() -> bool:
    """True if a terminal sends its signals to this process and its children."""
    with suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False
