"""How the CPU is divided into slices, and which CPUs may be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.cpu import slices
from evener.errors import RequestError
from evener.system.cores import (
    allowed_cpus,
    container_cpus,
    container_memory_bytes,
    core_groups,
    slice_cores,
    slice_cpus,
)


@st.composite
def core_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Draw cores with one or two hardware threads, some of them masked."""
    widths = draw(st.lists(st.integers(1, 2), min_size=1, max_size=24))
    cpus = iter(range(100))
    return tuple(tuple(next(cpus) for _ in range(width)) for width in widths)


@given(core_layouts(), st.integers(1, 12))
def test_slices_are_disjoint_equal_and_waste_less_than_one_core_each(
    groups: tuple[tuple[int, ...], ...], count: int
) -> None:
    cpus = [cpu for group in groups for cpu in group]
    if count > len(cpus):
        with pytest.raises(RequestError):
            slice_cpus(groups, count)
        return
    sets = slice_cpus(groups, count)
    flat = [cpu for cores in sets for cpu in cores]
    assert len(sets) == count
    assert len(set(flat)) == len(flat) <= len(cpus)
    assert len({len(cores) for cores in sets}) == 1
    assert set(flat) <= set(cpus)
    assert len(cpus) - len(flat) < 2 * count


@given(st.integers(1, 8), st.integers(1, 4))
def test_threads_of_one_core_stay_in_one_slice(cores: int, count: int) -> None:
    groups = tuple((core, core + 8) for core in range(cores))
    if cores < count:
        return
    for chosen in slice_cpus(groups, count):
        assert all((cpu + 8 in chosen) == (cpu in chosen) for cpu in range(8))


def test_siblings_come_from_the_kernel_and_unknown_cpus_stand_alone(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3", 4: "nonsense"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert core_groups(range(6), tmp_path) == ((0, 2), (1, 3), (4,), (5,))
    assert core_groups((0, 3), tmp_path) == ((0,), (3,))


def test_a_slice_is_certain_by_its_id_alone() -> None:
    """The id gives the same slice as evener.devices.

    There is none for other ids, or for more slices than CPUs.
    """
    allowed = allowed_cpus()
    for count in range(1, len(allowed) + 1):
        sets = slice_cpus(core_groups(allowed), count)
        assert tuple(slice_cores(f"cpu-{i}-of-{count}", allowed) for i in range(count)) == sets
        assert tuple(device.cores for device in slices(count)) == sets
    assert slice_cores(f"cpu-0-of-{len(allowed) + 1}", allowed) == ()
    assert slice_cores("GPU-0", allowed) == slice_cores("cpu-2-of-2", allowed) == ()


def group(root: Path, **files: str) -> None:
    """A control group's folder."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    members, root = tmp_path / "membership", tmp_path / "root"
    members.write_text("0::/job/step\n")
    shared = {"memory__current": "400", "memory__stat": "anon 5\ninactive_file 50"}
    group(root / "job", memory__max="1000", cpu__max="150000 100000", **shared)
    group(root / "job" / "step", memory__max="max", cpu__max="max 100000", **shared)
    assert container_memory_bytes(root, members) == 650
    assert container_cpus(root, members) == 1.5
    for nowhere in ((tmp_path / "none", members), (root, tmp_path / "none")):
        assert container_memory_bytes(*nowhere) is None
        assert container_cpus(*nowhere) is None


def test_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    members, root = tmp_path / "membership", tmp_path / "root"
    members.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n")
    names = {"memory__usage_in_bytes": "100", "memory__stat": "total_inactive_file 7"}
    group(root / "memory" / "job", memory__limit_in_bytes="300", **names)
    group(root / "memory", memory__limit_in_bytes=str(2**63 - 4096), **names)
    group(root / "cpu,cpuacct" / "job", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    group(root / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert container_memory_bytes(root, members) == 207
    assert container_cpus(root, members) == 2.0


def test_a_container_with_a_quota_is_cut_into_the_cpus_that_it_has_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4000, 4064)))
    monkeypatch.setattr("evener.system.cores.container_cpus", lambda: 4.5)
    assert allowed_cpus() == (4000, 4001, 4002, 4003)
    monkeypatch.setattr("evener.system.cores.container_cpus", lambda: 0.5)
    assert allowed_cpus() == (4000,)
    assert slice_cores("cpu-0-of-1", allowed_cpus()) == (4000,)
