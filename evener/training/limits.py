"""Find the bottlenecks of a training step, with their remedies and the gains to expect.

A bottleneck is a part of the step that a remedy can shorten, such as waiting for input. The
measured parts may overlap: for example, a lack of CPU cores also delays input. Overlaps are
removed, so that all bottlenecks together take no longer than the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

LEAST_SHARE = 0.05  # minimum fraction of a step for a part to be a limit
LEAST_GAIN = 0.05  # minimum lower bound of a remedy's gain for its limit to be reported
# The minimum is higher for the optimizer: a larger batch, its usual remedy, changes what is learned
LEAST_OPTIMIZER_GAIN = 0.1
# Time to move a batch from a worker process to the loop: 0.2 ms for small batches on a
# machine with cores to spare, 0.5 to 0.9 ms of CPU time on a busy one.
HAND_OVER_S = 0.5e-3
# The time between two steps that a trainer of a library needs for itself: 1 to 2.5 ms of callbacks,
# schedules and counts in transformers and Lightning.
TRAINER_S = 2e-3
# maximum error of the predicted step without a limit, relative to it; most of its time was measured
LEFT_ERROR = 0.2
LEAST_STEP_LEFT = 1e-3  # minimum fraction of a step that remains with any remedy


class LimitKind(StrEnum):
    """A kind of bottleneck, with a noun for it, its meaning and its usual remedy."""

    noun: str
    meaning: str
    usual_remedy: str

    def __new__(cls, value: str, noun: str, meaning: str, usual_remedy: str) -> LimitKind:
        """Create a kind of bottleneck with the texts that users see."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.noun = noun
        member.meaning = meaning
        member.usual_remedy = usual_remedy
        return member

    INPUT = (
        "input",
        "input",
        "The training waits for the rows of its next batch.",
        "Load rows in worker processes: DataLoader(num_workers=4, persistent_workers=True).",
    )
    RANK_INPUT = (
        "rank_input",
        "one rank's input",
        "One rank waits for its rows longer than the others do.",
        "Put that rank's data on a disk as fast as the others', or give it more loader workers.",
    )
    HOST_LAUNCHES = (
        "host_launches",
        "the host that starts kernels",
        "The device waits for its host to start kernels.",
        "Use a larger batch, or compile the model (torch.compile).",
    )
    HOST_STARVED = (
        "host_starved",
        "waiting for cores",
        "Threads of the training are ready to run but get no core.",
        "Stop the other programs, or give the training cores of its own (taskset, a cgroup).",
    )
    EXCHANGE = (
        "exchange",
        "the exchange of gradients",
        "The sum of gradients over the ranks takes time that computing doesn't hide.",
        "Use a larger batch, or several passes for each optimizer step.",
    )
    UNEQUAL = (
        "unequal",
        "waiting for the slowest device",
        "Faster devices wait for slower ones.",
        "Give each device a share that matches its speed: evener balance.",
    )
    MEMORY = (
        "memory",
        "memory",
        "Memory is short, so a share is computed in passes that are too small to be fast.",
        "Free memory: bfloat16, checkpointing of activations, or shards (split.shard).",
    )
    POWER = (
        "power",
        "a power limit",
        "A device is slowed by its power limit.",
        "Raise the power limit (nvidia-smi -pl), or give the device a smaller share.",
    )
    HEAT = (
        "heat",
        "heat",
        "A device is so hot that it slows down.",
        "Improve the device's cooling, or give it a smaller share.",
    )
    NEIGHBOUR = (
        "neighbour",
        "another process on the device",
        "Another process computes on the same device.",
        "Stop the other process, or give the device a smaller share.",
    )
    OPTIMIZER = (
        "optimizer",
        "the optimizer's step",
        "The optimizer's update takes a large part of a step.",
        "Use a fused optimizer (fused=True), or a larger batch.",
    )
    CHECKPOINTS = (
        "checkpoints",
        "writing checkpoints",
        "Training stops while checkpoints are written.",
        "Write checkpoints less often, or in the background.",
    )
    VALIDATION = (
        "validation",
        "validation",
        "Training stops while the model is validated.",
        "Validate less often, or on fewer rows.",
    )
    BETWEEN = (
        "between",
        "work between steps",
        "The host does other work between two steps: logging, metrics, callbacks.",
        "Do that work less often, or in a thread.",
    )
    OWN_CODE = (
        "own_code",
        "waiting in the model's own code",
        "The model's own code waits: neither its device nor its host computes.",
        "Look for sleeps, locks, files and .item() in the step with a profiler.",
    )


class TrainingLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A bottleneck, how long it takes in each step, and how much faster training is without it.

    Gains are fractions: 0.12 means 12 % more samples/s. `by` names the device, rank or program that
    causes the bottleneck, or is "" if it is unknown.
    """

    # The limits of a step don't overlap. The rest of the step is compute time (own work) and parts
    # under 5 %.

    kind: LimitKind
    milliseconds: float  # of a step
    share: float  # of a step, 0 to 1
    remedy: str  # a message or a command
    gain: float
    gain_low: float  # 95 % interval
    gain_high: float
    by: str = ""
    measured: bool = False  # the gain was measured in a step without the limit
    # the plan removes the limit; milliseconds and share then refer to a step without the plan
    taken_away: bool = False


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step that may be a bottleneck, such as waiting for input.

    `spared` is the fraction of the part's time that its remedy saves.
    """

    # A part is reported only if the lower bound of its gain reaches the `least_gain` of its kind.

    kind: LimitKind
    seconds: float  # of a step
    error_s: float = 0.0  # half of the 95 % interval of `seconds`
    high_error_s: float | None = None  # the upper half of the interval, if it differs
    rest_error_s: float = 0.0  # half of the interval of what a remedy changes in the rest of a step
    remaining_s: float = 0.0  # seconds that the usual remedy may leave or add
    spared: float = 1.0  # the fraction of `seconds` that the remedy saves
    without_s: float | None = None  # the measured duration of a step without the limit
    without_error_s: float = 0.0  # half of the 95 % interval of `without_s`
    remedy: str = ""  # empty: the kind's usual remedy
    by: str = ""


def bound_error(
    seconds: float, step_s: float, part_error: float, rest_error: float = LEFT_ERROR
) -> float:
    """Return the error margin of the time of one part of a step, in seconds.

    `part_error` is the relative error of this part's time. `rest_error` is the relative error of
    the time of all other parts. Each of them gives a margin, and the smaller margin is returned.
    """
    # The margin is half of a 95 % interval. The whole step was measured, so the part is known at
    # least as precisely as the rest.
    return min(part_error * seconds, rest_error * max(0.0, step_s - seconds))


def find_limits(step_s: float, parts: Iterable[StepPart]) -> tuple[TrainingLimit, ...]:
    """Return the bottlenecks of a step that takes `step_s` seconds, the largest gain first.

    Parts that take less than 5 % of the step, or whose remedy gains too little, aren't returned.
    """
    if step_s <= 0:
        return ()
    own = divide_step(step_s, tuple(parts))
    limits = [_describe(step_s, part) for part in own if _is_limit(step_s, part)]
    return tuple(sorted(limits, key=lambda limit: (-limit.gain, -limit.share, limit.kind)))


# kinds that are measured while nothing else happens, so they overlap with no other part
APART = frozenset({LimitKind.EXCHANGE, LimitKind.OWN_CODE})
SLOWED = frozenset({LimitKind.POWER, LimitKind.HEAT, LimitKind.NEIGHBOUR})


def divide_step(step_s: float, parts: Sequence[StepPart]) -> list[StepPart]:
    """Return the parts of a step, shortened so that no time counts twice.

    Together they take at most `step_s` seconds.
    """
    # A lack of cores slows all other parts except those of `APART` kinds. The time spent waiting
    # for a core is subtracted from them, in proportion to their durations. Unequal work includes
    # the time that the slowest device loses to heat, power or another process on the device. If
    # such a loss is also one of the parts, its time is subtracted from the unequal work. Parts that
    # still add up to more than the step are shortened. A lack of cores and `APART` kinds have
    # priority, then the longest parts.
    own = _without_starved(step_s, parts)
    own = [_without_slowed(part, own) for part in own]
    first = (LimitKind.HOST_STARVED, *APART)
    left_s = step_s
    divided = []
    for part in sorted(own, key=lambda part: (part.kind not in first, -part.seconds, part.kind)):
        divided.append(_shorten(part, min(part.seconds, left_s)))
        left_s -= divided[-1].seconds
    return divided


