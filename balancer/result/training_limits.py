"""Find what limits the training speed of the recommended layout, such as waiting for input.

A limit is a part of the step time that could be removed. The parts are measured by probes on real
devices, so simulated devices have no limits. Times are in seconds per optimizer step. If a part's
time differs between ranks, the longest counts, because the other ranks wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import msgspec

from evener.devices.types import Device
from evener.plan.file import Link
from evener.training.limits import (
    HAND_OVER_S,
    LimitKind,
    StepPart,
    TrainingLimit,
    bound_error,
    find_limits,
)

from ..search.report import SearchReport
from ..statistics import student
from ..types import Layout, Observation, PartSeconds, Timed

TWICE = 0.5  # fraction that twice the batch saves of a part that doesn't grow with the batch
STARVED_ERROR = 0.3  # relative: cores that are busy now may be free in the next minute
# Other programs also slow the cores that a training has, by their use of caches, memory and
# hardware threads. A step without them saves this fraction of its rest, too, times the fraction of
# the step in which threads waited for cores. It was 0.9 beside a program of 21 threads on 24 cores,
# and is near 0 beside programs that compute little. Half of that is expected, with as large an
# error.
SHARED_PART = 0.5
# twice the batch saves more than these parts, because nothing in a step grows more than its rows
UPDATE_ERROR, UPDATE_HIGH_ERROR = 0.2, 0.5
EXCHANGE_ERROR, EXCHANGE_HIGH_ERROR = 0.15, 0.25
FIXED_ERROR = 0.5  # relative, for the time that a single pass saves
# relative, for the time of a single pass by extrapolation: over the recorded runs of H200s, a line
# through two passes of up to 64 rows was off by -29 to +28 % in 8 of 10 cases, for 2 to 10 times as
# many rows, and by -1 to +14 % in half of them
PASS_ERROR = 0.25
# rows of a pass up to which most multiprocessors of a GPU are idle
FEW_ROWS = 16
# relative, half of an interval: a step that waits for no rows differs this much from one turn to
# the next, because most of its time is the host's
KEPT_ERROR = 0.2
SLOWED_ERROR = 0.5  # relative: not all kernels depend on the clock
NEIGHBOUR_ERROR = 0.3  # relative: the driver's values are means over long samples
# fraction of the time in which the session's own kernels ran: below it, the driver's sample mostly
# comes from before they began
LEAST_BUSY = 0.05
UNKNOWN_NEIGHBOUR_ERROR = 0.9  # if the driver doesn't say how long the session's kernels ran
LAUNCH_ERROR = 0.15  # relative, for a step of twice the batch
TWICE_BATCH = "Take a batch twice as large, or compile the model (torch.compile)."
LONGEST = 0.9  # of the longest compute time (own work): the other devices wait for such a device
LARGER_BATCH = "A larger batch: twice as many samples a step halve its part."
TRY_WORKERS = (
    "Load rows in worker processes (num_workers): evener balance --try workers measures how many "
    "are best."
)
KERAS_INPUT = (
    "Let tf.data work ahead: dataset.map(..., num_parallel_calls=tf.data.AUTOTUNE), cache(), "
    "prefetch(tf.data.AUTOTUNE)."
)


def find_training_limits(
    report: SearchReport, observations: Sequence[Observation], devices: Sequence[Device]
) -> tuple[TrainingLimit, ...]:
    """Return the parts of a step that could be removed to train faster, largest first.

    Returns an empty tuple if the step's parts weren't measured, or if the layout runs several jobs
    side by side.
    """
    chosen = report.chosen
    layout = chosen.layout
    turns = [one for one in report.turns_of(layout) if one.parts] or _list_timed_probes(
        observations, layout
    )
    if not turns or layout.traits.side_by_side or not chosen.throughput.value:
        return ()
    step_s = layout.global_batch / chosen.throughput.value
    looks = _list_detailed_probes(observations, layout)
    measured = _Measured(layout, turns, looks, step_s)
    parts = (
        *_find_input_wait(measured),
        *_find_host_waits(measured),
        *_find_exchange(measured, devices),
        *_find_update_time(measured),
        *_find_own_code_time(measured),
        *_find_lack_of_memory(measured, observations, devices),
        *_find_slow_compute(measured, devices),
    )
    return (*find_limits(step_s, parts), *_find_equal_split(report))


def _list_timed_probes(observations: Sequence[Observation], layout: Layout) -> list[Timed]:
    """Return the successful probes of a layout that have a breakdown of its step time."""
    found = [
        observation
        for observation in observations
        if isinstance(observation, Timed) and observation.probe.layout == layout
    ]
    return [one for one in found if one.parts]


def _list_detailed_probes(observations: Sequence[Observation], layout: Layout) -> list[Timed]:
    """Return the probes of a layout that also timed steps without data loading or launch delays.

    To avoid data loading, these steps reuse one batch. To avoid launch delays, all kernels are
    enqueued before the GPU begins.
    """
    turns = _list_timed_probes(observations, layout)
    return [turn for turn in turns if turn.kept is not None or turn.enqueued_seconds is not None]


class _Measured:
    """The measured parts of a layout's step, scaled to its final step time."""

    def __init__(
        self, layout: Layout, measurements: Sequence[Timed], looks: Sequence[Timed], step_s: float
    ) -> None:
        # `measurements` have the parts of a step; `step_s` is the step time of the verdict
        self.layout, self.turns, self.step_s = layout, measurements, step_s
        self.looks = looks
        self.closer = looks[-1] if looks else None

    def list_breakdowns(self, position: int) -> list[tuple[Timed, PartSeconds]]:
        """Return the probes that timed the parts of a device's step, each with the parts' times."""
        return [(turn, part) for turn in self.turns if (part := turn.parts[position]) is not None]

    def share(self, position: int, name: str) -> float | None:
        """Return the mean fraction of a step that a part takes on a device, or None if unknown.

        `name` is the name of the part's field in `PartSeconds`, such as "input_seconds".
        """
        shares = [
            seconds / one.step_seconds
            for one, part in self.list_breakdowns(position)
            if (seconds := getattr(part, name)) is not None and one.step_seconds > 0
        ]
        return fmean(shares) if shares else None

    def longest_seconds(self, name: str) -> float | None:
        """Return how many seconds a part of the step takes on the device where it takes longest.

        `name` is the name of the part's field in `PartSeconds`. Returns None if the time is
        unknown.
        """
        shares = [self.share(position, name) for position in self.layout.computing]
        known = [share for share in shares if share is not None]
        return max(known) * self.step_s if known else None

    def compute_seconds(self, position: int) -> float:
        """Return how many seconds a device computes per step.

        Returns 0 if it is unknown.
        """
        known = [
            own / turn.step_seconds
            for turn in self.turns
            if (own := turn.device_seconds[position]) is not None and turn.step_seconds > 0
        ]
        return fmean(known) * self.step_s if known else 0.0

    def lost_seconds(self, position: int, kind: LimitKind) -> float:
        """Return how many seconds per step a device loses because of heat or its power limit.

        `kind` says which of the two causes is meant.
        """
        own = self.compute_seconds(position) or self.step_s
        name = "heat_seconds" if kind is LimitKind.HEAT else "power_seconds"
        return own * (self.share(position, name) or 0.0)

    def seconds_waiting_for_others(self, position: int) -> float:
        """Return how many seconds per step a device's kernels wait because of other processes."""
        parts = [part for _, part in self.list_breakdowns(position)]
        parts = [part for part in parts if _covers_measurement(part)] or parts
        if not parts:
            return 0.0
        idle_s = self.launch_wait_seconds() + self.step_s * (
            self.share(position, "input_seconds") or 0.0
        )
        enqueued = max(0.0, 1 - idle_s / self.step_s)
        waits = []
        for part in parts:
            wait = part.neighbour
            if part.busy is not None:
                # at most the time for which own kernels are enqueued but don't run; and at most the
                # time for which they run, because a GPU gives processes equal slices of time
                wait = min(wait, max(enqueued - part.busy, part.busy))
            waits.append(wait)
        return (self.compute_seconds(position) or self.step_s) * fmean(waits)

    def list_slowest(self) -> list[int]:
        """Return the positions of the devices whose compute time is within 10 % of the longest."""
        longest = max((self.compute_seconds(i) for i in self.layout.computing), default=0.0)
        return [i for i in self.layout.computing if self.compute_seconds(i) >= LONGEST * longest]

    def launch_wait_seconds(self) -> float:
        """Return how many seconds per step a GPU waits for kernel launches.

        Returns 0 if it is unknown.
        """
        if self.closer is None or self.closer.enqueued_seconds is None:
            return 0.0
        step = self.closer.kept or self.closer
        return self.scale(max(0.0, step.step_seconds - self.closer.enqueued_seconds))

    def scale(self, seconds: float) -> float:
        """Convert a time measured in a detailed probe to the time it takes in a normal step.

        A detailed probe also times steps without data loading or launch delays. Its normal steps
        may take longer than the layout's step time, so the time is scaled by the ratio of the two.
        """
        assert self.closer is not None
        return seconds * self.step_s / self.closer.step_seconds


