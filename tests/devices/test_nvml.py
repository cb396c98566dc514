"""NVIDIA GPUs through a scripted driver: every metric, every failure, and recovery."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evener.devices.discover import discover, open_source
from evener.devices.nvidia.nvml_library import describe
from evener.devices.nvidia.source import DENIED_WORDS, SILENT_WORDS, NvmlSource, describe_event
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import DeviceSample, Reading, Snapshot, State
from evener.errors import DeviceError
from evener.tui.cli.monitor import snapshot_text
from tests.support.waiting import wait_for

GIB = 1 << 30


class Rig:
    """A source over a scripted driver, and the clock of both."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.now = 1000.0
        self.source = NvmlSource(
            library=nvml, builder=SnapshotBuilder(TrainingRates(lambda: ()), lambda: self.now)
        )

    def tick(self, seconds: float = 1.0, times: int = 1) -> Snapshot:
        """Let time pass, then sample."""
        for _ in range(times):
            self.now += seconds
            self.nvml.advance(seconds)
            snapshot = self.source.sample()
        return snapshot


@pytest.fixture
def rig(fake_nvml: Callable[..., Any]) -> Iterator[Rig]:
    """Yield two GPUs."""
    made = Rig(fake_nvml(gpus=2))
    yield made
    made.nvml.release()
    made.source.close()


def states(sample: DeviceSample) -> dict[str, State]:
    """Return every metric's state."""
    return {
        name: reading.state
        for name in sample.__struct_fields__
        if isinstance(reading := getattr(sample, name), Reading)
    }


def test_every_metric_of_a_healthy_gpu_has_its_value(rig: Rig) -> None:
    rig.nvml.gpus[0].fan_percent = 30
    rig.nvml.gpus[0].throttled = {74: 0.25, 270: 0.1}
    sample = rig.tick(times=11).devices[0]  # the energy counter is read every ten seconds
    expected = {
        "utilization_percent": 95,
        "sm_percent": 80,
        "occupancy_percent": 12,
        "tensor_percent": 70,
        "dram_percent": 14,
        "memory_used_bytes": 3 * GIB,
        "memory_total_bytes": 140 * GIB,
        "temperature_celsius": 40,
        "temperature_limit_celsius": 90,
        "power_watts": 300,
        "power_limit_watts": 700,
        "energy_joules": 3000,
        "clock_mhz": 1500,
        "clock_max_mhz": 1980,
        "throttled_percent": 25,
        "pcie_receive_bytes_per_second": 200 << 20,
        "pcie_send_bytes_per_second": 100 << 20,
        "link_receive_bytes_per_second": 1000 << 20,
        "link_send_bytes_per_second": 2000 << 20,
        "fan_percent": 30,
        "ecc_errors": 0,
    }
    assert {name: getattr(sample, name).current for name in expected} == pytest.approx(expected)
    assert sample.throttle_reasons == ("power cap", "heat (hardware)")
    assert sample.note == ""
    assert rig.tick().driver == "580.159"


def test_rates_need_a_second_look_and_are_never_a_false_zero(rig: Rig) -> None:
    sample = rig.tick().devices[0]
    for name in ("sm_percent", "throttled_percent"):
        assert getattr(sample, name) == Reading(State.STALE)
    assert sample.power_watts.current == 300


def test_throttling_has_its_reasons_before_its_share(rig: Rig) -> None:
    """`monitor --once` takes two samples, 0.12 s apart.

    That is too short for the percentage, which is neither lost nor missing.
    """
    rig.nvml.gpus[1].event_reasons = 0x04
    rig.tick()
    snapshot = rig.tick(0.12)
    assert [sample.throttled_percent for sample in snapshot.devices] == [Reading(State.STALE)] * 2
    assert [sample.throttle_reasons for sample in snapshot.devices] == [(), ("power cap",)]
    _, _, _, healthy, capped, *_ = snapshot_text(snapshot, 200, colour=False).splitlines()
    assert "…" in healthy
    assert "lost" not in healthy
    assert "…   power cap" in capped
    rig.nvml.gpus[1].throttled = {74: 0.25}
    assert rig.tick(times=6).devices[1].throttled_percent.current == pytest.approx(25, rel=0.05)


