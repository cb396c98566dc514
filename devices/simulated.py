"""Simulated devices from the catalogue or a machine file. Their readings are computed.

The readings depend on two quantities: `busy` is the fraction of time in which the device computes,
and `effort` is its throughput relative to its maximum. Utilization is busy^0.2, so that it is about
95 % even for small batches, as on real GPUs. Power depends mostly on effort, and temperature
follows power with a lag.
"""

from __future__ import annotations

import math
import random
import re
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from evener.errors import DeviceError, RequestError
from evener.system.files import read_whole

from .backend import Backend, Discovery
from .machine import (
    USUAL_WATTS,
    Machine,
    SimulatedDevice,
    SimulatedEvent,
    SimulatedPlacement,
    SimulatedShards,
    Sync,
)
from .types import Device, DeviceSample, Limit, Snapshot, Source, Term, value

if TYPE_CHECKING:
    from .snapshot_builder import SnapshotBuilder

Table = TypeVar("Table", bound=msgspec.Struct)


class MachineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a machine file in TOML."""

    device: tuple[SimulatedDevice, ...] = ()
    sync: Sync = Sync()  # absent: synchronization costs nothing
    placement: tuple[SimulatedPlacement, ...] = ()
    event: tuple[SimulatedEvent, ...] = ()
    shards: SimulatedShards | None = None  # absent: the model can't be sharded


class _Entry(msgspec.Struct, frozen=True):
    device: SimulatedDevice
    sync: Sync | None  # cost of synchronizing such devices; None: the catalogue's default


def load_machine(path: str | PathLike[str]) -> Machine:
    """Read a machine file.

    Raises `RequestError` if it can't be read or is invalid.
    """
    text = read_whole(path, "machine file", "Name an existing TOML file with [[device]] tables.")
    return parse_machine(text, str(path))


def parse_machine(text: bytes, source: str = "machine.toml") -> Machine:
    """Parse the text of a machine file.

    `source` is the file's name in error messages. Raises `RequestError` if the text isn't a valid
    machine.
    """
    data = _decode(text, source)
    file = _convert(data, MachineFile, source)
    if not file.device:
        raise RequestError(f"{source} has no devices.", "Add at least one [[device]] table.")
    for i, table in enumerate(data["device"]):
        _check_memory_keys(table, _where(source, "device", i, table))
    _check_positions(file, source)
    machine = Machine(
        file.device, file.sync, placements=file.placement, events=file.event, shards=file.shards
    )
    for i, device in enumerate(file.device):
        if file.shards is not None and device.memory_bytes(1) < file.shards.state_mib * MIB:
            raise RequestError(
                f"{_where(source, 'device', i, data['device'][i])} needs less memory for a "
                f"sample than"
                f" `shards.state_mib`, {file.shards.state_mib:g}.",
                "The state is a part of the memory that each device is given.",
            )
    return machine


def _check_positions(file: MachineFile, source: str) -> None:
    """Raise `RequestError` if two placements have the same name, or if a device doesn't exist.

    A placement may not use more devices than the machine has, and an event may only be for a device
    that the machine has. `source` is the file's name in error messages.
    """
    devices = len(file.device)
    for i, placement in enumerate(file.placement):
        where = f"{source}: placement {i}"
        if placement.name in {other.name for other in file.placement[:i]}:
            raise RequestError(
                f"{where}: `name` is {placement.name!r} again.", "Give each placement its own name."
            )
        if placement.devices > devices:
            raise RequestError(
                f"{where}: `devices` is {placement.devices}.", f"The machine has {devices}."
            )
    for i, event in enumerate(file.event):
        if event.device >= devices:
            raise RequestError(
                f"{source}: event {i}: `device` is {event.device}.",
                f"The last one is {devices - 1}.",
            )


def catalogue(names: Sequence[str]) -> Machine:
    """Return a machine that consists of devices in the catalogue, such as `gtx1080ti`.

    Its synchronization cost is the highest of any of these devices. Raises `RequestError` for an
    unknown name or an empty list.
    """
    entries, default = _entries()
    for name in names:
        if name.lower() not in entries:
            raise RequestError(
                f"The catalogue has no simulated device {name!r}.",
                f"It has {', '.join(entries)}; a machine file of your own ends in .toml.",
            )
    if not names:
        raise RequestError(
            "No simulated device is named.", f"The catalogue has {', '.join(entries)}."
        )
    chosen = [entries[name.lower()] for name in names]
    sync = max(
        (entry.sync or default for entry in chosen), key=lambda cost: cost.seconds(len(chosen) + 1)
    )
    return Machine(tuple(entry.device for entry in chosen), sync)


@cache
def _entries() -> tuple[dict[str, _Entry], Sync]:
    data = _decode(
        files("evener.devices").joinpath("catalogue.toml").read_bytes(), "catalogue.toml"
    )
    default = _convert(data.pop("sync"), Sync, "catalogue.toml: sync")
    entries: dict[str, _Entry] = {}
    for name, table in data.items():
        own = table.pop("sync", None)
        device = _convert(table, SimulatedDevice, f"catalogue.toml: {name}")
        entries[name] = _Entry(
            device, _convert(own, Sync, f"catalogue.toml: {name}") if own else None
        )
    return entries, default


def _decode(text: bytes, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except (
        RecursionError,
        ValueError,
    ) as error:  # also raised for text that isn't Unicode and for overlong numbers
        raise RequestError(f"{source} is not TOML: {error}.", "Correct that line.") from None


def _where(source: str, kind: str, position: int, table: object) -> str:
    name = table.get("name") if isinstance(table, dict) else None
    return f"{source}: {kind} {position}" + (
        f" ({name})" if isinstance(name, str) and name.isprintable() else ""
    )


def _convert(table: Any, kind: type[Table], where: str) -> Table:
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"{_explain_decoding_error(str(error), table, where)}.",
            "Correct that line of the file.",
        ) from None


def _explain_decoding_error(message: str, table: Any, where: str) -> str:
    """Return msgspec's error as a message that names the table, the key and the wrong value."""
    text, _, path = message.partition(" - at `$")
    seen = table
    for key, position in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        seen = seen[key or int(position)]
    found = re.fullmatch(r"\.(device|placement|event)\[(\d+)\](.*)", path.rstrip("`"))
    if found:
        where = _where(where, found[1], int(found[2]), table[found[1]][int(found[2])])
        path = found[3]
    text = text.replace("Object contains unknown field", "unknown key")
    text = text.replace("Object missing required field", "missing key")
    key = path.strip(".`")
    shown = "" if isinstance(seen, dict | list) else f" is {seen!r}"
    return f"{where}: `{key}`{shown}: {text}" if key else f"{where}: {text}"


