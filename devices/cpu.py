"""CPU slices: the cores of the CPU, divided into equal sets that are used as devices.

This module reads their metrics, and defines the environment of processes that train on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from evener.errors import PlanError, RequestError
from evener.system.cores import allowed_cpus, container_memory_bytes, core_groups, slice_cpus

from .backend import QUIET, Backend, ChildEnvironment, Discovery
from .snapshot_builder import SnapshotBuilder
from .types import (
    UNSUPPORTED,
    Device,
    DeviceSample,
    HostSample,
    Reading,
    Snapshot,
    Source,
    State,
    Term,
    limited,
    value,
)

DEFAULT_SLICES = 2
# part of the free memory for all slices; the rest is for this program and the system
MEMORY_SHARE = 0.8
# sizes are rounded down to a multiple of this, so that they repeat from run to run
MEMORY_STEP = 256 << 20


def slices(count: int | None = None) -> tuple[Device, ...]:
    """Divide the CPU into `count` slices of equal size, by default two.

    Only CPUs that this process may use are divided. If there is only one, the default is one slice.
    Each slice gets an equal part of 80 % of the free memory, rounded down to a multiple of 256 MiB.
    Raises `RequestError` if the CPU can't be divided into `count` slices.
    """
    if count is not None and count < 1:
        raise RequestError(f"The CPU can't be cut into {count} slices.", "Ask for cpu/1 or more.")
    cpus = allowed_cpus()
    wanted = min(DEFAULT_SLICES, len(cpus)) if count is None else count
    part = int(available_memory_bytes() * MEMORY_SHARE / wanted)
    memory_bytes = part - part % MEMORY_STEP if part >= MEMORY_STEP else part
    return tuple(
        Device(f"cpu-{i}-of-{wanted}", i, product_name(), "cpu", memory_bytes, cores)
        for i, cores in enumerate(slice_cpus(core_groups(cpus), wanted))
    )


def available_memory_bytes() -> int:
    """Return the memory that is free on this machine and within the container's limit, in bytes."""
    free: int = psutil.virtual_memory().available
    left = container_memory_bytes()
    return free if left is None else max(0, min(free, left))


def machine_memory_bytes() -> int:
    """Return the machine's installed memory in bytes."""
    total: int = psutil.virtual_memory().total
    return total


@cache
def product_name() -> str:
    """Return the processor's short model name, or "CPU" if it is unknown."""
    with suppress(OSError):
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if found:
            return (
                re.sub(r"\((?:R|TM|C)\)|\bCPU\b|@.*|\bProcessor\b|\s+(?=\s)", "", found[1]).strip()
                or "CPU"
            )
    return "CPU"


SLOW_PERIOD_SECONDS = 5.0  # for temperature and clock, as reading them may wake cores
SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
CPUS = Path("/sys/devices/system/cpu")


class CpuSource:
    """Reads the metrics of CPU slices.

    A slice's utilization is the mean load of its logical CPUs. Memory and temperature are those of
    the whole machine. Temperature and clocks are read only every 5 seconds.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        builder: SnapshotBuilder | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._devices = tuple(devices)
        self._notes = notes
        self._builder = builder or SnapshotBuilder()
        self._slow_due = 0.0
        self._heat: tuple[Reading, Reading] = (UNSUPPORTED, UNSUPPORTED)
        self._clocks: dict[str, tuple[Reading, Reading]] = {}

    def devices(self) -> tuple[Device, ...]:
        """Return the CPU devices: equal slices of the machine's logical CPUs."""
        return self._devices

    def sample(self) -> Snapshot:
        """Read the metrics of all slices and of the host."""
        started = self._builder.begin()
        host = self._builder.meter.read()
        if started >= self._slow_due:
            self._slow_due = started + SLOW_PERIOD_SECONDS
            self._heat = read_heat()
            self._clocks = {device.id: read_clock(device.cores) for device in self._devices}
        samples = [self._sample(device, host) for device in self._devices]
        return self._builder.snapshot(samples, self._notes, host=host)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _sample(self, device: Device, host: HostSample) -> DeviceSample:
        by_cpu = self._builder.meter.by_cpu
        busy = [by_cpu[core] for core in device.cores if core in by_cpu]
        clock, clock_max = self._clocks.get(device.id, (UNSUPPORTED, UNSUPPORTED))
        return DeviceSample(
            device=device,
            utilization_percent=value(sum(busy) / len(busy)) if busy else Reading(State.STALE),
            memory_used_bytes=value(host.memory_used_bytes),
            memory_total_bytes=value(host.memory_total_bytes),
            temperature_celsius=self._heat[0],
            temperature_limit_celsius=self._heat[1],
            clock_mhz=clock,
            clock_max_mhz=clock_max,
        )


