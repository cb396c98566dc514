"""The evidence that exploration found on one device, and groups of indistinguishable devices.

Indistinguishable devices share one curve fitted to the points of all, hence equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, product
from statistics import median, median_low

import msgspec

from ...statistics import student
from ...types import Failed, Observation, OutOfMemory, Timed
from ..observations import Observations
from .memory import Memory, read_memory
from .step_time import LEVEL, SAME_BATCH, Point, fit_curve

CLEAR = 2.0  # standard errors, 95 %: what differs by less may be equal (noisy_slow)
# of a probe, which has 5 to 16; turns the half-width of its interval into a standard error
TYPICAL_BLOCKS = 8
LUCKY = 4.0  # times: an interval of three blocks is too narrow by more in 1 of 20 probes
# standard errors by which the mean ratio of two devices' times may differ from 1 (equal, identical)
MEAN_ERRORS = 3.0
BATCH_ERRORS = 4.0  # the same for a single batch, of which there are several (equal, identical)
# batches, in common with another device too: one shows either a fixed cost or a slope
FEWEST_SIZES = 2


class DeviceEvidence(msgspec.Struct, frozen=True):
    """One device's points. `rounds` counts its solo probes; `lost` says why it is left out, or is
    empty.
    """

    alone: tuple[
        Point, ...
    ]  # a process of its own while the other devices work too, which may slow it
    at_rest: tuple[Point, ...]  # a process of its own while the others are idle
    in_splits: tuple[Point, ...]  # its own part of the step of splits
    memory: Memory
    rounds: int
    lost: str
    alone_in_passes: tuple[Point, ...] = ()  # as in the first two, but in several passes
    split_in_passes: tuple[Point, ...] = ()
    undivided: bool = False  # a step in passes failed for a reason other than memory

    def out_of_use(self, quantum: int) -> bool:
        """True if the device failed for good, or ran out of memory at the smallest share."""
        return bool(self.lost) or (self.memory.failed is not None and self.memory.failed <= quantum)

    @property
    def best_rate(self) -> float:
        """The most samples/s that it did alone."""
        return max((point.batch / point.seconds for point in self.alone), default=0.0)

    def solo_points(self, devices: int) -> tuple[Point, ...]:
        """The points alone, and those at rest or in splits beyond them; of one device left all
        (knee).
        """
        known = max((p.batch for p in self.alone), default=0) if devices > 1 else 0
        return (*self.alone, *(p for p in (*self.at_rest, *self.in_splits) if p.batch > known))


def read_device(store: Observations, position: int) -> DeviceEvidence:
    """A device's evidence, read from the observations of exploration."""
    seen = store.explored(position)
    by_rows = [one for one in seen if one.probe.layout.by_rows]
    solo = [one for one in by_rows if one.probe.layout.traits.alone]
    splits = [
        one for one in (*by_rows, *store.raced_splits(position)) if one.probe.layout.traits.together
    ]
    in_passes = [one for one in solo if one.probe.layout.in_passes]
    at_rest = [one for one in solo if one.probe.stage == "rest" and not one.probe.layout.in_passes]
    rounds = [one for one in solo if one.probe.stage == "solo" and not one.probe.layout.in_passes]
    slower = _slower_since(store, position, rounds, splits)
    in_splits = tuple(read_points(splits, position, slower))
    return DeviceEvidence(
        alone=tuple(read_points(rounds, position, slower)),
        at_rest=tuple(read_points(at_rest, position, slower)),
        in_splits=tuple(point for point in in_splits if point.passes == 1),
        memory=_memory(store, position, by_rows),
        rounds=len(rounds),
        lost=_lost(store, position, seen),
        alone_in_passes=tuple(read_points(in_passes, position, slower)),
        split_in_passes=tuple(point for point in in_splits if point.passes > 1),
        undivided=any(_blames_passes(position, one) for one in seen),
    )


def _blames_passes(position: int, seen: Observation) -> bool:
    """True if a probe failed for good with this device's share in passes, which the workload may
    not support.
    """
    failed = isinstance(seen, Failed) and seen.cause != "device"
    return failed and seen.probe.layout.passes(position) > 1


