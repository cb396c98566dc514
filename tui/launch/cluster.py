"""A training on all hosts of a plan, through Ray: `evener launch` on each, started by evener's actor there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evener.balancer.probes.launch_plan import find_free_ports
from evener.balancer.probes.script_copy import copy_script
from evener.devices.cluster.agents import HostLostError, Kept, start_agents
from evener.devices.cluster.placement import find_plan_nodes
from evener.plan import load_plan, to_toml
from evener.tui.launch.children import caught_signals
from evener.tui.launch.host_training import END_SECONDS, HostTraining
from evener.tui.launch.job import check_plan
from evener.tui.text.formatting import plain

POLL_SECONDS = 0.1
SILENT_SECONDS = 15.0
OTHERS_SECONDS = 30.0  # that the other hosts have to end by themselves, once one has failed
LOST_EXIT_CODE = 3


def launch_on_cluster(
    path: Path, command: Sequence[str], max_restarts: int, rendezvous: str | None, address: str, wait_seconds: float
) -> int:
    """Start the training on each host of the plan and wait for its end; the exit code. EvenerError if it can't start.

    The plan and the script, with the Python files beside it, are sent to each host.
    """
    plan = load_plan(path)
    check_plan(plan, command)
    agents = start_agents(find_plan_nodes(plan, address).values())
    meeting = rendezvous or f"{agents[0].host}:{agents[0].call(find_free_ports, 1, agents[0].host)[0]}"
    script = copy_script(Path(command[0])) if command[0] != "-m" else None
    text = to_toml(plan)
    parts: list[HostPart] = []
    with caught_signals() as caught:
        try:
            for agent in agents:
                options = ["--host", agent.host, "--rendezvous", meeting, "--max-restarts", str(max_restarts)]
                options += ["--wait", f"{wait_seconds:g}"]
                kept = agent.keep(HostTraining, text, script, options, tuple(command), str(Path.cwd()))
                parts.append(HostPart(agent.host, kept))
            code = wait_for_hosts(parts, caught)
        finally:
            for part in parts:
                part.end()
    return 128 + caught[0] if caught else code


class HostPart:
    """One host's part: a thread prints what it writes until it ends."""

    def __init__(self, host: str, training: Kept) -> None:
        self.code: int | None = None
        self._host, self._training = host, training
        self._thread = threading.Thread(target=self._relay, name=host, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it, if it still runs."""
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
                    print(f"[{self._host}] {plain(line.decode(errors='replace').rstrip())}", flush=True)
        except HostLostError as lost:
            print(f"evener: {plain(lost.message)}", file=sys.stderr, flush=True)
            code = LOST_EXIT_CODE
        self.code = code


def wait_for_hosts(parts: Sequence[HostPart], caught: Sequence[int]) -> int:
    """Until all have ended, a signal comes, or one has failed and the others have had their time: its exit code."""
    deadline, code = float("inf"), 0
    while not caught and any(part.code is None for part in parts) and time.monotonic() < deadline:
        code = code or next((part.code for part in parts if part.code), 0)
        if code and deadline == float("inf"):
            deadline = time.monotonic() + OTHERS_SECONDS
        time.sleep(POLL_SECONDS)
    return code or next((part.code for part in parts if part.code), 0)
