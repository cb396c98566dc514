"""Launch a training run on all hosts of a plan, through Ray."""

from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from evener.balancer.probes.launch_plan import reserve_free_ports
from evener.balancer.probes.script_copy import ScriptCopy, WrittenScript, copy_script
from evener.devices.cluster.agents import Agent, HostLostError, RemoteObject, start_agents
from evener.devices.cluster.connection import check_head
from evener.devices.cluster.discovery import find_plan_nodes

from ..errors import DeviceError
from ..plan.file import Plan, load_plan, to_toml
from ..plan.solver import leave_out
from ..printable import plain, print_notice
from ..system.signals import caught_signals, end_with_parent
from ..training.launched import REPLACED_PLAN
from .job import GRACE_SECONDS, check_plan
from .restarts import compare_rows

POLL_SECONDS = 0.1
# interval between checks of Ray's head; without a head, Ray ends this process after a minute
HEAD_SECONDS = 5.0
HEAD_SILENT_SECONDS = SILENT_SECONDS = 15.0
PEER_SECONDS = 30.0  # how long the other hosts may take to exit by themselves after one has failed
LOST_EXIT_CODE = 3


def launch_on_cluster(
    path: Path,
    command: Sequence[str],
    max_restarts: int,
    rendezvous: str | None,
    address: str,
    wait_seconds: float,
    grace_seconds: float = GRACE_SECONDS,
    extra_options: Sequence[str] = (),
) -> int:
    """Run `command` on every host of a plan, and return the exit code.

    - `path`: the plan's file.
    - `max_restarts`: how many times the processes may restart after a host is lost. Its shares go
      to the other hosts, unless Ray can start a new actor on the lost one.
    - `rendezvous`: HOST:PORT at which the hosts meet in the first start; None for a free port of
      the first host.
    - `address`: the Ray cluster's address.
    - `wait_seconds`, `grace_seconds`: how long the hosts have to join, and the processes to exit
      after SIGTERM.
    - `extra_options`: further options of `evener launch`.

    After a signal, the exit code is 128 plus the signal's number. Raises EvenerError if training
    can't start.
    """
    # the plan, the script and the Python files beside it are sent to each host
    planned = plan = load_plan(path)
    check_plan(plan, command)
    end_seconds = grace_seconds + END_SECONDS
    agents = start_agents(find_plan_nodes(plan, address).values())
    script = copy_script(Path(command[0])) if command[0] != "-m" else None
    with caught_signals() as caught:
        for attempt in range(max_restarts + 1):
            options = ["--max-restarts", str(max_restarts - attempt), "--wait", f"{wait_seconds:g}"]
            options += ["--grace", f"{grace_seconds:g}", *extra_options]
            if rendezvous is not None and not attempt:
                options += ["--rendezvous", rendezvous]
            make = functools.partial(
                HostLaunch,
                to_toml(plan),
                str(path.absolute()),
                script,
                end_seconds,
            )
            code, lost = _train_once(agents, make, options, command, caught, end_seconds)
            if caught:
                return 128 + caught[0]
            if not lost or attempt == max_restarts:
                break
            check_head()
            gone = _restart_actors(agents, lost)
            agents = tuple(agent for agent in agents if agent.host not in gone)
            if not agents:
                break
            if gone:
                before = plan
                plan = _leave_out_hosts(planned, agents)
                print_notice(
                    f"{', '.join(sorted(gone))} is left out: {compare_rows(before, plan)} rows"
                )
            who = "all others" if gone else "all"
            print_notice(f"{who} start again, {attempt + 1} of {max_restarts} times")
    return code


def _restart_actors(agents: Sequence[Agent], lost_hosts: set[str]) -> set[str]:
    """Start new actors on the lost hosts, and return the hosts on which that failed."""
    gone = set()
    for agent in agents:
        if agent.host in lost_hosts and not agent.restart(agent.generation):
            gone.add(agent.host)
    for host in sorted(lost_hosts - gone):
        print_notice(f"the host {host} has a new actor of evener")
    return gone