def _without_starved(step_s: float, parts: Sequence[StepPart]) -> list[StepPart]:
    """Subtract the time in which threads waited for a CPU core from the other parts of a step."""
    # A lack of cores slows all other parts by the same fraction, except for parts of `APART` kinds.
    apart_s = sum(part.seconds for part in parts if part.kind in APART)
    starved_s = sum(part.seconds for part in parts if part.kind is LimitKind.HOST_STARVED)
    room_s = step_s - apart_s
    if room_s <= 0 or starved_s <= 0:
        return list(parts)
    rest = 1 - min(1.0, starved_s / room_s)
    whole = (LimitKind.HOST_STARVED, *APART)
    return [part if part.kind in whole else _shorten(part, rest * part.seconds) for part in parts]


def _without_slowed(part: StepPart, parts: Sequence[StepPart]) -> StepPart:
    """Return the time of unequal work without the time in which ranks wait for slowed devices.

    A device may be slowed by heat, power limits or other processes. That other ranks wait for it
    counts as unequal work, but `parts` also lists this time as a part of its own. If `part` isn't
    unequal work, it is returned unchanged.
    """
    if part.kind is not LimitKind.UNEQUAL:
        return part
    slowed_s = sum(each.seconds for each in parts if each.kind in SLOWED and each.by == part.by)
    return _shorten(part, max(0.0, part.seconds - slowed_s))


def _shorten(part: StepPart, seconds: float) -> StepPart:
    """Return a copy of the part that takes at most `seconds` seconds.

    Its errors shrink in proportion.
    """
    if seconds >= part.seconds:
        return part
    rest = seconds / part.seconds
    high_s = None if part.high_error_s is None else part.high_error_s * rest
    return msgspec.structs.replace(
        part,
        seconds=seconds,
        error_s=part.error_s * rest,
        high_error_s=high_s,
        rest_error_s=part.rest_error_s * rest,
    )


def _is_limit(step_s: float, part: StepPart) -> bool:
    if part.seconds < LEAST_SHARE * step_s:
        return False
    left = _find_remaining_time(step_s, part)
    return _gain(step_s, left.most_s + part.remaining_s) >= least_gain(part.kind)


def least_gain(kind: LimitKind) -> float:
    """Return the smallest gain for which a bottleneck of this kind is reported, as a fraction."""
    return LEAST_OPTIMIZER_GAIN if kind is LimitKind.OPTIMIZER else LEAST_GAIN


class _RemainingTime(NamedTuple):
    """How long a step would take once a remedy is applied, with its 95 % interval, in seconds."""

    seconds: float
    least_s: float
    most_s: float


def _find_remaining_time(step_s: float, part: StepPart) -> _RemainingTime:
    """Return how long a step would take without this part.

    A duration that was measured without the part is used if there is one. Otherwise, the duration
    is predicted.
    """
    if part.without_s is not None:
        error_s = part.without_error_s
        return _RemainingTime(part.without_s, part.without_s - error_s, part.without_s + error_s)
    left_s = step_s - part.spared * min(part.seconds, step_s)
    high_error_s = part.error_s if part.high_error_s is None else part.high_error_s
    return _RemainingTime(
        left_s, left_s - part.spared * high_error_s, left_s + part.spared * part.error_s
    )


def _describe(step_s: float, part: StepPart) -> TrainingLimit:
    seconds = min(part.seconds, step_s)
    left = _find_remaining_time(step_s, part)
    rest_error_s = part.spared * part.rest_error_s
    longer_s = math.hypot(left.most_s - left.seconds, rest_error_s)
    shorter_s = math.hypot(left.seconds - left.least_s, rest_error_s)
    return TrainingLimit(
        kind=part.kind,
        milliseconds=seconds * 1e3,
        share=seconds / step_s,
        remedy=part.remedy or part.kind.usual_remedy,
        gain=_gain(step_s, left.seconds),
        gain_low=_gain(step_s, left.seconds + longer_s),
        gain_high=_gain(step_s, left.seconds - shorter_s),
        by=part.by,
        measured=part.without_s is not None,
    )


def _gain(step_s: float, left_s: float) -> float:
    """Return the relative gain in speed if a step takes `left_s` instead of `step_s` seconds."""
    # 0.5 means 50 % more samples/s. The gain is never negative, because a remedy that slows the
    # training run needn't be applied.
    left = min(max(left_s, LEAST_STEP_LEFT * step_s), step_s)
    return step_s / left - 1
