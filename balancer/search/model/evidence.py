"""Collect the measurements of each device from the observations of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, product
from statistics import median, median_low

import msgspec

from ...statistics import LONE_ERROR, student
from ...types import Failed, Observation, OutOfMemory, Stage, Timed
from ..observations import Observations
from .memory import Memory, read_memory
from .step_time import FLAT_TOLERANCE, SAME_BATCH, Point, fit_curve

CLEAR = 2.0  # standard errors (95 %); values that differ by less may be equal
# blocks of a typical probe (5 to 16), which convert its interval's half-width into a standard error
TYPICAL_BLOCKS = 8
# factor; in 1 of 20 probes, an interval of three blocks is too narrow by more than this
LUCKY = 4.0
# standard errors by which the mean ratio of the times of two equal devices may differ from 1
MEAN_ERRORS = 3.0
BATCH_ERRORS = 4.0  # the same limit for a single batch, of which there are several
# minimum number of batch sizes to fit a cost, or in common with another device to compare them: one
# size can't tell a fixed cost from a slope
FEWEST_SIZES = 2


class DeviceEvidence(msgspec.Struct, frozen=True):
    """All measurements of one device.

    `rounds` is the number of its solo-stage probes that used a single pass per step. `lost` is the
    reason why it can't be used; "" if it can.
    """

    alone: tuple[
        Point, ...
    ]  # in its own process while the other devices compute too, which may slow it
    others_idle: tuple[Point, ...]  # in its own process while the others are idle
    in_splits: tuple[Point, ...]  # its compute time (own work) in the steps of splits
    memory: Memory
    rounds: int
    lost: str
    alone_in_passes: tuple[Point, ...] = ()  # like `alone` and `others_idle`, but in several passes
    split_in_passes: tuple[Point, ...] = ()
    passes_failed: bool = False  # a step in passes failed for a reason other than memory

    def is_unusable(self, quantum: int) -> bool:
        """Whether the device failed, or can't hold even `quantum` rows in memory."""
        return bool(self.lost) or (
            self.memory.smallest_failed is not None and self.memory.smallest_failed <= quantum
        )

    @property
    def best_rate(self) -> float:
        """The device's highest measured throughput on its own, in samples/s; 0 if it never ran.

        Other devices may have computed at the same time, each in its own process.
        """
        return max((point.batch / point.seconds for point in self.alone), default=0.0)

    def solo_points(self, device_count: int) -> tuple[Point, ...]:
        """Return the step times from which the device's speed on its own is estimated.

        These are the measurements of the solo stage. Steps over several devices, and steps measured
        while the other devices were idle, are added to them. If the search has several devices
        (`device_count`), such steps are added only for batches above the largest one of the solo
        stage. If it has one device, all are added.
        """
        # with a single device, all points were measured under the same conditions
        largest = max((p.batch for p in self.alone), default=0) if device_count > 1 else 0
        others = (*self.others_idle, *self.in_splits)
        return (*self.alone, *(p for p in others if p.batch > largest))


def read_device(store: Observations, position: int) -> DeviceEvidence:
    """Collect all measurements of the device at a position."""
    seen = store.explored(position)
    by_rows = [one for one in seen if one.probe.layout.by_rows]
    own = _sort_by_use(by_rows)
    own.splits += store.raced_splits(position)
    slowdown = _throttling_factor(store, position, own)
    in_splits = tuple(read_points(own.splits, position, slowdown))
    return DeviceEvidence(
        alone=tuple(read_points(own.rounds, position, slowdown)),
        others_idle=tuple(read_points(own.others_idle, position, slowdown)),
        in_splits=tuple(point for point in in_splits if point.passes == 1),
        memory=_read_memory_use(store, position, by_rows),
        rounds=len(own.rounds),
        lost=_why_unusable(store, position, seen),
        alone_in_passes=tuple(read_points(own.in_passes, position, slowdown)),
        split_in_passes=tuple(point for point in in_splits if point.passes > 1),
        passes_failed=any(_may_blame_passes(position, one) for one in seen),
    )


class _ObservationsByUse(msgspec.Struct):
    """The observations of one device, grouped by how it was measured."""

    # alone in one pass, while the other devices computed too
    rounds: list[Observation] = []
    # alone in one pass, while the other devices were idle
    others_idle: list[Observation] = []
    # alone in several passes
    in_passes: list[Observation] = []
    # its share of a split
    splits: list[Observation] = []