def _leave_out_hosts(plan: Plan, agents: Sequence[Agent]) -> Plan:
    """Return the plan for the hosts of `agents` only.

    These hosts also get the rows of the hosts that are left out.
    """
    left = {agent.host for agent in agents}
    others = [share for share in plan.layout.share if share.host not in left]
    return leave_out(plan, {(share.host, share.device) for share in others})


def _train_once(
    agents: Sequence[Agent],
    factory: Callable[..., HostLaunch],
    options: Sequence[str],
    command: Sequence[str],
    signals: Sequence[int],
    end_seconds: float,
) -> tuple[int, set[str]]:
    """Start `evener launch` on each host, and wait until all have ended.

    `factory` creates a HostLaunch on a host. `options` and `command` are arguments of `evener
    launch`. A signal in `signals` ends the wait, and a launch that doesn't stop within
    `end_seconds` is killed. Returns the exit code and the names of the lost hosts.
    """
    parts: list[RemoteLaunch] = []
    lost: set[str] = set()
    try:
        if "--rendezvous" not in options:
            first = agents[0].host
            (port,) = agents[0].call(reserve_free_ports, 1, first)
            options = [*options, "--rendezvous", f"{first}:{port}"]
        for agent in agents:
            own = ["--host", agent.host, *options]
            kept = agent.keep(factory, own, tuple(command), str(Path.cwd()))
            parts.append(RemoteLaunch(agent.host, kept, end_seconds))
        code = wait_for_hosts(parts, signals)
    except HostLostError as gone:
        print_notice(f"the host {gone.host} {gone.why}")
        code = LOST_EXIT_CODE
        lost = {gone.host}
    finally:
        for part in reversed(parts):  # the first host last, as it serves the rendezvous
            part.end()
    return code, lost | {part.host for part in parts if part.lost}


