"""Devices, their limits, and the readings of their metrics.

A reading has the value of a metric, or the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from evener.live.files import Training

DeviceKind = Annotated[str, Meta(pattern="^[a-z0-9]{1,12}$")]  # a key of devices/registry.py


class Limit(msgspec.Struct, frozen=True):
    """A limit for a device's compute, its memory or both, given after `@` in `--devices`.

    It is enforced on real devices. A simulated device becomes slower or has less memory.
    """

    percent: float | None = None  # of its compute, above 0 and at most 100
    memory_bytes: int | None = None

    def __bool__(self) -> bool:
        return self.percent is not None or self.memory_bytes is not None


class Device(msgspec.Struct, frozen=True):
    """A device to train on: a GPU, a CPU slice or a simulated device."""

    # a GPU's UUID, or for example "cpu-0-of-2" or "sim-0-gtx1080ti": unique on a host, and the
    # same after a restart
    id: str
    index: int  # index among devices of its kind, for display and for frameworks that use indices
    name: str  # the product name
    kind: DeviceKind
    memory_bytes: int | None  # available to a training process, before any limit; None: unknown
    cores: tuple[int, ...] = ()  # the logical CPUs of a CPU slice
    limit: Limit = Limit()
    host: str = ""  # its host's address in a Ray cluster; empty: this machine
    bfloat16: bool | None = None  # True if it has hardware for bfloat16; None: unknown

    @property
    def on_cpu(self) -> bool:
        """True for a CPU slice, which uses cores and memory of the host."""
        return self.kind == "cpu"

    @property
    def label(self) -> str:
        """The name to display, such as "GPU:0", or "10.0.0.2/GPU:0" in a Ray cluster."""
        short = f"{self.kind.upper()}:{self.index}"
        # hosts in journals are untrusted text
        return f"{self.host}/{short}" if self.host and self.host.isprintable() else short

    @property
    def key(self) -> str:
        """The device's id, preceded by its host's name in a Ray cluster.

        It is unique in the cluster.
        """
        return f"{self.host}/{self.id}" if self.host else self.id

    @property
    def usable_memory_bytes(self) -> int | None:
        """The memory that training may use: the device's memory or its limit, if that is lower.

        None if both are unknown.
        """
        sizes = [size for size in (self.memory_bytes, self.limit.memory_bytes) if size is not None]
        return min(sizes) if sizes else None


class Term(msgspec.Struct, frozen=True):
    """A part of `--devices`, such as "gpu:0@60%". `devices/terms.py` parses it."""

    kind: str  # "auto", or a key of devices/registry.py
    pick: str = ""  # index, UUID, catalogue name or file; empty: all of the kind
    limit: Limit = Limit()
    slices: int | None = None  # N of cpu/N
    host: str | None = None  # a host of the Ray cluster; None: this machine, without Ray


def limited(device: Device, limit: Limit) -> Device:
    """Return a device with this limit. An empty limit changes nothing."""
    return msgspec.structs.replace(device, limit=limit) if limit else device


def group_by_host(devices: Iterable[Device]) -> dict[str, tuple[Device, ...]]:
    """Return the devices of each host. The host "" is this machine."""
    hosts: dict[str, tuple[Device, ...]] = {}
    for device in devices:
        hosts[device.host] = (*hosts.get(device.host, ()), device)
    return hosts


class State(StrEnum):
    """Whether a reading has a value, or why it has none."""

    VALUE = "value"
    UNSUPPORTED = "unsupported"  # this device can't report it
    DENIED = "denied"  # the device reports it, but this user may not read it
    LOST = "lost"  # the device fell off the bus, or its driver went away
    STALE = "stale"  # the last value, which is too old to be current; or no value yet


# constants, because they are used thousands of times per tick and an enum's member takes five times
# as long
_VALUE = State.VALUE


class Reading(msgspec.Struct, frozen=True, gc=False):
    """The value of a metric, or the reason why there is none.

    `age_seconds` is the time since the value was measured. `value` is None unless `state` is VALUE
    or STALE.
    """

    state: State
    value: float | None = None
    age_seconds: float = 0.0

    @property
    def current(self) -> float | None:
        """The value, or None if it is missing or out of date."""
        return self.value if self.state is _VALUE else None

    def aged(self, age_seconds: float, state: State | None = None) -> Reading:
        """Return the reading with another age and, if `state` is given, another state.

        A reading without a value is returned unchanged.
        """
        return self if self.value is None else Reading(state or self.state, self.value, age_seconds)

    def scaled(self, factor: float) -> Reading:
        """Return the reading with its value multiplied by `factor`."""
        return (
            self
            if self.value is None
            else Reading(self.state, self.value * factor, self.age_seconds)
        )


UNSUPPORTED = Reading(State.UNSUPPORTED)
DENIED = Reading(State.DENIED)
LOST = Reading(State.LOST)
PENDING = Reading(State.STALE)  # no value yet: a rate needs two samples


def value(number: float, age_seconds: float = 0.0) -> Reading:
    """Return a reading with the value `number`, which was measured `age_seconds` ago."""
    return Reading(_VALUE, float(number), age_seconds)


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics of one device in a snapshot. Percentages are from 0 to 100."""

    device: Device
    utilization_percent: Reading = UNSUPPORTED  # time in which any kernel ran
    sm_percent: Reading = UNSUPPORTED  # multiprocessors busy (GPM)
    occupancy_percent: Reading = UNSUPPORTED
    tensor_percent: Reading = UNSUPPORTED
    dram_percent: Reading = UNSUPPORTED  # memory bandwidth used
    memory_used_bytes: Reading = UNSUPPORTED
    memory_total_bytes: Reading = UNSUPPORTED
    temperature_celsius: Reading = UNSUPPORTED
    temperature_limit_celsius: Reading = UNSUPPORTED  # the temperature at which it throttles
    # mean over the tick, from the energy counter if there is one
    power_watts: Reading = UNSUPPORTED
    power_limit_watts: Reading = UNSUPPORTED
    energy_joules: Reading = UNSUPPORTED  # since the sampler started
    clock_mhz: Reading = UNSUPPORTED  # of the multiprocessors
    clock_max_mhz: Reading = UNSUPPORTED
    # percentage of the tick, from nanosecond counters if they exist
    throttled_percent: Reading = UNSUPPORTED
    throttle_reasons: tuple[str, ...] = ()  # such as "power cap"
    pcie_receive_bytes_per_second: Reading = UNSUPPORTED
    pcie_send_bytes_per_second: Reading = UNSUPPORTED
    link_receive_bytes_per_second: Reading = UNSUPPORTED  # NVLink, all links
    link_send_bytes_per_second: Reading = UNSUPPORTED
    fan_percent: Reading = UNSUPPORTED
    ecc_errors: Reading = UNSUPPORTED  # uncorrected, since boot
    # of training runs that write reports, and of running probes
    samples_per_second: Reading = UNSUPPORTED
    events: tuple[str, ...] = ()  # such as XID or ECC errors, the newest last
    note: str = ""  # a message if the whole device has failed ("GPU is lost; ...")


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a device in a snapshot. A process on two devices has two samples."""

    pid: int
    # Unix time in seconds, as psutil reports it; identifies a process together with the pid
    start_time: float
    user: str
    device_id: str
    device_label: str
    memory_bytes: Reading = UNSUPPORTED
    sm_percent: Reading = UNSUPPORTED
    cpu_percent: Reading = UNSUPPORTED
    command: str = ""  # cleaned of control characters
    samples_per_second: Reading = UNSUPPORTED
    # without padding; for training runs whose rows have lengths
    tokens_per_second: Reading = UNSUPPORTED
    padding_percent: Reading = UNSUPPORTED  # of the computed tokens
    host: str = ""  # in a Ray cluster; empty: this machine
    # True for a process that runs kernels for others, such as the server of NVIDIA's MPS: the
    # driver counts their kernels as its own
    serves_others: bool = False


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU load and memory of a machine in a snapshot."""

    cpu_percent: float
    load_1min: float
    memory_used_bytes: int
    memory_total_bytes: int
    cores: int
    hostname: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of all devices and processes, and of the host, at one moment."""

    at_seconds: float  # Unix time
    interval_seconds: float  # since the previous tick
    devices: tuple[DeviceSample, ...]
    processes: tuple[ProcessSample, ...]
    host: HostSample
    sampling_seconds: float  # seconds that this tick took
    driver: str = ""  # the driver's version; empty: no driver
    notes: tuple[str, ...] = ()  # messages such as "No NVIDIA driver: ..."
    # reports of this user's training processes, with these devices' ids
    reports: tuple[Training, ...] = ()


class Source(Protocol):
    """Reads the metrics of a fixed set of devices.

    If a device fails, no error is raised, but its readings show it.
    """

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that this source reads."""

    def sample(self) -> Snapshot:
        """Read all devices, their processes and the host.

        Always call it from the same thread.
        """

    def close(self) -> None:
        """Release the driver and all other resources."""