def _check_memory_keys(table: dict[str, Any], where: str) -> None:
    straight = [key for key in ("memory_base_mib", "memory_per_sample_mib") if key in table]
    if "memory_curve" in table and straight:
        raise RequestError(
            f"{where}: `memory_curve` and `{straight[0]}` exclude each other.", "Keep one of them."
        )
    if "memory_curve" not in table and len(straight) < 2:
        missing = "memory_per_sample_mib" if "memory_base_mib" in straight else "memory_base_mib"
        raise RequestError(
            f"{where}: missing key `{missing}`.", "Give both of the memory line, or `memory_curve`."
        )


MIB = 1 << 20
AMBIENT_CELSIUS = 31.0
FULL_LOAD_CELSIUS = 76.0
SLOWDOWN_CELSIUS = 84.0
HEAT_LAG_SECONDS = 25.0
IDLE_MHZ = 210.0
FULL_MHZ = 1900.0
IDLE_MEMORY_BYTES = 12 * MIB
BYTES_PER_SAMPLE = 28 * 28 * 4  # bytes that the host sends to the device per sample
# bytes per second, in both directions, if steps follow each other without a pause
FULL_LINK_BYTES = 9e9


class SimulatedLoad(msgspec.Struct, frozen=True):
    """The load of a simulated device at one moment, or its mean over an interval."""

    samples_per_second: float
    busy: float  # fraction of time in which the device computes
    effort: float  # samples/s relative to the device's maximum alone
    watts: float
    memory_bytes: int


class _LoadMeter:
    """Averages a simulated device's load over the time between two readings."""

    def __init__(self, load: SimulatedLoad, now: float) -> None:
        self._load = load
        self._changed_at = now
        self._past: list[tuple[float, SimulatedLoad]] = []  # (seconds, load) since the last reading

    def change(self, load: SimulatedLoad, now: float) -> None:
        """Set the load that the device has from `now` on."""
        self._note(now)
        self._load = load

    def read(self, now: float) -> SimulatedLoad:
        """Return the device's load since the last reading.

        The values are means, except for the memory use, which is the peak.
        """
        self._note(now)
        past = self._past
        self._past = []
        seconds = sum(length for length, _ in past)
        if seconds <= 0:
            return self._load

        def mean(value: Callable[[SimulatedLoad], float]) -> float:
            return sum(length * value(load) for length, load in past) / seconds

        return SimulatedLoad(
            mean(lambda load: load.samples_per_second),
            mean(lambda load: load.busy),
            mean(lambda load: load.effort),
            mean(lambda load: load.watts),
            # memory isn't released at once
            max(load.memory_bytes for _, load in past),
        )

    def _note(self, now: float) -> None:
        length = now - self._changed_at
        if length > 0:
            self._past.append((length, self._load))
        self._changed_at = now


class _State(msgspec.Struct):
    meter: _LoadMeter
    celsius: float
    joules: float
    random: random.Random


