"""Samples/s of the devices and processes: what trainings report of themselves, laid onto this machine's devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from devices.base import Device, Reading, State
from evener.live import Training, read_trainings

READ_PERIOD_SECONDS = 0.5  # a training writes no more often
OLD_SECONDS = 5.0  # a report this old says what was, not what is

Rates = dict[tuple[int, str], tuple[float, float]]  # (pid, device id) -> (samples/s, age in seconds)


class TrainingRates:
    """Who trains where and how fast; reads the reports at most twice a second."""

    def __init__(
        self,
        read: Callable[[], Sequence[Training]] = read_trainings,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._read, self._clock, self._wall = read, clock, wall
        self._next_read = -1.0
        self._trainings: Sequence[Training] = ()

    def refresh(self) -> Sequence[Training]:
        """The trainings that report themselves now."""
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_PERIOD_SECONDS
            self._trainings = self._read()
        return self._trainings

    def by_process(self, devices: Sequence[Device], pids: Mapping[str, Sequence[int]]) -> Rates:
        """Each training's part on each device. `pids`: the processes that the driver sees, by device id.

        A training that names no device counts on those where the driver sees its process, in equal parts.
        """
        rates: Rates = {}
        now = self._wall()
        for training in self.refresh():
            age = max(0.0, now - training.updated_at)
            parts = [(device.id, rate) for device, rate in _named(training, devices)]
            if not training.devices:
                seen = [device.id for device in devices if training.pid in pids.get(device.id, ())]
                parts = [(identity, training.samples_per_second / len(seen)) for identity in seen]
            for identity, rate in parts:
                earlier, _ = rates.get((training.pid, identity), (0.0, 0.0))
                rates[training.pid, identity] = (earlier + rate, age)
        return rates


def rate_reading(parts: Sequence[tuple[float, float]]) -> Reading:
    """The sum of samples/s with ages; stale if the newest part is old."""
    if not parts:
        return Reading(State.UNSUPPORTED)
    fresh = [(rate, age) for rate, age in parts if age <= OLD_SECONDS]
    used = fresh or parts
    state = State.VALUE if fresh else State.STALE
    return Reading(state, sum(rate for rate, _ in used), max(age for _, age in used))


def _named(training: Training, devices: Sequence[Device]) -> list[tuple[Device, float]]:
    found: list[tuple[Device, float]] = []
    for live in training.devices:
        for device in devices:
            if live.id == device.id or (not live.id and live.index == device.index):
                found.append((device, live.samples_per_second))
                break
    return found
