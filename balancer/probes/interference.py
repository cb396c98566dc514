"""Finds external disturbances of a probe: heat, power limits and lost devices.

It also finds memory that other processes hold. GPUs are read through their drivers, and only
between timed blocks. Each GPU has a watch (`VitalsWatch`) that calls the driver on separate
threads, so a driver that hangs doesn't block the probe. CPU slices have no driver, so only the free
memory of the host is read for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
import psutil

from evener.devices.backend import Vitals, VitalsWatch
from evener.devices.cluster.agents import HostLostError
from evener.devices.cpu import available_memory_bytes
from evener.devices.discover import SETTLE_READS, SETTLE_SECONDS
from evener.devices.registry import find_backend
from evener.devices.types import Device
from evener.system.taken_cores import name_process

from ..types import PartSeconds
from .block_timing import Block
from .failures import GroupError, RankFailure, StoppedError

# seconds; a reading takes a millisecond or two, and slower readings aren't waited for
READ_SECONDS = 0.05
# seconds to wait before a probe for a driver that was silent and may answer again
RETURN_SECONDS = 0.5
# a device whose driver takes more seconds to answer can't be used for training
SILENT_SECONDS = 5.0
# relative to SILENT_SECONDS: the longest time in which a busy machine starts to query the driver
PATIENCE = 3.0
# fraction of a GPU's memory in use that may be the driver's own; SPREAD_SMALL at most on small GPUs
SPREAD = 0.02
SPREAD_BYTES = 1 << 30
SPREAD_SMALL = 0.1
# fraction of a device's memory to which others' bytes are rounded up, so that small changes aren't
# reported again
STEP = 0.01
CLOSE_SECONDS = 0.2  # timeout for closing all watches


class Neighbours(NamedTuple):
    """How a device's time is shared between the probe and other programs.

    `part` is the fraction of time in which the device ran kernels of other programs, and `own_part`
    the fraction in which it ran kernels of the probe. `names` are the names of the other programs.
    """

    part: float
    own_part: float
    names: str


class InterferenceMonitor:
    """Reads the drivers of the devices on this host, without waiting for slow ones.

    A driver that doesn't answer for `silent_seconds` counts as lost.
    """

    def __init__(
        self, devices: Sequence[Device], host: str = "", silent_seconds: float = SILENT_SECONDS
    ) -> None:
        self._devices = devices
        self._host = host
        self._silent_seconds = silent_seconds
        self._watches: dict[int, VitalsWatch | None] = {}  # None: the device reports nothing
        self._short: dict[int, int] = {}  # position -> bytes that others hold, as last reported

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait until the drivers of these devices answer.

        Raises GroupError if a driver is lost, and StoppedError once `stop` is set.
        """
        self._read(positions, READ_SECONDS)
        watches = list(self._find_watches(positions).values())
        until = time.monotonic() + RETURN_SECONDS
        for watch in watches:
            watch.answer(until)
        until = time.monotonic() + PATIENCE * self._silent_seconds
        while (
            any(w.pending and w.silent_seconds < self._silent_seconds for w in watches)
            and time.monotonic() < until
        ):
            if stop.wait(READ_SECONDS):
                raise StoppedError
        self._raise_if_gone(positions)

    def read(self, positions: Iterable[int]) -> Mapping[int, Vitals]:
        """Return the latest reading of each device's driver by position.

        Raises GroupError if a driver is lost.
        """
        vitals = self._read(positions, READ_SECONDS)
        self._raise_if_gone(positions)
        return vitals

    def measure_taken_memory(
        self,
        positions: Iterable[int],
        probe_pids: Collection[int],
        unused_positions: Collection[int],
    ) -> dict[int, int]:
        """Return how much of each device's usable memory other programs hold, in bytes.

        - `probe_pids`: process ids of the probe processes, whose memory doesn't count.
        - `unused_positions`: positions of devices on which no probe process runs.

        Devices are left out if their use is unknown.
        """
        # if a driver doesn't list the processes, the number is known only for unused devices
        found: dict[int, int] = {}
        for position in self._list_own_positions(positions):
            short = self._find_persistently_taken(
                position, probe_pids, position in unused_positions
            )
            if short is None:
                continue
            found[position] = self._round_up(position, short) if short else 0
        return found

    def find_neighbours(
        self, positions: Iterable[int], probe_pids: Collection[int]
    ) -> dict[int, Neighbours]:
        """Return how the probe and other programs shared each device's time since the last call.

        `probe_pids` are the process ids of the probe processes. Devices whose drivers don't list
        these processes are left out.
        """
        # in a container, for example, the driver may number processes differently than this host
        found = {}
        for position, vitals in self._read(positions, SETTLE_SECONDS, full=True).items():
            if not vitals.busy.keys() & probe_pids:
                continue  # the driver may know the processes by other pids
            busy = {pid: part for pid, part in vitals.busy.items() if part}
            others = {pid: part for pid, part in busy.items() if pid not in probe_pids}
            mine = sum(part for pid, part in busy.items() if pid in probe_pids)
            total = mine + sum(others.values())
            scale = 1 / max(1.0, total)
            if not mine:
                continue  # a sample from before they began
            names = sorted({name_process(pid) for pid in others})
            found[position] = Neighbours(
                scale * sum(others.values()), scale * mine, ", ".join(names)
            )
        return found

    def _round_up(self, position: int, taken_bytes: int) -> int:
        """Round a byte count up to a multiple of a hundredth of the device's memory.

        The result is never lower than the last one, so that small changes aren't reported.
        """
        if taken_bytes > self._short.get(position, 0):
            step = max(1, int(STEP * (self._devices[position].memory_bytes or 0)))
            self._short[position] = -(-taken_bytes // step) * step
        return self._short[position]

    def close(self) -> None:
        """Stop reading the drivers, without waiting for one that hangs."""
        until = time.monotonic() + CLOSE_SECONDS
        watches = [watch for watch in self._watches.values() if watch]
        for watch in watches:
            watch.close()
        for watch in watches:
            watch.answer(until)

    def _list_own_positions(self, positions: Iterable[int]) -> list[int]:
        """Return those positions whose devices are on this host, without duplicates."""
        return [
            position
            for position in dict.fromkeys(positions)
            if self._devices[position].host == self._host
        ]

    def _find_watches(self, positions: Iterable[int]) -> dict[int, VitalsWatch]:
        """Return the driver watches of these devices by position; open those that are missing."""
        own = self._list_own_positions(positions)
        found = {}
        for position in own:
            if position not in self._watches:
                device = self._devices[position]
                reader = find_backend(device.kind).open_vitals(device)
                self._watches[position] = VitalsWatch(reader) if reader else None
            watch = self._watches[position]
            # otherwise the device has no driver that can be read
            if watch is not None:
                found[position] = watch
        return found

    def _read(
        self, positions: Iterable[int], wait_seconds: float, full: bool = False
    ) -> Mapping[int, Vitals]:
        """Ask the drivers of these devices at the same time, and wait at most `wait_seconds`.

        Returns the reading of each device, or its previous one if its driver hasn't answered in
        time. `full` readings include memory and processes.
        """
        watches = self._find_watches(positions)
        asked = {i: watch.ask(full) for i, watch in watches.items()}
        until = time.monotonic() + wait_seconds
        # a driver that hasn't answered an earlier reading isn't waited for
        return {i: watch.answer(until if asked[i] else 0.0) for i, watch in watches.items()}

    def _raise_if_gone(self, positions: Iterable[int]) -> None:
        ranks = {position: rank for rank, position in enumerate(dict.fromkeys(positions))}
        for position, watch in self._find_watches(positions).items():
            words = watch.answer().trouble
            if watch.silent_seconds >= self._silent_seconds:
                words = f"The driver has not answered for {watch.silent_seconds:.0f} s."
            if words:
                detail = words[:1].lower() + words.removesuffix(".")[1:]
                raise GroupError(
                    RankFailure(ranks[position], "device", detail, gpu=ranks[position])
                )

    def _find_persistently_taken(
        self, position: int, probe_pids: Collection[int], is_unused: bool
    ) -> int | None:
        """Return how many bytes of a device other programs hold, or None if unknown.

        If the value has risen, it is read again a few times, because a program that holds memory
        may be exiting. `probe_pids` are the process ids of the probe processes; `is_unused` means
        that none of them runs on the device.
        """
        reported = self._short.get(position, 0) + _possible_driver_bytes(
            self._devices[position].memory_bytes or 0
        )
        short = self._taken_now(position, probe_pids, is_unused)
        for _ in range(SETTLE_READS):
            if short is None or short <= reported:
                break
            time.sleep(SETTLE_SECONDS)
            again = self._taken_now(position, probe_pids, is_unused)
            short = None if again is None else min(short, again)
        return short

    def _taken_now(self, position: int, probe_pids: Collection[int], is_unused: bool) -> int | None:
        device = self._devices[position]
        usable = device.usable_memory_bytes
        whole = device.memory_bytes
        if usable is None or whole is None:
            return None
        if device.on_cpu:
            left = available_memory_bytes() + sum(_resident_bytes(pid) for pid in probe_pids)
            return max(0, usable - left)
        vitals = self._read((position,), SETTLE_SECONDS, full=True).get(position, Vitals())
        others = _others_bytes(vitals, probe_pids, is_unused)
        if others is None or others < _possible_driver_bytes(whole):
            return None if others is None else 0
        return max(0, usable - max(0, whole - others))


class DriverReader(Protocol):
    """An object that returns driver readings of devices."""

    def read(self, positions: Collection[int]) -> Mapping[int, Vitals]: ...


class DeviceWatch(DriverReader, Protocol):
    """A DriverReader that also reports how much other programs use each device."""

    def find_neighbours(self, positions: Collection[int]) -> Mapping[int, Neighbours]: ...


class ProbeInterference:
    """Reads the drivers of a probe's devices to see whether heat or power limits slow them.

    `idle_readings` are the first readings of devices that the probe doesn't use, for their idle
    power.
    """

    def __init__(
        self,
        monitor: DriverReader,
        positions: Sequence[int],
        idle_readings: Mapping[int, Vitals] | None = None,
    ) -> None:
        self._monitor = monitor
        self._positions = positions
        self._idle = idle_readings or {}
        self._before = monitor.read(positions)
        self._first = {**self._idle, **self._before}

    def annotate(self, block: Block) -> Block:
        """Read the drivers after a block of steps, and add to it how long devices were throttled.

        Raises GroupError if a device was lost in the meantime.
        """
        before = self._before
        self._before = self._monitor.read(self._positions)
        held = [
            (_share_of_time(before.get(i), now, "held_seconds"), i)
            for i, now in self._before.items()
        ]
        capped = [
            _share_of_time(before.get(i), now, "capped_seconds") for i, now in self._before.items()
        ]
        slowed, position = max(held, default=(0.0, -1))
        parts = block.parts
        if len(parts) == len(self._positions):  # each rank has one device
            parts = tuple(
                _add_throttled_time(part, block.wall_seconds, before.get(i), self._before.get(i))
                for i, part in zip(self._positions, parts, strict=True)
            )
        return msgspec.structs.replace(
            block,
            slowed=slowed,
            capped=max(capped, default=0.0),
            slowest=position if slowed else -1,
            parts=parts,
        )

    def mean_watts(self) -> dict[int, float]:
        """Return the mean power of each device over the probe in watts, by position.

        Devices whose driver doesn't count energy are left out.
        """
        found = {}
        for position, last in {**read_idle(self._monitor, self._idle), **self._before}.items():
            first = self._first.get(position, last)
            if (
                first.joules is not None
                and last.joules is not None
                and last.at_seconds > first.at_seconds
            ):
                found[position] = max(0.0, last.joules - first.joules) / (
                    last.at_seconds - first.at_seconds
                )
        return found


def _add_throttled_time(
    part: PartSeconds, wall_seconds: float, before: Vitals | None, now: Vitals | None
) -> PartSeconds:
    """Add to a step's breakdown the seconds that a device lost to heat and to power limits."""
    if now is None or now.clock_fraction is None:
        return part
    braked = _share_of_time(before, now, "braked_seconds")
    heat = _share_of_time(before, now, "held_seconds") - braked
    power = max(braked, _share_of_time(before, now, "capped_seconds"))
    # a clock at 80 % of its highest value, for example, loses 20 % of the time
    lost = (1 - now.clock_fraction) * wall_seconds
    heat_seconds = max(0.0, heat) * lost
    power_seconds = min(power, 1 - max(0.0, heat)) * lost
    return msgspec.structs.replace(part, heat_seconds=heat_seconds, power_seconds=power_seconds)


def read_idle(monitor: DriverReader, positions: Collection[int]) -> Mapping[int, Vitals]:
    """Return driver readings of unused devices.

    Returns an empty dictionary if a driver can't be read.
    """
    # the probe can run without it
    with suppress(GroupError, HostLostError):
        return monitor.read(positions) if positions else {}
    return {}


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if there is no such process."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _possible_driver_bytes(memory_bytes: int) -> float:
    """Return how many bytes of a device's memory in use may belong to the driver itself.

    If fewer bytes are in use, other programs may hold none of them. `memory_bytes` is the device's
    total memory.
    """
    return max(SPREAD * memory_bytes, min(SPREAD_BYTES, SPREAD_SMALL * memory_bytes))


def _others_bytes(vitals: Vitals, probe_pids: Collection[int], is_unused: bool) -> int | None:
    """Return the bytes that programs other than the probe processes hold on a device.

    `probe_pids` are the process ids of the probe processes; `is_unused` means that none of them
    runs on the device. Returns None if the driver doesn't say.
    """
    if vitals.used_bytes is None:
        return None
    sizes = [vitals.processes[pid] for pid in probe_pids if pid in vitals.processes]
    mine = [size for size in sizes if size is not None]
    # the driver doesn't list the children, so their bytes are unknown
    if not is_unused and not mine:
        return None
    return max(0, vitals.used_bytes - sum(mine))


def _share_of_time(before: Vitals | None, now: Vitals, counter: str) -> float:
    """Return the fraction of time in which a device was throttled between two driver readings.

    `counter` names the field of the readings that counts the throttled seconds of one cause, such
    as "capped_seconds". Returns 0 if the fraction is unknown.
    """
    if before is None or now.at_seconds <= before.at_seconds:
        return 0.0
    first = getattr(before, counter)
    last = getattr(now, counter)
    if first is None or last is None:
        return 0.0
    return float(min(1.0, max(0.0, (last - first) / (now.at_seconds - before.at_seconds))))
