"""Probes on GPUs that are throttled, shared, lost or silent.

The driver is scripted, and the real children need no GPU.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from evener.balancer.events import ProbeProgress
from evener.balancer.probes.block_timing import Block
from evener.balancer.probes.hosts import LocalHost
from evener.balancer.probes.interference import READ_SECONDS, InterferenceMonitor, ProbeInterference
from evener.balancer.result.measurements import describe_doubts
from evener.balancer.result.sentences import write_doubt
from evener.balancer.types import (
    Failed,
    Layout,
    Observation,
    OutOfMemory,
    Probe,
    Stage,
    Timed,
    layout_of,
    solo,
)
from evener.devices.discover import discover
from evener.devices.nvidia.gpu_reader import HARDWARE_HEAT, POWER_CAP
from tests.support.probe_children import list_probe_children
from tests.support.probers import child_prober

MIB = 1 << 20
COUNTERS = [f"field {field}" for field in (POWER_CAP, HARDWARE_HEAT, 269, 271)]


class Bench:
    """Two scripted GPUs with a prober."""

    def __init__(self, nvml: Any, **settings: Any) -> None:
        self.nvml = nvml
        self.devices = discover("gpu").devices
        self.prober = child_prober(self.devices, **{"base_ms": 5.0, **settings})
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        """Let the driver's counters advance with time."""
        last = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self.nvml.advance(now - last)
            last = now

    def probe(self, layout: Layout, measuring: Callable[[], object] | None = None) -> Observation:
        """Probe a layout; with `measuring`, a long probe that calls it when measuring begins."""
        stage: Stage = Stage.SOLO if layout.kind == "solo" else Stage.SPLIT
        probe = Probe(layout, stage, 60.0 if measuring else 0.6, whole=measuring is not None)

        def report(progress: ProbeProgress) -> None:
            if measuring and progress.phase == "measuring":
                measuring()

        (seen,) = self.prober.measure((probe,), report, threading.Event())
        return seen

    def watch(self, monitor: InterferenceMonitor) -> None:
        """Ask the driver through another monitor."""
        host = self.prober._hosts.find(self.devices[0])
        assert isinstance(host, LocalHost)
        host.monitor = monitor

    def __enter__(self) -> Bench:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._clock.join()
        self.nvml.release()
        self.prober.close()


@pytest.fixture
def nvml(fake_nvml: Callable[..., Any]) -> Iterator[Any]:
    """Two unused GPUs of 600 MiB."""
    double = fake_nvml(2)
    for gpu in double.gpus:
        gpu.total_bytes, gpu.reserved_bytes, gpu.used_bytes = 600 * MIB, 0, 0
    yield double
    double.release()


def doubts(seen: Observation) -> dict[str, tuple[float, int]]:
    """Return the strength and the device of each doubt by name."""
    assert isinstance(seen, Timed), seen
    return {doubt.code: (doubt.value, doubt.device) for doubt in seen.warnings}


def test_a_gpu_that_is_held_back_is_named_measured_again_and_doubted(nvml: Any) -> None:
    """By the driver's counters, one GPU is throttled by heat for a third of the time.

    A second round follows, and the cool GPU isn't blamed.
    """
    nvml.gpus[1].throttled = {HARDWARE_HEAT: 0.35}
    with Bench(nvml) as bench:
        cool, hot = bench.probe(solo(2, 0, 8)), bench.probe(solo(2, 1, 8))
        both = bench.probe(layout_of((8, 8)))
    assert doubts(cool).get("throttled", (0.0, -1))[1] == -1
    for seen in (hot, both):
        share, device = doubts(seen)["throttled"]
        assert 0.05 < share < 0.9
        assert device == 1
    assert isinstance(hot, Timed)
    found = describe_doubts(hot.warnings, bench.devices)
    (sentence,) = [write_doubt(one, True) for one in found if one.code == "throttled"]
    assert sentence.startswith("GPU:1: Some steps were held back")


def test_a_probe_knows_what_its_gpu_and_the_idle_one_draw(nvml: Any) -> None:
    nvml.gpus[1].power_watts = 50.0
    with Bench(nvml) as bench:
        assert isinstance(bench.probe(solo(2, 1, 8)), Timed)
        seen = bench.probe(solo(2, 0, 8))
    assert isinstance(seen, Timed)
    assert seen.power is not None
    assert seen.power.active_watts > seen.power.idle_watts > 0


