"""Measure how long a process waits for CPU cores, and name the programs that use them.

Linux counts how long each thread ran, and how long it was ready to run but had no core. A process's
owner can read these times in /proc/PID/task/TID/schedstat. Linux also counts how long a hypervisor
gave each core to other machines (steal time). Without these counters, as on other systems and in
some containers, all times are 0.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .cores import CGROUPS, MEMBERSHIP, list_groups

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
LEAST_CORES = 0.1  # minimum number of cores for a program to be named
MOST_NAMED = 3
LONGEST_NAME = 40  # characters
CONTAINER = "the container's CPU limit"
OWN_WORKERS = "the training's own worker processes"
HYPERVISOR = "other virtual machines on this host"


class CoreTimes(NamedTuple):
    """Times of a process and its CPU cores in seconds, counted from an arbitrary start."""

    at_s: float = 0.0
    ran_s: float = 0.0  # total of all threads
    delayed_s: float = 0.0  # time ready to run without a core, total of all threads
    throttled_s: float = 0.0  # time in which the container's CPU quota was used up
    busy_s: float = 0.0  # time in which the process's cores ran any program
    stolen_s: float = 0.0  # time in which the hypervisor ran other machines on these cores


class Starvation(NamedTuple):
    """How long a process waited for a CPU core during a period, in seconds."""

    wall_s: float = 0.0
    starved_s: float = 0.0  # at most wall_s
    throttled_s: float = 0.0

    @property
    def part(self) -> float:
        """The fraction of the period in which the process waited, or 0 if the period is empty."""
        return self.starved_s / self.wall_s if self.wall_s > 0 else 0.0


class CoreWatch:
    """Measures how long the threads of a process wait for a CPU core.

    If `pid` is None, it measures this process. `cores` is the number of cores that the process may
    use, by default those of its affinity.
    """

    def __init__(self, pid: int | None = None, cores: int | None = None) -> None:
        self._tasks = PROC / str(pid or os.getpid()) / "task"
        self._own_cores = frozenset(os.sched_getaffinity(pid or 0))
        self._cores = cores or len(self._own_cores)
        self._before: dict[str, tuple[int, int]] = {}
        self._last = CoreTimes()
        self.read()

    @property
    def known(self) -> bool:
        """True if the kernel reports how long threads waited."""
        return bool(self._before)

    def read(self) -> Starvation:
        """Return how long the process has waited for a CPU core since the last reading.

        The first reading is made when this object is created.
        """
        # The kernel's waiting times also contain waiting for other threads, and for an idle core to
        # wake up. Three limits leave that out: the CPU time that the threads missed is at most what
        # other programs, the hypervisor and the quota took; the CPU time that they wanted is at
        # most that of all cores; and while a core is idle, no thread counts as delayed.
        before = self._last
        last = self._read_totals()
        self._last = last
        wall_s = last.at_s - before.at_s
        ran_s = last.ran_s - before.ran_s
        delayed_s = last.delayed_s - before.delayed_s + _find_stolen(before, last)
        wanted_s = min(ran_s + delayed_s, self._cores * wall_s)
        missed_s = min(wanted_s - ran_s, _find_taken(before, last))
        if wall_s <= 0 or missed_s <= 0:
            return Starvation(max(0.0, wall_s))
        threads = max(1.0, (ran_s + missed_s) / wall_s)
        all_busy_s = wall_s - _find_idle(before, last, len(self._own_cores)) / len(self._own_cores)
        starved_s = min(wall_s, all_busy_s, missed_s / threads)
        return Starvation(wall_s, starved_s, max(0.0, last.throttled_s - before.throttled_s))

    def _read_totals(self) -> CoreTimes:
        """Return the times of all threads and cores so far."""
        # a thread that is new since the last reading is counted from its start
        now = _read_threads(self._tasks)
        ran_s = self._last.ran_s
        delayed_s = self._last.delayed_s
        for thread, (ran, delayed) in now.items():
            ran_before, delayed_before = self._before.get(thread, (0, 0))
            if ran < ran_before:  # the thread id has been reused
                ran_before = delayed_before = 0
            ran_s += (ran - ran_before) / 1e9
            delayed_s += (delayed - delayed_before) / 1e9
        self._before = now
        busy_s, stolen_s = read_core_seconds(self._own_cores)
        throttled_s = read_throttled_seconds()
        return CoreTimes(time.perf_counter(), ran_s, delayed_s, throttled_s, busy_s, stolen_s)


def _find_stolen(before: CoreTimes, last: CoreTimes) -> float:
    """Return the seconds that the hypervisor took from this process between two readings."""
    # The kernel counts it neither as running nor as waiting, so it is estimated: the cores' stolen
    # time times the process's fraction of their busy time.
    stolen_s, busy_s = last.stolen_s - before.stolen_s, last.busy_s - before.busy_s
    ran_s = last.ran_s - before.ran_s
    if stolen_s <= 0 or ran_s <= 0:
        return 0.0
    return stolen_s * min(1.0, ran_s / max(busy_s, ran_s))


def _find_taken(before: CoreTimes, last: CoreTimes) -> float:
    """Return the CPU seconds that others took between two readings, or inf if unknown.

    Others are other processes, the hypervisor and the container's CPU quota.
    """
    if not last.busy_s:
        return math.inf
    others_s = (last.busy_s - before.busy_s) - (last.ran_s - before.ran_s)
    stolen_s, throttled_s = last.stolen_s - before.stolen_s, last.throttled_s - before.throttled_s
    return max(0.0, others_s + 1 / TICKS_PER_SECOND) + stolen_s + throttled_s


def _find_idle(before: CoreTimes, last: CoreTimes, cores: int) -> float:
    """Return the seconds in which cores were idle between two readings, added up over all cores.

    Returns 0 if that is unknown.
    """
    # a quota leaves cores idle that the process may not use
    if not last.busy_s or last.throttled_s > before.throttled_s:
        return 0.0
    used_s = last.busy_s - before.busy_s + last.stolen_s - before.stolen_s
    return max(0.0, cores * (last.at_s - before.at_s) - used_s)


def read_core_seconds(cores: Collection[int], stat: Path = PROC / "stat") -> tuple[float, float]:
    """Return the busy time and the steal time of cores since boot, in seconds.

    Both are added up over `cores`, and are 0 if unknown.
    """
    busy = stolen = 0
    names = {f"cpu{core}" for core in cores}
    with suppress(OSError, ValueError, IndexError):
        for line in stat.read_text().splitlines():
            name, *ticks = line.split()
            if name not in names:
                continue
            user, nice, system, _, _, hard, soft, taken = map(int, ticks[:8])
            busy += user + nice + system + hard + soft
            stolen += taken
    return busy / TICKS_PER_SECOND, stolen / TICKS_PER_SECOND


def _read_threads(tasks: Path) -> dict[str, tuple[int, int]]:
    """Return, for each thread, how many nanoseconds it ran and how many it waited to run."""
    found = {}
    try:
        names = os.listdir(tasks)
    except OSError:
        return {}
    for name in names:
        with suppress(OSError, ValueError, IndexError):  # the thread may have ended
            ran, delayed = (tasks / name / "schedstat").read_text().split()[:2]
            found[name] = int(ran), int(delayed)
    return found


def read_throttled_seconds(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Return how long the container's CPU quota has stopped its processes so far, in seconds.

    If there are several quotas, the longest of these times is returned. Returns 0 if unknown.
    """
    seconds = 0.0
    for folder, version in list_groups("cpu", root, membership):
        name, unit = ("throttled_usec", 1e-6) if version == 2 else ("throttled_time", 1e-9)
        with suppress(OSError, ValueError, IndexError):
            for line in (folder / "cpu.stat").read_text().splitlines():
                if line.startswith(f"{name} "):
                    seconds = max(seconds, int(line.split()[1]) * unit)
    return seconds


