"""From the sampler's thread to the app: snapshots as messages, history, and the samples/s of running probes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from textual.message import Message

from evener.devices.cuda_visible import visible_gpus
from evener.devices.discover import discover, open_source
from evener.devices.recording import Recording
from evener.devices.sampler import Sampler
from evener.devices.simulated.source import SimulatedSource
from evener.devices.types import Device, Snapshot, Source

Post = Callable[[Message], object]


@dataclass
class Sampled(Message):
    """One tick of the sampler."""

    snapshot: Snapshot

    def can_replace(self, message: Message) -> bool:
        """A newer tick replaces one that is still waiting."""
        return isinstance(message, Sampled)


class ProbeLoad(NamedTuple):
    """What a running probe does to one device."""

    samples_per_second: float
    share: int  # samples of each step


class SnapshotPublisher:
    """Posts a source's snapshots to the app; the source is sampled on a thread of its own."""

    def __init__(self, source: Source, interval_seconds: float = 1.0) -> None:
        self._source = source
        self._sampler = Sampler(source, interval_seconds)
        self._post: Post | None = None

    @property
    def interval_seconds(self) -> float:
        """Time between two snapshots."""
        return self._sampler.interval_seconds

    @interval_seconds.setter
    def interval_seconds(self, seconds: float) -> None:
        self._sampler.interval_seconds = seconds

    @property
    def state(self) -> str:
        """Where a recording is; empty for live readings."""
        source = self._source
        if not isinstance(source, Recording):
            return ""
        return f"replay {source.position + 1}/{len(source)}"

    def start(self, post: Post) -> None:
        """Take the first sample at once, and post `Sampled` messages from any thread until stopped."""
        self._post = post
        self._sampler.subscribe(self._publish)
        self._sampler.start()

    def stop(self) -> None:
        """Stop sampling and close the source; may be called twice."""
        self._post = None
        with contextlib.suppress(RuntimeError):
            self._sampler.close()

    def history(self, device_id: str, metric: str) -> tuple[float | None, ...]:
        """A metric's newest values, one per tick, oldest first."""
        return self._sampler.history(device_id, metric)

    def set_loads(self, loads: Mapping[str, ProbeLoad]) -> None:
        """Which devices, by id, run probes now: simulated ones act on it; on real ones, probes report themselves."""
        if isinstance(self._source, SimulatedSource):
            for position, device in enumerate(self._source.devices()):
                load = loads.get(device.id)
                speed, share = (load.samples_per_second, load.share) if load is not None else (0.0, 0)
                self._source.set_load(position, speed, share)

    def _publish(self, snapshot: Snapshot) -> None:
        if self._post is not None:
            self._post(Sampled(snapshot))


def open_publisher(
    devices: str, replay: Path | None, interval_seconds: float
) -> tuple[SnapshotPublisher, tuple[Device, ...]]:
    """The publisher for `--devices` or a recording, and the devices that a search may use.

    RequestError and DeviceError say what is wrong with either one.
    """
    if replay is not None:
        recorded = Recording(replay)
        return SnapshotPublisher(recorded, max(0.1, recorded.interval_seconds)), recorded.devices()
    found = discover(devices, only_visible=False)
    return SnapshotPublisher(open_source(found), interval_seconds), _trainable(found.devices)


def _trainable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """A monitor shows every GPU; a search uses those that CUDA would."""
    if not devices or devices[0].kind != "gpu":
        return devices
    return visible_gpus(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
