"""The verdict of a search as data: the recommendation, its gain over each rival, and
doubts about it.

`result/judge.py` creates it, `result/sentences.py` writes it as text, and `--json` prints its
fields (docs/json.md). Gains, errors and fractions are relative: 0.17 is 17 %.
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
        "knobs"  # the plan's layout without its knobs, or with others
    ]
)
WhyNot = Literal[  # a layout with more samples/s isn't the plan
    "tolerance",  # it takes a larger batch, and the plan is within --tolerance of it
    "tie",  # the difference is within the error, and the plan is simpler
    "in_turn",  # measured one right after the other, the plan was faster
    "objective",  # something other than speed decides
    "measured_again",  # the plan's figure is of later measurements, by which none was chosen
]


class Figure(msgspec.Struct, frozen=True):
    """Samples/s with their 95 % interval; not `known` if the interval is too
    wide for comparisons.
    """

    samples_per_second: float
    low: float
    high: float
    known: bool = True
    tokens_per_second: float = 0.0  # without padding; these two where rows have lengths
    padding: float = 0.0


class RateGap(msgspec.Struct, frozen=True):
    """The plan's samples/s divided by a rival's, minus 1, with the 95 % interval
    of that comparison.

    `alternately`: measured in alternating turns of both layouts. The gap may then be more precise
    than either layout's samples/s, and may differ from the gap between those two values.
    """

    value: float
    low: float
    high: float
    alternately: bool = False


Action = Literal[
    "one_device",  # train on one device; no plan is needed
    "plain_parallel",  # equal shares, as frameworks give them by themselves; no plan is needed
    "plan",  # train by the plan
    "measure_again",
    "fix_code",  # the loss isn't finite
]


class Recommendation(msgspec.Struct, frozen=True):
    """The one recommendation, with the layout that it is about."""

    action: Action
    devices: tuple[str, ...]
    batches: tuple[int, ...]
    answer: str  # the layout in words
    # why to measure again: the code of a doubt, `uncertain` or `uncompared`
    reason: str = ""


class Chosen(msgspec.Struct, frozen=True):
    """The layout to train with. `devices`, `batches` and `micro` list the devices
    that take part.
    """

    family: str  # solo, even, split, shard, pack or place
    kind: LayoutKind
    answer: str  # 826 + 571 on GPU:0 + GPU:1
    devices: tuple[str, ...]
    batches: tuple[int, ...]
    micro: tuple[int, ...]  # rows of a pass
    global_batch: int
    trainings: int = 1  # side by side
    knobs: tuple[str, ...] = ()
    own_work_gap: float | None = None  # between the devices' own work; None: unknown


class Rival(msgspec.Struct, frozen=True):
    """Another layout that ran, and the plan's gain over it."""

    kind: RivalKind
    name: str
    devices: tuple[str, ...]
    batches: tuple[int, ...]
    global_batch: int
    figure: Figure
    gain: float | None = None  # of the plan over it; None: they aren't compared
    tie: bool = False  # neither is surely faster
    unclear: bool = False  # a tie that may hide a large difference
    paired: bool = False  # the gain was measured in turn, and the figures alone say another
    trainings: int = 1
    knobs: tuple[str, ...] = ()
    why_not: WhyNot | None = None  # its figure is above the plan's
    # samples/s of one device at this batch as measured before, if they are above the figure
    earlier: float = 0.0
    difference: RateGap | None = None  # None: they aren't compared


class SplitLoss(msgspec.Struct, frozen=True):
    """Why the best split is slower than one device. Times are seconds of one step,
    None if unknown.
    """

    cause: Literal["longest_part", "exchange", "unexplained"]
    step_seconds: float
    longest_seconds: float | None = None  # of its longest share, alone
    whole_seconds: float | None = None  # of all samples on the chosen device
    exchange_seconds: float | None = None


class SumLoss(msgspec.Struct, frozen=True):
    """Why several devices reach much less than the sum of each device alone. Times are seconds
    of one step.

    `lost_seconds`: how much longer a step takes than a step at the sum's speed.
    """

    # both: the two together explain it, and neither does alone
    cause: Literal["longest_part", "exchange", "both", "unexplained"]
    part: float  # of the sum
    lost_seconds: float
    longest_seconds: float | None = None  # of its longest share, alone
    exchange_seconds: float | None = None


class UnequalTwins(msgspec.Struct, frozen=True):
    """Two devices of the same product, one of which is much faster than the other at
    the same batch.
    """

    fast: str
    slow: str
    product: str
    times: float


class DoubtFound(msgspec.Struct, frozen=True):
    """A doubt about the measurements of the plan."""

    code: Doubt
    device: str = ""  # label; empty: all of them
    value: float = 0.0  # a relative size, a share of time, or a step
    taken: float = 0.0  # the part of the CPU time that other work took; 0: unknown


