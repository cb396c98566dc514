"""The sampler behind the app, which also takes the samples/s of running probes and tells where a recording is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from evener.devices.backend import visible_devices
from evener.devices.discover import discover, open_source
from evener.devices.recording import Recording
from evener.devices.registry import find_backend
from evener.devices.sampler import Sampler
from evener.devices.simulated import SimulatedSource
from evener.devices.types import Device


class SnapshotPublisher(Sampler):
    """A sampler that simulated devices can be loaded through."""

    @property
    def state(self) -> str:
        """The place in a recording; empty for live readings."""
        source = self.source
        return f"replay {source.position + 1}/{len(source)}" if isinstance(source, Recording) else ""

    def set_loads(self, loads: Mapping[str, tuple[float, int]]) -> None:
        """Samples/s and share of the probes that run now, by device id.

        Simulated devices act on it; on real ones, probes report themselves.
        """
        if isinstance(self.source, SimulatedSource):
            for position, device in enumerate(self.source.devices()):
                self.source.set_load(position, *loads.get(device.id, ()))


def open_publisher(
    devices: str, replay: Path | None, ray_address: str = ""
) -> tuple[SnapshotPublisher, tuple[Device, ...]]:
    """The publisher for `--devices` or a recording, and the devices that a search may use.

    RequestError and DeviceError say what is wrong with either one.
    """
    if replay is not None:
        recorded = Recording(replay)
        return SnapshotPublisher(recorded, max(0.1, recorded.interval_seconds)), recorded.devices()
    found = discover(devices, only_visible=False, ray_address=ray_address)
    return SnapshotPublisher(open_source(found)), _trainable(found.devices)


def _trainable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices that a search uses: a monitor shows every GPU, and a variable may hide some from frameworks."""
    variable = find_backend(devices[0].kind).visible_variable if devices else ""
    if not variable or devices[0].host:
        return devices
    return visible_devices(devices, os.environ.get(variable))