def _sort_by_use(by_rows: Iterable[Observation]) -> _ObservationsByUse:
    found = _ObservationsByUse()
    for row in by_rows:
        layout = row.probe.layout
        if layout.traits.together:
            found.splits.append(row)
        elif layout.traits.alone and layout.in_passes:
            found.in_passes.append(row)
        elif layout.traits.alone and row.probe.stage == Stage.REST:
            found.others_idle.append(row)
        elif layout.traits.alone and row.probe.stage == Stage.SOLO:
            found.rounds.append(row)
    return found


def _may_blame_passes(position: int, observation: Observation) -> bool:
    """Whether a probe failed, possibly because it used gradient accumulation."""
    failed = isinstance(observation, Failed) and observation.cause != "device"
    return failed and observation.probe.layout.passes(position) > 1


def _read_memory_use(store: Observations, position: int, by_rows: list[Observation]) -> Memory:
    """Return a model of the device's memory as a function of the rows per pass.

    `by_rows` are the device's observations of layouts whose rows all cost the same.
    """
    alone: dict[int, int] = {}
    in_splits: dict[int, int] = {}
    ran: list[int] = []
    full = [1] if _fits_no_rows(store, position, by_rows) else []
    for seen in by_rows:
        layout = seen.probe.layout
        share = layout.pass_rows[position]
        if _out_of_memory(store, position, seen):
            full.append(share)
        elif isinstance(seen, Timed):
            if store.leaves_room(position, seen):
                ran.append(share)
            used = seen.memory_bytes[position]
            if used is not None:
                points = alone if layout.traits.alone and not layout.in_passes else in_splits
                points[share] = max(used, points.get(share, 0))
    # splits also hold buffers for gradients, so they count only above what ran alone
    largest = max(alone, default=0) if len(alone) > 1 else 0
    beyond = {batch: used for batch, used in in_splits.items() if batch > largest}
    return read_memory(store.memory_limit(position), {**beyond, **alone}, ran, full)


def _fits_no_rows(store: Observations, position: int, by_rows: Sequence[Observation]) -> bool:
    """Whether the device has too little memory for the model itself, without any rows.

    `by_rows` are the device's observations of layouts whose rows all cost the same.
    """
    if any(isinstance(seen, Timed) for seen in by_rows):
        return False
    full = [seen for seen in by_rows if _out_of_memory(store, position, seen)]
    alone = [seen for seen in full if seen.probe.layout.traits.alone]
    return any(isinstance(seen, OutOfMemory) and seen.fits_no_rows for seen in alone)


def _out_of_memory(store: Observations, position: int, observation: Observation) -> bool:
    """Whether a probe ran out of memory on this device, and would do so again."""
    if isinstance(observation, Failed):
        return _too_large(store, position, observation)
    # other processes may have held memory that they have released since
    if not isinstance(observation, OutOfMemory) or not store.is_still_full(position, observation):
        return False
    if observation.devices:
        return position in observation.devices
    layout = observation.probe.layout

    def strain(i: int) -> tuple[float, int]:
        return layout.pass_rows[i] / store.largest_alone(i), -i

    # probably the largest share, relative to the largest batch that each device ran alone
    return position == max(layout.active, key=strain)


def _too_large(store: Observations, position: int, failure: Failed) -> bool:
    """Whether a probe probably failed because its batch is too large for a kernel.

    This is assumed if the batch was larger than every batch that ran on the device.
    """
    layout = failure.probe.layout
    if layout.active != (position,) or layout.in_passes or failure.cause == "device":
        return False
    ran = store.largest_alone(position)
    # the device remains usable with smaller batches
    return ran >= 1 and layout.shares[position] > ran


def _why_unusable(store: Observations, position: int, explored: Sequence[Observation]) -> str:
    """Return the reason why the device can't be used, or "" if it can.

    `explored` are the device's observations from before the final comparison.
    """
    if position in store.gone:
        return store.gone[position]
    for seen in explored:
        if not isinstance(seen, Failed) or _may_blame_passes(position, seen):
            continue
        active = seen.probe.layout.active
        if (position,) not in (seen.devices, active):
            continue
        # if a failure names a pair of devices, either may be the cause, unless this device was lost
        in_a_pair = len(active) == 2
        if seen.cause == "device" or not (in_a_pair or _too_large(store, position, seen)):
            return seen.detail
    return ""