class RemoteLaunch:
    """Represents `evener launch` on another host: prints its output here, and keeps its exit code.

    `code` is None while it runs. `lost` becomes True if the host no longer answers.
    """

    def __init__(self, host: str, training: RemoteObject, end_seconds: float) -> None:
        self._end_seconds = end_seconds
        self.code: int | None = None
        self.lost = False
        self.host = host
        self._training = training
        self._thread = threading.Thread(target=self._relay, name=host, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the launch, wait until the rest of its output is printed, and release it."""
        if not self.lost:
            with suppress(HostLostError):
                self._training.ask("stop", seconds=self._end_seconds + END_SECONDS)
        self._thread.join(SILENT_SECONDS)
        self._training.close()

    def _relay(self) -> None:
        code: int | None = None
        try:
            while code is None:
                lines, code = self._training.ask("read", seconds=SILENT_SECONDS)
                for line in lines:
                    print(
                        f"[{self.host}] {plain(line.decode(errors='replace').rstrip())}", flush=True
                    )
        except HostLostError as gone:
            print_notice(f"the host {gone.host} {gone.why}")
            self.lost = True
            code = LOST_EXIT_CODE
        self.code = code


def wait_for_hosts(parts: Sequence[RemoteLaunch], signals: Sequence[int]) -> int:
    """Wait until the launches on all hosts have ended, and return the first exit code that isn't 0.

    A lost host or a signal in `signals` ends the wait early. Returns 0 if no launch has failed.
    Raises DeviceError if Ray's head no longer answers.
    """
    # After a failure, the other launches get PEER_SECONDS to end by themselves. If a host is lost,
    # they can't continue.
    deadline = float("inf")
    answered = time.monotonic()
    code = 0  # exit code of the first part that failed
    while not signals and time.monotonic() < deadline:
        if all(part.code is not None for part in parts) or any(part.lost for part in parts):
            break
        if not code:
            code = _find_failure(parts)
            if code:
                deadline = time.monotonic() + PEER_SECONDS
        time.sleep(POLL_SECONDS)
        answered = _check_head(answered)
    return code or _find_failure(parts)


def _find_failure(parts: Sequence[RemoteLaunch]) -> int:
    """Return the exit code of the first launch that failed, or 0 if none has failed."""
    codes = (part.code for part in parts)
    return next((code for code in codes if code), 0)


def _check_head(answered: float) -> float:
    """Check every few seconds that Ray's head answers, and return the time of its last answer.

    `answered` is the time of the previous answer, in seconds of the monotonic clock. Raises
    DeviceError if there has been no answer for HEAD_SILENT_SECONDS.
    """
    now = time.monotonic()
    if now < answered + HEAD_SECONDS:
        return answered
    try:
        check_head()
    except DeviceError:
        if now > answered + HEAD_SILENT_SECONDS:
            raise
        return answered
    return now


READ_SECONDS = 1.0
END_SECONDS = 5.0  # time for a host's launch to exit after its own processes


class HostLaunch:
    """Runs `evener launch` as a subprocess on this host. Another host reads its output.

    - `plan`: the content of the plan file.
    - `plan_path`: the original path of the plan file.
    - `script`: copies of the script and of the other files in its folder; None for a module.
    - `end_seconds`: how long the launch may take to stop before it is killed.
    - `options`, `command`: arguments of `evener launch`.
    - `folder`: the working directory, if it exists on this host.
    """

    # the launch ends together with this process

    def __init__(
        self,
        plan: bytes,
        plan_path: str,
        script: ScriptCopy | None,
        end_seconds: float,
        options: Sequence[str],
        command: Sequence[str],
        folder: str,
    ) -> None:
        self._written = WrittenScript(script) if script else None
        path = Path(tempfile.mkdtemp(prefix="evener-"), "plan.toml")
        path.write_bytes(plan)
        self._plan = path
        words = [self._written.path, *command[1:]] if self._written else list(command)
        self._command = [sys.executable, "-m", "evener", "launch", *options, str(path), *words]
        self._environment = {**os.environ, REPLACED_PLAN: plan_path}
        self._end_seconds = end_seconds
        self._folder = folder if os.access(folder, os.X_OK) else None
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(1000)
        self._started = threading.Event()
        threading.Thread(target=self._run_launch, name="launch", daemon=True).start()

    def read(self) -> tuple[list[bytes], int | None]:
        """Return new lines of output, and the exit code once all lines have been read.

        Waits up to a second for a line. The exit code is None until the launch has ended.
        """
        lines: list[bytes | None] = []
        with suppress(queue.Empty):
            lines.append(self._lines.get(timeout=READ_SECONDS))
            while True:
                lines.append(self._lines.get_nowait())
        ended = bool(lines) and lines[-1] is None
        if ended:
            self._lines.put(None)  # for a reader that waits for more
        written = [line for line in lines if line is not None]
        return written, self._code if ended and not written else None

    def stop(self) -> None:
        """Stop the launch with SIGTERM, or with SIGKILL if it doesn't exit in time."""
        self._started.wait()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self._end_seconds)
            return
        os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the launch, and delete the temporary plan and script."""
        self.stop()
        self._plan.unlink()
        self._plan.parent.rmdir()
        if self._written:
            self._written.close()

    def _run_launch(self) -> None:
        """Run the launch and put its output lines into the queue, with None at the end."""
        # the thread that starts the launch has to live as long as the launch: when it ends, the
        # kernel signals the process that it started (PR_SET_PDEATHSIG)
        try:
            self._process = process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            self._lines.put(f"evener: {error}\n".encode())
            self._code = 1
        else:
            self._started.set()
            assert process.stdout is not None
            for line in process.stdout:
                self._lines.put(line)
            self._code = process.wait()
        self._started.set()
        self._lines.put(None)
