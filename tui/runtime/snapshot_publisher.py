"""From the sampler's thread to the app: snapshots as messages, history, and the samples/s of running probes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from textual.message import Message

from evener.devices.cuda_visible import visible_gpus
from evener.devices.discover import discover, open_source
from evener.devices.recording import Recording, ReplaySource
from evener.devices.sampler import Sampler
from evener.devices.simulated.source import SimulatedSource
from evener.devices.types import Device, DeviceSample, Snapshot, Source, State, value
from evener.tui.runtime.messages import Sampled

Post = Callable[[Message], object]


class Load(NamedTuple):
    """What a running probe does to one device."""

    samples_per_second: float
    share: int  # samples of each step


class Feed(Protocol):
    """Where the app's snapshots come from."""

    interval_seconds: float

    @property
    def state(self) -> str:
        """What is special about it, in a word or two; empty for live readings."""
        ...

    def start(self, post: Post) -> None:
        """Post `Sampled` messages from now on, from any thread."""
        ...

    def stop(self) -> None:
        """End; returns when no more messages come."""
        ...

    def history(self, device_id: str, metric: str) -> tuple[float | None, ...]:
        """A metric's newest values, a tick each, oldest first."""
        ...

    def follow(self, loads: Mapping[str, Load]) -> None:
        """These devices, by id, run probes now; the others don't."""
        ...


class SampledFeed:
    """A source, sampled on a thread of its own."""

    def __init__(self, source: Source, interval_seconds: float = 1.0) -> None:
        self._source = source
        self._sampler = Sampler(source, interval_seconds)
        self._loads: Mapping[str, Load] = {}
        self._post: Post | None = None

    @property
    def interval_seconds(self) -> float:
        """Between two snapshots."""
        return self._sampler.interval_seconds

    @interval_seconds.setter
    def interval_seconds(self, seconds: float) -> None:
        self._sampler.interval_seconds = seconds

    @property
    def state(self) -> str:
        """Where a recording is."""
        source = self._source
        if not isinstance(source, ReplaySource):
            return ""
        return f"replay {source.position + 1}/{len(source.recording)}"

    def start(self, post: Post) -> None:
        """Take the first sample now."""
        self._post = post
        self._sampler.subscribe(self._tell)
        self._sampler.start()

    def stop(self) -> None:
        """End sampling and close the source; it may be called twice."""
        self._post = None
        with contextlib.suppress(RuntimeError):
            self._sampler.close()

    def history(self, device_id: str, metric: str) -> tuple[float | None, ...]:
        """As the sampler keeps it."""
        return self._sampler.history(device_id, metric)

    def follow(self, loads: Mapping[str, Load]) -> None:
        """Simulated devices follow the load themselves; of real ones it is told beside what the driver says."""
        self._loads = dict(loads)
        if isinstance(self._source, SimulatedSource):
            for position, device in enumerate(self._source.devices()):
                load = loads.get(device.id)
                speed, share = (load.samples_per_second, load.share) if load is not None else (0.0, None)
                self._source.set_load(position, speed, share)

    def _tell(self, snapshot: Snapshot) -> None:
        post, loads = self._post, self._loads
        if post is None:
            return
        if loads and not isinstance(self._source, SimulatedSource):
            devices = tuple(_with_load(sample, loads.get(sample.device.id)) for sample in snapshot.devices)
            snapshot = msgspec.structs.replace(snapshot, devices=devices)
        post(Sampled(snapshot))


def _with_load(sample: DeviceSample, load: Load | None) -> DeviceSample:
    if load is None or sample.samples_per_second.state is State.VALUE:
        return sample
    return msgspec.structs.replace(sample, samples_per_second=value(load.samples_per_second))


def open_feed(devices: str, replay: Path | None, interval_seconds: float) -> tuple[Feed, tuple[Device, ...]]:
    """What `--devices` or a recording shows, and the devices that a search may take.

    RequestError and DeviceError say what is wrong with either.
    """
    if replay is not None:
        recorded = ReplaySource(Recording(replay))
        return SampledFeed(recorded, max(0.1, recorded.interval_seconds)), recorded.devices()
    found = discover(devices, only_visible=False)
    return SampledFeed(open_source(found), interval_seconds), _trainable(found.devices)


def _trainable(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """A monitor shows every GPU; a search keeps to those that CUDA would."""
    if not devices or devices[0].kind != "gpu":
        return devices
    return visible_gpus(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
