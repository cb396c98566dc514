"""Readings of simulated devices follow the simulated load and the seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.discover import discover, open_source
from evener.devices.machine import Machine
from evener.devices.simulated import SimulatedSource, catalogue
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import DeviceSample, Reading


class Run:
    """A source and its clock."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self.now = 0.0
        self.source = SimulatedSource(
            machine, seed, SnapshotBuilder(TrainingRates(lambda: ()), lambda: self.now)
        )

    def tick(self, times: int = 1) -> tuple[DeviceSample, ...]:
        """Let seconds pass."""
        for _ in range(times):
            self.now += 1.0
            samples = self.source.sample().devices
        return samples


def number(reading: Reading) -> float:
    """Return a value, which must exist."""
    assert reading.current is not None
    return reading.current


def test_an_idle_card_is_cool_and_a_loaded_one_warms_up_to_its_load() -> None:
    run = Run(catalogue(["gtx1080ti", "gtx1080"]))
    idle = run.tick(60)[0]
    assert number(idle.temperature_celsius) < 40
    assert number(idle.power_watts) < 30
    assert number(idle.utilization_percent) == 0
    assert number(idle.samples_per_second) == 0
    run.source.set_load(0, 1345.0, 1024)
    warming, loaded = run.tick(5)[0], run.tick(120)[0]
    assert 40 < number(warming.temperature_celsius) < number(loaded.temperature_celsius) < 84
    assert number(loaded.power_watts) > 200
    assert number(loaded.utilization_percent) > 97
    assert number(loaded.samples_per_second) == pytest.approx(1345, rel=0.05)
    assert number(loaded.memory_used_bytes) == pytest.approx(
        run.source.machine.memory_bytes(0, 1024), rel=0.01
    )
    run.source.set_load(0, 0.0, 0)
    assert number(run.tick(200)[0].temperature_celsius) < 40


def test_a_small_batch_looks_busy_at_half_the_power() -> None:
    """Utilisation was 96 % at half the throughput on real cards."""
    run = Run(catalogue(["gtx1080ti"]))
    run.source.set_load(0, 684.0, 64)
    (small,) = run.tick(60)
    run.source.set_load(0, 1345.0, 1024)
    (large,) = run.tick(60)
    assert number(small.utilization_percent) > 93
    assert number(small.power_watts) < 0.75 * number(large.power_watts)
    assert number(small.sm_percent) < 0.75 * number(large.sm_percent)
    assert number(small.memory_used_bytes) < number(large.memory_used_bytes)


def test_work_between_two_readings_is_seen() -> None:
    """A probe that has ended by the next reading is a part of it. The one after is idle."""
    run = Run(catalogue(["t4"]))
    run.tick()
    run.source.set_load(0, 900.0, 256)
    run.now += 0.5
    run.source.set_load(0)
    run.now -= 0.5
    (half,) = run.tick()
    assert number(half.samples_per_second) == pytest.approx(450, rel=0.05)
    assert number(half.memory_used_bytes) > 1 << 30
    assert number(run.tick()[0].samples_per_second) == 0


def test_a_device_that_trains_at_an_unknown_rate_is_busy() -> None:
    """It trains at its own speed until the rate is known."""
    run = Run(catalogue(["t4"]))
    run.source.set_load(0, None, 256)
    (sample,) = run.tick()
    assert number(sample.utilization_percent) > 90
    assert number(sample.samples_per_second) > 100


def test_links_carry_gradients_only_between_devices() -> None:
    run = Run(catalogue(["t4", "t4"]))
    run.source.set_load(0, 500.0, 512)
    assert number(run.tick()[0].link_send_bytes_per_second) == 0
    run.source.set_load(1, 500.0, 512)
    assert number(run.tick()[0].link_send_bytes_per_second) > 1e8


def test_the_same_seed_and_times_give_the_same_readings() -> None:
    runs = [Run(catalogue(["t4", "v100"]), seed) for seed in (3, 3, 4)]
    for run in runs:
        run.source.set_load(1, 900.0, 256)
    first, again, other = (run.tick(20) for run in runs)
    assert first == again
    assert first != other


@given(st.floats(0, 1e9), st.integers(0, 1 << 30))
def test_any_load_gives_readings_that_a_card_could_have(rate: float, share: int) -> None:
    run = Run(catalogue(["t4"]))
    run.source.set_load(0, rate, share)
    (sample,) = run.tick(3)
    for name in ("utilization_percent", "sm_percent", "dram_percent", "fan_percent"):
        assert 0 <= number(getattr(sample, name)) <= 100
    assert 0 < number(sample.power_watts) <= number(sample.power_limit_watts)
    assert 0 <= number(sample.memory_used_bytes) <= number(sample.memory_total_bytes)
    assert 25 < number(sample.temperature_celsius) < 84


def test_a_discovery_of_simulated_devices_opens_their_source() -> None:
    source = open_source(discover("sim:t4,t4@50%", environ={}))
    snapshot = source.sample()
    assert [sample.device.label for sample in snapshot.devices] == ["SIM:0", "SIM:1"]
    assert "none is measured" in snapshot.notes[0]
    source.close()