class LeftOut(msgspec.Struct, frozen=True):
    """A device, layout, family of layouts or host that isn't part of the plan, and why."""

    what: Literal["device", "layout", "family", "host", "request"]
    name: str
    reason: Literal[
        "nothing_ran",
        "nothing_fits",
        "failed",
        "gone",  # worked at first and can't be used now; still a part of the plan
        "out_of_memory",
        "no_time",
        "packs_growing",  # no time for more, though they still gained
        "by_rows",  # shares are assigned by what rows cost
        "slower",
        "not_faster",  # a device: a split with it was measured, and is as fast at the most
        "not_tried",  # a device: no split with it was measured near the plan's batch
        "impossible",
    ]
    why: str = ""
    rows: int = 0  # that didn't fit
    enough_seconds: int = 0  # of a budget that should do
    loss: float = 0.0  # with it
    samples_per_second: float = 0.0
    hosts: int = 0
    global_batch: int = 0
    network_seconds: float = 0.0  # of each step, where they explain the loss


class ReplacedLayout(msgspec.Struct, frozen=True):
    """A layout that ran out of memory, and the layout that was measured instead."""

    name: str
    wished: str
    instead: str


class Unfinished(msgspec.Struct, frozen=True):
    """A phase before measuring in which probes still were when the time was over."""

    phase: str  # importing | loading | building | preparing | warming up
    name: str
    seconds: float
    devices: tuple[str, ...]
    where: str = ""  # file.py:12


class TakenMemory(msgspec.Struct, frozen=True):
    """Memory of a device that other processes hold, and that the plan leaves to them."""

    device: str
    size_bytes: int


class CodeLimit(msgspec.Struct, frozen=True):
    """The user's code fails above a number of rows, though memory suffices."""

    rows: int  # the most that ran below it
    failed_rows: int  # the fewest that failed
    error: str


class FewSteps(msgspec.Struct, frozen=True):
    """An epoch has so few steps that the model learns little."""

    steps: int
    global_batch: int
    rows: int
    most: int  # the largest batch of an epoch of 100 steps; 0: there are fewer rows


class ShortBudget(msgspec.Struct, frozen=True):
    """The budget was over before any split was measured."""

    budget_seconds: float
    start_seconds: float  # of it, to start processes
    enough_seconds: int


class PassStatistics(msgspec.Struct, frozen=True):
    """A layer computes its statistics over the rows of a pass, not over a device's whole share."""

    layer: str
    rows: int


class ObjectiveReached(msgspec.Struct, frozen=True):
    """The chosen layout's value of an objective that overruled speed."""

    objective: str
    value: float
    max_slowdown: float
    gain: float | None = None  # over the fastest layout; None: the plan is that


class Learning(msgspec.Struct, frozen=True):
    """What the batch means for learning, if the noise scale or the script's batch is known."""

    global_batch: int
    scale: NoiseScale | None = None
    worth: tuple[float, float, float] | None = None  # value and 95 % interval
    # measured batches that are faster than all smaller ones: batch, samples/s, their worth
    frontier: tuple[tuple[int, float, float], ...] = ()
    own_batch: int | None = None
    speed: float | None = None  # times the samples/s of the script's own batch
    extra: tuple[float, float, float] | None = None  # times the samples for the same loss
    adam_rate: float | None = None  # times the learning rate of the own batch
    sgd_rate: float | None = None
    sgd_rule: Literal["linear", "adascale"] = "linear"


class AdapterMemory(msgspec.Struct, frozen=True):
    """The approximate memory of a frozen model with adapters, and the devices that can
    hold it alone.
    """

    kind: str  # lora, qlora
    words: str
    state_bytes: int
    fits: tuple[str, ...]


class StateMemory(msgspec.Struct, frozen=True):
    """The memory of a model's state, if shards were tried, and training methods that
    would need less.
    """

    state_bytes: int
    whole_on: tuple[str, ...]  # devices that hold it alone
    held: tuple[tuple[str, int], ...]  # the part of each device, where the plan is in shards
    adapters: tuple[AdapterMemory, ...] = ()  # none where adapters are what is trained


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search."""

    chosen: Chosen
    figure: Figure
    advice: Recommendation | None = None  # None: a verdict of an older version
    equal_shares: bool = False  # are right: frameworks' own data parallelism is as fast
    simulated: bool = False
    rivals: tuple[Rival, ...] = ()
    split_loss: SplitLoss | None = None
    split_unmeasured: bool = False  # one device was chosen, and no split near its batch ran
    tolerance: float = 0.0
    framework: str = "none"
    batch_given: bool = False  # by the user
    doubts: tuple[DoubtFound, ...] = ()
    on_gpus: bool = False  # which may be hot
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()  # on the devices and the request
    short_budget: ShortBudget | None = None
    retreats: tuple[ReplacedLayout, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    taken_memory: tuple[TakenMemory, ...] = ()
    code_limit: CodeLimit | None = None
    few_steps: FewSteps | None = None
    pass_statistics: PassStatistics | None = None
    slow_bfloat16: tuple[str, ...] = ()  # devices without hardware for it, beside others with it
    objective: ObjectiveReached | None = None
    learning: Learning | None = None
    state: StateMemory | None = None  # None: the model wasn't tried in shards
    stopped: StopCode = "settled"
    stopped_detail: str = ""
    failed: int = 0  # measurements that failed, besides those that ran out of memory
    sum_loss: SumLoss | None = None  # None: the plan reaches nearly the sum, or is one device
    unequal_twins: UnequalTwins | None = None
    link: Link | None = None  # between the chosen devices; None: it wasn't measured
    limits: tuple[TrainingLimit, ...] = ()  # what the training's time goes to, the largest first
