"""Start the processes of one host, copy their output, and wait until they end."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import msgspec

from evener.balancer.probes.launch_plan import OPEN_SERVERS, reserve_free_ports

from ..errors import DeviceError, RequestError
from ..printable import print_notice
from ..system.memory_files import make_memory_file
from ..system.signals import caught_signals, restored_signals
from ..training.launched import RENDEZVOUS
from ..training.start_rank import STARTS
from .job import HostJob


class GroupExit(msgspec.Struct, frozen=True):
    """How a group of processes ended: by a signal, by failures, or with success."""

    signal: int = 0  # the signal that the launcher received; 0: none
    # exit codes by rank, for ranks that failed by themselves; -N: killed by signal N
    failures: dict[int, int] = {}
    # ranks that exited with code 0 before others failed, which may be the cause
    left: tuple[int, ...] = ()

    @property
    def is_loss(self) -> bool:
        """True if signals killed the processes, as when a device or memory fails."""
        # SIGTERM doesn't count: it is sent to the other processes after one has failed
        codes = set(self.failures.values())
        return bool(codes) and (
            any(code < 0 and code != -signal.SIGTERM for code in codes) or max(codes) < 0
        )

    @property
    def words(self) -> str:
        """Name the rank that failed first, and a rank that exited with code 0 before it."""
        # unless SIGKILL explains the failure
        rank, code = min(self.failures.items(), key=lambda each: (_order(each[1]), each[0]))
        left = (
            f"rank {self.left[0]} left with exit code 0, and "
            if self.left and code != -signal.SIGKILL
            else ""
        )
        return f"{left}rank {rank} " + (
            f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
        )


def _order(code: int) -> int:
    """Return a sort key for an exit code."""
    # The lowest key is the most likely cause of all failures. A killed process makes others abort
    # or raise an error, and then the launcher sends SIGTERM to the rest.
    return {-signal.SIGKILL: 0, -signal.SIGTERM: 3}.get(code, 1 if code < 0 else 2)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


STREAMS = (1, 2)  # standard output and error
LONGEST_LINE = 1 << 16
_EMPTY = b"\r\n"  # begins evener's own lines, and so ends the line of a progress bar
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")  # ends of lines, including a progress bar's


def _always() -> bool:
    return True


@contextmanager
def named_output(
    names: Sequence[str], has_several: Callable[[], bool] = _always
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Context manager: give processes pipes for output, and print their lines with a prefix.

    Yields the paths for standard output and standard error of each process. A line has no prefix
    while `has_several` returns False.
    """
    # All output is printed by the end of the context. A marker ends each pipe, because descendants
    # of the processes may keep the pipes open.
    end = secrets.token_bytes(16)
    pipes = [
        (*os.pipe(), _LineNames(name, has_several), stream)
        for name, stream in product(names, STREAMS)
    ]
    threads = [
        threading.Thread(target=_copy_output, args=(read, end, *place), daemon=True)
        for read, _, *place in pipes
    ]
    for thread in threads:
        thread.start()
    paths = [f"/proc/{os.getpid()}/fd/{write}" for _, write, *_ in pipes]
    try:
        yield tuple(zip(paths[::2], paths[1::2], strict=True))
    finally:
        for (_, write, *_), thread in zip(pipes, threads, strict=True):
            _end_copy(write, end, thread)


class _LineNames:
    """The prefix for a process's output lines."""

    # The prefix is the process's name, or empty until `has_several` returns True.

    def __init__(self, name: str, has_several: Callable[[], bool]) -> None:
        self._name = f"[{name}] ".encode()
        self._has_several = has_several
        self._is_named = False

    def find(self) -> bytes:
        """Return the prefix; once set, it stays."""
        self._is_named = self._is_named or self._has_several()
        return self._name if self._is_named else b""


def _end_copy(write: int, end: bytes, thread: threading.Thread) -> None:
    """End a copying thread and close its pipe."""
    with suppress(OSError):
        # the thread stops at the marker `end`
        os.write(write, end)
    thread.join()
    os.close(write)


