"""The machine around the devices: its CPUs, its memory and its processes, read from the kernel."""

from __future__ import annotations

import os
import pwd
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from evener.devices.types import HostSample

STAT = Path("/proc/stat")
LONGEST_COMMAND = 4096
FIRST_WAIT_SECONDS = 0.03  # a few of the kernel's ticks
IDLE_FIELDS = (3, 4)  # idle and iowait, among user nice system idle iowait irq softirq steal
COUNTED_FIELDS = 8  # guest time behind them is part of user time already


class CpuUse(msgspec.Struct, frozen=True):
    """Busy time since the reading before, 0 – 100."""

    total_percent: float | None  # None: no time has passed
    by_cpu: dict[int, float]  # logical CPU -> percent; empty before the second reading


class CpuMeter:
    """Turns the kernel's tick counters into percentages between two readings; the first counts from its creation."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._before = self._counters()

    def read(self) -> CpuUse:
        """Busy shares since the call before."""
        now = self._counters()
        shares: dict[int, float] = {}
        for cpu, (busy, total) in now.items():
            busy0, total0 = self._before.get(cpu, (busy, total))
            if total > total0:
                shares[cpu] = min(100.0, max(0.0, 100.0 * (busy - busy0) / (total - total0)))
        if shares:
            self._before = now
        return CpuUse(shares.pop(-1, None), shares)

    def _counters(self) -> dict[int, tuple[int, int]]:
        """CPU -> (busy, total) in ticks; -1 stands for all together."""
        counters: dict[int, tuple[int, int]] = {}
        with suppress(OSError), self._stat.open() as lines:
            for line in lines:
                if not line.startswith("cpu"):
                    break
                name, *numbers = line.split()
                ticks = [int(number) for number in numbers[:COUNTED_FIELDS]]
                idle = sum(ticks[field] for field in IDLE_FIELDS if field < len(ticks))
                counters[int(name[3:] or -1)] = (sum(ticks) - idle, sum(ticks))
        return counters


class HostMeter:
    """The host line, and the busy shares of single CPUs that came with it."""

    def __init__(self) -> None:
        self._cpus = CpuMeter()
        self._percent = 0.0
        self._cores = len(os.sched_getaffinity(0))
        self._name = clean_text(socket.gethostname())
        self.by_cpu: dict[int, float] = {}

    def read(self) -> HostSample:
        """The machine now."""
        use = self._cpus.read()
        if use.total_percent is None and not self.by_cpu:
            time.sleep(FIRST_WAIT_SECONDS)  # the first line would show 0 % otherwise
            use = self._cpus.read()
        if use.total_percent is not None:
            self._percent, self.by_cpu = use.total_percent, use.by_cpu
        memory = psutil.virtual_memory()
        return HostSample(
            cpu_percent=self._percent,
            load_1min=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            cores=os.cpu_count() or self._cores,
            hostname=self._name,
        )


class ProcessFacts(msgspec.Struct, frozen=True):
    """Who a process is; unknown facts are empty."""

    pid: int
    start_time: float = 0.0  # seconds since the epoch; 0: unknown
    user: str = ""
    command: str = ""


class ProcessReading(msgspec.Struct, frozen=True):
    """A process at one moment."""

    facts: ProcessFacts
    cpu_percent: float | None = None  # since the reading before, 100 for one core; None at first, or where denied
    memory_bytes: int | None = None  # resident in the machine's memory


class ProcessTable:
    """Facts of processes, looked up once for each live process; a reused pid is another process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[psutil.Process, ProcessFacts]] = {}
        self._users: dict[int, str] = {}

    def look(self, pid: int) -> ProcessReading:
        """Who `pid` is and what it uses; for processes of other containers or users perhaps only the pid."""
        known = self._known.get(pid)
        entry = self._entry(pid)
        if entry is None:
            return ProcessReading(ProcessFacts(pid))
        process, facts = entry
        try:
            percent = process.cpu_percent(None)
            return ProcessReading(facts, percent if known is entry else None, process.memory_info().rss)
        except psutil.Error:
            return ProcessReading(facts)

    def forget_others(self, pids: Iterable[int]) -> None:
        """Forget all processes but these."""
        kept = set(pids)
        for pid in [pid for pid in self._known if pid not in kept]:
            del self._known[pid]

    def _entry(self, pid: int) -> tuple[psutil.Process, ProcessFacts] | None:
        known = self._known.get(pid)
        if known is not None and known[0].is_running():
            return known
        self._known.pop(pid, None)
        try:
            process = psutil.Process(pid)
            facts = self._look_up(process)
        except (psutil.Error, ValueError, OverflowError):
            return None
        self._known[pid] = (process, facts)
        return self._known[pid]

    def _look_up(self, process: psutil.Process) -> ProcessFacts:
        command, user = "", ""
        with suppress(psutil.AccessDenied, psutil.ZombieProcess):
            command = " ".join(process.cmdline())
        with suppress(psutil.AccessDenied, psutil.ZombieProcess):
            command = command or process.name()
        with suppress(psutil.AccessDenied, psutil.ZombieProcess):
            user = self._user(process.uids().real)
        return ProcessFacts(process.pid, process.create_time(), user, clean_text(command))

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            self._users[uid] = str(uid)
            with suppress(KeyError):
                self._users[uid] = clean_text(pwd.getpwuid(uid).pw_name)
        return self._users[uid]


def clean_text(text: str) -> str:
    """Text without anything that could control a terminal or reverse its direction; at most 4096 characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:LONGEST_COMMAND]).strip()