def _find_input_wait(measured: _Measured) -> Iterator[StepPart]:
    """Yield how long a step waits for the data loader."""
    seconds = measured.longest_seconds("input_seconds")
    step = _find_step_without_input(measured)
    if step is None:
        if seconds is not None:
            yield StepPart(
                kind=LimitKind.INPUT,
                seconds=seconds,
                remaining_s=HAND_OVER_S,
                remedy=TRY_WORKERS,
            )
        return
    without, error = step
    known = seconds is not None
    yield StepPart(
        kind=LimitKind.INPUT,
        seconds=max(0.0, measured.step_s - without) if seconds is None else seconds,
        without_s=without,
        without_error_s=error,
        remaining_s=HAND_OVER_S,
        remedy=TRY_WORKERS if known else KERAS_INPUT,
    )


def _find_step_without_input(measured: _Measured) -> tuple[float, float] | None:
    """Return how long a step takes without waiting for data, and the error of that time.

    Both are in seconds. The error is half of the 95 % interval. Returns None if the time wasn't
    measured.
    """
    scaled = []
    errors = []
    for look in measured.looks:
        if look.kept is not None:
            scale = measured.step_s / look.step_seconds
            scaled.append(scale * look.kept.step_seconds)
            errors.append(scale * (look.kept.high_seconds - look.kept.low_seconds) / 2)
    if not scaled:
        return None
    count = len(scaled)
    mean = fmean(scaled)
    apart = student(count - 1) * stdev(scaled) / math.sqrt(count) if count > 1 else 0.0
    # the error is at least the one that is usual between measurements
    usual = KEPT_ERROR * mean / math.sqrt(count)
    return mean, max(fmean(errors), apart, usual)


