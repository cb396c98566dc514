"""Trainings' reports, assigned to this machine's devices: samples/s of each device and process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from evener.live.files import LiveDevice, Training, read_trainings

from ..registry import find_backend
from ..types import UNSUPPORTED, Device, Reading, State

READ_PERIOD_SECONDS = 0.5  # a training writes no more often
OLD_SECONDS = 5.0  # a report is out of date once the next one has been due for this long

Rates = dict[tuple[int, str], tuple[float, float]]  # (pid, device id) -> (samples/s, seconds that it is late)


class TrainingRates:
    """The samples/s of each training on each device; reports are read at most twice a second."""

    def __init__(
        self, read: Callable[[], Sequence[Training]] = read_trainings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._next_read = -1.0
        self._trainings: Sequence[Training] = ()
        self._ended: Sequence[Training] = ()  # ranks whose process has gone while others of their training go on
        self.reports: tuple[Training, ...] = ()  # all of them, with the ids of the devices that `by_process` got last

    def by_process(self, devices: Sequence[Device], pids: Mapping[str, Sequence[int]]) -> Rates:
        """Each training's part on each device. `pids`: the processes that the driver sees, by device id.

        A training that names no device counts on those where the driver sees its process, in equal parts.
        """
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_PERIOD_SECONDS
            self._refresh()
        rates: Rates = {}
        now = time.time()
        here = {device.id for device in devices}
        placed = [_place(training, devices, pids) for training in self._trainings]
        for training in placed:
            age = training.late_seconds(now)
            for live in training.devices:
                if live.id in here:
                    earlier, _ = rates.get((training.pid, live.id), (0.0, 0.0))
                    rates[training.pid, live.id] = (earlier + live.samples_per_second, age)
        self.reports = (*placed, *(_place(training, devices, {}) for training in self._ended))
        return rates

    def _refresh(self) -> None:
        before = (*self._trainings, *self._ended)
        self._trainings = self._read()
        going = {each.training for each in self._trainings if each.training}
        ranks = {(each.training, each.rank) for each in self._trainings}
        self._ended = [each for each in before if each.training in going and (each.training, each.rank) not in ranks]

    def tokens(self, pid: int) -> tuple[Reading, Reading]:
        """Tokens/s and padding in per cent of the process, as `by_process` read them last."""
        found = [each for each in self._trainings if each.pid == pid and each.tokens_per_second]
        if not found:
            return UNSUPPORTED, UNSUPPORTED
        newest = max(found, key=lambda training: training.updated_at)
        age = newest.late_seconds(time.time())
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


def _place(training: Training, devices: Sequence[Device], pids: Mapping[str, Sequence[int]]) -> Training:
    """The training with its devices named as this machine names them, as far as they are here.

    Ids name their device. Bare indices are the framework's own count, which CUDA_VISIBLE_DEVICES shifts: they follow
    the GPUs that the driver sees the process on, if it sees as many, else the driver's count.
    """
    seen = [device for device in devices if training.pid in pids.get(device.id, ())]
    if not training.devices:
        parts = [LiveDevice(each.id, each.index, 0, training.samples_per_second / len(seen)) for each in seen]
        return msgspec.structs.replace(training, devices=tuple(parts))
    by_index = {device.index: device for device in devices if find_backend(device.kind).own_memory}
    bare = sorted({live.index for live in training.devices if not live.id and live.index >= 0})
    if not bare:
        return training
    if len(bare) == len(seen):
        by_index = dict(zip(bare, sorted(seen, key=lambda device: device.index), strict=True))
    named = (
        live if live.id or live.index not in by_index else msgspec.structs.replace(live, id=by_index[live.index].id)
        for live in training.devices
    )
    return msgspec.structs.replace(training, devices=tuple(named))