def _memory(store: Observations, position: int, by_rows: list[Observation]) -> Memory:
    alone: dict[int, int] = {}
    in_splits: dict[int, int] = {}
    ran: list[int] = []
    full: list[int] = []
    for seen in by_rows:
        layout = seen.probe.layout
        points = alone if layout.traits.alone and not layout.in_passes else in_splits
        share = layout.pass_rows[position]
        if _out_of_memory(store, position, seen):
            full.append(share)
        elif isinstance(seen, Timed):
            used = seen.memory_bytes[position]
            if store.holds(position, seen):
                ran.append(share)
            if used is not None:
                points[share] = max(used, points.get(share, 0))
    largest = max(alone, default=0) if len(alone) > 1 else 0
    beyond = {
        batch: used for batch, used in in_splits.items() if batch > largest
    }  # they hold buffers of exchange too
    return read_memory(store.memory_limit(position), {**beyond, **alone}, ran, full)


def _out_of_memory(store: Observations, position: int, seen: Observation) -> bool:
    """True if this device ran out of memory: it is named, or had the largest share for what it ran
    alone.
    """
    if isinstance(seen, Failed):
        return _too_large(store, position, seen)
    if not isinstance(seen, OutOfMemory) or not store.full_now(position, seen):
        return False
    if seen.devices:
        return position in seen.devices
    shares = seen.probe.layout.pass_rows
    return position == max(
        seen.probe.layout.active, key=lambda i: (shares[i] / store.largest_alone(i), -i)
    )


def _too_large(store: Observations, position: int, seen: Failed) -> bool:
    """True if the device failed alone, for good, at a larger batch than it ran: some kernels have
    such a limit.
    """
    layout, ran = seen.probe.layout, store.largest_alone(position)
    alone = layout.active == (position,) and seen.cause != "device" and not layout.in_passes
    return alone and ran >= 1 and layout.shares[position] > ran


def _lost(store: Observations, position: int, explored: Sequence[Observation]) -> str:
    """The reason why the device is left out, or empty.

    The device has gone, at any stage, or failed for good, alone or named by a split of 3 or more; a
    failure in a pair is blamed on the pair.
    """
    if position in store.gone:
        return store.gone[position]
    failed = (
        one for one in explored if isinstance(one, Failed) and not _blames_passes(position, one)
    )
    own = [one for one in failed if (position,) in (one.devices, one.probe.layout.active)]
    fatal = (
        one.detail
        for one in own
        if one.cause == "device"
        or (len(one.probe.layout.active) != 2 and not _too_large(store, position, one))
    )
    return next(fatal, "")


def _slower_since(
    store: Observations, position: int, rounds: Sequence[Observation], splits: Sequence[Observation]
) -> float:
    """The factor by which steps now take longer, if it was held back in its last check, or always
    before any; or 1.
    """
    later = [
        one for one in store.timed("split", "race", "check") if one.probe.layout.shares[position]
    ]
    checks = [one for one in later if one.probe.stage == "check"]
    if len(later) < 2 or not all(
        one.held_back(position) for one in checks[-1:] or later
    ):  # once is a burst (throttle)
        return 1.0
    steady = [
        [one for one in seen if isinstance(one, Timed) and not one.held_back()]
        for seen in (rounds, splits)
    ]
    curve = fit_curve(point for seen in steady for point in read_points(seen, position))
    if curve is None:
        return 1.0
    held = [one for one in checks or later if one.held_back(position) and one.probe.layout.by_rows]
    ratios = [
        p.seconds / curve.seconds(p.batch) for p in read_points(held, position) if p.passes == 1
    ]
    return max(1.0, median(ratios or [1.0]))


def read_points(seen: Sequence[Observation], position: int, slower: float = 1.0) -> Iterator[Point]:
    """The device's own part of steps, or whole steps that it took alone, with standard errors.

    Each error is the larger of its own error and the error expected from the median noise per step:
    an interval of few blocks is often too narrow by luck, as a probe ends once it is narrow enough;
    but by `LUCKY` at most, as steps of few rows may be noisier. A device that was held back says
    little of its curve, unless nothing else does, or it is `slower` by this factor since.
    """
    timed = [one for one in seen if isinstance(one, Timed)]
    own = [
        one.device_seconds[position] or one.step_seconds * one.probe.layout.traits.alone
        for one in timed
    ]
    found = [(one, seconds) for one, seconds in zip(timed, own, strict=True) if seconds]
    steady = [(one, seconds) for one, seconds in found if not one.held_back(position)]
    found = steady if steady and slower == 1 else found
    noise = median(
        [relative_error(one) * math.sqrt(max(1, one.steps)) for one, _ in found] or [0.0]
    )
    for one, seconds in found:
        layout, error = one.probe.layout, relative_error(one)
        wide = max(error, min(noise / math.sqrt(max(1, one.steps)), LUCKY * error))
        now = seconds if one.held_back(position) else slower * seconds
        yield Point(layout.shares[position], now, wide, layout.passes(position))