def test_a_chip_without_gpm_counts_its_traffic_by_the_fields(rig: Rig) -> None:
    rig.nvml.gpus[1].gpm = None
    sample = rig.tick(times=3).devices[1]
    assert sample.sm_percent.state is State.UNSUPPORTED
    assert sample.pcie_receive_bytes_per_second.current == pytest.approx(1e9)
    assert sample.link_send_bytes_per_second.current == pytest.approx(1e6 * 1024)


def test_a_chip_without_counters_falls_back_to_the_plain_calls(rig: Rig) -> None:
    for field_id in (83, 185, 190, 74, 76, 269, 270, 271):
        rig.nvml.fail(f"field {field_id}", rig.nvml.NVML_ERROR_NOT_SUPPORTED)
    rig.nvml.gpus[0].event_reasons = 0x24
    sample = rig.tick(times=2).devices[0]
    assert sample.power_watts.current == 300
    assert sample.power_limit_watts.current == 700
    assert sample.energy_joules.state is State.UNSUPPORTED
    assert sample.throttled_percent.current == 100, "at both readings"
    assert sample.throttle_reasons == ("power cap", "heat (software)")


CALLS = {
    "nvmlDeviceGetUtilizationRates": "utilization_percent",
    "nvmlDeviceGetTemperature": "temperature_celsius",
    "nvmlDeviceGetClockInfo": "clock_mhz",
    "nvmlDeviceGetTemperatureThreshold": "temperature_limit_celsius",
    "nvmlDeviceGetMaxClockInfo": "clock_max_mhz",
    "nvmlGpmSampleGet": "dram_percent",
    "nvmlDeviceGetFieldValues": "ecc_errors",
}


