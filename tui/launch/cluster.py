"""A training on all hosts of a plan, through Ray: `evener launch` on each, started by evener's actor there.

A host that goes is left out, if restarts are allowed: the training starts again on those that are left.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from evener.balancer.probes.launch_plan import find_free_ports
from evener.balancer.probes.script_copy import copy_script
from evener.devices.cluster.agents import Agent, HostLostError, Kept, start_agents
from evener.devices.cluster.connection import check_head
from evener.devices.cluster.placement import find_plan_nodes
from evener.errors import DeviceError
from evener.plan.file import load_plan, to_toml
from evener.plan.smaller import leave_out

from ..signals import caught_signals
from ..text.formatting import plain
from .host_training import END_SECONDS, HostTraining
from .job import check_plan
from .restarts import compare_rows, say

POLL_SECONDS = 0.1
HEAD_SECONDS = 5.0  # between two looks at Ray's head: without it, Ray ends this process after a minute
SILENT_SECONDS = 15.0
OTHERS_SECONDS = 30.0  # that the other hosts have to end by themselves, once one has failed
LOST_EXIT_CODE = 3


def launch_on_cluster(
    path: Path, command: Sequence[str], max_restarts: int, rendezvous: str | None, address: str, wait_seconds: float
) -> int:
    """Start the training on each host of the plan and wait for its end; the exit code. EvenerError if it can't start.

    The plan and the script, with the Python files beside it, are sent to each host. Up to `max_restarts` times hosts
    that are lost are left out, by a plan for the others.
    """
    planned = plan = load_plan(path)
    check_plan(plan, command)
    agents = start_agents(find_plan_nodes(plan, address).values())
    script = copy_script(Path(command[0])) if command[0] != "-m" else None
    with caught_signals() as caught:
        for attempt in range(max_restarts + 1):
            options = ["--max-restarts", str(max_restarts - attempt), "--wait", f"{wait_seconds:g}"]
            options += [] if attempt or rendezvous is None else ["--rendezvous", rendezvous]
            make = functools.partial(HostTraining, to_toml(plan), str(path.absolute()), script)
            code, lost = _train(agents, make, options, command, caught)
            if caught:
                return 128 + caught[0]
            agents = tuple(agent for agent in agents if agent.host not in lost)
            if not lost or not agents or attempt == max_restarts:
                break
            check_head()
            left = {agent.host for agent in agents}
            gone = {(share.host, share.device) for share in planned.layout.share if share.host not in left}
            before, plan = plan, leave_out(planned, gone)
            say(f"{', '.join(sorted(lost))} is left out: {compare_rows(before, plan)} rows")
            say(f"all others start again, {attempt + 1} of {max_restarts} times")
    return code


def _train(
    agents: Sequence[Agent],
    make: Callable[..., HostTraining],
    options: Sequence[str],
    command: Sequence[str],
    caught: Sequence[int],
) -> tuple[int, set[str]]:
    """Start once on these hosts and wait until it has ended on all; the exit code, and the hosts that were lost."""
    parts: list[HostPart] = []
    lost: set[str] = set()
    try:
        if "--rendezvous" not in options:
            first = agents[0].host
            options = [*options, "--rendezvous", f"{first}:{agents[0].call(find_free_ports, 1, first)[0]}"]
        for agent in agents:
            own = ["--host", agent.host, *options]
            kept = agent.keep(make, own, tuple(command), str(Path.cwd()))
            parts.append(HostPart(agent.host, kept))
        code = wait_for_hosts(parts, caught)
    except HostLostError as gone:
        say(f"the host {gone.host} {gone.why}")
        code, lost = LOST_EXIT_CODE, {gone.host}
    finally:
        for part in reversed(parts):  # the first host last: the others meet there
            part.end()
    return code, lost | {part.host for part in parts if part.lost}


class HostPart:
    """A host's part of a training: a thread prints what it writes until it ends."""

    def __init__(self, host: str, training: Kept) -> None:
        self.code: int | None = None
        self.lost = False
        self.host, self._training = host, training
        self._thread = threading.Thread(target=self._relay, name=host, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it, if it still runs."""
        if not self.lost:
            with suppress(HostLostError):
                self._training.ask("stop", seconds=END_SECONDS)
        self._thread.join(SILENT_SECONDS)
        self._training.close()

    def _relay(self) -> None:
        code: int | None = None
        try:
            while code is None:
                lines, code = self._training.ask("read", seconds=SILENT_SECONDS)
                for line in lines:
                    print(f"[{self.host}] {plain(line.decode(errors='replace').rstrip())}", flush=True)
        except HostLostError as gone:
            say(f"the host {gone.host} {gone.why}")
            self.lost, code = True, LOST_EXIT_CODE
        self.code = code


def wait_for_hosts(parts: Sequence[HostPart], caught: Sequence[int]) -> int:
    """Wait until all have ended, a signal comes, or one has failed and the others have had their time; its exit code.

    The others can't go on without a host that is lost, and needn't end by themselves. DeviceError if Ray's head is.
    """
    deadline, code, answered = float("inf"), 0, time.monotonic()
    while not caught and any(part.code is None for part in parts) and time.monotonic() < deadline:
        if any(part.lost for part in parts):
            break
        code = code or next((part.code for part in parts if part.code), 0)
        if code and deadline == float("inf"):
            deadline = time.monotonic() + OTHERS_SECONDS
        time.sleep(POLL_SECONDS)
        answered = _look_at_head(answered)
    return code or next((part.code for part in parts if part.code), 0)


def _look_at_head(answered: float) -> float:
    """The time of the head's last answer; DeviceError if that is too long ago."""
    now = time.monotonic()
    if now < answered + HEAD_SECONDS:
        return answered
    try:
        check_head()
    except DeviceError:
        if now > answered + SILENT_SECONDS:
            raise
        return answered
    return now