def with_drift(devices: Sequence[DeviceEvidence]) -> list[DeviceEvidence]:
    """The evidence of all devices, in whose errors it counts by how much two probes of nearly one
    batch differ.

    That is the median, beyond errors and rows, over all such pairs and one that shows none: a
    lasting neighbour moves one pair of one device.
    """
    moves = [0.0]
    for a, b in (pair for one in devices for pair in combinations((*one.alone, *one.in_splits), 2)):
        if (rows := abs(math.log(a.batch / b.batch))) <= LEVEL:
            gap, error = _gap(a, b)
            moves.append(abs(gap) - rows / 2 if abs(gap) - rows / 2 > CLEAR * error else 0.0)
    drift = median_low(moves)

    def wider(points: Sequence[Point]) -> tuple[Point, ...]:
        return tuple(msgspec.structs.replace(p, error=math.hypot(p.error, drift)) for p in points)

    return [
        msgspec.structs.replace(
            one, alone=wider(one.alone), at_rest=wider(one.at_rest), in_splits=wider(one.in_splits)
        )
        for one in devices
    ]


def relative_error(seen: Timed) -> float:
    """Relative standard error of a step time, from its 95 % interval."""
    half = (seen.high_seconds - seen.low_seconds) / 2
    return half / seen.step_seconds / student(TYPICAL_BLOCKS - 1) if seen.step_seconds > 0 else 1.0


# ---------------------------------------------------------------------- indistinguishable devices


def group_devices(devices: Sequence[DeviceEvidence], limits: Sequence[int] = ()) -> list[list[int]]:
    """Positions grouped so that each is as fast as the first of its group; lost devices are groups
    of their own.

    Devices of which the training has different parts are never one group, however noisy their
    points are.
    """
    pace = [device.alone[0].seconds if device.alone else math.inf for device in devices]
    order = sorted(range(len(devices)), key=lambda i: (pace[i], i))
    part = limits or (0,) * len(devices)
    return group_by(
        order,
        lambda one, other: part[one] == part[other] and same_speed(devices[one], devices[other]),
    )


def group_by(order: Iterable[int], same: Callable[[int, int], bool]) -> list[list[int]]:
    """Each in the last group whose first is the `same`, or in one of its own."""
    groups: list[list[int]] = []
    for position in order:
        group = next((group for group in reversed(groups) if same(group[0], position)), [])
        if not group:
            groups.append(group)
        group.append(position)
    return [sorted(group) for group in groups]


def same_speed(one: DeviceEvidence, other: DeviceEvidence) -> bool:
    """True if noise alone explains how two devices differ, in time at every common batch."""
    pairs = chain(product(one.alone, other.alone), product(one.in_splits, other.in_splits))
    gaps = (_gap(a, b) for a, b in pairs if abs(a.batch - b.batch) <= SAME_BATCH * a.batch)
    return not one.lost and not other.lost and is_noise(gaps)


def _gap(one: Point, other: Point) -> tuple[float, float]:
    """The logarithm of the ratio of two times of nearly one batch, and its standard error."""
    gap = math.log(one.seconds / other.seconds * (other.batch / one.batch) ** 0.5)
    return gap, math.hypot(one.sure_error, other.sure_error)


def is_noise(gaps: Iterable[tuple[float, float]]) -> bool:
    """True if noise explains logarithms of time ratios, with their errors, at two batches or
    more.
    """
    total, mean, count = 0.0, 0.0, 0
    for gap, error in gaps:
        if (
            abs(gap) > BATCH_ERRORS * error
        ):  # of 1024 devices half a million pairs are looked at for each decision
            return False
        total, mean, count = total + 1 / error**2, mean + gap / error**2, count + 1
    return count >= FEWEST_SIZES and abs(mean) <= MEAN_ERRORS * math.sqrt(total)
