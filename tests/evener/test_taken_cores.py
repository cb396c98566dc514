"""Whether a process is starved of cores, for how long, and by whom; with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from evener.system import taken_cores
from evener.system.taken_cores import (
    CoreWatch,
    name_competitors,
    read_core_seconds,
    read_process_use,
    read_throttled_seconds,
)

BUSY = "while True: pass"
NOBODY = -1  # no process has this parent
SCHEDSTAT = Path("/proc/self/schedstat")
pytestmark = pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the kernel doesn't count delays")


@pytest.fixture(autouse=True)
def all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name even a program that gets little of a busy machine."""
    monkeypatch.setattr(taken_cores, "LEAST_CORES", 0.0)


def spin(seconds: float) -> None:
    """Compute for this long in wall time."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def start_load(folder: Path, core: int, count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that compute forever on one core: `python busy_load.py`."""
    script = folder / "busy_load.py"
    script.write_text(
        f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\n{BUSY}\n"
    )
    load = [
        subprocess.Popen([sys.executable, "-W", "ignore", str(script)], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    for each in load:
        assert each.stdout is not None
        each.stdout.readline()
    return load


def end(load: list[subprocess.Popen[bytes]]) -> None:
    """Kill these processes."""
    for each in load:
        each.kill()
        each.communicate()


def test_a_process_beside_three_others_on_a_core_waits_three_quarters_of_the_time(
    tmp_path: Path,
) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    load = start_load(tmp_path, core, 3)
    try:
        os.sched_setaffinity(0, {core})
        watch, before = CoreWatch(), read_process_use()
        spin(1.0)
        starved, after = watch.read(), read_process_use()
        named = name_competitors(before, after, NOBODY, 0.0, max_names=100)
    finally:
        os.sched_setaffinity(0, cores)
        end(load)
    assert starved.part > 0.5
    assert "busy_load.py" in named


def test_a_process_that_sleeps_is_not_starved() -> None:
    watch = CoreWatch()
    time.sleep(0.3)
    assert watch.read().part < 0.4  # waking up may take long on a busy machine


def test_programs_under_the_root_are_not_others(tmp_path: Path) -> None:
    load = start_load(tmp_path, min(os.sched_getaffinity(0)), 1)
    try:
        before, named, until = read_process_use(), "", time.monotonic() + 60
        while "busy_load.py" not in named and time.monotonic() < until:
            time.sleep(0.2)
            after = read_process_use()
            named = name_competitors(before, after, NOBODY, 0.0, max_names=100)
        assert "busy_load.py" in named
        assert "busy_load.py" not in name_competitors(
            before, after, os.getpid(), 0.0, max_names=100
        )
        workers = name_competitors(
            before, after, os.getpid(), 0.0, max_names=100, training_pid=os.getpid()
        )
        assert "own worker processes" in workers
    finally:
        end(load)


@pytest.mark.parametrize(
    ("busy_s", "starved_s"),
    [(0.65, 0.0), (1.0, 0.4), (0.8, 0.2)],
    ids=["its own threads", "another program", "half of both"],
)
def test_threads_that_wait_for_each_other_are_not_starved(
    busy_s: float, starved_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core, three threads do 0.6 s of work per second and otherwise wait for each other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    clock, spent = iter((10.0, 11.0)), [0.0, 0.0]
    monkeypatch.setattr("evener.system.taken_cores.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(taken_cores, "read_core_seconds", lambda _: (5.0 + spent[0], 0.0))
    ran = {str(thread): (0, 0) for thread in range(3)}
    monkeypatch.setattr(taken_cores, "_read_threads", lambda _: dict(ran))
    watch = CoreWatch()
    spent[0] = busy_s
    ran |= dict.fromkeys(ran, (200000000, 900000000))
    assert watch.read().starved_s == pytest.approx(starved_s, abs=0.07)


def test_time_that_the_hypervisor_takes_is_none_that_a_thread_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steal time of the process's cores counts in proportion to the process's use of them."""
    stat, spent = tmp_path / "stat", [0.0]

    def write(busy: int, stolen: int) -> None:
        own = "\n".join(
            f"cpu{core} {busy} 0 0 900 0 0 0 {stolen} 0 0" for core in os.sched_getaffinity(0)
        )
        stat.write_text(f"cpu  1 1 1 1 1 1 1 1 1 1\n{own}\ncpu999 0 0 0 0 0 0 0 5000 0 0\n")

    assert read_core_seconds({0}, tmp_path / "none") == (0.0, 0.0)
    write(300, 50)
    assert read_core_seconds({max(os.sched_getaffinity(0))}, stat) == (3.0, 0.5)
    monkeypatch.setattr(taken_cores, "read_core_seconds", lambda cores: read(cores))
    monkeypatch.setattr(taken_cores, "_read_threads", lambda _: {"1": (int(spent[0] * 1e9), 0)})
    clock = iter((10.0, 11.0))
    monkeypatch.setattr("evener.system.taken_cores.time.perf_counter", lambda: next(clock))

    def read(cores: Collection[int]) -> tuple[float, float]:
        return read_core_seconds(cores, stat)

    cores = len(os.sched_getaffinity(0))
    watch = CoreWatch()
    spent[0] = 0.6
    write(300 + 120 // cores, 50 + 40 // cores)
    assert watch.read().starved_s == pytest.approx(0.2, abs=0.03), "0.6 of 1.2 s that cores ran"


def test_what_a_container_may_not_have_is_read_in_both_versions(tmp_path: Path) -> None:
    for version, text in (("2", "nr_throttled 3\nthrottled_usec 2500000\n"), ("1", "")):
        root = tmp_path / version
        (root / "job").mkdir(parents=True)
        (root / "job" / "cpu.stat").write_text(text or "throttled_time 2500000000\n")
        membership = tmp_path / f"membership{version}"
        membership.write_text("0::/job\n" if version == "2" else "4:cpu:/job\n")
        if version == "1":
            (root / "cpu").mkdir()
            (root / "job").rename(root / "cpu" / "job")
        assert read_throttled_seconds(root, membership) == 2.5
