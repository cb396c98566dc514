"""Find out which CPU cores and how much memory this process may use, and divide the cores.

The limits of containers (cgroups version 1 and 2) are respected. The cores are divided into slices:
equal sets of logical CPUs, each of which counts as a device. Hardware threads of a core stay in one
slice if there are enough cores. The same number of slices always gives the same CPUs, so a training
run uses the CPUs that the search has measured.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import RequestError

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


def container_memory_bytes(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many bytes are left below the container's memory limit, or None if there is none.

    Cached files that the kernel can drop count as free. If there are several limits, the smallest
    remainder is returned.
    """

    def remaining(folder: Path, version: int) -> float:
        limit_name, used_name = _MEMORY_FILES[version]
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
        if limit >= NO_LIMIT:
            raise ValueError(limit)
        found = re.search(
            r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE
        )
        return max(0, limit - used + (int(found[1]) if found else 0))

    least = _least("memory", remaining, root, membership)
    return None if least is None else int(least)


def free_memory_bytes(meminfo: Path = MEMINFO) -> int:
    """Return the bytes of memory that are available on the host and within the container's limit.

    Returns 0 if that is unknown.
    """
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        if found:
            left = int(found[1]) * 1024
            limit = container_memory_bytes()
            return left if limit is None else min(left, limit)
    return 0


def container_cpus(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the number of CPUs in the container's quota, such as 1.5, or None if it has none.

    If there are several quotas, the smallest is returned.
    """

    def quota(folder: Path, version: int) -> float:
        if version == 2:
            given, period = (folder / "cpu.max").read_text().split()
        else:
            given, period = (
                (folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        if int(given) <= 0:  # version 1 writes -1 for "no quota"
            raise ValueError(given)
        return int(given) / int(period)

    return _least("cpu", quota, root, membership)


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


def _least(
    controller: str, read: Callable[[Path, int], float], root: Path, membership: Path
) -> float | None:
    """Return the smallest of the limits of this process's cgroups, or None if none has a limit.

    `read` returns a cgroup's value from its folder and version. It raises ValueError or OSError if
    the cgroup has no limit.
    """
    found: list[float] = []
    for folder, version in list_groups(controller, root, membership):
        with suppress(OSError, ValueError, ZeroDivisionError):
            found.append(read(folder, version))
    return min(found, default=None)


def list_groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the version of each cgroup of this process, the innermost first.

    `controller` is the name of the resource, such as "memory".
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, base = (1, root / controllers) if controllers else (2, root)
        if not base.is_dir():
            base = root / controller
        here = base / path.lstrip("/")
        for folder in (
            here,
            *(parent for parent in here.parents if parent == base or base in parent.parents),
        ):
            yield folder, version


TOPOLOGY = Path("/sys/devices/system/cpu")
_SLICE = re.compile(r"cpu-(\d{1,6})-of-(\d{1,6})")

Groups = tuple[tuple[int, ...], ...]


def allowed_cpus() -> tuple[int, ...]:
    """Return the logical CPUs that this process may use.

    If the container has a smaller CPU quota, only that many CPUs are returned: the quota is rounded
    down, but to no less than one.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    quota = container_cpus()
    if quota is None or quota >= len(cpus):
        return cpus
    whole_cores = [cpu for group in core_groups(cpus) for cpu in group]
    return tuple(sorted(whole_cores[: max(1, int(quota))]))


def core_groups(cpus: Iterable[int], topology: Path = TOPOLOGY) -> Groups:
    """Group logical CPUs by physical core.

    If the topology is unknown, each CPU is a group of its own.
    """
    wanted = sorted(set(cpus))
    groups: dict[tuple[int, ...], None] = {}
    for cpu in wanted:
        siblings = [cpu]
        with suppress(OSError, ValueError):
            text = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
            siblings = [each for each in parse_cpu_list(text) if each in wanted]
        groups[tuple(sorted({*siblings, cpu}))] = None
    return tuple(groups)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs as the kernel writes it, such as "0-3,8".

    Raises ValueError for any other text.
    """
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def slice_cpus(groups: Groups, count: int) -> Groups:
    """Divide logical CPUs into `count` slices of equal size, without dividing a core if possible.

    `groups` lists the logical CPUs of each core. Left-over CPUs aren't in any slice. Raises
    RequestError if there are fewer CPUs than slices.
    """
    cpus = tuple(cpu for group in groups for cpu in group)
    if count > len(cpus):
        raise RequestError(
            f"The CPU can't be cut into {count} slices: this process may use {len(cpus)} "
            f"logical CPUs.",
            f"Ask for cpu/{len(cpus)} or fewer.",
        )
    if len(groups) >= count:
        per_slice = len(groups) // count
        slices = [
            tuple(cpu for group in groups[i * per_slice : (i + 1) * per_slice] for cpu in group)
            for i in range(count)
        ]
        if len({len(cores) for cores in slices}) == 1:
            return tuple(tuple(sorted(cores)) for cores in slices)
    per_slice = len(cpus) // count
    return tuple(tuple(sorted(cpus[i * per_slice : (i + 1) * per_slice])) for i in range(count))


def slice_cores(device: str, allowed: Iterable[int]) -> tuple[int, ...]:
    """Return the logical CPUs of a slice with a name such as "cpu-0-of-2".

    Returns () if it isn't the name of a slice, or if `allowed` has too few CPUs.
    """
    named = _SLICE.fullmatch(device)
    if named is None:
        return ()
    position = int(named[1])
    count = int(named[2])
    groups = core_groups(allowed)
    if not 0 <= position < count <= sum(len(group) for group in groups):
        return ()
    return slice_cpus(groups, count)[position]


def pin_threads(cores: Iterable[int]) -> None:
    """Restrict all threads of this process to these logical CPUs.

    Threads that they start later are restricted, too.
    """
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def cap_address_space(room_bytes: int) -> None:
    """Limit this process's address space to its current size plus `room_bytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + room_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )
