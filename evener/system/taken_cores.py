"""Cores that other programs take from this process: how long its threads waited for one, and who
had them.

Linux counts for each thread the time that it ran and the time that it was ready to run and had no
core (/proc/PID/task/TID/schedstat, for the process's own user without privileges), and for each
core the time that a hypervisor gave to other machines. Elsewhere, and
in containers that hide it, nothing is known and all figures are 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .cores import CGROUPS, MEMBERSHIP, list_groups

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
LEAST_CORES = 0.1  # that another program takes, to be named
MOST_NAMED = 3
LONGEST_NAME = 40  # characters
CONTAINER = "the container's CPU limit"
OWN_WORKERS = "the training's own worker processes"
HYPERVISOR = "other virtual machines on this host"


class CoreTimes(NamedTuple):
    """Seconds since some start; differences of two readings count."""

    at_s: float = 0.0
    ran_s: float = 0.0  # by all threads together
    delayed_s: float = 0.0  # ready to run, without a core, by all threads together
    throttled_s: float = 0.0  # in which the container's quota was used up
    busy_s: float = 0.0  # in which anybody ran on one of the process's cores
    stolen_s: float = 0.0  # of these cores, in which the hypervisor ran other machines


class Starvation(NamedTuple):
    """How long a process was held up for want of cores."""

    wall_s: float = 0.0
    starved_s: float = 0.0  # of the wall time
    throttled_s: float = 0.0

    @property
    def part(self) -> float:
        """The part of the wall time."""
        return self.starved_s / self.wall_s if self.wall_s > 0 else 0.0


class CoreWatch:
    """Watches the threads of one process from one reading to the next."""

    def __init__(self, pid: int | None = None, cores: int | None = None) -> None:
        self._tasks = PROC / str(pid or os.getpid()) / "task"
        self._own_cores = frozenset(os.sched_getaffinity(pid or 0))
        self._cores = cores or len(self._own_cores)
        self._before: dict[str, tuple[int, int]] = {}
        self._last = CoreTimes()
        self.read()

    @property
    def known(self) -> bool:
        """True if the kernel says how long threads wait."""
        return bool(self._before)

    def read(self) -> Starvation:
        """What happened since the last reading.

        Threads of the process that wait for one another's cores aren't starved by others: only
        what they could have had together counts, which is all cores for all of the time.
        """
        before = self._last
        last = self._sum_up()
        self._last = last
        wall_s = last.at_s - before.at_s
        ran_s = last.ran_s - before.ran_s
        delayed_s = last.delayed_s - before.delayed_s + _find_stolen(before, last)
        wanted_s = min(ran_s + delayed_s, self._cores * wall_s)
        if wall_s <= 0 or wanted_s <= ran_s:
            return Starvation(max(0.0, wall_s))
        threads = max(1.0, wanted_s / wall_s)
        starved_s = min(wall_s, (wanted_s - ran_s) / threads)
        return Starvation(wall_s, starved_s, max(0.0, last.throttled_s - before.throttled_s))

    def _sum_up(self) -> CoreTimes:
        """The times of all threads, those that have begun since counted from their start."""
        now = _read_threads(self._tasks)
        ran_s = self._last.ran_s
        delayed_s = self._last.delayed_s
        for thread, (ran, delayed) in now.items():
            ran_before, delayed_before = self._before.get(thread, (0, 0))
            if ran < ran_before:  # the number is another thread's now
                ran_before = delayed_before = 0
            ran_s += (ran - ran_before) / 1e9
            delayed_s += (delayed - delayed_before) / 1e9
        self._before = now
        busy_s, stolen_s = read_core_seconds(self._own_cores)
        throttled_s = read_throttled_seconds()
        return CoreTimes(time.perf_counter(), ran_s, delayed_s, throttled_s, busy_s, stolen_s)


def _find_stolen(before: CoreTimes, last: CoreTimes) -> float:
    """The seconds between two readings that the hypervisor took from a process: of its cores as
    many as it had of the rest. Its threads count them neither as run nor as delayed.
    """
    stolen_s, busy_s = last.stolen_s - before.stolen_s, last.busy_s - before.busy_s
    ran_s = last.ran_s - before.ran_s
    if stolen_s <= 0 or ran_s <= 0:
        return 0.0
    return stolen_s * min(1.0, ran_s / max(busy_s, ran_s))


def read_core_seconds(cores: Collection[int], stat: Path = PROC / "stat") -> tuple[float, float]:
    """The seconds in which these cores ran anything, and those that the hypervisor took from them;
    0 where the kernel doesn't say.
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
    """Nanoseconds that each thread has run and waited for a core."""
    found = {}
    try:
        names = os.listdir(tasks)
    except OSError:
        return {}
    for name in names:
        with suppress(OSError, ValueError, IndexError):  # of a thread that has ended
            ran, delayed = (tasks / name / "schedstat").read_text().split()[:2]
            found[name] = int(ran), int(delayed)
    return found


def read_throttled_seconds(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """The seconds in which this process's control groups had used up their CPU quota; 0 where
    that isn't known.
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
    """CPU seconds of every process that can be seen, at one moment."""

    at_s: float
    seconds: Mapping[tuple[int, str], float]  # by pid and start time
    parents: Mapping[int, int]
    stolen_s: float  # that the hypervisor gave to others, of all cores


def look_at_processes() -> ProcessUse:
    """The CPU time of every process so far; about 20 us for each."""
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


def name_takers(
    before: ProcessUse,
    after: ProcessUse,
    own_root: int,
    throttled_s: float,
    most: int = MOST_NAMED,
    own: int = -1,
) -> str:
    """The programs that took the most CPU time between two looks, as `python load.py (1.9 cores)`.

    Left out are `own_root`, all processes under it, and the one that started it. Empty where
    nobody is seen, as in a container that hides the others. What `own` has started itself, as
    workers of a loader, is named as such.
    """
    wall_s = after.at_s - before.at_s
    if wall_s <= 0:
        return ""
    taken: dict[str, float] = {}  # cores by name: several processes of one name are one program
    for (pid, started), seconds in after.seconds.items():
        cores = (seconds - before.seconds.get((pid, started), 0.0)) / wall_s
        mine = pid == after.parents.get(own_root) or _is_under(pid, own_root, after.parents)
        worker = pid != own and _is_under(pid, own, after.parents)
        if cores > 0 and (worker or not mine):
            name = OWN_WORKERS if worker else name_process(pid)
            taken[name] = taken.get(name, 0.0) + cores
    first = sorted(taken.items(), key=lambda item: -item[1])[:most]
    named = [f"{name} ({cores:.1f} cores)" for name, cores in first if cores >= LEAST_CORES]
    if throttled_s >= 0.05 * wall_s:
        named.append(CONTAINER)
    if (after.stolen_s - before.stolen_s) / wall_s >= LEAST_CORES:
        named.append(HYPERVISOR)
    return ", ".join(named)


def _is_under(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    """True for `root` and its descendants."""
    seen: set[int] = set()
    while pid not in seen:
        if pid == root:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False


def name_process(pid: int) -> str:
    """The program with its script or module, without folders."""
    with suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        named = [Path(word).name for word in (words[0], _find_script(words[1:])) if word]
        text = " ".join(named) or (PROC / str(pid) / "comm").read_text().strip()
        return "".join(sign for sign in text if sign.isprintable())[:LONGEST_NAME]
    return f"process {pid}"


_WITH_VALUE = ("-W", "-X")  # options of Python that are followed by their value


def _find_script(arguments: list[str]) -> str:
    """The first argument that isn't an option or an option's value; empty for code on the command
    line.
    """
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
