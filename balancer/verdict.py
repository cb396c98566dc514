"""The result of a search as data: the chosen layout, its alternatives, warnings and advice.

Gains, errors and fractions are relative: 0.17 is 17 %. `--json` prints these fields (docs/json.md).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.plan.file import Link
from evener.training.limits import TrainingLimit
from evener.training.noise_scale import NoiseScale

from .types import Doubt

StopCode = Literal[
    "settled",
    "unsure",
    "tied",
    "uncertain",
    "unsteady",
    "only_one",
    "budget",
    "no_fit",
    "row_too_long",
    "out_of_memory",
    "all_lost",
    "late",
    "interrupted",
    "cut_off",
]
LayoutKind = Literal[
    "equal_shares",
    "other_shares",
    "one_device",
    "sharded",  # each device holds a part of the model
    "side_by_side",  # several trainings on one device
    "placed",  # parts of the model on several devices
]
RivalKind = (
    LayoutKind
    | Literal[
        "knobs"  # the plan's layout with other knobs, or none
    ]
)
WhyNotChosen = Literal[  # why a layout with more samples/s isn't the plan
    "tolerance",  # it needs a larger batch, and the plan is within --tolerance of it
    "tie",  # the difference is within the error, and the plan is simpler
    "in_turn",  # measured in alternating turns, the plan was faster
    "objective",  # the objective is something other than speed
    "measured_again",  # the plan's rate is from later measurements, after the choice
    "memory",  # its memory was nearly full, so a training by it is likely to fail
]


class MeasuredRate(msgspec.Struct, frozen=True):
    """A measured throughput with its 95 % interval.

    `known` is False if the interval is too wide to compare the throughput with others.
    """

    samples_per_second: float
    low: float
    high: float
    known: bool = True
    tokens_per_second: float = 0.0  # without padding; these two only if rows have lengths
    padding: float = 0.0


class RateGap(msgspec.Struct, frozen=True):
    """How much faster one layout is than another, as a fraction, with its 95 % interval.

    With `alternately`, the two layouts were measured in alternation, which is more precise.
    """

    value: float
    low: float
    high: float
    alternately: bool = False


Action = Literal[
    "one_device",  # train on one device; no plan is needed
    "plain_parallel",  # equal shares, the default of frameworks; no plan is needed
    "plan",  # train with the plan
    "measure_again",
    "fix_code",  # the loss is NaN or infinite
]


class Recommendation(msgspec.Struct, frozen=True):
    """What the user should do next, such as train with the plan or measure again."""

    action: Action
    devices: tuple[str, ...]
    batches: tuple[int, ...]
    description: str  # of the layout, as text
    # why to measure again: the code of a doubt, `uncertain` or `uncompared`
    reason: str = ""


class Chosen(msgspec.Struct, frozen=True):
    """The layout that the search has chosen, with its devices and batches."""

    family: str  # solo, even, split, shard, pack or place
    kind: LayoutKind
    description: str  # 826 + 571 on GPU:0 + GPU:1
    devices: tuple[str, ...]
    batches: tuple[int, ...]
    micro: tuple[int, ...]  # rows of a pass
    global_batch: int
    trainings: int = 1  # number of trainings side by side
    knobs: tuple[str, ...] = ()
    own_work_gap: float | None = None  # between the devices' compute times; None: unknown


class Rival(msgspec.Struct, frozen=True):
    """A measured layout that wasn't chosen, and how much faster the plan is."""

    kind: RivalKind
    name: str
    devices: tuple[str, ...]
    batches: tuple[int, ...]
    global_batch: int
    rate: MeasuredRate
    gain: float | None = None  # of the plan over this rival; None: they aren't compared
    tie: bool = False  # neither is surely faster
    unclear: bool = False  # a tie that may hide a large difference
    paired: bool = False  # the gain was measured in turns and differs from that of the two rates
    trainings: int = 1
    knobs: tuple[str, ...] = ()
    why_not: WhyNotChosen | None = None  # set if its samples/s exceed the plan's
    # of one device at this batch, if they exceed those of `rate`
    earlier_samples_per_second: float = 0.0
    difference: RateGap | None = None  # None: they aren't compared


class SplitLoss(msgspec.Struct, frozen=True):
    """Why training on several devices was slower than training on one of them.

    Times are in seconds per step; None means unknown. `cause` is "longest_part" if the other
    devices wait for the one with the largest share, and "exchange" if synchronization takes too
    long.
    """

    cause: Literal["longest_part", "exchange", "unexplained"]
    step_seconds: float
    longest_seconds: float | None = None  # of the split's longest share, measured alone
    whole_seconds: float | None = None  # of a step with all samples on the chosen device
    exchange_seconds: float | None = None


