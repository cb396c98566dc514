"""A driver's real answers, recorded on H200s, are read again and compared with
nvidia-smi's rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.devices.nvidia.source import NvmlSource
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import DeviceSample, Reading, Snapshot, State
from tests.support.nvml_tape import NvmlPlayer, NvmlRecorder

TAPE = Path(__file__).parents[1] / "recorded" / "h200x2-nvml.tape"
LOADED = slice(14, 24)  # ticks, a second each, with matrix products on the second GPU throughout
MIB = 1 << 20


def sampled(
    library: Any, clock: Callable[[], float], times: int, move: Callable[[int], None]
) -> list[Snapshot]:
    """Return readings of a library. `move` gets the number of each reading before it."""
    source = NvmlSource(library=library, builder=SnapshotBuilder(TrainingRates(lambda: ()), clock))
    found = []
    for look in range(times):
        move(look)
        found.append(source.sample())
    source.close()
    return found


def read_metric(sample: DeviceSample, metric: str) -> tuple[State, float | None]:
    """Return a metric's state and value, whatever its age."""
    reading: Reading = getattr(sample, metric)
    return reading.state, reading.value


def test_a_tape_replays_what_the_driver_answered(
    fake_nvml: Callable[..., Any], tmp_path: Path
) -> None:
    nvml = fake_nvml(gpus=2)
    recorder = NvmlRecorder(nvml)
    heats = [40, 55, 55, 70, 60, 61, 62, 63]

    def heat(look: int) -> None:
        nvml.gpus[1].temperature = heats[look]
        nvml.advance(1.0)
        recorder.began -= 1.0

    told = sampled(recorder, lambda: time.monotonic() - recorder.began, len(heats), heat)
    (tmp_path / "tape.jsonl").write_text("\n".join(recorder.lines()))
    player = NvmlPlayer(tmp_path / "tape.jsonl")

    def wind(look: int) -> None:
        player.now = look + 1.5

    played = sampled(player, lambda: player.now, len(heats), wind)
    for one, other in zip(told[1:], played[1:], strict=True):
        for before, after in zip(one.devices, other.devices, strict=True):
            assert after.device == before.device
            for metric in (
                "temperature_celsius",
                "memory_used_bytes",
                "sm_percent",
                "power_watts",
                "fan_percent",
            ):
                assert read_metric(after, metric) == read_metric(before, metric), metric


def test_what_is_no_tape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no tape"):
        NvmlPlayer(tmp_path / "other.jsonl")


@pytest.fixture(scope="module")
def tape() -> NvmlPlayer:
    """Return two H200s: idle, then matrix products on the second, then idle again."""
    return NvmlPlayer(TAPE)


@pytest.fixture(scope="module")
def seen(tape: NvmlPlayer) -> list[Snapshot]:
    """Return what evener reads from the tape at each of its ticks."""
    ticks = tape.header["ticks"]

    def wind(look: int) -> None:
        tape.now = ticks[look] + 0.1  # the answers of a tick arrived in its first tenth

    return sampled(tape, lambda: tape.now, len(ticks), wind)


def test_every_reading_is_what_nvidia_smi_printed(tape: NvmlPlayer, seen: list[Snapshot]) -> None:
    assert len(tape.header["nvidia_smi"]) == 8
    for at, rows in tape.header["nvidia_smi"]:
        snapshot = seen[int(at)]
        for device, row in zip(snapshot.devices, rows, strict=True):
            utilization, used, watts, celsius, clock = map(float, row[1:6])
            assert device.utilization_percent.value == utilization
            assert (device.memory_used_bytes.value or 0) / MIB == pytest.approx(used, abs=1)
            assert device.power_watts.value == pytest.approx(watts, rel=0.03)
            assert device.temperature_celsius.value == pytest.approx(celsius, abs=3)
            assert device.clock_mhz.value == pytest.approx(clock, rel=0.05)


def test_a_gpu_at_its_power_cap_is_shown_as_one(seen: list[Snapshot]) -> None:
    idle, busy = (snapshot.devices for snapshot in (seen[6], seen[22]))
    for device in (*idle, busy[0]):
        assert (device.utilization_percent.value, device.sm_percent.value) == (0, 0)
        assert (device.throttled_percent.value, device.throttle_reasons) == (0, ())
    products = busy[1]
    assert products.utilization_percent.value == 100
    assert (products.sm_percent.value or 0) > 95
    assert (products.tensor_percent.value or 0) > 90
    assert 10 < (products.dram_percent.value or 0) < 25
    assert products.power_watts.value == pytest.approx(products.power_limit_watts.value, rel=0.02)
    assert (products.throttled_percent.value or 0) > 95
    assert products.throttle_reasons == ("power cap",)


def test_energy_is_the_sum_of_the_power(seen: list[Snapshot]) -> None:
    """The driver has two different counters: one of energy, one of mean power over a second."""
    counted_at = 30  # the last tick at which the energy counter was read
    for place in (0, 1):
        watts = [
            snapshot.devices[place].power_watts.value or 0.0
            for snapshot in seen[1 : counted_at + 1]
        ]
        assert seen[counted_at].devices[place].energy_joules.value == pytest.approx(
            sum(watts), rel=0.03
        )


def test_a_process_is_there_while_it_runs_and_on_its_gpus(seen: list[Snapshot]) -> None:
    """It computed on the second GPU; its library also held memory on the first."""
    for snapshot in (*seen[:11], *seen[27:]):
        assert snapshot.processes == ()
    for snapshot in seen[19:24]:
        first, second = snapshot.processes
        assert first.pid == second.pid
        assert (first.device_label, second.device_label) == ("GPU:0", "GPU:1")
        assert (second.memory_bytes.value or 0) / MIB == pytest.approx(874, abs=1)
        assert (second.sm_percent.value or 0) > 90
        assert (first.sm_percent.value or 0) < 5


def test_nothing_that_an_h200_tells_is_missing(seen: list[Snapshot]) -> None:
    """It has no fan, and these had no link in use."""
    absent = {"fan_percent", "samples_per_second"}
    for snapshot in seen[LOADED]:
        assert snapshot.driver == "580.159.04"
        assert snapshot.notes == ()
        for device in snapshot.devices:
            readings = {name: getattr(device, name) for name in device.__struct_fields__}
            unknown = {
                name
                for name, told in readings.items()
                if isinstance(told, Reading) and told.value is None
            }
            assert unknown == absent