def test_a_chip_without_counters_is_judged_by_the_reasons_of_the_moment(nvml: Any) -> None:
    """If the driver's mask reports a hardware slowdown each time, all of the time was slow."""
    for call in COUNTERS:
        nvml.fail(call, pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.gpus[0].event_reasons = 0x08
    with Bench(nvml) as bench:
        share, device = doubts(bench.probe(solo(2, 0, 8)))["throttled"]
    assert share > 0.2  # a late reading on a busy machine loses some of it
    assert device == 0


def test_a_power_limit_is_reported_and_raises_no_doubt(nvml: Any) -> None:
    """A power limit is no doubt, as training will meet it, too."""
    nvml.gpus[0].throttled = {POWER_CAP: 0.8}
    with Bench(nvml) as bench:
        seen = bench.probe(solo(2, 0, 8))
    assert doubts(seen)["capped"][0] > 0.2
    assert doubts(seen).get("throttled", (0.0, -1))[1] == -1
    assert isinstance(seen, Timed)
    (said,) = [one for one in describe_doubts(seen.warnings, bench.devices) if one.code == "capped"]
    assert "the rate holds for this limit" in write_doubt(said, True)


def test_work_that_lower_clocks_lost_is_reported_with_its_reason(nvml: Any) -> None:
    """The fractions of work lost to heat and to a power limit are reported separately."""
    nvml.gpus[1].throttled, nvml.gpus[1].clock_mhz = {HARDWARE_HEAT: 0.4}, 990
    nvml.gpus[0].throttled, nvml.gpus[0].clock_mhz = {POWER_CAP: 0.9}, 1320
    with Bench(nvml) as bench:
        capped, hot = bench.probe(solo(2, 0, 8)), bench.probe(solo(2, 1, 8))
        both = bench.probe(layout_of((8, 8)))
    for seen in (capped, both):
        power, heat = lost(seen, 0)
        assert 0.1 < power <= 1 / 3
        assert heat == 0
    for seen in (hot, both):
        power, heat = lost(seen, 1)
        assert 0.05 < heat <= 0.5
        assert power == 0


def lost(seen: Observation, position: int) -> tuple[float, float]:
    """Return the fractions of a step that power and heat took from a device's work."""
    assert isinstance(seen, Timed), seen
    part = seen.parts[position]
    assert part is not None
    return part.power_seconds / seen.step_seconds, part.heat_seconds / seen.step_seconds


def test_a_neighbour_that_computes_is_not_taken_for_the_session_s_own_children(nvml: Any) -> None:
    """If the driver doesn't name the children, their processes may be anybody's."""
    fake_process = sys.modules[type(nvml).__module__].FakeProcess
    with Bench(nvml) as bench:
        assert isinstance(bench.probe(solo(2, 0, 8)), Timed)
        neighbour = fake_process(os.getpid(), sm_percent=40)
        nvml.gpus[0].processes = [neighbour]
        unclear = bench.probe(solo(2, 0, 8))
        own = [fake_process(each.pid, sm_percent=60) for each in list_probe_children()]
        nvml.gpus[0].processes = own
        alone = bench.probe(solo(2, 0, 8))
        nvml.gpus[0].processes = [*own, neighbour]
        shared = bench.probe(solo(2, 0, 8))
    for seen in (unclear, alone):
        assert isinstance(seen, Timed)
        assert seen.parts[0] is not None
        assert seen.parts[0].neighbour == 0
    assert isinstance(shared, Timed)
    assert shared.parts[0] is not None
    assert shared.parts[0].neighbour == pytest.approx(0.4)
    assert shared.parts[0].neighbours.startswith("python")


def test_reading_counters_costs_little_and_is_not_within_a_block(nvml: Any) -> None:
    """Between two blocks, the counters of each GPU are read once in a batch.

    A driver that hangs is waited for only once, and briefly.
    """
    monitor = InterferenceMonitor(discover("gpu").devices)
    monitor.wait_for_drivers((0, 1), threading.Event())
    interference = ProbeInterference(monitor, (0, 1))
    before = nvml.calls.copy()
    for _ in range(100):
        interference.annotate(Block(1, 0.01))
    asked = nvml.calls - before
    assert set(asked) == {"nvmlDeviceGetFieldValues"}
    assert asked.total() <= 200  # on a busy machine, an answer may come too late
    nvml.hang("nvmlDeviceGetFieldValues", 1)
    began = time.monotonic()
    for _ in range(400):
        interference.annotate(Block(1, 0.01))
    assert time.monotonic() - began < 400 * READ_SECONDS
    nvml.release()
    monitor.close()


@pytest.mark.parametrize("how", ["lost", "unloaded"])
def test_a_gpu_that_the_driver_no_longer_has_fails_its_probe_and_is_named(
    nvml: Any, how: str
) -> None:
    """A GPU lost during or before a probe fails it, although the child continues.

    It is measured again once it is back.
    """
    with Bench(nvml) as bench:
        assert isinstance(bench.probe(solo(2, 1, 8)), Timed)
        act = (lambda: nvml.lose(1)) if how == "lost" else nvml.unload
        midway, after = bench.probe(solo(2, 1, 8), act), bench.probe(layout_of((8, 8)))
        nvml.restore(1)
        nvml.reload()
        again = bench.probe(solo(2, 1, 8))
    for seen in (midway, after):
        assert isinstance(seen, Failed)
        assert seen.cause == "device"
        assert seen.devices == (1,)
        assert ("the GPU is lost" if how == "lost" else "driver") in seen.detail
    assert isinstance(again, Timed)


def test_a_driver_that_is_silent_fails_the_probe_of_its_gpu_alone(nvml: Any) -> None:
    """The other GPU is measured, a stop works at once, and the GPU is retried once it answers."""
    with Bench(nvml) as bench:
        bench.watch(InterferenceMonitor(bench.devices, silent_seconds=1.5))
        assert isinstance(bench.probe(solo(2, 1, 8)), Timed)
        nvml.hang("nvmlDeviceGetFieldValues", 1)
        silent, other = bench.probe(solo(2, 1, 8)), bench.probe(solo(2, 0, 8))
        assert isinstance(silent, Failed)
        assert silent.cause == "device"
        assert "the driver has not answered for" in silent.detail
        assert isinstance(other, Timed)
        nvml.release()
        assert isinstance(bench.probe(solo(2, 1, 8)), Timed)
        nvml.hang("nvmlDeviceGetFieldValues", 1)
        bench.watch(InterferenceMonitor(bench.devices, silent_seconds=60.0))
        stop = threading.Event()
        threading.Timer(0.2, stop.set).start()
        began = time.monotonic()
        assert not list(
            bench.prober.measure((Probe(solo(2, 1, 8), Stage.SOLO, 1.0),), lambda _: None, stop)
        )
        assert time.monotonic() - began < 30.0


def test_memory_that_others_hold_is_reported_when_a_probe_begins_and_runs_out(
    nvml: Any,
) -> None:
    """Memory of others is reported by the pids that the driver names.

    Without pids, only that of a GPU without own children counts.
    """
    fake_process = sys.modules[type(nvml).__module__].FakeProcess
    with Bench(nvml, memory_per_sample_mib=1.0, fail="memory", at_share=100) as bench:
        free = bench.probe(solo(2, 0, 8))
        assert isinstance(free, Timed)
        assert free.short_bytes == (0, 0)
        # the owner is unclear while an own child runs there
        nvml.gpus[0].used_bytes = 300 * MIB
        hidden = bench.probe(solo(2, 0, 8))
        nvml.gpus[0].processes = [
            fake_process(each.pid, 250 * MIB) for each in list_probe_children()
        ]
        own = bench.probe(solo(2, 0, 8))
        nvml.gpus[0].processes[0].used_bytes = 50 * MIB
        others = bench.probe(solo(2, 0, 8))
        nvml.gpus[0].processes = []
        full = bench.probe(solo(2, 0, 200))
    for seen, said in ((hidden, ()), (own, (0, 0))):
        assert isinstance(seen, Timed)
        assert seen.short_bytes == said
    assert isinstance(others, Timed)
    assert 250 * MIB <= others.short_bytes[0] <= 257 * MIB
    assert isinstance(full, OutOfMemory)
    assert 300 * MIB <= full.short_bytes[0] <= 306 * MIB
    assert full.short_bytes[1] == 0