def _throttling_factor(store: Observations, position: int, own: _ObservationsByUse) -> float:
    """Return how many times slower the device is because it is throttled; 1.0 if it isn't.

    `own` groups the device's observations by how it was measured.
    """
    throttled = _throttled_until_now(store, position)
    unthrottled = (*_steady_points(own.rounds, position), *_steady_points(own.splits, position))
    unthrottled_curve = fit_curve(unthrottled) if throttled else None
    if unthrottled_curve is None:
        return 1.0
    throttled_by_rows = [one for one in throttled if one.probe.layout.by_rows]
    at_once = (point for point in read_points(throttled_by_rows, position) if point.passes == 1)
    # the time while throttled, divided by the time predicted without throttling
    ratios = [point.seconds / unthrottled_curve.seconds(point.batch) for point in at_once]
    return max(1.0, median(ratios or [1.0]))


def _throttled_until_now(store: Observations, position: int) -> list[Timed]:
    """Return the measurements in which the device was throttled; empty if it has recovered."""
    timed = store.timed(Stage.SPLIT, Stage.RACE, Stage.CHECK)
    later = [one for one in timed if one.probe.layout.shares[position]]
    checks = [one for one in later if one.probe.stage == Stage.CHECK]
    # the last check decides; without one, all splits and turns of the race
    last = checks[-1:] or later
    # throttling may be brief, so a single measurement isn't enough
    if len(later) < 2 or not all(one.was_throttled(position) for one in last):
        return []
    return [one for one in checks or later if one.was_throttled(position)]


def _steady_points(observations: Sequence[Observation], position: int) -> Iterator[Point]:
    """Yield the device's step times from measurements in which no device was throttled."""
    timed = (observation for observation in observations if isinstance(observation, Timed))
    return read_points([one for one in timed if not one.was_throttled()], position)


def read_points(
    observations: Sequence[Observation], position: int, slowdown: float = 1.0
) -> Iterator[Point]:
    """Yield the step times of a device from its measurements.

    `slowdown` is how many times slower the device is now because it is throttled. If it is above 1,
    all measurements are used, and step times measured without throttling are multiplied by it. If
    it is 1, throttled measurements are used only if there are no others.
    """
    measured = [
        (observation, _own_seconds(observation, position))
        for observation in observations
        if isinstance(observation, Timed)
    ]
    measured = [(one, seconds) for one, seconds in measured if seconds]
    unthrottled = [(one, seconds) for one, seconds in measured if not one.was_throttled(position)]
    if unthrottled and slowdown == 1:
        measured = unthrottled
    # A probe ends once its interval is narrow enough, so an error is often too small by chance. It
    # is raised to the error expected from the median noise, but at most by LUCKY, because steps of
    # few rows may be noisier than others.
    noise = _typical_noise([one for one, _ in measured])
    for one, seconds in measured:
        layout = one.probe.layout
        error = step_error(one)
        expected = noise / math.sqrt(max(1, one.steps))
        seconds_now = seconds if one.was_throttled(position) else slowdown * seconds
        yield Point(
            layout.shares[position],
            seconds_now,
            max(error, min(expected, LUCKY * error)),
            layout.passes(position),
        )


def _typical_noise(measurements: Iterable[Timed]) -> float:
    """Return the relative standard deviation of a single step's time: the median of all probes."""
    # a probe with a single step doesn't show its noise
    certain = (timed for timed in measurements if not timed.is_single_step)
    noises = [relative_error(one) * math.sqrt(max(1, one.steps)) for one in certain]
    return median(noises or [0.0])


def _own_seconds(timed: Timed, position: int) -> float:
    """Return the device's compute time in a step, in seconds; 0 if unknown.

    If it wasn't reported and no other device took part, this is the whole step time.
    """
    own = timed.device_seconds[position]
    if own:
        return own
    return timed.step_seconds if timed.probe.layout.traits.alone else 0.0


def with_drift(devices: Sequence[DeviceEvidence]) -> list[DeviceEvidence]:
    """Return the devices, with the machine's drift added to the errors of their step times.

    Drift is how much repeated measurements of the same batch typically differ beyond their noise.
    """
    # without the additional 0, a single pair of points, which one disturbance may have changed,
    # would be taken for drift
    drift = median_low([0.0, *_list_drifts(devices)])

    def wider(points: Sequence[Point]) -> tuple[Point, ...]:
        return tuple(msgspec.structs.replace(p, error=math.hypot(p.error, drift)) for p in points)

    return [
        msgspec.structs.replace(
            device,
            alone=wider(device.alone),
            others_idle=wider(device.others_idle),
            in_splits=wider(device.in_splits),
        )
        for device in devices
    ]


