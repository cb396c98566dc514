"""Find warnings, failures and limits in the measurements of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, permutations
from typing import Literal, get_args

from evener.devices.types import Device

from ..search.ranking import ROUGH
from ..statistics import is_known
from ..types import (
    Doubt,
    Failed,
    Interval,
    Layout,
    MeasurementDoubt,
    Observation,
    OutOfMemory,
    Stage,
    Timed,
)
from ..verdict import (
    CodeLimit,
    LeftOut,
    PassStatistics,
    ShortEpoch,
    TakenMemory,
    UnequalDevices,
    VerdictDoubt,
)
from .rivals import printed_gain

ORDER = get_args(Doubt)
# if other processes disturbed this fraction of a rival's blocks, they also slowed the chosen layout
MOSTLY = 0.5
FEW_STEPS = 100  # steps per epoch: with fewer, the model learns little
CHANGED = 0.1  # relative difference of two measurements of one layout


def find_doubts(
    observations: Sequence[Observation], chosen: Layout, error: float | None = None
) -> tuple[MeasurementDoubt, ...]:
    """Return the warnings about a search's measurements, at most one for each code (e.g. "noisy").

    - A NaN or infinite loss, and measurements of one layout that disagree, are reported for any
      layout. Most other warnings are only reported for the chosen one.
    - "ran_out" says how often the chosen layout ran out of memory.
    - "noisy" contains the relative error of a measurement. If `error` (the relative error of the
      final samples/s) is given, "noisy" contains it instead, and is dropped if it is small.
    - "few_steps" replaces "noisy" and "too_short" if the chosen layout was only timed by single
      steps.
    """
    worst: dict[str, MeasurementDoubt] = {}
    for doubt in chain(_doubts_about(observations, chosen), _compare_repeats(observations)):
        if doubt.code not in worst or _weight(doubt) > _weight(worst[doubt.code]):
            worst[doubt.code] = doubt
    if error is not None and "noisy" in worst:
        worst["noisy"] = MeasurementDoubt("noisy", error)
        if error <= ROUGH:  # the search required no greater precision
            del worst["noisy"]
    failures = [each for each in observations if isinstance(each, OutOfMemory)]
    count = sum(each.probe.layout == chosen for each in failures)
    if count:
        worst["ran_out"] = MeasurementDoubt("ran_out", count)
    lone = _count_single_steps(observations, chosen)
    if lone:
        worst.pop("noisy", None)
        worst.pop("too_short", None)
        worst["few_steps"] = MeasurementDoubt("few_steps", lone)
    return tuple(worst[code] for code in ORDER if code in worst)


def _count_single_steps(observations: Iterable[Observation], chosen: Layout) -> int:
    """Return how often the chosen layout was measured, if each measurement timed only one step.

    Returns 0 if any of them timed several steps.
    """
    own = [
        observation
        for observation in observations
        if isinstance(observation, Timed) and observation.probe.layout == chosen
    ]
    return len(own) if all(one.is_single_step for one in own) else 0


def _weight(doubt: MeasurementDoubt) -> float:
    """Return a number for how serious a warning is, to compare it with others of the same kind."""
    # a loss that was NaN or infinite is more serious, the earlier it happened
    return -doubt.value if doubt.code == "not_finite" else abs(doubt.value)


def _doubts_about(
    observations: Iterable[Observation], chosen: Layout
) -> Iterator[MeasurementDoubt]:
    """Yield the warnings about measurements that concern the chosen layout.

    These are its own warnings and some about other layouts: a loss that isn't finite and, if the
    chosen layout uses several devices, long disturbances in the final comparison.
    """
    for observation in observations:
        if isinstance(observation, Timed):
            yield from (warning for warning in observation.warnings if warning.code == "not_finite")
        if isinstance(observation, Timed) and observation.probe.layout == chosen:
            yield from observation.warnings
        # a disturbed rank looks like one that waits for others, so long disturbances of other
        # layouts in the race count for a layout with several devices
        elif (
            isinstance(observation, Timed)
            and observation.probe.stage == Stage.RACE
            and len(chosen.active) > 1
        ):
            yield from (
                warning
                for warning in observation.warnings
                if warning.code == "disturbed" and warning.value >= MOSTLY
            )


def _compare_repeats(observations: Iterable[Observation]) -> Iterator[MeasurementDoubt]:
    """Yield a warning for each pair of measurements that clearly disagree about the same layout."""
    repeats: defaultdict[Layout, list[Timed]] = defaultdict(list)
    for observation in observations:
        if isinstance(observation, Timed):
            repeats[observation.probe.layout].append(observation)
    for slow, fast in (pair for taken in repeats.values() for pair in permutations(taken, 2)):
        change = fast.samples_per_second / slow.samples_per_second - 1
        # all devices run at the same time in the solo stage, so a later measurement may be faster
        at_once = slow.probe.stage == Stage.SOLO != fast.probe.stage
        # more than 10 % apart, with intervals that don't overlap
        if change > CHANGED and slow.throughput.high < fast.throughput.low and not at_once:
            yield MeasurementDoubt("changed", change)


def describe_doubts(
    doubts: Iterable[MeasurementDoubt], devices: Sequence[Device]
) -> tuple[VerdictDoubt, ...]:
    """Convert warnings so that they name devices by their labels instead of their positions.

    A warning about the whole step has the label "".
    """
    return tuple(
        VerdictDoubt(
            doubt.code,
            devices[doubt.device].label if 0 <= doubt.device < len(devices) else "",
            doubt.value,
            doubt.taken,
        )
        for doubt in doubts
    )


def find_taken_memory(
    observations: Iterable[Observation], devices: Sequence[Device]
) -> tuple[TakenMemory, ...]:
    """List the devices on which other processes held memory, each with the most bytes they held."""
    found = sorted(find_taken_bytes(observations).items())
    return tuple(TakenMemory(devices[i].label, size) for i, size in found)


def find_pass_statistics(chosen: Layout, layer: str) -> PassStatistics | None:
    """Return a warning if a layer's statistics depend on the size of a pass, as in BatchNorm.

    `layer` is the name of that layer, or "". The warning has the size of the smallest pass. Returns
    None if the model has no such layer, or if the layout doesn't use gradient accumulation.
    """
    rows = [chosen.pass_rows[i] for i in chosen.active if chosen.passes(i) > 1]
    return PassStatistics(layer, min(rows)) if layer and rows else None


def find_code_limit(observations: Iterable[Observation]) -> CodeLimit | None:
    """Return the micro-batch size above which the user's code raises an exception, or None.

    There is such a limit if all probes that raised the same exception had more rows than all probes
    that succeeded on the same devices. The result has the largest size that succeeded and the
    smallest that failed.
    """
    ran: defaultdict[int, int] = defaultdict(int)
    failed: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for observation in observations:
        rows = observation.probe.layout.pass_rows
        if isinstance(observation, Timed):
            for i in observation.probe.layout.active:
                ran[i] = max(ran[i], rows[i])
        elif isinstance(observation, Failed) and observation.cause == "raised":
            largest = max(
                observation.devices or observation.probe.layout.active, key=lambda i: rows[i]
            )
            fewest = failed[strip_location(observation.detail)]
            fewest[largest] = min(fewest.get(largest, rows[largest]), rows[largest])
    for error, fewest in failed.items():
        most = max((ran[i] for i in fewest), default=0)
        if most and most < min(fewest.values()):
            return CodeLimit(most, min(fewest.values()), error)
    return None


PHASES = ("building", "preparing", "warming up", "measuring")


def strip_location(detail: str) -> str:
    """Return an error message without the parts that differ between devices.

    These are the device, the phase and the traceback's path.
    """
    error = detail.partition(" (traceback in ")[0].rstrip(".")
    for phase in PHASES:
        error = error.partition(f"{phase}: ")[2] or error
    return error


# ratio of speeds; devices of the same product differ by less, unless something is wrong
UNEQUAL_RATIO = 1.25


def find_unequal_devices(
    rates: Mapping[tuple[int, int], Interval],
    printed: Mapping[int, float],
    devices: Sequence[Device],
) -> UnequalDevices | None:
    """Return two devices of the same product that differ much in speed, or None.

    - `rates`: each device's samples/s when it trains alone, by device position and global batch.
    - `printed`: each device's samples/s as the result prints them, by position; their batches may
      differ.

    Two devices are compared at the largest batch at which both were measured. One must be at least
    1.25 times as fast as the other, and also faster by the printed samples/s. The intervals must
    not overlap. Pairs whose samples/s are too uncertain to compare are left out. If several pairs
    remain, the one with the largest ratio is returned.
    """
    batches = defaultdict[int, set[int]](set)
    for position, batch in rates:
        batches[position].add(batch)
    found: UnequalDevices | None = None
    for i, j in permutations(sorted(batches), 2):
        first, second, common = devices[i], devices[j], batches[i] & batches[j]
        if not common or (first.name, first.limit) != (second.name, second.limit):
            continue
        batch = max(common)
        fast, slow = rates[i, batch], rates[j, batch]
        if not is_known(fast, slow) or fast.low <= slow.high:
            continue
        if printed_gain(printed.get(i, fast.value), printed.get(j, slow.value)) <= 0:
            continue
        times = 1 + printed_gain(fast.value, slow.value)
        if times >= max(UNEQUAL_RATIO, found.ratio if found else 0.0):
            found = UnequalDevices(first.label, second.label, first.name, times, batch)
    return found


def find_taken_bytes(observations: Iterable[Observation]) -> dict[int, int]:
    """Return the most bytes that other processes held on each device, by device position.

    Devices on which they held none are left out.
    """
    most: dict[int, int] = {}
    for observation in observations:
        for i, size in enumerate(
            () if isinstance(observation, Failed) else observation.short_bytes
        ):
            if size > most.get(i, 0):
                most[i] = size
    return most


Reason = Literal["nothing_ran", "nothing_fits", "failed", "gone"]


def find_left_out(
    observations: Sequence[Observation], devices: Sequence[Device], chosen: Layout
) -> tuple[LeftOut, ...]:
    """Return the devices that can't be used, each with its last failure.

    A device that trained successfully after its failure isn't included.
    """
    found: dict[int, LeftOut] = {}
    ran: set[int] = set()
    for observation in observations:
        if isinstance(observation, Timed):
            ran |= set(observation.probe.layout.active)
            found = {i: why for i, why in found.items() if i not in observation.probe.layout.active}
            continue
        for i in observation.devices or observation.probe.layout.active:
            reason = _why_left_out(observation, i, i in ran, chosen)
            if reason is not None:
                rows = observation.probe.layout.pass_rows[i]
                found[i] = LeftOut("device", devices[i].label, reason, observation.detail, rows)
    return tuple(found[i] for i in sorted(found))


def _why_left_out(
    failure: Failed | OutOfMemory, position: int, has_run: bool, chosen: Layout
) -> Reason | None:
    """Return why a device can't be used after a failure.

    Returns None if it still can be used. `has_run` says whether a probe had succeeded on the device
    before.
    """
    if not has_run:
        return "nothing_ran" if isinstance(failure, Failed) else "nothing_fits"
    if not isinstance(failure, Failed) or failure.devices != (position,):
        return None
    if not chosen.shares[position]:
        return "failed"
    return "gone" if failure.cause == "device" else None


def find_short_epoch(chosen: Layout, rows: int) -> ShortEpoch | None:
    """Return a warning if an epoch has fewer than 100 steps of the chosen layout, or None.

    `rows` is the size of the data set; 0 means unknown.
    """
    batch = chosen.global_batch
    if not 0 < rows < FEW_STEPS * batch:
        return None
    return ShortEpoch(rows // batch, batch, rows, rows // FEW_STEPS)
