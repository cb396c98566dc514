"""Samples simulated devices: heat, power, memory, clock and traffic that follow a simulated load.

Everything is derived from two figures of a load: busy, the share of time in which the device computes, and effort, its
samples/s against the most that it can do. Busy drives what monitors call utilisation, effort the power; heat follows
the power with a lag. So a small batch shows 95 % utilisation at half the power, as real cards do.
"""

from __future__ import annotations

import math
import random
import threading

import msgspec

from ..host.snapshot_builder import SnapshotBuilder
from ..machine import USUAL_WATTS, Machine
from ..types import Device, DeviceSample, Snapshot, value

MIB = 1 << 20
AMBIENT_CELSIUS, FULL_LOAD_CELSIUS, SLOWDOWN_CELSIUS = 31.0, 76.0, 84.0
HEAT_LAG_SECONDS = 25.0
IDLE_MHZ, FULL_MHZ = 210.0, 1900.0
IDLE_MEMORY_BYTES = 12 * MIB
BYTES_PER_SAMPLE = 28 * 28 * 4  # that the workload's host sends for one sample
FULL_LINK_BYTES = 9e9  # per second, in both directions, when steps follow each other without a pause


class SimulatedLoad(msgspec.Struct, frozen=True):
    """The training on a simulated device, and the readings that follow from it."""

    samples_per_second: float
    busy: float  # share of time that the device computes
    effort: float  # samples/s over the most that it trains alone
    watts: float
    memory_bytes: int


class _State(msgspec.Struct):
    load: SimulatedLoad
    celsius: float
    joules: float
    random: random.Random


class SimulatedSource:
    """A Source over a Machine; the same seed and times give the same readings. `set_load` is safe from any thread."""

    def __init__(self, machine: Machine, seed: int = 0, builder: SnapshotBuilder | None = None) -> None:
        self.machine = machine
        self._devices = machine.described()
        self._builder = builder or SnapshotBuilder()
        self._lock = threading.Lock()
        self._states = [
            _State(self._load(position, 0.0, 0), AMBIENT_CELSIUS + 3, 0.0, random.Random(f"{seed}/{device.id}"))
            for position, device in enumerate(self._devices)
        ]

    def devices(self) -> tuple[Device, ...]:
        """The simulated devices, in order."""
        return self._devices

    def set_load(self, position: int, samples_per_second: float = 0.0, share: int = 0) -> None:
        """Let the device train at this rate from now on, with `share` samples a step; 0 samples/s: it idles."""
        with self._lock:
            self._states[position].load = self._load(position, max(0.0, samples_per_second), share)

    def sample(self) -> Snapshot:
        """All devices now."""
        self._builder.begin()
        with self._lock:
            together = sum(state.load.samples_per_second > 0 for state in self._states) > 1
            samples = [self._sample(position, together) for position in range(len(self._devices))]
        notes = ("Simulated devices: every reading is computed, none is measured.",)
        return self._builder.snapshot(samples, notes)

    def close(self) -> None:
        """Do nothing: this source holds nothing open."""

    def _load(self, position: int, samples_per_second: float, share: int) -> SimulatedLoad:
        """The load of a device: it is busy for steps per second times seconds per step."""
        physics, busy = self.machine.devices[position], 0.0
        if samples_per_second and share:
            busy = min(1.0, samples_per_second / share * self.machine.device_seconds(position, share, False))
        effort = min(1.0, samples_per_second / physics.samples_per_second)
        memory_bytes = self.machine.memory_bytes(position, share if samples_per_second else 0)
        return SimulatedLoad(samples_per_second, busy, effort, physics.watts(busy, samples_per_second), memory_bytes)

    def _sample(self, position: int, together: bool) -> DeviceSample:
        """One device now; one that trains alone exchanges nothing."""
        device, state = self._devices[position], self._states[position]
        interval = self._builder.interval_seconds
        physics, load = self.machine.devices[position], state.load
        busy, effort = load.busy, load.effort
        limit = physics.power_watts or USUAL_WATTS
        jitter = state.random.gauss(0.0, 0.006)
        watts = min(limit, load.watts * (1 + jitter))
        target = AMBIENT_CELSIUS + (FULL_LOAD_CELSIUS - AMBIENT_CELSIUS) * watts / limit
        state.celsius += (target - state.celsius) * (1 - math.exp(-interval / HEAT_LAG_SECONDS))
        state.joules += watts * interval
        used = IDLE_MEMORY_BYTES + load.memory_bytes
        moved = load.samples_per_second * BYTES_PER_SAMPLE
        return DeviceSample(
            device=device,
            utilization_percent=value(100 * _noisy(busy**0.2, jitter)),
            sm_percent=value(100 * _noisy(0.3 * busy + 0.62 * effort, jitter)),
            occupancy_percent=value(100 * _noisy(0.4 * effort, jitter)),
            tensor_percent=value(0.0),
            dram_percent=value(100 * _noisy(0.12 * busy + 0.35 * effort, jitter)),
            memory_used_bytes=value(min(used, self.machine.usable_memory_bytes(position))),
            memory_total_bytes=value(device.memory_bytes or 0),
            temperature_celsius=value(round(state.celsius)),
            temperature_limit_celsius=value(SLOWDOWN_CELSIUS),
            power_watts=value(watts),
            power_limit_watts=value(limit),
            energy_joules=value(state.joules),
            clock_mhz=value(round(IDLE_MHZ + (FULL_MHZ * 0.97 - IDLE_MHZ) * busy**0.1 * (1 + jitter))),
            clock_max_mhz=value(FULL_MHZ),
            throttled_percent=value(0.0),
            pcie_receive_bytes_per_second=value(moved),
            pcie_send_bytes_per_second=value(moved / 40),
            link_receive_bytes_per_second=value(FULL_LINK_BYTES * busy * together),
            link_send_bytes_per_second=value(FULL_LINK_BYTES * busy * together),
            fan_percent=value(round(max(20.0, (state.celsius - AMBIENT_CELSIUS) * 1.6))),
            ecc_errors=value(0),
            samples_per_second=value(load.samples_per_second * (1 + 0.5 * jitter)),
        )


def _noisy(share: float, jitter: float) -> float:
    return min(1.0, max(0.0, share * (1 + jitter)))
