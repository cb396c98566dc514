"""The machine around the devices: its CPUs, its memory and its processes, read from the kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from evener.cpu_topology import parse_cpu_list
from evener.devices.types import HostSample

ONLINE = Path("/sys/devices/system/cpu/online")
LONGEST_COMMAND = 4096
FIRST_WAIT_SECONDS = 0.03  # a few of the kernel's ticks: the first line would show 0 % otherwise


class HostMeter:
    """The host line, and the busy shares of single CPUs that came with it."""

    def __init__(self) -> None:
        self._name = clean_text(socket.gethostname())
        self.by_cpu: dict[int, float] = {}  # logical CPU -> percent; empty before the first line

    def read(self) -> HostSample:
        """The machine now."""
        percents = psutil.cpu_percent(None if self.by_cpu else FIRST_WAIT_SECONDS, percpu=True)
        self.by_cpu = dict(zip(_online_cpus(len(percents)), percents, strict=False))
        memory = psutil.virtual_memory()
        return HostSample(
            cpu_percent=sum(percents) / max(1, len(percents)),
            load_1min=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            cores=os.cpu_count() or 1,
            hostname=self._name,
        )


def _online_cpus(count: int) -> Iterable[int]:
    """The numbers of the CPUs that psutil lists; some may be missing in between."""
    with suppress(OSError, ValueError):
        return parse_cpu_list(ONLINE.read_text())
    return range(count)


class ProcessReading(msgspec.Struct, frozen=True):
    """Who a process is and what it uses now; unknown facts are empty."""

    pid: int
    start_time: float = 0.0  # seconds since the epoch; 0: unknown
    user: str = ""
    command: str = ""
    parent_pid: int = 0
    cpu_percent: float | None = None  # since the reading before, 100 for one core; None at first, or where denied
    memory_bytes: int | None = None  # resident in the machine's memory


class ProcessTable:
    """Facts of processes, looked up once for each live process; a reused pid is another process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[psutil.Process, ProcessReading]] = {}

    def look(self, pid: int) -> ProcessReading:
        """Who `pid` is and what it uses; for processes of other containers or users perhaps only the pid."""
        known = self._known.get(pid)
        try:
            if known is None or not known[0].is_running():
                process = psutil.Process(pid)
                self._known[pid] = process, _look_up(process)
            process, facts = self._known[pid]
        except (psutil.Error, ValueError, OverflowError):
            self._known.pop(pid, None)
            return ProcessReading(pid)
        with suppress(psutil.Error):
            percent, memory_bytes = process.cpu_percent(None), process.memory_info().rss
            percent = percent if known is self._known[pid] else None
            return msgspec.structs.replace(facts, cpu_percent=percent, memory_bytes=memory_bytes)
        return facts

    def forget_others(self, pids: Iterable[int]) -> None:
        """Forget all processes but these."""
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}


def _look_up(process: psutil.Process) -> ProcessReading:
    found = process.as_dict(["cmdline", "name", "username"], ad_value="")
    command, user = clean_text(" ".join(found["cmdline"] or ()) or found["name"]), clean_text(found["username"])
    return ProcessReading(process.pid, process.create_time(), user, command, process.ppid())


def clean_text(text: str) -> str:
    """Text without anything that could control a terminal or reverse its direction; at most 4096 characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:LONGEST_COMMAND]).strip()
