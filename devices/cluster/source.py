"""Samples the devices of several hosts: each host's own source, in evener's actor there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from evener.live.files import LiveDevice

from ..types import LOST, Device, DeviceSample, HostSample, Snapshot, Source, group_by_host
from .agents import HostLostError, Kept, find_agent

SAMPLE_SECONDS = 3.0  # a host that takes longer is shown as lost until it answers again
OpenHost = Callable[[tuple[Device, ...]], Source]  # runs on a host, with its devices as they are to it


class ClusterSource:
    """A Source over devices with hosts. A host that doesn't answer is shown so; at the start it is a HostLostError."""

    def __init__(self, devices: Sequence[Device], notes: tuple[str, ...], open_host: OpenHost) -> None:
        self._devices, self._notes = tuple(devices), notes
        self._hosts: dict[str, Kept] = {}
        for host, own in group_by_host(devices).items():
            local = tuple(msgspec.structs.replace(device, host="") for device in own)
            self._hosts[host] = find_agent(host).keep(open_host, local)

    def devices(self) -> tuple[Device, ...]:
        """All devices, host by host."""
        return self._devices

    def sample(self) -> Snapshot:
        """All hosts now, asked at the same time."""
        started = time.monotonic()
        calls = {host: kept.begin("sample") for host, kept in self._hosts.items()}
        found: dict[str, Snapshot] = {}
        lost: dict[str, str] = {}
        for host, call in calls.items():
            try:
                found[host] = _name_host(self._hosts[host].finish(call, SAMPLE_SECONDS), host)
            except HostLostError as error:
                lost[host] = error.message
        gone = [
            DeviceSample(device=device, utilization_percent=LOST, memory_used_bytes=LOST, note=lost[device.host])
            for device in self._devices
            if device.host in lost
        ]
        # hosts that share a machine read the same files
        reported = [each for seen in found.values() for each in seen.reports]
        reports = {(each.training, each.rank, each.pid, each.updated_at): each for each in reported}
        return Snapshot(
            at_seconds=time.time(),
            interval_seconds=max((each.interval_seconds for each in found.values()), default=0.0),
            devices=(*(sample for each in found.values() for sample in each.devices), *gone),
            processes=tuple(process for each in found.values() for process in each.processes),
            host=_add_hosts([each.host for each in found.values()]),
            sampling_seconds=time.monotonic() - started,
            driver=", ".join(dict.fromkeys(each.driver for each in found.values() if each.driver)),
            notes=self._notes,
            reports=tuple(reports.values()),
        )

    def close(self) -> None:
        """Close every host's source."""
        for kept in self._hosts.values():
            kept.close()


def _name_host(snapshot: Snapshot, host: str) -> Snapshot:
    devices = tuple(
        msgspec.structs.replace(sample, device=msgspec.structs.replace(sample.device, host=host))
        for sample in snapshot.devices
    )
    processes = tuple(
        msgspec.structs.replace(process, device_label=f"{host}/{process.device_label}", host=host)
        for process in snapshot.processes
    )
    reports = tuple(
        msgspec.structs.replace(each, devices=tuple(_place(live, host) for live in each.devices))
        for each in snapshot.reports
    )
    return msgspec.structs.replace(snapshot, devices=devices, processes=processes, reports=reports)


def _place(live: LiveDevice, host: str) -> LiveDevice:
    return live if live.host else msgspec.structs.replace(live, host=host)


def _add_hosts(hosts: Sequence[HostSample]) -> HostSample:
    """All hosts as one: sums, and the mean of their cores' use."""
    cores = sum(host.cores for host in hosts)
    return HostSample(
        cpu_percent=sum(host.cpu_percent * host.cores for host in hosts) / max(1, cores),
        load_1min=sum(host.load_1min for host in hosts),
        memory_used_bytes=sum(host.memory_used_bytes for host in hosts),
        memory_total_bytes=sum(host.memory_total_bytes for host in hosts),
        cores=cores,
        hostname=", ".join(dict.fromkeys(host.hostname for host in hosts)),
    )