def _find_host_waits(measured: _Measured) -> Iterator[StepPart]:
    """Yield how long a step waits for kernel launches, and for CPU cores used by other programs."""
    starved = measured.longest_seconds("starved_seconds") or 0.0
    named = [
        part
        for position in measured.layout.computing
        for _, part in measured.list_breakdowns(position)
        if part.taken_by
    ]
    most = max(named, key=lambda part: part.starved_seconds, default=None)
    shared = SHARED_PART * max(0.0, 1 - starved / measured.step_s)
    error_s = bound_error(starved, measured.step_s, STARVED_ERROR)
    yield StepPart(
        kind=LimitKind.HOST_STARVED,
        seconds=starved,
        error_s=math.hypot(error_s, shared * starved),
        spared=1 + shared,
        by=most.taken_by if most else "",
    )
    waits_s = measured.launch_wait_seconds()
    if waits_s > 0:
        spared_s = _seconds_saved_by_doubling(measured.step_s, waits_s)
        yield StepPart(
            kind=LimitKind.HOST_LAUNCHES,
            seconds=waits_s,
            error_s=LAUNCH_ERROR * (measured.step_s - spared_s) * waits_s / spared_s,
            spared=spared_s / waits_s,
            remedy=TWICE_BATCH,
        )


def _seconds_saved_by_doubling(step_s: float, waits_s: float) -> float:
    """Return how much time a launch-bound GPU would save by computing twice as many rows per step.

    The result is in seconds per batch of the present size. In a step of `step_s` seconds, the GPU
    waits `waits_s` seconds for kernel launches. A step with more rows needs no more launches.
    """
    # the host takes as long as before, and the device twice as long
    after_s = max(step_s, 2 * (step_s - waits_s))
    return step_s - after_s / 2


