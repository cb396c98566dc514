"""Samples/s of the devices and processes: what trainings report of themselves, assigned to this machine's devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from evener.devices.types import UNSUPPORTED, Device, Reading, State
from evener.live import Training, read_trainings

READ_PERIOD_SECONDS = 0.5  # a training writes no more often
OLD_SECONDS = 5.0  # a report this old says what was, not what is

Rates = dict[tuple[int, str], tuple[float, float]]  # (pid, device id) -> (samples/s, age in seconds)


class TrainingRates:
    """Who trains where and how fast; reads the reports at most twice a second."""

    def __init__(
        self, read: Callable[[], Sequence[Training]] = read_trainings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._next_read = -1.0
        self._trainings: Sequence[Training] = ()

    def by_process(self, devices: Sequence[Device], pids: Mapping[str, Sequence[int]]) -> Rates:
        """Each training's part on each device. `pids`: the processes that the driver sees, by device id.

        A training that names no device counts on those where the driver sees its process, in equal parts.
        """
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_PERIOD_SECONDS
            self._trainings = self._read()
        rates: Rates = {}
        now = time.time()
        for training in self._trainings:
            age = max(0.0, now - training.updated_at)
            seen = [device for device in devices if training.pid in pids.get(device.id, ())]
            for device, rate in _parts(training, devices, seen):
                earlier, _ = rates.get((training.pid, device.id), (0.0, 0.0))
                rates[training.pid, device.id] = (earlier + rate, age)
        return rates

    def tokens(self, pid: int) -> tuple[Reading, Reading]:
        """Tokens/s and padding in per cent of the process, as `by_process` read them last."""
        found = [each for each in self._trainings if each.pid == pid and each.tokens_per_second]
        if not found:
            return UNSUPPORTED, UNSUPPORTED
        newest = max(found, key=lambda training: training.updated_at)
        age = max(0.0, time.time() - newest.updated_at)
        state = State.VALUE if age <= OLD_SECONDS else State.STALE
        return Reading(state, newest.tokens_per_second, age), Reading(state, 100 * newest.padding, age)


def rate_reading(parts: Sequence[tuple[float, float]]) -> Reading:
    """The sum of samples/s with ages; stale if the newest part is old."""
    if not parts:
        return Reading(State.UNSUPPORTED)
    fresh = [(rate, age) for rate, age in parts if age <= OLD_SECONDS]
    used = fresh or parts
    state = State.VALUE if fresh else State.STALE
    return Reading(state, sum(rate for rate, _ in used), max(age for _, age in used))


def _parts(training: Training, devices: Sequence[Device], seen: Sequence[Device]) -> list[tuple[Device, float]]:
    """Which devices a training's figures belong to.

    Ids name their device. Bare indices are the framework's own count, which CUDA_VISIBLE_DEVICES shifts: they follow
    the GPUs that the driver sees the process on, if it sees as many, else the driver's count.
    """
    if not training.devices:
        return [(device, training.samples_per_second / len(seen)) for device in seen]
    by_id = {device.id: device for device in devices}
    by_index = {device.index: device for device in devices if device.kind == "gpu"}
    bare = sorted({live.index for live in training.devices if not live.id and live.index >= 0})
    if len(bare) == len(seen):
        by_index = dict(zip(bare, sorted(seen, key=lambda device: device.index), strict=True))
    found = ((by_id.get(live.id) if live.id else by_index.get(live.index), live) for live in training.devices)
    return [(device, live.samples_per_second) for device, live in found if device is not None]