class ProcessUse(NamedTuple):
    """The CPU seconds that each process had used at one point in time."""

    at_s: float
    seconds: Mapping[tuple[int, str], float]  # by pid and start time
    parents: Mapping[int, int]
    stolen_s: float  # time taken by the hypervisor, over all cores


def read_process_use() -> ProcessUse:
    """Return the CPU seconds that each visible process has used so far."""
    seconds: dict[tuple[int, str], float] = {}
    parents = {}
    for name in os.listdir(PROC):
        if not name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            fields = (PROC / name / "stat").read_text().rpartition(")")[2].split()
            pid = int(name)
            seconds[pid, fields[19]] = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
            parents[pid] = int(fields[1])
    return ProcessUse(time.perf_counter(), seconds, parents, _read_stolen_seconds())


def name_competitors(
    before: ProcessUse,
    after: ProcessUse,
    root_pid: int,
    throttled_s: float,
    max_names: int = MOST_NAMED,
    training_pid: int = -1,
) -> str:
    """Return a list of the programs that used the most CPU time between two readings, as text.

    Each name is followed by the number of cores that the program used. The process `root_pid`, its
    parent and its descendants aren't named, except for workers of the process `training_pid`. The
    container's quota and other virtual machines are also named if they took a lot of time.
    `throttled_s` is how long the quota stopped this container's processes, in seconds. Returns ""
    if nothing took a lot of time.
    """
    wall_s = after.at_s - before.at_s
    if wall_s <= 0:
        return ""
    taken: dict[str, float] = {}  # cores by program name; processes with the same name are added up
    for (pid, started), seconds in after.seconds.items():
        cores = (seconds - before.seconds.get((pid, started), 0.0)) / wall_s
        mine = pid == after.parents.get(root_pid) or _is_under(pid, root_pid, after.parents)
        worker = pid != training_pid and _is_under(pid, training_pid, after.parents)
        if cores > 0 and (worker or not mine):
            name = OWN_WORKERS if worker else name_process(pid)
            taken[name] = taken.get(name, 0.0) + cores
    first = sorted(taken.items(), key=lambda item: -item[1])[:max_names]
    named = [f"{name} ({cores:.1f} cores)" for name, cores in first if cores >= LEAST_CORES]
    if throttled_s >= 0.05 * wall_s:
        named.append(CONTAINER)
    if (after.stolen_s - before.stolen_s) / wall_s >= LEAST_CORES:
        named.append(HYPERVISOR)
    return ", ".join(named)


def _is_under(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    """Return True if `pid` is `root` or a descendant of it."""
    seen: set[int] = set()
    while pid not in seen:
        if pid == root:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False


def name_process(pid: int) -> str:
    """Return the name of a process's program and script, or "process PID" if it has ended."""
    with suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        named = [Path(word).name for word in (words[0], _find_script(words[1:])) if word]
        text = " ".join(named) or (PROC / str(pid) / "comm").read_text().strip()
        return "".join(sign for sign in text if sign.isprintable())[:LONGEST_NAME]
    return f"process {pid}"


_WITH_VALUE = ("-W", "-X")  # options of Python that are followed by a value


def _find_script(arguments: list[str]) -> str:
    """Return the script among the arguments of Python, or "" if there is none."""
    # it is the first argument that is neither an option nor an option's value
    words = iter(arguments)
    for word in words:
        if word == "-c":
            return ""
        if word in _WITH_VALUE:
            next(words, "")
        elif word and not word.startswith("-"):
            return word
    return ""


def _read_stolen_seconds() -> float:
    with suppress(OSError, ValueError, IndexError):
        first = (PROC / "stat").read_text().partition("\n")[0].split()
        return int(first[8]) / TICKS_PER_SECOND
    return 0.0