def _find_exchange(measured: _Measured, devices: Sequence[Device]) -> Iterator[StepPart]:
    """Yield the part of the gradient exchange that doesn't overlap with computation."""
    layout = measured.layout
    if len(layout.computing) < 2 or not layout.traits.together:
        return
    rests = [_waiting_fraction(measured, i, devices[i].on_cpu) for i in layout.computing]
    known = [rest for rest in rests if rest is not None]
    if len(known) < len(rests):
        return
    # the slowest device waits for the exchange only, not for others to finish computing
    seconds = max(0.0, min(known)) * measured.step_s
    yield StepPart(
        kind=LimitKind.EXCHANGE,
        seconds=seconds,
        spared=TWICE,
        error_s=EXCHANGE_ERROR * seconds,
        high_error_s=EXCHANGE_HIGH_ERROR * seconds,
        remedy=f"{LARGER_BATCH} evener doctor --links measures the links.",
        by=_describe_link(measured, devices),
    )


def _describe_link(measured: _Measured, devices: Sequence[Device]) -> str:
    """Return a description of the link between the devices, or their labels if it is unknown."""
    link = find_link(measured.turns, measured.layout, devices)
    if link is None:
        return " – ".join(devices[i].label for i in measured.layout.active)
    return link.describe()


def find_link(
    observations: Sequence[Observation], layout: Layout, devices: Sequence[Device]
) -> Link | None:
    """Return the latest measurement of the link between the layout's devices, or None."""
    labels = tuple(devices[i].label for i in layout.active)
    for observation in reversed(observations):
        if not isinstance(observation, Timed) or observation.probe.layout.active != layout.active:
            continue
        if observation.link_bytes_per_second:
            return Link(labels, observation.link_path, observation.link_bytes_per_second)
    return None


def _waiting_fraction(measured: _Measured, position: int, on_cpu: bool) -> float | None:
    """Return the fraction of a step in which a device doesn't compute, or None if unknown."""
    shares = []
    for one, part in measured.list_breakdowns(position):
        own = one.device_seconds[position]
        if own is None:
            return None
        # the compute time of a CPU is CPU time, without waiting for rows or for a core
        beside = (part.input_seconds or 0.0) + part.starved_seconds if on_cpu else 0.0
        shares.append(1 - (own + beside) / one.step_seconds)
    return fmean(shares) if shares else None


def _find_update_time(measured: _Measured) -> Iterator[StepPart]:
    """Yield the time that the optimizer's update takes."""
    update = measured.longest_seconds("update_seconds")
    if update is not None:
        # waiting for the host to launch kernels is another limit
        seconds = update * max(0.0, 1 - measured.launch_wait_seconds() / measured.step_s)
        yield StepPart(
            kind=LimitKind.OPTIMIZER,
            seconds=seconds,
            spared=TWICE,
            error_s=UPDATE_ERROR * seconds,
            high_error_s=UPDATE_HIGH_ERROR * seconds,
            remedy=f"A fused optimizer (fused=True), where its class has one. {LARGER_BATCH}",
        )


def _find_lack_of_memory(
    measured: _Measured, observations: Sequence[Observation], devices: Sequence[Device]
) -> Iterator[StepPart]:
    """Yield the time lost because the slowest devices need gradient accumulation.

    With more memory, they could compute their rows in one pass.
    """
    layout = measured.layout
    for position in measured.list_slowest():
        passes = layout.passes(position)
        known = _list_passes(observations, position)
        if passes < 2 or len(known) < 2:
            continue
        spared_s, error_s = _seconds_saved_by_one_pass(known, passes, devices[position].on_cpu)
        yield StepPart(
            kind=LimitKind.MEMORY,
            seconds=spared_s,
            error_s=error_s,
            by=devices[position].label,
        )


def _list_passes(observations: Sequence[Observation], position: int) -> list[tuple[int, float]]:
    """Return the two largest batches that a device computed in one pass, with their times.

    The times are in seconds.
    """
    fastest: dict[int, float] = {}
    for observation in observations:
        if not isinstance(observation, Timed) or not observation.probe.layout.by_rows:
            continue
        layout, own = observation.probe.layout, observation.device_seconds[position]
        rows = layout.shares[position]
        if own is not None and rows and layout.passes(position) == 1 and not layout.knobs:
            fastest[rows] = min(own, fastest.get(rows, own))
    return sorted(fastest.items())[-2:]