class SumLoss(msgspec.Struct, frozen=True):
    """Why the plan is slower than the sum of its devices' throughputs when each trains alone.

    All times are in seconds per step. `lost_seconds` is the measured step time minus the step time
    that this sum of throughputs would give.
    """

    # both: the two causes together explain it, and neither does alone
    cause: Literal["longest_part", "exchange", "both", "unexplained"]
    fraction: float  # of the sum that the plan reaches
    lost_seconds: float
    longest_seconds: float | None = None  # of its longest share, alone
    exchange_seconds: float | None = None


class UnequalDevices(msgspec.Struct, frozen=True):
    """Two devices of the same product with different speeds.

    `ratio` is the faster one's throughput divided by the slower one's.
    """

    fast: str
    slow: str
    product: str
    ratio: float
    batch: int = 0


class VerdictDoubt(msgspec.Struct, frozen=True):
    """A warning about the results, such as throttling, with the device that it concerns."""

    code: Doubt
    device: str = ""  # label; empty: all devices
    value: float = 0.0  # a relative size, a fraction of time, or a step number
    taken: float = 0.0  # the fraction of the CPU time that other processes took; 0: unknown


class LeftOut(msgspec.Struct, frozen=True):
    """A device, layout or option that the plan doesn't use, with the reason."""

    kind: Literal["device", "layout", "family", "host", "request"]
    name: str
    reason: Literal[
        "nothing_ran",
        "nothing_fits",
        "failed",
        "gone",  # ran at first and can't be used now; still a part of the plan
        "out_of_memory",
        "no_time",
        "packs_growing",  # no time for larger packs, though packs still gained
        "by_rows",  # shares are assigned by the cost of rows
        "slower",
        "not_faster",  # a device: a split with it was measured, and is no faster
        "not_tried",  # a device: no split with it was measured near the plan's batch
        "impossible",
    ]
    detail: str = ""
    rows: int = 0  # rows that didn't fit
    enough_seconds: int = 0  # a budget that should be enough
    loss: float = 0.0  # the loss if it were used
    tie: bool = False  # the loss is too close to call
    # of "no_time": those of a measurement before the final comparison, or 0
    samples_per_second: float = 0.0
    hosts: int = 0
    global_batch: int = 0
    network_seconds: float = 0.0  # seconds of each step on the network, if they explain the loss
    devices: tuple[str, ...] = ()  # of "not_faster": those that compute in that split


class ReplacedLayout(msgspec.Struct, frozen=True):
    """A layout that ran out of memory, and the layout that was measured instead."""

    name: str
    original: str
    replacement: str


class Unfinished(msgspec.Struct, frozen=True):
    """A probe that was still starting or warming up when the search ended.

    `phase` is what it was doing, such as "importing" or "building". `name` is what it imported or
    built, and `seconds` is how long that had taken.
    """

    phase: str  # importing | loading | building | preparing | warming up
    name: str
    seconds: float
    devices: tuple[str, ...]
    where: str = ""  # file.py:12


class TakenMemory(msgspec.Struct, frozen=True):
    """How much memory of a device other programs hold, in bytes."""

    device: str
    size_bytes: int


class CodeLimit(msgspec.Struct, frozen=True):
    """The micro-batch size above which the user's code fails with an error."""

    rows: int  # the most rows that ran below the limit
    failed_rows: int  # the fewest rows that failed
    error: str


class ShortEpoch(msgspec.Struct, frozen=True):
    """Warning: with the plan's global batch, an epoch has fewer than 100 steps."""

    steps: int
    global_batch: int
    rows: int
    largest_batch: int  # the largest with which an epoch has 100 steps; 0: fewer than 100 rows


class ShortBudget(msgspec.Struct, frozen=True):
    """Warning: the budget was spent before several devices were measured together."""

    budget_seconds: float
    start_seconds: float  # the part of the budget spent on starting processes
    enough_seconds: int


class RepeatedBuild(msgspec.Struct, frozen=True):
    """Warning: processes built the model again, because none could be copied after its build."""

    seconds: float  # how long one build takes
    reason: str  # why not, with "it" for the process that built the model