@pytest.mark.parametrize(
    ("code_name", "state"),
    [
        ("NOT_SUPPORTED", State.UNSUPPORTED),
        ("NO_PERMISSION", State.DENIED),
        ("UNKNOWN", State.STALE),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_one_failing_call_costs_its_metric_and_no_other(
    rig: Rig, call: str, code_name: str, state: State
) -> None:
    """The metric says why it has no value. The rest is unchanged, and it returns when the call
    succeeds.
    """
    rig.nvml.fail(call, getattr(rig.nvml, f"NVML_ERROR_{code_name}"), gpu=0)
    broken, healthy = rig.tick(times=3).devices
    metric = CALLS[call]
    assert getattr(broken, metric).state is state
    assert getattr(broken, metric).current is None
    assert getattr(healthy, metric).current is not None
    assert broken.memory_used_bytes.current == 3 * GIB
    rig.nvml.mend(call, gpu=0)
    assert getattr(rig.tick(61.0, times=2).devices[0], metric).current is not None


def test_a_call_that_fails_for_a_moment_leaves_its_last_value_with_its_age(rig: Rig) -> None:
    rig.tick()
    rig.nvml.fail("nvmlDeviceGetTemperature", rig.nvml.NVML_ERROR_TIMEOUT, gpu=0)
    assert rig.tick(2.0).devices[0].temperature_celsius == Reading(State.STALE, 40.0, 2.0)
    assert rig.tick(2.0).devices[0].temperature_celsius == Reading(State.STALE, 40.0, 4.0)
    rig.nvml.mend("nvmlDeviceGetTemperature", gpu=0)
    assert rig.tick().devices[0].temperature_celsius.current == 40


def test_what_is_denied_is_asked_again_only_now_and_then(rig: Rig) -> None:
    rig.nvml.fail("nvmlDeviceGetClockInfo", rig.nvml.NVML_ERROR_NO_PERMISSION)
    rig.tick(times=8)
    assert rig.nvml.calls["nvmlDeviceGetClockInfo"] == 2


def test_gpm_denied_for_a_while_comes_back(rig: Rig) -> None:
    rig.tick(times=2)
    rig.nvml.fail("nvmlGpmMetricsGet", rig.nvml.NVML_ERROR_NO_PERMISSION)
    assert rig.tick().devices[0].sm_percent.state is State.DENIED
    rig.nvml.mend("nvmlGpmMetricsGet")
    assert rig.tick(times=12).devices[0].sm_percent.current == 80


def test_gpm_is_not_asked_twice_within_a_tenth_of_a_second(rig: Rig) -> None:
    rig.tick(times=2)
    before = rig.nvml.calls["nvmlGpmSampleGet"]
    again = rig.tick(0.05).devices[0].sm_percent
    assert (again.state, again.value) == (State.VALUE, 80.0)
    assert again.age_seconds == pytest.approx(0.05)
    assert rig.nvml.calls["nvmlGpmSampleGet"] == before


def test_a_counter_that_starts_over_gives_no_rate_for_one_tick(rig: Rig) -> None:
    rig.tick(times=2)
    for gpu in rig.nvml.gpus:
        gpu.counters.clear()
    sample = rig.tick().devices[0]
    assert sample.energy_joules.current is not None
    assert sample.energy_joules.current >= 0


def test_counters_of_traffic_are_not_asked_where_gpm_tells_it(rig: Rig) -> None:
    rig.nvml.gpus[1].gpm = None
    rig.tick(times=3)
    before = rig.nvml.calls["nvmlDeviceGetFieldValues"]
    rig.tick()
    # energy of both, traffic of the one
    assert rig.nvml.calls["nvmlDeviceGetFieldValues"] == before + 3


def test_a_gpu_is_lost_and_back(rig: Rig) -> None:
    rig.nvml.gpus[1].processes = [type_of_process(rig)(os.getpid())]
    rig.tick(times=3)
    rig.nvml.lose(1)
    healthy, lost = rig.tick().devices
    assert healthy.temperature_celsius.current == 40
    assert set(states(lost).values()) - {State.UNSUPPORTED} == {State.LOST}
    assert "lost" in lost.note
    assert not rig.tick().processes
    rig.nvml.restore(1)
    back = rig.tick(6.0, times=2).devices[1]
    assert back.temperature_celsius.current == 40
    assert back.sm_percent.current == 80
    assert back.note == ""


def test_a_gpu_lost_for_a_minute_is_looked_for_by_a_new_init(rig: Rig) -> None:
    rig.tick()
    rig.nvml.lose(0)
    inits = rig.nvml.calls["nvmlInit"]
    rig.tick(10.0, times=5)
    assert rig.nvml.calls["nvmlInit"] == inits
    rig.tick(10.0, times=4)
    assert rig.nvml.calls["nvmlInit"] == inits + 1
    healthy = rig.tick(10.0).devices[1]
    assert healthy.temperature_celsius.current == 40
    assert healthy.energy_joules.current == 300 * (50 + 40 + 10)  # continued after the new init


def test_a_gpu_that_needs_a_reset_says_so(rig: Rig) -> None:
    rig.nvml.fail("nvmlDeviceGetTemperature", rig.nvml.NVML_ERROR_RESET_REQUIRED, gpu=0)
    assert rig.tick().devices[0].note == "The GPU needs a reset."
    rig.nvml.gpus[1].recovery_action = 2
    assert "reboot" in rig.tick(6.0).devices[1].note


def test_the_driver_is_unloaded_and_loaded_again(rig: Rig) -> None:
    rig.tick(times=4)
    rig.nvml.unload()
    snapshot = rig.tick()
    assert [set(states(sample).values()) - {State.UNSUPPORTED} for sample in snapshot.devices] == [
        {State.LOST}
    ] * 2
    assert "unloaded" in snapshot.notes[0]
    assert "not loaded" in rig.tick().notes[0]
    rig.nvml.reload()
    snapshot = rig.tick(3.0, times=2)
    assert [sample.temperature_celsius.current for sample in snapshot.devices] == [40, 40]
    assert snapshot.notes == ()
    assert [device.index for device in rig.source.devices()] == [0, 1]


def test_a_driver_that_was_replaced_is_opened_again(rig: Rig) -> None:
    """After an update without a reboot, library and kernel disagree until the modules
    are reloaded.
    """
    rig.tick()
    rig.nvml.unload(rig.nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert "different versions" in rig.tick(times=2).notes[0]
    rig.nvml.reload()
    assert rig.tick(3.0).devices[0].clock_mhz.current == 1500


def test_permission_is_lost_for_everything_and_comes_back(rig: Rig) -> None:
    rig.tick(times=2)
    calls = [
        name
        for name in rig.nvml.calls
        if name.startswith("nvmlDeviceGet") and "Process" not in name
    ]
    for name in (*calls, "nvmlGpmSampleGet"):
        rig.nvml.fail(name, rig.nvml.NVML_ERROR_NO_PERMISSION, gpu=0)
    row = rig.tick(times=2).devices[0]
    assert row.note == DENIED_WORDS
    assert row.temperature_celsius.state is State.DENIED
    for name in (*calls, "nvmlGpmSampleGet"):
        rig.nvml.mend(name, gpu=0)
    row = rig.tick(11.0, times=2).devices[0]
    assert row.note == ""
    assert row.temperature_celsius.current == 40


def test_a_driver_that_answers_unknown_error_to_everything_is_reported(rig: Rig) -> None:
    rig.tick()
    for name in CALLS:
        rig.nvml.fail(name, rig.nvml.NVML_ERROR_UNKNOWN, gpu=0)
    rig.nvml.fail("nvmlDeviceGetMemoryInfo_v2", rig.nvml.NVML_ERROR_UNKNOWN, gpu=0)
    row = rig.tick(times=2).devices[0]
    assert row.note == SILENT_WORDS
    assert row.temperature_celsius.state is State.STALE


def type_of_process(rig: Rig) -> Any:
    """Return the process record of the test double."""
    import sys

    return sys.modules[type(rig.nvml).__module__].FakeProcess


def test_the_server_of_mps_serves_others(rig: Rig) -> None:
    """A real process has the server's name, and the driver lists it beside this one."""
    server = subprocess.Popen(["nvidia-cuda-mps-server", "60"], executable="/bin/sleep")
    try:
        rig.nvml.gpus[0].processes = [
            type_of_process(rig)(pid, sm_percent=90) for pid in (server.pid, os.getpid())
        ]
        rows = {row.pid: row.serves_others for row in rig.tick(times=2).processes}
    finally:
        server.kill()
        server.wait()
    assert rows == {server.pid: True, os.getpid(): False}


def test_processes_have_an_owner_a_command_and_their_use(rig: Rig) -> None:
    process = type_of_process(rig)
    rig.nvml.gpus[0].processes = [
        process(os.getpid(), 2 * GIB, 40),
        process(4_000_000, None, 0),
        process(1, 5, 0, True),
    ]
    rows = {row.pid: row for row in rig.tick(times=2).processes}
    own = rows[os.getpid()]
    assert (own.device_label, own.memory_bytes.current, own.sm_percent.current) == (
        "GPU:0",
        2 * GIB,
        40,
    )
    assert own.user
    assert "py" in own.command
    assert own.start_time <= time.time()
    assert own.cpu_percent.current is not None
    stranger = rows[4_000_000]
    assert (stranger.user, stranger.start_time, stranger.memory_bytes.state) == (
        "",
        0.0,
        State.UNSUPPORTED,
    )
    assert stranger.sm_percent.current == 0
    assert rows[1].memory_bytes.current == 5


def test_process_lists_are_asked_every_few_seconds_only(rig: Rig) -> None:
    rig.tick(0.5, times=10)
    assert rig.nvml.calls["nvmlDeviceGetComputeRunningProcesses_v3"] == 4
    assert rig.nvml.calls["nvmlDeviceGetGraphicsRunningProcesses_v3"] == 2


def test_a_new_process_has_its_share_at_once_and_the_same_ones_at_every_second_look(
    rig: Rig,
) -> None:
    rig.nvml.gpus[0].processes = [type_of_process(rig)(os.getpid(), sm_percent=10)]
    rig.tick(3.0, times=2)
    before = rig.nvml.calls["nvmlDeviceGetProcessUtilization"]
    rig.tick(3.0, times=4)
    assert rig.nvml.calls["nvmlDeviceGetProcessUtilization"] == before + 2
    rig.tick(3.0)
    rig.nvml.gpus[0].processes.append(type_of_process(rig)(os.getppid(), sm_percent=40))
    shares = {row.pid: row.sm_percent.current for row in rig.tick(3.0).processes}
    assert shares == {os.getpid(): 10, os.getppid(): 40}
    assert rig.nvml.calls["nvmlDeviceGetProcessUtilization"] == before + 4


def test_an_idle_process_is_idle_and_an_unknown_one_is_not_zero(rig: Rig) -> None:
    rig.nvml.gpus[0].processes = [type_of_process(rig)(os.getpid(), sm_percent=0)]
    assert rig.tick().processes[0].sm_percent.current == 0
    rig.nvml.fail("nvmlDeviceGetProcessUtilization", rig.nvml.NVML_ERROR_NOT_SUPPORTED)
    assert rig.tick(3.0, times=2).processes[0].sm_percent.state is State.UNSUPPORTED


def test_a_mig_instance_is_a_row_of_its_own(fake_nvml: Callable[..., Any]) -> None:
    nvml = fake_nvml(gpus=2)
    kind = type(nvml.gpus[0])
    nvml.gpus[0].instances = [
        kind("MIG-a", "H200 MIG 1g.18gb", 18 * GIB),
        kind("MIG-b", "H200 MIG 1g.18gb", 18 * GIB),
    ]
    rig = Rig(nvml)
    rows = rig.tick(times=2).devices
    assert [row.device.id[:5] for row in rows] == ["GPU-0", "MIG-a", "MIG-b"]
    assert rows[1].memory_total_bytes.current == 17 * GIB
    assert rows[1].sm_percent.current == 80
    assert nvml.calls["nvmlGpmMigSampleGet"] == 4
    rig.source.close()


def test_nothing_that_blocks_is_called_and_static_facts_are_asked_once(rig: Rig) -> None:
    rig.tick(times=30)
    assert "nvmlDeviceGetPcieThroughput" not in rig.nvml.calls
    for name in (
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlGpmQueryDeviceSupport",
    ):
        assert rig.nvml.calls[name] == 2
    assert rig.nvml.calls["nvmlDeviceGetFieldValues"] <= 2 * (30 + 15 + 7)
    assert rig.nvml.calls["nvmlDeviceGetTemperature"] == 2 * 15


def test_xid_and_ecc_events_reach_their_own_row(rig: Rig) -> None:
    rig.tick(times=3)
    rig.nvml.emit(1, 0x8, 79)
    rig.nvml.emit(1, 0x2)
    wait_for(lambda: len(rig.tick().devices[1].events) == 2)
    healthy, hurt = rig.tick().devices
    assert healthy.events == ()
    assert hurt.events[0].endswith("XID 79: GPU has fallen off the bus")
    assert "ECC" in hurt.events[1]
    rig.nvml.lose(1)
    assert rig.tick().devices[1].events == hurt.events


def test_an_unknown_event_is_still_reported() -> None:
    assert describe_event(0x8, 999) == "XID 999"
    assert describe_event(0x10000, 0) == "event 0x10000"


def test_a_driver_without_events_is_no_trouble(rig: Rig) -> None:
    rig.nvml.fail("nvmlEventSetCreate", rig.nvml.NVML_ERROR_NOT_SUPPORTED)
    assert rig.tick(times=4).devices[0].events == ()


def test_close_frees_all_and_leaves_no_thread(rig: Rig) -> None:
    rig.tick(times=4)
    rig.source.close()
    rig.source.close()
    assert rig.nvml.open == 0
    assert rig.nvml.event_sets == 0
    assert rig.nvml.calls["nvmlGpmSampleFree"] == rig.nvml.calls["nvmlGpmSampleAlloc"] == 4
    assert not [thread for thread in threading.enumerate() if thread.name == "evener-nvml-events"]


def test_close_does_not_wait_for_a_driver_that_hangs(rig: Rig) -> None:
    rig.tick(times=2)
    rig.nvml.hang("nvmlEventSetWait_v2")
    rig.tick()
    started = time.monotonic()
    rig.source.close()
    assert time.monotonic() - started < 20, "it hangs for 30 s"
    assert rig.nvml.calls["nvmlShutdown"] == 0


def test_without_a_driver_there_is_no_source_but_a_message(fake_nvml: Callable[..., Any]) -> None:
    with pytest.raises(DeviceError, match="No NVIDIA driver"):
        NvmlSource(library=fake_nvml(driver=False))


def test_a_discovery_opens_only_its_own_gpus(fake_nvml: Callable[..., Any]) -> None:
    nvml = fake_nvml(gpus=3)
    source = open_source(discover("gpu:2", environ={}))
    assert [sample.device.index for sample in source.sample().devices] == [2]
    source.close()
    assert nvml.open == 0


def test_a_gpu_says_whether_it_has_hardware_for_bfloat16(fake_nvml: Callable[..., Any]) -> None:
    """GPUs have it from compute capability 8.0 on. If the driver doesn't report it, it
    is unknown.
    """
    nvml = fake_nvml(gpus=3)
    nvml.nvmlInit()
    nvml.gpus[1].capability = (7, 5)
    not_supported = nvml.NVML_ERROR_NOT_SUPPORTED
    nvml.fail("nvmlDeviceGetCudaComputeCapability", not_supported, gpu=2)
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(3)]
    found = [describe(nvml, handle, index) for index, handle in enumerate(handles)]
    assert [device.bfloat16 for device in found] == [True, False, None]
