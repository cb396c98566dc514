"""The hosts of a session's devices, asked as if they were one machine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from evener.devices.cluster.agents import HostLostError
from evener.devices.types import Device, group_by_host
from evener.devices.vitals import Vitals

from .launch_plan import LOOPBACK
from .local_host import LocalHost
from .remote_host import RemoteHost
from .script_copy import copy_workload


class Hosts:
    """All hosts of these devices; DeviceError if one of them can't be reached."""

    def __init__(self, devices: Sequence[Device], framework: str, workload: str) -> None:
        self._devices = devices
        self._by_name: dict[str, LocalHost | RemoteHost] = {}
        for name in group_by_host(devices):
            self._by_name[name] = (
                RemoteHost(devices, framework, workload, name, copy_workload(workload))
                if name
                else LocalHost(devices, framework, workload)
            )

    def find(self, device: Device) -> LocalHost | RemoteHost:
        """The host of a device."""
        return self._by_name[device.host]

    def find_addresses(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """The addresses where a group's ranks can meet, each on its device's host; on loopback if there is one host."""
        counts = Counter(device.host for device in devices)
        free = {
            name: iter(self._by_name[name].find_addresses(count, name if len(counts) > 1 else LOOPBACK))
            for name, count in counts.items()
        }
        return tuple(next(free[device.host]) for device in devices)

    def wait_for_drivers(self, positions: Collection[int], stop: threading.Event) -> None:
        """Wait for each driver's answer; GroupError names a device that has none or is gone."""
        for host in self._among(positions):
            host.wait_for_drivers(positions, stop)

    def read(self, positions: Collection[int]) -> Mapping[int, Vitals]:
        """The drivers' present readings, by position; GroupError if a device is gone or its driver silent for long."""
        return {i: vitals for host in self._among(positions) for i, vitals in host.read(positions).items()}

    def measure_short(self, positions: Collection[int], clean: Collection[int]) -> dict[int, int]:
        """Bytes that each device lacks because others hold them; no child runs on the `clean` ones."""
        return {i: size for host in self._among(positions) for i, size in host.measure_short(positions, clean).items()}

    def available_memory_bytes(self) -> int:
        """Memory that can still be had on the host with the least."""
        sizes = []
        for host in self._by_name.values():
            with suppress(HostLostError):
                sizes.append(host.available_memory_bytes())
        return min(sizes, default=0)

    def close(self) -> None:
        """Kill every child; safe to call twice."""
        for host in self._by_name.values():
            host.close()

    def _among(self, positions: Collection[int]) -> Iterator[LocalHost | RemoteHost]:
        for name in dict.fromkeys(self._devices[position].host for position in positions):
            yield self._by_name[name]
