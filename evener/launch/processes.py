"""Start the processes of one host, copy their output, and wait until they have ended."""

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
    """How the processes of a host have ended: with success, with failures, or by a signal."""

    signal: int = 0  # the signal that the launcher received; 0: none
    # exit codes by rank, for ranks that failed by themselves; -N: killed by signal N
    failures: dict[int, int] = {}
    # ranks that exited with code 0 before others failed, which may be the cause
    left: tuple[int, ...] = ()

    @property
    def is_loss(self) -> bool:
        """True if processes were killed by a signal, which suggests that a device has failed.

        This also happens when the host's memory runs out. SIGTERM counts only if no process exited
        with an error code.
        """
        # SIGTERM doesn't count: it is sent to the other processes after one has failed
        codes = set(self.failures.values())
        return bool(codes) and (
            any(code < 0 and code != -signal.SIGTERM for code in codes) or max(codes) < 0
        )

    @property
    def words(self) -> str:
        """A message that names the rank that failed first.

        If another rank exited with code 0 before the failure, the message names it, too.
        """
        # a rank that exited isn't named if SIGKILL explains the failure
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
    """Return a sort key for exit codes. The likeliest cause of the other failures comes first."""
    # A killed process makes others abort or raise an error, and then the launcher sends SIGTERM to
    # the rest.
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
    """Create pipes for the output of processes, and print each line with the process's name.

    This is a context manager. It yields, for each process, the paths to use as standard output and
    standard error. The name precedes the line. It is left out as long as `has_several` returns
    False.
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
    """The prefix that is printed before each output line of a process."""

    def __init__(self, name: str, has_several: Callable[[], bool]) -> None:
        self._name = f"[{name}] ".encode()
        self._has_several = has_several
        self._is_named = False

    def find(self) -> bytes:
        """Return the prefix to print: the process's name in brackets, or b"" for none.

        It is empty until `has_several` first returns True, and the name from then on.
        """
        self._is_named = self._is_named or self._has_several()
        return self._name if self._is_named else b""


def _end_copy(write_fd: int, end_marker: bytes, thread: threading.Thread) -> None:
    """End a thread that copies output from a pipe, and close the pipe.

    `end_marker` is written to the pipe, and the thread stops when it reads it.
    """
    with suppress(OSError):
        os.write(write_fd, end_marker)
    thread.join()
    os.close(write_fd)


def _copy_output(read_fd: int, end_marker: bytes, names: _LineNames, write_fd: int) -> None:
    """Copy lines from a pipe to an output stream, each with a prefix.

    `read_fd` and `write_fd` are their file descriptors. Copying ends at the bytes `end_marker`.
    """
    # If the stream is closed, reading stops, so that the process gets an error when it writes.
    begun = found = b""
    with suppress(OSError), os.fdopen(read_fd, "rb", 0) as pipe:
        while not found:
            text, found, _ = (begun + pipe.read(LONGEST_LINE)).partition(end_marker)
            *lines, begun = _ENDS.split(text)
            if found or len(begun) > LONGEST_LINE:
                lines = [*lines, begun and begun + b"\n" * bool(found)]
                begun = b""
            name = names.find()
            for line in lines:
                if line not in (b"", _EMPTY):
                    _write(write_fd, name + line)


def _write(stream: int, text: bytes) -> None:
    while text:
        text = text[os.write(stream, text) :]


POLL_SECONDS = 0.1


def run_children(job: HostJob) -> GroupExit:
    """Start the processes of a job, and wait until all have exited or one has failed.

    PyTorch's agent isn't used. After a failure, the other processes get SIGTERM. A signal to this
    process is passed on to them. Processes that still run after the job's `grace_seconds` are
    killed.
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
    """Return the environment variables for a single PyTorch process that runs without the agent."""
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
    """Return a HOST:PORT on this machine whose port is free."""
    # PyTorch requires an address, but nothing listens there: the processes meet through a file
    return f"127.0.0.1:{reserve_free_ports(1)[0]}"


def _describe_rendezvous(address: str) -> str:
    """Return the value of an environment variable that says where a host's processes meet.

    It contains `address` and the path of a new file in memory.
    """
    # The value is `address`, a space and the path of a file. Without the file, PyTorch would use
    # `address`, a HOST:PORT.
    return f"{address} {make_memory_file()}"


def _list_tf_configs(job: HostJob) -> list[dict[str, str]]:
    """Return the environment variable TF_CONFIG for each process of this host.

    Returns [] if the processes don't need it.
    """
    # several processes of engine "multiworker" need it, in the plan's order
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


def _wait(processes: Sequence[subprocess.Popen[bytes]], signals: list[int]) -> dict[int, int]:
    """Wait until all processes have exited or one has failed, and return their exit codes.

    The keys are the indices of those that have exited. Returns {} after a signal in `signals`.
    """
    while not signals:
        polled = enumerate(process.poll() for process in processes)
        codes = {i: code for i, code in polled if code is not None}
        if any(codes.values()) or len(codes) == len(processes):
            return codes
        time.sleep(POLL_SECONDS)
    return {}


def _end_processes(
    processes: Sequence[subprocess.Popen[bytes]], signal_number: int, grace_seconds: float
) -> None:
    """Send signal `signal_number` to the processes that are still running.

    Those that don't exit within `grace_seconds` are killed.
    """
    # a terminal has already sent the signal of Ctrl-C to processes in its foreground
    for process in processes:
        if process.poll() is None and not (signal_number == signal.SIGINT and _is_in_foreground()):
            process.send_signal(signal_number)
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def _is_in_foreground() -> bool:
    """Return True if this process is in the terminal's foreground process group."""
    with suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


FORCE_SECONDS = 25  # a process that exits this long after the first failure was killed by the agent


def _describe_agent(job: HostJob, address: str) -> dict[str, str]:
    """Return the environment variables for PyTorch's agent and the processes that it starts."""
    # ranks meet at this address or, on a single host, through the file
    more = {}
    if job.attempt:
        more["TORCHELASTIC_RESTART_COUNT"] = str(job.attempt)
    if len(job.hosts) == 1:
        more[RENDEZVOUS] = _describe_rendezvous(address)
    return job.environment([more] * len(job.processes))


def _read_failures(job: HostJob, failures: Mapping[int, Any]) -> GroupExit:
    """Return how the ranks ended, from the failures that PyTorch's agent has reported.

    Ranks that the agent killed after the first failure aren't counted.
    """
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
    # the agents of several hosts have to restart together
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