def _list_drifts(devices: Sequence[DeviceEvidence]) -> Iterator[float]:
    """Yield how much two measurements of nearly the same batch differ, as a fraction.

    0 if the difference is within their noise.
    """
    for device in devices:
        for a, b in combinations((*device.alone, *device.in_splits), 2):
            rows = abs(math.log(a.batch / b.batch))
            if rows <= FLAT_TOLERANCE:
                gap, error = _log_ratio(a, b)
                moved = abs(gap) - rows / 2
                yield moved if moved > CLEAR * error else 0.0


def relative_error(timed: Timed) -> float:
    """Return the relative standard error of a step time, computed from its interval."""
    if timed.step_seconds <= 0:
        return 1.0
    half = (timed.high_seconds - timed.low_seconds) / 2
    return half / timed.step_seconds / student(TYPICAL_BLOCKS - 1)


def step_error(timed: Timed) -> float:
    """Return the relative standard error of a measured step time.

    If the probe timed a single step, there is no interval, and a typical error is returned.
    """
    return LONE_ERROR if timed.is_single_step else relative_error(timed)


# ---------------------------------------------------------------------- equally fast devices


def group_devices(devices: Sequence[DeviceEvidence], limits: Sequence[int] = ()) -> list[list[int]]:
    """Group devices that are equally fast within noise; return the positions in each group.

    `limits` has a number for each device. Devices with different numbers are never grouped, because
    they may use different fractions of their hardware in training. Empty means that all devices
    have the same limit.
    """
    pace = [device.alone[0].seconds if device.alone else math.inf for device in devices]
    order = sorted(range(len(devices)), key=lambda i: (pace[i], i))
    part = limits or (0,) * len(devices)

    def same(one: int, other: int) -> bool:
        return part[one] == part[other] and same_speed(devices[one], devices[other])

    return group_by(order, same)


def group_by(order: Iterable[int], same: Callable[[int, int], bool]) -> list[list[int]]:
    """Group device positions by a relation that isn't transitive, such as equality within noise.

    Each position is compared with the first member of each group, the newest group first. It joins
    the first group for which `same` returns True, or else starts a new group.
    """
    groups: list[list[int]] = []
    for position in order:
        for group in reversed(groups):
            if same(group[0], position):
                group.append(position)
                break
        else:
            groups.append([position])
    return [sorted(group) for group in groups]


def same_speed(one: DeviceEvidence, other: DeviceEvidence) -> bool:
    """Whether two devices took the same time, within noise, for every batch that both ran."""
    if one.lost or other.lost:
        return False
    pairs = chain(product(one.alone, other.alone), product(one.in_splits, other.in_splits))
    near = ((a, b) for a, b in pairs if abs(a.batch - b.batch) <= SAME_BATCH * a.batch)
    return is_noise(_log_ratio(a, b) for a, b in near) and not contradict_each_other(one, other)


def contradict_each_other(one: DeviceEvidence, other: DeviceEvidence) -> bool:
    """Whether no single non-decreasing curve explains the step times of both devices."""
    for a, b in product(one.alone, other.alone):
        fewer, more = sorted((a, b), key=lambda point: point.batch)
        noise = BATCH_ERRORS * math.hypot(a.floored_error, b.floored_error)
        gap = math.log(fewer.seconds / more.seconds)
        rows = math.log(more.batch / fewer.batch)
        if gap > noise or (rows <= FLAT_TOLERANCE and -gap > rows + noise):
            return True
    return False


def _log_ratio(one: Point, other: Point) -> tuple[float, float]:
    """Return the logarithm of the ratio of two step times, and its standard error.

    A small difference between the two batches is corrected for.
    """
    # times are assumed to grow with the square root of the batch, which is between constant time
    # and growth in proportion
    gap = math.log(one.seconds / other.seconds * (other.batch / one.batch) ** 0.5)
    return gap, math.hypot(one.floored_error, other.floored_error)


def is_noise(differences: Iterable[tuple[float, float]]) -> bool:
    """Whether all differences may be due to noise.

    `differences` are pairs of a difference and its standard error. False if there are fewer than
    two.
    """
    total = 0.0
    mean = 0.0
    count = 0
    # return early: 1024 devices have half a million pairs to compare per decision
    for gap, error in differences:
        if abs(gap) > BATCH_ERRORS * error:
            return False
        total += 1 / error**2
        mean += gap / error**2
        count += 1
    return count >= FEWEST_SIZES and abs(mean) <= MEAN_ERRORS * math.sqrt(total)