def _seconds_saved_by_one_pass(
    measured_passes: Sequence[tuple[int, float]], passes: int, on_cpu: bool
) -> tuple[float, float]:
    """Return how many seconds one pass would save compared with `passes` passes of the same rows.

    The second value is the error of this estimate. `measured_passes` has the rows and the seconds
    of two measured passes, the smaller one first.
    """
    (few, few_s), (many, many_s) = measured_passes
    now_s = passes * many_s
    if on_cpu or many > FEW_ROWS:
        # a pass takes a fixed time plus a time for each row
        slope = min(max(0.0, (many_s - few_s) / (many - few)), many_s / many)
        single_s = many_s + slope * (passes - 1) * many
    else:
        # few rows leave multiprocessors of a GPU idle: twice the rows took 1.17 times as long from
        # 4 to 8 rows on an H200, and 1.15 times on average from there to 64
        power = min(max(0.0, math.log(many_s / few_s) / math.log(many / few)), 1.0)
        single_s = many_s * passes**power
    spared_s = now_s - single_s
    return spared_s, bound_error(spared_s, now_s, FIXED_ERROR, PASS_ERROR)


def _covers_measurement(part: PartSeconds) -> bool:
    """Return whether the driver's sample of GPU use is mostly from the time of the measurement.

    It isn't if this session's kernels ran for under 5 % of the sample: most of it then comes from
    before they began. Returns True if that fraction is unknown.
    """
    return part.busy is None or part.busy >= LEAST_BUSY


def _find_slow_compute(measured: _Measured, devices: Sequence[Device]) -> Iterator[StepPart]:
    """Yield the time lost to heat, to a power limit, and to other processes on the device."""
    # of the devices that the others wait for, the one that loses most counts
    for kind in (LimitKind.HEAT, LimitKind.POWER):
        lost = {i: measured.lost_seconds(i, kind) for i in measured.list_slowest()}
        most = max(lost, key=lost.__getitem__)
        error_s = bound_error(lost[most], measured.step_s, SLOWED_ERROR)
        yield StepPart(kind=kind, seconds=lost[most], error_s=error_s, by=devices[most].label)
    waited = {i: measured.seconds_waiting_for_others(i) for i in measured.list_slowest()}
    most = max(waited, key=waited.__getitem__)
    who = devices[most].label
    parts = [part for _, part in measured.list_breakdowns(most)]
    names = [part.neighbours for part in parts if part.neighbours]
    known = any(part.busy is not None for part in parts)
    yield StepPart(
        kind=LimitKind.NEIGHBOUR,
        seconds=waited[most],
        error_s=(
            bound_error(waited[most], measured.step_s, NEIGHBOUR_ERROR)
            if known
            else UNKNOWN_NEIGHBOUR_ERROR * waited[most]
        ),
        by=f"{names[-1]} on {who}" if names else who,
    )


def _find_equal_split(report: SearchReport) -> list[TrainingLimit]:
    """Return how much time per step the plan saves compared with equal shares.

    The result is a list with one limit, which is marked as already removed by the plan. The list is
    empty unless equal shares of the same batch were measured on the same devices.
    """
    chosen = report.chosen
    layout = chosen.layout
    rows = [layout.shares[i] for i in layout.computing]
    if len(rows) < 2 or not layout.traits.by_shares or max(rows) - min(rows) <= 1:
        return []
    for result in report.results:
        same = result.layout.active == layout.active and result.layout.global_batch == sum(rows)
        equal = [result.layout.shares[i] for i in result.layout.computing]
        if not same or max(equal) - min(equal) > 1 or result.layout.knobs != layout.knobs:
            continue
        step_s, even_s = sum(rows) / chosen.throughput.value, sum(rows) / result.throughput.value
        error_s = (sum(rows) / chosen.throughput.low - sum(rows) / chosen.throughput.high) / 2
        part = StepPart(
            kind=LimitKind.UNEQUAL,
            seconds=max(0.0, even_s - step_s),
            without_s=step_s,
            without_error_s=error_s,
            remedy="The plan's shares.",
        )
        found = find_limits(even_s, [part])
        return [msgspec.structs.replace(each, taken_away=True) for each in found]
    return []


def _find_own_code_time(measured: _Measured) -> Iterator[StepPart]:
    """Yield the time in which no data was loaded, and neither the CPU nor the device was busy.

    This time is spent by the script's own code.
    """
    seconds = measured.longest_seconds("idle_seconds")
    if seconds is not None:
        yield StepPart(kind=LimitKind.OWN_CODE, seconds=seconds)