class SimulatedSource:
    """Computes readings of simulated devices.

    The same `seed` gives the same noise. `set_load` is thread-safe.
    """

    def __init__(
        self, machine: Machine, seed: int = 0, builder: SnapshotBuilder | None = None
    ) -> None:
        # importing psutil takes 20 ms, and a search doesn't need it
        from .snapshot_builder import (
            SnapshotBuilder,
        )

        self.machine = machine
        self._devices = machine.described()
        self._builder = builder or SnapshotBuilder()
        self._lock = threading.Lock()
        self._states = [
            _State(
                _LoadMeter(self._make_load(position, 0.0, 0), self._builder.clock()),
                AMBIENT_CELSIUS + 3,
                0.0,
                random.Random(f"{seed}/{device.id}"),
            )
            for position, device in enumerate(self._devices)
        ]

    def devices(self) -> tuple[Device, ...]:
        """Return the simulated devices."""
        return self._devices

    def set_load(
        self, position: int, samples_per_second: float | None = 0.0, share: int = 0
    ) -> None:
        """Set a device's samples/s and the rows of each of its gradient-accumulation passes.

        If `samples_per_second` is None, the device works without pauses. With the defaults, it is
        idle.
        """
        if samples_per_second is not None:
            rate = max(0.0, samples_per_second)
        else:
            rate = share / self.machine.device_seconds(position, share, False)
        with self._lock:
            self._states[position].meter.change(
                self._make_load(position, rate, share), self._builder.clock()
            )

    def sample(self) -> Snapshot:
        """Compute the readings of all devices from their load since the last sample."""
        now = self._builder.begin()
        with self._lock:
            loads = [state.meter.read(now) for state in self._states]
            together = sum(load.samples_per_second > 0 for load in loads) > 1
            samples = [self._sample_device(i, load, together) for i, load in enumerate(loads)]
        notes = ("Simulated devices: every reading is computed, none is measured.",)
        return self._builder.snapshot(samples, notes)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _make_load(self, position: int, samples_per_second: float, share: int) -> SimulatedLoad:
        """Return the load of a device that trains in passes of `share` rows."""
        physics = self.machine.devices[position]
        busy = 0.0
        if samples_per_second and share:
            # steps per second times seconds per step
            busy = min(
                1.0,
                samples_per_second / share * self.machine.device_seconds(position, share, False),
            )
        effort = min(1.0, samples_per_second / physics.samples_per_second)
        memory_bytes = self.machine.memory_bytes(position, share if samples_per_second else 0)
        return SimulatedLoad(
            samples_per_second, busy, effort, physics.watts(busy, samples_per_second), memory_bytes
        )

    def _sample_device(self, position: int, load: SimulatedLoad, together: bool) -> DeviceSample:
        """Compute the readings of one device, and update its temperature and energy.

        `together` is True if several devices have work, and therefore exchange gradients.
        """
        device = self._devices[position]
        state = self._states[position]
        interval = self._builder.interval_seconds
        physics = self.machine.devices[position]
        busy = load.busy
        effort = load.effort
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
            clock_mhz=value(
                round(IDLE_MHZ + (FULL_MHZ * 0.97 - IDLE_MHZ) * busy**0.1 * (1 + jitter))
            ),
            clock_max_mhz=value(FULL_MHZ),
            throttled_percent=value(0.0),
            pcie_receive_bytes_per_second=value(moved),
            pcie_send_bytes_per_second=value(moved / 40),
            # a device that trains alone has no link traffic
            link_receive_bytes_per_second=value(FULL_LINK_BYTES * busy * together),
            link_send_bytes_per_second=value(FULL_LINK_BYTES * busy * together),
            fan_percent=value(round(max(20.0, (state.celsius - AMBIENT_CELSIUS) * 1.6))),
            ecc_errors=value(0),
            samples_per_second=value(load.samples_per_second * (1 + 0.5 * jitter)),
        )


def _noisy(share: float, jitter: float) -> float:
    return min(1.0, max(0.0, share * (1 + jitter)))


class SimulatedDevices(Backend):
    """The backend of simulated devices, which are requested as `sim:NAME` or `sim:FILE`."""

    kind = "sim"
    own_memory = False
    simulated = True

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """Return the devices of a machine file, or devices in the catalogue.

        Raises `RequestError` if a name is unknown, a file is invalid, or a machine file is combined
        with other devices.
        """
        files = [
            term.pick for term in terms if term.pick.lower().endswith(".toml") or "/" in term.pick
        ]
        if files and len(terms) > 1:
            raise RequestError(
                f"The machine file {files[0]!r} can't be combined with other devices.",
                "Add them to the file.",
            )
        machine = load_machine(files[0]) if files else catalogue([term.pick for term in terms])
        limits = (
            (terms[0].limit,) * len(machine.devices)
            if files
            else tuple(term.limit for term in terms)
        )
        if any(limit != Limit() for limit in limits):
            machine = msgspec.structs.replace(machine, limits=limits)
        return Discovery(machine.described(), (), machine)

    def write_term(self, device_id: str) -> str:
        """Raise `DeviceError`, because a plan for simulated devices can't be used for training."""
        raise DeviceError(
            f"The plan is for a simulated device, {device_id}.", "Make one for real devices."
        )

    def open_source(self, discovery: Discovery) -> Source:
        """Return a source that computes readings of the simulated machine."""
        assert discovery.machine is not None
        return SimulatedSource(discovery.machine)