def _copy_output(read: int, end: bytes, names: _LineNames, stream: int) -> None:
    """Copy lines from a pipe to a stream, each with a prefix."""
    # `read` and `stream` are file descriptors. The end is a marker in the pipe. If the stream is
    # closed, reading stops, so that the process gets an error when it writes.
    begun = found = b""
    with suppress(OSError), os.fdopen(read, "rb", 0) as pipe:
        while not found:
            text, found, _ = (begun + pipe.read(LONGEST_LINE)).partition(end)
            *lines, begun = _ENDS.split(text)
            if found or len(begun) > LONGEST_LINE:
                lines = [*lines, begun and begun + b"\n" * bool(found)]
                begun = b""
            name = names.find()
            for line in lines:
                if line not in (b"", _EMPTY):
                    _write(stream, name + line)


def _write(stream: int, text: bytes) -> None:
    while text:
        text = text[os.write(stream, text) :]


POLL_SECONDS = 0.1


def run_children(job: HostJob) -> GroupExit:
    """Start the processes of a job, without an agent, and wait until all exit or one fails.

    After a failure, the others get SIGTERM; a signal to this process is passed on to them.
    Processes that run longer than the job's `grace_seconds` after that are killed.
    """
    with caught_signals() as caught:
        running = _start(job)
        codes: dict[int, int] = {}
        try:
            codes = _wait(running, caught)
        finally:
            _end_processes(running, caught[0] if caught else signal.SIGTERM, job.grace_seconds)
    if caught:
        return GroupExit(caught[0])
    first = job.plan.layout.active.index(job.own[0])
    failures = {first + i: code for i, code in codes.items() if code}
    return GroupExit(
        failures=failures, left=tuple(first + i for i, code in codes.items() if not code)
    )


def _start(job: HostJob) -> list[subprocess.Popen[bytes]]:
    environment = job.environment(
        [_single_rank_environment(job)] if job.executable else _list_tf_configs(job)
    )
    starts = json.loads(environment[STARTS])
    command = [sys.executable, "-m", "evener.training.start_rank", *job.command]
    return [
        subprocess.Popen(command, env={**environment, STARTS: json.dumps([start])})
        for start in starts
    ]


def _single_rank_environment(job: HostJob) -> dict[str, str]:
    """Return the variables with which a single PyTorch process starts without torchrun's agent."""
    # importing the agent takes two seconds
    address = _find_address()
    attempt = str(job.attempt)
    host, _, port = address.partition(":")
    numbers = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    return {
        **numbers,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        RENDEZVOUS: _describe_rendezvous(address),
        "TORCHELASTIC_RESTART_COUNT": attempt,
    }


def _find_address() -> str:
    """Return a free HOST:PORT on this machine."""
    # PyTorch requires an address, but nothing listens there: processes rendezvous through a file
    return f"127.0.0.1:{reserve_free_ports(1)[0]}"


def _describe_rendezvous(address: str) -> str:
    """Return the variable by which processes on one host find their rendezvous."""
    # The value is `address`, a space and the file's path. Without the file, PyTorch would use
    # `address`, a HOST:PORT.
    return f"{address} {make_memory_file()}"


def _list_tf_configs(job: HostJob) -> list[dict[str, str]]:
    """Return the variable `TF_CONFIG` for each process of this host, or [] if it isn't needed."""
    # it is needed for several processes of engine "multiworker", and in the plan's order
    active = job.plan.layout.active
    if len(active) == 1 or job.plan.layout.engine != "multiworker":
        return []
    if len(job.hosts) == 1:
        if not job.attempt:
            print_notice(OPEN_SERVERS)
        peers = [f"127.0.0.1:{port}" for port in reserve_free_ports(len(active))]
    else:
        peers = [f"{share.host}:{job.rendezvous[1] + i}" for i, share in enumerate(active)]
    own = [i for i, share in enumerate(active) if share.host == job.host]
    configs = ({"cluster": {"worker": peers}, "task": {"type": "worker", "index": i}} for i in own)
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


