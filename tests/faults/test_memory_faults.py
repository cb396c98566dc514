"""Memory that really runs out, in each way: every one gives an OutOfMemory with its device."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from evener.balancer.events import Finished, Observed, ProbeStarted
from evener.balancer.probes.child_prober import Prober
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.types import Observation, OutOfMemory, Probe, Stage, Timed, layout_of
from evener.devices.cpu import slices
from evener.devices.types import Device, Limit
from tests.support.cores import CORES, two_cores
from tests.support.frameworks import skip_without
from tests.support.probers import child_prober
from tests.support.python_path import python_path
from tests.support.whole_sessions import finish

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup/memory")


def observe(prober: Prober, batch: int, micro: int = 0) -> Observation:
    """Probe the first device alone; in passes of `micro` rows unless that is 0."""
    layout = layout_of((batch,), (micro or batch,))
    (seen,) = prober.measure(
        (Probe(layout, Stage.SOLO, 0.2, steps=1),), lambda _: None, threading.Event()
    )
    return seen


def one_slice(memory_bytes: int | None = None) -> Device:
    """Return the first of two slices, or the only one, with a memory limit."""
    return msgspec.structs.replace(slices(min(2, CORES))[0], limit=Limit(memory_bytes=memory_bytes))


def test_the_host_s_memory_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An allocation really fails under a limit of the address space."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({400 * MIB}, {400 * MIB}))"
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    prober = child_prober((one_slice(),), memory_per_sample_mib=1.0)
    seen = observe(prober, 1000)
    assert isinstance(seen, OutOfMemory)
    assert seen.devices == (0,)
    assert isinstance(observe(prober, 10), Timed)
    prober.close()


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 120 MiB."""
    folder = CGROUP / f"evener-{uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(120 * MIB))
    except OSError:
        pytest.skip("memory cgroups need root and cgroup version 1")
    yield folder
    folder.rmdir()


def test_the_kernel_s_killer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: Path) -> None:
    """A child killed by the kernel's OOM killer counts as out of memory; a smaller batch fits."""
    (tmp_path / "sitecustomize.py").write_text(
        f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    prober = child_prober((one_slice(),), memory_per_sample_mib=1.0)
    seen = observe(prober, 400)
    fits = observe(prober, 10)
    prober.close()
    assert isinstance(seen, OutOfMemory)
    assert "SIGKILL" in seen.detail
    assert isinstance(fits, Timed)


HOG = """
import sys, time
open(sys.argv[1], "w").write("0")
held = bytearray(int(sys.argv[2]))
for i in range(0, len(held), 4096):
    held[i] = 1
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("quick_probes")
def test_memory_that_a_real_process_takes_midway(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: Path
) -> None:
    """Children and another process share 700 MiB.

    Before the largest batch runs, the other process leaves memory for half of it. The kernel kills
    the next child, which counts as out of memory, and the plan is smaller than the killed batch.
    """
    (group / "memory.limit_in_bytes").write_text(str(700 * MIB))
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'worker' in ' '.join(sys.orig_argv): "
        f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    settings = {
        "memory_base_mib": 0.0,
        "memory_per_sample_mib": 1.0,
        "base_ms": 20.0,
        "per_sample_ms": 0.2,
    }
    request = Request(
        devices="cpu:0",
        workload="synthetic",
        settings=settings,
        budget_seconds=40.0,
        max_global_batch=400,
    )
    session = Session(open_run(request))
    strangers, killed = list[subprocess.Popen[bytes]](), list[int]()
    try:
        for event in session.events():
            if (
                isinstance(event, ProbeStarted)
                and event.probe.layout.global_batch > 8
                and not strangers
            ):
                session.pause()  # until the other process has allocated its memory
            if not isinstance(event, Observed):
                continue
            batch = event.seen.probe.layout.global_batch
            if isinstance(event.seen, OutOfMemory):
                killed.append(batch)
            if isinstance(event.seen, Timed) and batch > 8 and not strangers:
                command = [
                    sys.executable,
                    "-c",
                    HOG,
                    str(group / "cgroup.procs"),
                    str((680 - 400 // 2) * MIB),
                ]
                strangers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
                strangers[0].stdout.readline()  # type: ignore[union-attr]
                session.unpause()
    finally:
        session.close()
        for stranger in strangers:
            stranger.kill()
            stranger.communicate()
    assert isinstance(event, Finished)
    assert strangers
    assert event.plan.layout.global_batch < min(killed)


@two_cores
@pytest.mark.usefixtures("quick_probes")
def test_the_retreat_bisects_between_what_ran_and_what_did_not() -> None:
    """A device with little memory ends with a batch that fits, after few failures."""
    request = Request(
        devices="cpu:0@64MiB,cpu:1",
        workload="synthetic",
        settings={"memory_per_sample_mib": 0.5, "base_ms": 20.0},
        budget_seconds=5.0,
        max_global_batch=600,
    )
    plan = finish(request)[0].plan
    assert plan.batches[0] <= 126
    assert plan.search.out_of_memory <= 3
    assert plan.layout.share[0].limit == "64MiB"


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize(
    ("framework", "workload", "cap_mib", "batch", "micro"),
    [("tensorflow", "keras_mnist", 200, 2_000, 200), ("torch", "torch_mnist", 120, 900, 100)],
)
def test_a_real_batch_fits_its_slice_in_passes_and_runs_out_of_it_in_one(
    framework: str, workload: str, cap_mib: int, batch: int, micro: int
) -> None:
    """A framework's own allocation fails under its cap in one pass, and fits in several.

    It runs in a child that has just computed the whole batch.
    """
    skip_without(framework)
    prober = child_prober((one_slice(cap_mib * MIB),), workload, framework)
    fits = observe(prober, batch, micro)
    seen = observe(prober, batch)
    again = observe(prober, batch, micro)
    prober.close()
    assert isinstance(seen, OutOfMemory), seen
    assert seen.devices == (0,)
    assert isinstance(fits, Timed), fits
    assert fits.probe.layout.passes(0) == batch // micro
    assert isinstance(again, Timed), again
    if framework == "torch":
        assert fits.start_seconds > again.start_seconds == 0, "its child goes on"