def read_heat() -> tuple[Reading, Reading]:
    """Return the temperature of the processor's hottest sensor and its limit, in °C.

    Without a sensor, both readings are unsupported.
    """
    sensors: dict[str, list[Any]] = {}
    with suppress(OSError, AttributeError, RuntimeError):
        sensors = psutil.sensors_temperatures()
    for name in SENSORS:
        if sensors.get(name):
            hottest = max(sensors[name], key=lambda sensor: sensor.current)
            return value(hottest.current), value(hottest.high) if hottest.high else UNSUPPORTED
    return UNSUPPORTED, UNSUPPORTED


def read_clock(cores: Sequence[int]) -> tuple[Reading, Reading]:
    """Return the current and the highest clock of the first of these cores, in MHz.

    A clock that the kernel doesn't report is unsupported.
    """
    found: list[Reading] = []
    for name in ("scaling_cur_freq", "cpuinfo_max_freq"):
        reading = UNSUPPORTED
        with suppress(OSError, ValueError, IndexError):
            reading = value(int((CPUS / f"cpu{cores[0]}" / "cpufreq" / name).read_text()) / 1000)
        found.append(reading)
    return found[0], found[1]


MIB = 1 << 20
# Without these settings, glibc maps and unmaps the large buffers of every step, which costs 15 % of
# the speed and causes half of the noise.
STEADY_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_ARENA_MAX": "1",
}


class CpuSlices(Backend):
    """The backend of CPU slices, which are requested as `cpu`, `cpu/N` or `cpu/N:I`.

    If a slice's compute is limited, the process that measures training enforces the limit itself:
    it spins before each step, so that the step takes as long as on a slower CPU.
    """

    kind = "cpu"
    own_memory = False
    torch_name = "cpu"
    tensorflow_name = "CPU"

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """Divide the CPU, and return the requested slices.

        A message says how many logical CPUs are left over. Raises `RequestError` if the terms ask
        for different numbers of slices, or for a slice that doesn't exist.
        """
        counts = {term.slices for term in terms}
        if len(counts) > 1:
            raise RequestError(
                "One request cuts the CPU in two ways.", "Use the same cpu/N everywhere."
            )
        every = slices(counts.pop())
        chosen: list[Device] = []
        for term in terms:
            picked = (_find_slice(every, term.pick),) if term.pick else every
            chosen += [limited(device, term.limit) for device in picked]
        spare = len(allowed_cpus()) - sum(len(device.cores) for device in every)
        note = (
            f"{len(every)} equal slices leave {spare} of {len(allowed_cpus())} logical CPUs unused."
        )
        return Discovery(tuple(chosen), (note,) if spare else ())

    def write_term(self, device_id: str) -> str:
        """Return the part of a `--devices` request that selects a slice, such as `cpu/2:0`.

        For example, `cpu/2:0` selects the slice with the id `cpu-0-of-2`. Raises `PlanError` if the
        id isn't that of a slice.
        """
        found = re.fullmatch(r"cpu-(\d+)-of-(\d+)", device_id)
        if not found:
            raise PlanError(
                f"The plan's device {device_id} isn't a slice of a CPU.", "Write it as cpu-0-of-2."
            )
        return f"cpu/{found[2]}:{found[1]}"

    def open_source(self, discovery: Discovery) -> Source:
        """Return a source that reads the metrics of the slices."""
        return CpuSource(discovery.devices, notes=discovery.notes)

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """Return the environment variables and limits of a process that trains on these slices.

        The process uses one thread per physical core, and the memory limits of the slices are added
        up. TensorFlow gets the limit through environment variables, and PyTorch as
        `address_space_bytes`. If the user has set a memory limit, oneDNN is turned off for
        TensorFlow, because with oneDNN, a step that exceeds the limit kills the process instead of
        raising an error.
        """
        cores = tuple(sorted(core for device in devices for core in device.cores))
        threads = max(1, len(core_groups(cores)))
        variables = {**QUIET, **STEADY_MALLOC}
        variables |= dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)
        )
        sizes = [device.usable_memory_bytes for device in devices]
        memory_bytes = (
            sum(size for size in sizes if size is not None) if None not in sizes else None
        )
        if framework == "tensorflow":
            # Two inter-op threads, because a waiting collective must not occupy the only one.
            variables |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "2"}
            if memory_bytes is not None:
                variables["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
                variables["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(max(1, memory_bytes // MIB))
            if any(device.limit.memory_bytes is not None for device in devices):
                # without oneDNN, such a step raises ResourceExhaustedError, but steps take twice
                # the time
                variables["TF_ENABLE_ONEDNN_OPTS"] = "0"
        return ChildEnvironment(
            variables, cores, memory_bytes if framework == "torch" else None, threads
        )


def _find_slice(every: Sequence[Device], pick: str) -> Device:
    if re.fullmatch(r"\d{1,6}", pick, re.ASCII) and int(pick) < len(every):
        return every[int(pick)]
    raise RequestError(
        f"There is no slice {pick!r} of the CPU: it is cut into {len(every)}, from 0 to "
        f"{len(every) - 1}.",
        "Pick one of them, or cut it finer with cpu/N:I.",
    )
