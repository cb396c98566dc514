"""Measure the load of the host and of processes, and send signals to processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from evener.errors import RequestError
from evener.live.files import read_stat
from evener.system.cores import parse_cpu_list

from .types import HostSample, ProcessSample

ONLINE = Path("/sys/devices/system/cpu/online")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHORTEST_SECONDS = 1e-3  # shortest time between two readings of a process
LONGEST_COMMAND = 4096
FIRST_WAIT_SECONDS = 0.03  # a few kernel ticks, so that the first sample doesn't show 0 %


class HostMeter:
    """Measures how much CPU and memory are used on this host.

    After each call of `read`, `by_cpu` maps each online logical CPU to its load in percent.
    """

    def __init__(self) -> None:
        self._name = clean_text(socket.gethostname())
        self._cpus: tuple[int, ...] = ()  # numbers of the online CPUs
        self.by_cpu: dict[int, float] = {}  # logical CPU -> percent; empty before the first sample

    def read(self) -> HostSample:
        """Measure the CPU load since the last call, and the memory in use.

        The first call has no earlier call to compare with, so it measures the load for 30 ms.
        """
        percents = psutil.cpu_percent(None if self.by_cpu else FIRST_WAIT_SECONDS, percpu=True)
        if len(percents) != len(self._cpus):
            self._cpus = tuple(_online_cpus(len(percents)))
        self.by_cpu = dict(zip(self._cpus, percents, strict=False))
        memory = psutil.virtual_memory()
        return HostSample(
            cpu_percent=sum(percents) / max(1, len(percents)),
            load_1min=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            cores=len(percents) or 1,
            hostname=self._name,
        )


def _online_cpus(count: int) -> Iterable[int]:
    """Return the indices of the online CPUs, or `range(count)` if they are unknown."""
    with suppress(OSError, ValueError):
        return parse_cpu_list(ONLINE.read_text())
    return range(count)


class ProcessReading(msgspec.Struct, frozen=True):
    """The owner, command and resource use of a process. Unknown values have their defaults."""

    pid: int
    start_time: float = 0.0  # Unix time in seconds; 0: unknown
    user: str = ""
    command: str = ""
    # since the previous reading; 100 is one core; None: first reading, or denied
    cpu_percent: float | None = None
    memory_bytes: int | None = None  # resident in the machine's memory


class _LastReading(NamedTuple):
    """The previous reading of a process, from which its CPU load is computed."""

    facts: ProcessReading
    started: bytes  # start in clock ticks since boot, to recognize a reused pid
    cpu_ticks: int
    at: float


class ProcessTable:
    """Reads processes by pid, and caches what doesn't change between readings."""

    def __init__(self) -> None:
        self._known: dict[int, _LastReading] = {}

    def look(self, pid: int) -> ProcessReading:
        """Read the owner, command, CPU load and memory of a process.

        The CPU load is measured since the previous call for the same process. If the process has
        ended or can't be read, only the `pid` of the result is set.
        """
        before = self._known.pop(pid, None)
        now = time.monotonic()
        stat = read_stat(pid)
        if not stat:
            return ProcessReading(pid)
        started = stat[19]
        cpu_ticks = int(stat[11]) + int(stat[12])
        percent = None
        if before is not None and before.started == started:
            facts = before.facts
            percent = (
                100
                * (cpu_ticks - before.cpu_ticks)
                / TICKS_PER_SECOND
                / max(now - before.at, SHORTEST_SECONDS)
            )
        else:
            try:
                facts = _look_up(psutil.Process(pid))
            except psutil.Error:
                return ProcessReading(pid)
        self._known[pid] = _LastReading(facts, started, cpu_ticks, now)
        return msgspec.structs.replace(
            facts, cpu_percent=percent, memory_bytes=int(stat[21]) * PAGE_BYTES
        )

    def forget_others(self, pids: Iterable[int]) -> None:
        """Remove cached readings, except those of the processes in `pids`."""
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}


def _look_up(process: psutil.Process) -> ProcessReading:
    found = process.as_dict(["cmdline", "name", "username"], ad_value="")
    command = clean_text(" ".join(found["cmdline"] or ()) or found["name"])
    user = clean_text(found["username"])
    return ProcessReading(process.pid, process.create_time(), user, command)


def clean_text(text: str) -> str:
    """Return up to 4096 characters of the text, with spaces in place of unprintable characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:LONGEST_COMMAND]).strip()


SIGNALS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL}
START_TIME_TOLERANCE_SECONDS = 0.05  # psutil computes it from clock ticks


def send_signal(row: ProcessSample, name: str) -> None:
    """Send the signal INT, TERM or KILL to the process in a row of the process table.

    Raises `RequestError`, without sending the signal, if the process is on another host, has ended
    or belongs to another user, or if its pid now belongs to another process.
    """
    if row.host:
        raise RequestError(
            f"Process {row.pid} runs on {row.host}, out of reach from here.", "Run evener there."
        )
    try:
        # the pid can't be reused while the pidfd is held
        with open(os.pidfd_open(row.pid), "rb") as held:
            _check_same(row)
            signal.pidfd_send_signal(held.fileno(), SIGNALS[name])
    except (PermissionError, psutil.AccessDenied):
        raise RequestError(f"You may not signal process {row.pid}.", "Nothing was sent.") from None
    except (OSError, psutil.NoSuchProcess):
        raise RequestError(f"Process {row.pid} has ended.", "Nothing was sent.") from None


def _check_same(row: ProcessSample) -> None:
    process = psutil.Process(row.pid)
    if abs(process.create_time() - row.start_time) > START_TIME_TOLERANCE_SECONDS:
        raise RequestError(f"Pid {row.pid} is another process now.", "Nothing was done.")
    if os.geteuid() != 0 and process.uids().real != os.geteuid():
        raise RequestError(
            f"Process {row.pid} belongs to another user.", "Ask them, or an administrator."
        )
