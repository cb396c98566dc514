"""The CPU cut into devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.cpu import MEMORY_SHARE, available_memory_bytes, container_memory_bytes, core_groups, cut, slices
from evener.errors import RequestError


@st.composite
def core_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Cores with one or two hardware threads, some masked out."""
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
            cut(groups, count)
        return
    sets = cut(groups, count)
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
    for chosen in cut(groups, count):
        assert all((cpu + 8 in chosen) == (cpu in chosen) for cpu in range(8))


def test_siblings_come_from_the_kernel_and_unknown_cpus_stand_alone(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3", 4: "nonsense"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert core_groups(range(6), tmp_path) == ((0, 2), (1, 3), (4,), (5,))
    assert core_groups((0, 3), tmp_path) == ((0,), (3,))


def test_the_slices_of_this_machine_share_its_cores_and_free_memory() -> None:
    devices = slices()
    cores = [core for device in devices for core in device.cores]
    assert len(cores) == len(set(cores))
    assert set(cores) <= os.sched_getaffinity(0)
    assert 0 < sum(device.memory_bytes or 0 for device in devices) <= available_memory_bytes() * (MEMORY_SHARE + 0.1)
    assert [device.id for device in slices(1)] == ["cpu-0-of-1"]


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_an_impossible_number_of_slices_is_a_request_error(count: int) -> None:
    with pytest.raises(RequestError):
        slices(count)


def test_the_tightest_memory_cgroup_counts(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/job/step\n")
    for folder, limit, used, cached in (("job", "1000", "400", "50"), ("job/step", "max", "400", "0")):
        here = tmp_path / "root" / folder
        here.mkdir(parents=True)
        (here / "memory.max").write_text(limit + "\n")
        (here / "memory.current").write_text(used + "\n")
        (here / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    assert container_memory_bytes(tmp_path / "root", tmp_path / "membership") == 650
    assert container_memory_bytes(tmp_path / "none", tmp_path / "membership") is None
    assert container_memory_bytes(tmp_path / "root", tmp_path / "none") is None