class RanOut(msgspec.Struct, frozen=True):
    """Attempts to train on several devices, which all failed because memory ran out.

    The plan therefore doesn't use several devices. `batches` has each device's rows in each layout
    that was tried, in the order in which they were tried.
    """

    in_shards: bool  # whether each device held a part of the model's state
    devices: tuple[str, ...]  # that ran out of memory
    batches: tuple[tuple[int, ...], ...]
    try_seconds: float  # how long one took on average, with the start of its processes
    lacked_time: bool = False  # the budget ended before the search had no more to try


class PassStatistics(msgspec.Struct, frozen=True):
    """Warning: a layer, such as batch normalization, computes statistics over a single pass.

    The statistics then depend on how a device's share is divided into passes. `rows` is the size of
    the smallest pass.
    """

    layer: str
    rows: int


class ObjectiveReached(msgspec.Struct, frozen=True):
    """The value that the plan reaches for an objective other than speed, such as samples per joule.

    `gain` says how much better this value is than that of the fastest layout, as a fraction.
    """

    objective: str
    value: float
    max_slowdown: float
    gain: float | None = None  # over the fastest layout; None: the plan is that


class Learning(msgspec.Struct, frozen=True):
    """How the plan's global batch affects learning, estimated from the gradient noise scale."""

    global_batch: int
    noise_scale: NoiseScale | None = None
    # fraction that a sample of the batch is worth, with its 95 % interval
    worth: tuple[float, float, float] | None = None
    # measured batches that are faster than all smaller batches: batch, samples/s, their worth
    frontier: tuple[tuple[int, float, float], ...] = ()
    own_batch: int | None = None
    relative_speed: float | None = None  # samples/s divided by those of the script's own batch
    # factor on the samples needed for the same loss
    extra_samples: tuple[float, float, float] | None = None
    adam_rate: float | None = None  # factor on the own batch's learning rate
    sgd_rate: float | None = None
    sgd_rule: Literal["linear", "adascale"] = "linear"


class AdapterMemory(msgspec.Struct, frozen=True):
    """Estimated memory for training adapters (LoRA, QLoRA) on top of a frozen model.

    `state_bytes` is for a device that holds the whole model; `fits_on` lists the devices with that
    much memory.
    """

    kind: str  # lora, qlora
    description: str
    state_bytes: int
    fits_on: tuple[str, ...]


class StateMemory(msgspec.Struct, frozen=True):
    """Memory for the whole model's parameters, gradients and optimizer state, in bytes.

    `fits_on` lists the devices that could hold all of it on their own.
    """

    state_bytes: int
    fits_on: tuple[str, ...]  # devices that can hold it alone
    shard_bytes: tuple[tuple[str, int], ...]  # on each device, if the plan is sharded
    adapters: tuple[AdapterMemory, ...] = ()  # empty if adapters are what is trained


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The complete result of a search, as data.

    None, "" or an empty tuple means that a field doesn't apply, or that its value is unknown.
    """

    chosen: Chosen
    rate: MeasuredRate
    recommendation: Recommendation | None = None  # None: a verdict of an older version
    equal_shares: bool = False  # equal shares are right: plain data parallelism is as fast
    simulated: bool = False
    rivals: tuple[Rival, ...] = ()
    split_loss: SplitLoss | None = None
    split_unmeasured: bool = False  # one device was chosen, and no split near its batch ran
    tolerance: float = 0.0
    framework: str = "none"
    batch_given: bool = False  # the user set the batch
    doubts: tuple[VerdictDoubt, ...] = ()
    on_gpus: bool = False  # GPUs may be throttled by heat
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()  # about the devices and the request
    short_budget: ShortBudget | None = None
    repeated_build: RepeatedBuild | None = None
    ran_out: tuple[RanOut, ...] = ()
    replaced: tuple[ReplacedLayout, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    taken_memory: tuple[TakenMemory, ...] = ()
    code_limit: CodeLimit | None = None
    short_epoch: ShortEpoch | None = None
    pass_statistics: PassStatistics | None = None
    # devices without hardware for bfloat16, beside devices that have it
    slow_bfloat16: tuple[str, ...] = ()
    objective: ObjectiveReached | None = None
    learning: Learning | None = None
    state: StateMemory | None = None  # None: the model wasn't tried in shards
    stopped: StopCode = "settled"
    stopped_detail: str = ""
    failed: int = 0  # measurements that failed, besides those that ran out of memory
    sum_loss: SumLoss | None = None  # None: the plan nearly reaches the sum, or is one device
    unequal_devices: UnequalDevices | None = None
    link: Link | None = None  # between the chosen devices; None: it wasn't measured
    limits: tuple[TrainingLimit, ...] = ()  # what takes the training's time, the largest first
