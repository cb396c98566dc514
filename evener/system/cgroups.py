"""The memory and CPU time that a container's control groups, version 1 or 2, leave to this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 for none


def container_memory_bytes(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """The bytes that the tightest memory limit leaves; None without a limit. Cached files count as free."""

    def remaining(folder: Path, version: int) -> float:
        limit_name, used_name = _MEMORY_FILES[version]
        limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
        if limit >= NO_LIMIT:
            raise ValueError(limit)
        found = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        return max(0, limit - used + (int(found[1]) if found else 0))

    least = _least("memory", remaining, root, membership)
    return None if least is None else int(least)


def container_cpus(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """CPU seconds per second that the tightest quota gives; None without a quota."""

    def quota(folder: Path, version: int) -> float:
        if version == 2:
            given, period = (folder / "cpu.max").read_text().split()
        else:
            given, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if int(given) <= 0:  # version 1 writes -1 for none
            raise ValueError(given)
        return int(given) / int(period)

    return _least("cpu", quota, root, membership)


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


def _least(controller: str, read: Callable[[Path, int], float], root: Path, membership: Path) -> float | None:
    """The least that `read` finds in this process' groups; those without a limit are skipped."""
    found: list[float] = []
    for folder, version in _list_groups(controller, root, membership):
        with suppress(OSError, ValueError, ZeroDivisionError):
            found.append(read(folder, version))
    return min(found, default=None)


def _list_groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process' groups and of those above, and their version."""
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
        for folder in (here, *(parent for parent in here.parents if parent == base or base in parent.parents)):
            yield folder, version