def _wait(running: Sequence[subprocess.Popen[bytes]], caught: list[int]) -> dict[int, int]:
    """Wait until all processes have exited or one has failed, and return exit codes by index."""
    while not caught:
        polled = enumerate(process.poll() for process in running)
        codes = {i: code for i, code in polled if code is not None}
        if any(codes.values()) or len(codes) == len(running):
            return codes
        time.sleep(POLL_SECONDS)
    # after a signal
    return {}


def _end_processes(
    running: Sequence[subprocess.Popen[bytes]], number: int, grace_seconds: float
) -> None:
    """Signal the running processes, and kill those that don't exit within `grace_seconds`."""
    # a terminal has already sent the signal of Ctrl-C to processes in its foreground
    for process in running:
        if process.poll() is None and not (number == signal.SIGINT and _is_in_foreground()):
            process.send_signal(number)
    deadline = time.monotonic() + grace_seconds
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def _is_in_foreground() -> bool:
    """Return True if this process is in the terminal's foreground group."""
    with suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


FORCE_SECONDS = 25  # a process that exits this long after the first failure was killed by the agent


def _describe_agent(job: HostJob, address: str) -> dict[str, str]:
    """Return the environment for PyTorch's agent and its processes."""
    # ranks meet at this address or, on a single host, through the file
    more = {}
    if job.attempt:
        more["TORCHELASTIC_RESTART_COUNT"] = str(job.attempt)
    if len(job.hosts) == 1:
        more[RENDEZVOUS] = _describe_rendezvous(address)
    return job.environment([more] * len(job.processes))


def _read_failures(job: HostJob, failures: Mapping[int, Any]) -> GroupExit:
    """Return the exit codes of the ranks that failed by themselves."""
    # The agent reports these failures. It kills other ranks FORCE_SECONDS after the first failure.
    first = min(failure.timestamp for failure in failures.values())
    ended = {}
    for rank, failure in failures.items():
        if failure.timestamp < first + FORCE_SECONDS:
            ended[rank] = failure.exitcode
    if len(job.hosts) > 1:
        return GroupExit(failures=ended)  # failures on other hosts aren't visible here
    left = tuple(rank for rank in range(len(job.processes)) if rank not in failures)
    return GroupExit(failures=ended, left=left)


def run_agent(job: HostJob, max_restarts: int) -> GroupExit:
    """Run the processes of a job under PyTorch's elastic agent, and return how they ended.

    The agent restarts them at most `max_restarts` times. Raises RequestError if PyTorch isn't
    installed, and DeviceError if the hosts don't meet within the job's `wait_seconds`.
    """
    # such restarts are for several hosts, whose agents have to restart together
    address = _find_address()
    environment = _describe_agent(job, address)
    # otherwise PyTorch logs pages about an unreachable host
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher import LaunchConfig, elastic_launch

        from .rendezvous import choose_rendezvous
    except ImportError as error:
        raise RequestError(
            f"PyTorch can't be imported ({error}).", 'Install it: pip install "evener[torch]".'
        ) from None
    logging.disable(logging.CRITICAL)  # silence the agent's log, as the failure is reported below
    if "TORCH_CPP_LOG_LEVEL" not in environment:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    # Use a new store for each start, because the agent's own store still has the addresses of
    # processes from before a restart.
    os.environ.update({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment})
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(job.grace_seconds))
    with restored_signals():
        config = LaunchConfig(
            nproc_per_node=len(job.processes),
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(job.folder)),
            **choose_rendezvous(job, address),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "evener.training.start_rank", *job.command)
        except ChildFailedError as error:
            return _read_failures(job, error.failures)
        except SignalException as error:
            return GroupExit(error.sigval)
        except RendezvousError:
            host, port = job.rendezvous
            raise DeviceError(
                f"The hosts {', '.join(job.hosts)} didn't meet at {host}:{port} within "
                f"{job.wait_seconds:g} s.",
                (
                    "Run the line for each other host there, see that the port is open, or wait "
                    "longer (--wait 10m)."
                ),
            ) from None
    return GroupExit()
