"""Devices that disappear, hang, fill up or slow down during a search.

They are shown as such, measured again or left out, and reported.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from evener.balancer.events import Event, Finished, Observed, ProbeProgress, ProbeStarted
from evener.balancer.probes.interference import InterferenceMonitor
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.types import Failed, Observation, OutOfMemory, Probe, Stage, Timed, layout_of
from evener.devices.nvidia.source import NvmlSource
from evener.devices.sampler import Sampler
from evener.devices.types import Snapshot, State
from evener.errors import DeviceError
from evener.tui.app import EvenerApp
from tests.support.probe_children import list_children, list_probe_children
from tests.support.probers import child_prober
from tests.support.python_path import python_path
from tests.support.waiting import wait_for

LOST = """
import os, threading, time
def watch():
    while not os.path.exists({flag!r}):
        time.sleep(0.01)
    os.write(2, b"CUDA error: GPU is lost\\n")
    os.abort()
if os.environ.get("CUDA_VISIBLE_DEVICES") == {gpu!r}:
    threading.Thread(target=watch, daemon=True).start()
"""
MIB = 1 << 20
TAKEN = """
import os
if os.path.exists({flag!r}):
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (470 << 20, 470 << 20))
"""


def drive(session: Session, see: Callable[[Event], None] = lambda _: None) -> Finished:
    """Run a session to its end; check that it has a plan and leaves no child."""
    last: Event | None = None
    for last in session.events():
        see(last)
    session.close()
    assert isinstance(last, Finished)
    assert not list_children()
    return last


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
@pytest.mark.parametrize(("stage", "by"), [("solo", "SIGABRT"), ("split", "driver has")])
def test_a_gpu_that_is_lost_midway_is_left_out_and_reported(
    fake_nvml: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stage: str,
    by: str,
) -> None:
    """A GPU lost during a stage is left out and reported.

    Either its processes abort as it falls off the bus, or a driver call blocks for 10 s once a
    split has run. The other GPU continues until it is measured again, and gets the plan, although a
    split over both was measured before.
    """
    double = fake_nvml(2)
    double.gpus[0].used_bytes = double.gpus[1].used_bytes = 0
    double.gpus[0].utilization = double.gpus[1].utilization = 0
    flag = tmp_path / "lost"
    # with 5 s, a quick race would be over
    monkeypatch.setattr(InterferenceMonitor.__init__, "__defaults__", (1.0,))
    if by == "SIGABRT":
        (tmp_path / "sitecustomize.py").write_text(
            LOST.format(flag=str(flag), gpu=double.gpus[1].uuid)
        )
        monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))

    failed: list[Failed] = []

    def lose(event: Event) -> None:
        if not isinstance(event, Observed):
            return
        if isinstance(event.seen, Failed):
            failed.append(event.seen)
        elif failed:
            session.stop()
        elif event.seen.probe.stage == stage and not flag.exists():
            flag.touch()
            if by == "SIGABRT":
                double.lose(1)
            else:
                double.hang("nvmlDeviceGetFieldValues", 1)
                threading.Timer(10.0, double.release).start()

    dear = {"per_sample_ms": 0.5}  # a split is the fastest, so it is measured again
    request = Request(
        devices="gpu", workload="synthetic", settings=dear, budget_seconds=60.0, max_global_batch=64
    )
    session = Session(open_run(request))
    finished = drive(session, lose)
    assert flag.exists()
    assert finished.plan.layout.batches[0] > 0
    assert finished.plan.layout.batches[1] == 0
    words = (by, "the GPU is lost")  # whichever came first of the two
    assert any(
        "GPU:1" in each and any(word in each for word in words) for each in finished.plan.warnings
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
def test_a_driver_that_goes_away_midway_ends_with_the_plan_so_far_or_says_that_it_has_gone(
    fake_nvml: Callable[..., Any],
) -> None:
    """A driver unloaded after both GPUs have run gives the best plan with a warning.

    Unloaded earlier, it gives exit code 3.
    """
    double = fake_nvml(2)
    request = Request(devices="gpu", workload="synthetic", budget_seconds=6.0, max_global_batch=64)
    unloaded = threading.Event()

    def unload(event: Event) -> None:
        if isinstance(event, Observed) and event.probes >= 2 and not unloaded.is_set():
            unloaded.set()
            double.unload()

    finished = drive(Session(open_run(request)), unload)
    assert unloaded.is_set()
    assert finished.plan.layout.global_batch
    assert any(one.startswith("GPU:") and "driver" in one for one in finished.plan.warnings)
    double.reload()
    session = Session(open_run(request))
    events = session.events()
    while not (isinstance(event := next(events), ProbeProgress) and event.phase == "building"):
        pass
    double.unload()
    with pytest.raises(DeviceError, match=r"GPU:0 .*GPU:1 failed.* driver ") as fault:
        list(events)
    session.close()
    assert fault.value.exit_code == 3
    assert not list_children()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
def test_gpu_memory_that_others_take_midway_lowers_the_line_and_the_plan_fits(
    fake_nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan fits if others take GPU memory during the search.

    After 64 rows of 4 MiB, 300 of 600 MiB are taken: by the driver's account, and by failing
    allocations. One probe runs out of memory, the next ones fit at once, and the warnings and the
    verdict explain it.
    """
    double = fake_nvml(2)
    for gpu in double.gpus:
        gpu.total_bytes, gpu.reserved_bytes, gpu.used_bytes = 600 * MIB, 0, 0
    flag = tmp_path / "taken"
    (tmp_path / "sitecustomize.py").write_text(TAKEN.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    settings = {"memory_base_mib": 0.0, "memory_per_sample_mib": 4.0, "base_ms": 20.0}
    request = Request(
        devices="gpu",
        workload="synthetic",
        settings=settings,
        budget_seconds=60.0,
        max_global_batch=900,
    )
    session, raced = Session(open_run(request)), list[Event]()

    def take(event: Event) -> None:
        if not isinstance(event, Observed):
            return
        if flag.exists() and isinstance(event.seen, Timed) and event.seen.probe.stage == Stage.RACE:
            raced.append(event)
            if len(raced) == 4:
                session.stop()
        if max(event.seen.probe.layout.shares) >= 64 and not flag.exists():
            flag.touch()
            for gpu in double.gpus:
                gpu.used_bytes = 300 * MIB
            for child in list_children():
                child.kill()  # new children find less memory

    finished = drive(session, take)
    assert flag.exists()
    assert max(finished.plan.layout.batches) * 4 <= 300
    assert finished.plan.search.out_of_memory <= 2
    assert any(
        "other processes hold 300 MiB of its memory" in one for one in finished.plan.warnings
    )
    assert finished.found is not None
    assert finished.found.taken_memory


class Rig:
    """A sampler over a scripted driver, fast enough for a test."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.sampler = Sampler(NvmlSource(library=nvml), 0.1)

    def latest(self, state: State, gpu: int = 0) -> Snapshot | None:
        """Return the latest snapshot if the GPU's temperature is in this state."""
        snapshot = self.sampler.latest()
        right = snapshot is not None and snapshot.devices[gpu].temperature_celsius.state is state
        return snapshot if right else None


@pytest.fixture
def rig(fake_nvml: Callable[..., Any]) -> Iterator[Rig]:
    """Two GPUs with a sampler."""
    made = Rig(fake_nvml(2))
    made.sampler.start()
    with contextlib.closing(made.sampler):
        wait_for(lambda: made.latest(State.VALUE))
        yield made
        made.nvml.release()


def test_a_gpu_that_falls_off_the_bus_is_lost_and_the_other_is_read_on(rig: Rig) -> None:
    """The GPU is shown as lost with a message, never as zero."""
    rig.nvml.lose(1)
    seen = wait_for(lambda: rig.latest(State.LOST, 1))
    assert "lost" in seen.devices[1].note
    assert seen.devices[1].memory_used_bytes.value is None
    assert seen.devices[0].temperature_celsius.current is not None


def test_a_driver_that_goes_away_is_reported_and_found_again(rig: Rig) -> None:
    """An unloaded driver is reported, and found again once it is loaded."""
    rig.nvml.unload()
    seen = wait_for(lambda: rig.latest(State.LOST))
    assert seen.notes
    rig.nvml.reload()
    wait_for(lambda: rig.latest(State.VALUE))


CALLS = ("nvmlDeviceGetTemperature", "nvmlDeviceGetFieldValues")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_hangs_holds_up_no_reader(rig: Rig, call: str) -> None:
    """Readers get the last values as stale while a call hangs, and current values afterwards."""
    rig.nvml.hang(call)
    seen = wait_for(lambda: rig.latest(State.STALE))
    assert "does not answer" in seen.devices[0].note
    took: list[float] = []
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        began = time.monotonic()
        assert rig.sampler.latest() is not None
        rig.sampler.history(seen.devices[0].device.id, "temperature_celsius")
        took.append(time.monotonic() - began)
        time.sleep(0.005)
    assert median(took) < 0.5, (
        "a single one may be late where others work, all of them only if they wait"
    )
    rig.nvml.release()
    wait_for(lambda: rig.latest(State.VALUE))


async def test_the_app_obeys_its_keys_while_the_driver_hangs_and_ends_in_time(
    fake_nvml: Callable[..., Any],
) -> None:
    """A driver call that blocks for seconds blocks only the sampling thread.

    The app reports it and reads on afterwards. A call that never returns doesn't keep the app from
    exiting.
    """
    nvml = fake_nvml(2)
    source = NvmlSource(library=nvml)
    app = EvenerApp(Sampler(source, 0.1), devices="gpu", trainable=source.devices())

    def shown() -> State | None:
        return None if app.snapshot is None else app.snapshot.devices[0].temperature_celsius.state

    try:
        async with app.run_test(size=(120, 30)) as pilot:
            while shown() is None:
                await pilot.pause(0.05)
            nvml.hang("nvmlDeviceGetTemperature")
            while shown() is not State.STALE:
                await pilot.pause(0.05)
            assert app.snapshot is not None
            assert "does not answer" in app.snapshot.notes[-1]
            for key, mode in (("2", "balance"), ("3", "runs"), ("1", "monitor")):
                await pilot.press(key)
                assert app.current_mode == mode
            assert shown() is State.STALE, "keys wait for the driver"
            nvml.release()
            while shown() is not State.VALUE:
                await pilot.pause(0.05)
            nvml.hang("nvmlDeviceGetTemperature")
            await pilot.pause(0.5)
            began = time.monotonic()
            await pilot.press("q")
        assert time.monotonic() - began < 25, "it hangs for 30 s"
    finally:
        nvml.release()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
def test_memory_that_another_process_takes_midway_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory that another process takes is measured again.

    What fitted before runs out of memory; smaller probes follow, and the plan fits. The other
    process is simulated by a limit that leaves each allocating child that much less memory.
    """
    flag = tmp_path / "taken"
    code = (
        "import os\n"
        "if os.environ.get('EVENER_TAKEN') and os.path.exists(os.environ['EVENER_TAKEN']):\n"
        "    import resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    monkeypatch.setenv("EVENER_TAKEN", str(flag))
    settings: dict[str, Any] = {"memory_per_sample_mib": 2.0, "base_ms": 20.0}
    request = Request(
        devices="cpu:0",
        workload="synthetic",
        settings=settings,
        budget_seconds=60.0,
        max_global_batch=600,
    )
    session = Session(open_run(request))
    taken_at: list[int] = []
    ran_out: list[Observation] = []

    def take(event: Event) -> None:
        if isinstance(event, Observed):
            if isinstance(event.seen, OutOfMemory):
                ran_out.append(event.seen)
            elif ran_out:
                session.stop()
            largest = max(event.seen.probe.layout.shares)
            if event.seen.probe.stage == Stage.SOLO and largest > 8 and not taken_at:
                taken_at.append(event.probes)
                flag.touch()
                for child in list_children():
                    child.kill()  # the children that held memory are gone; new ones find less

    finished = drive(session, take)
    assert taken_at
    assert finished.plan.search.out_of_memory >= 1
    assert max(finished.plan.layout.batches) * 2 < 400
    prober = child_prober(session._run.job.devices, **settings)
    layout = layout_of(finished.plan.layout.batches)
    probe = Probe(layout, Stage.SOLO if layout.kind == "solo" else Stage.SPLIT, 0.3)
    (again,) = prober.measure((probe,), lambda _: None, threading.Event())
    prober.close()
    assert isinstance(again, Timed), "the plan does not fit what is left"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes")
def test_devices_that_are_held_back_while_they_are_measured_are_doubted_in_the_verdict() -> None:
    """Devices that are throttled while layouts are compared are doubted in the verdict.

    Every child is really stopped for half of the time. The winner is measured again by then, at the
    latest in its check.
    """
    session = Session(
        open_run(
            Request(devices="cpu", workload="synthetic", budget_seconds=15.0, max_global_batch=64)
        )
    )
    racing, over = threading.Event(), threading.Event()

    def hold_back() -> None:
        while not over.is_set():
            # it scans all processes
            children = list_probe_children() if racing.is_set() else []
            for act in ("suspend", "resume") * 10:
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        getattr(child, act)()
                time.sleep(0.01)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        finished = drive(session, lambda event: racing.set() if _in_race(event) else None)
    finally:
        over.set()
        thread.join()
    assert finished.found is not None
    rough = not finished.found.rate.known  # on a busy machine
    assert finished.found.doubts or rough, finished.verdict
    causes = (
        "Other work",
        "held back",
        "in one measurement",
        "vary",
        "longer --budget",
    )  # ranks may count it as waiting
    assert any(cause in warning for warning in finished.plan.warnings for cause in causes), (
        finished.plan.warnings
    )


def _in_race(event: Event) -> bool:
    return isinstance(event, ProbeStarted) and event.probe.stage in (Stage.RACE, Stage.CHECK)
