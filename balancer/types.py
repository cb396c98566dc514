"""Data types of a search: layouts, probes, their outcomes, and the problem to solve."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from statistics import fmean
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evener.plan.layout import KINDS, Kind, Traits, check_kind
from evener.shares.curves import Amount, Cost, Work
from evener.shares.whole_rows import count_passes, split_passes

Count = Annotated[int, Meta(ge=0, le=10**15)]
Position = Annotated[int, Meta(ge=0, lt=4096)]


class Stage(StrEnum):
    """The part of a search in which a probe is measured, such as exploration or comparison."""

    SOLO = "solo"
    """Exploration: every device alone, all at the same time."""
    REST = "rest"
    """Exploration: one device alone, while the others are idle."""
    SPLIT = "split"
    """Exploration: a synchronous step over several devices."""
    PART = "part"
    """Exploration of sharded training: one device alone on its rows, with a part of the state."""
    SHARD = "shard"
    """Exploration of sharded training: a whole step over several devices."""
    PACK = "pack"
    """Comparison: several trainings side by side on one device, whose best number is searched."""
    RACE = "race"
    """Comparison: one turn of a candidate."""
    KNOBS = "knobs"
    """Comparison: the winner with another option, such as XLA or a number of loader workers."""
    CHECK = "check"
    """The chosen layout again: this measurement had no part in choosing it."""


# device: the device or its driver was lost
Cause = Literal["signal", "exit", "timeout", "protocol", "raised", "unsupported", "device"]


class Layout(msgspec.Struct, frozen=True, dict=True):
    """One way to train on the devices of a request.

    It says which devices take part, and with how many rows. `shares` has each device's rows per
    step, in the order of the request; 0 if it computes none.
    """

    kind: Kind
    shares: tuple[Count, ...]
    # pack: trainings side by side, each with the whole share
    processes: Annotated[int, Meta(ge=1, le=4096)] = 1
    placement: str = ""  # place: the workload's own name for it; pack: "", "logical" or "mps"
    knobs: tuple[str, ...] = ()  # options beyond the request's: "xla", "mixed", "workers4"
    # rows of one pass, for each device; empty: every share is one pass
    micro: tuple[Count, ...] = ()
    # rows are assigned by their length's cost; `shares` are then mean row counts
    costs: tuple[Cost | None, ...] = ()
    tokens: tuple[Count, ...] = ()  # with `costs`: the most padded tokens in a pass; 0: no limit
    length: Count = 0  # the length of all rows, if the probe measures rows of one length
    # sharded training: the fraction of the model's state on each device
    state: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_kind(self.kind)

    @property
    def traits(self) -> Traits:
        """Properties of this kind of layout."""
        return KINDS[self.kind]

    @property
    def global_batch(self) -> int:
        """Rows per step on all devices together.

        If several processes train on one device, these are the rows per step of each process.
        """
        return sum(self.shares)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Positions of the devices that compute rows or hold a part of the model."""
        held = self.state or (0.0,) * len(self.shares)
        both = enumerate(zip(self.shares, held, strict=True))
        return tuple(i for i, (share, part) in both if share or part)

    @cached_property
    def computing(self) -> tuple[int, ...]:
        """Positions of the devices that compute rows."""
        return tuple(i for i, share in enumerate(self.shares) if share)

    @cached_property
    def pass_rows(self) -> tuple[int, ...]:
        """Rows of the largest pass on each device.

        They are equal to `shares` unless gradients are accumulated over several passes.
        """
        return self.micro or self.shares

    @cached_property
    def group_key(self) -> Layout:
        """This layout with each share reduced to one row.

        It identifies the group of probe processes that can run the layout. Layouts with equal keys
        can be measured by the same processes, one after the other.
        """
        shares = tuple(min(1, share) for share in self.shares)
        return Layout(
            self.kind, shares, self.processes, self.placement, self.knobs, state=self.state
        )

    @property
    def in_passes(self) -> bool:
        """Whether any device accumulates gradients over several passes."""
        return bool(self.micro)

    @property
    def by_rows(self) -> bool:
        """Whether a share is just a number of rows, no matter how long these rows are."""
        return not (self.costs or self.length)

    def passes(self, position: int) -> int:
        """Return the number of passes in which the device at `position` computes its share.

        Returns 0 if it has no share.
        """
        share = self.shares[position]
        return count_passes(share, self.pass_rows[position]) if share else 0


def solo(devices: int, position: int, batch: int, micro: int = 0) -> Layout:
    """Return the layout that trains `batch` rows on a single device, the one at `position`.

    `micro` limits the rows of a pass, for gradient accumulation; 0 means a single pass.
    """
    shares = tuple(batch if i == position else 0 for i in range(devices))
    return layout_of(shares, (micro,) * devices) if 0 < micro < batch else Layout("solo", shares)


def layout_of(shares: tuple[int, ...], micro: tuple[int, ...] = ()) -> Layout:
    """Return the layout with these shares: "solo" if only one device has rows, else "split".

    `micro` limits the rows that each device computes in one pass; empty means one pass for each
    share. The rows are spread evenly over the passes, and the layout stores the rows of the largest
    pass. Layouts with the same passes are therefore equal.
    """
    kind: Kind = "solo" if shares.count(0) == len(shares) - 1 else "split"
    if not micro:
        return Layout(kind, shares)
    rows = tuple(
        max(split_passes(share, most)) if share else 0
        for share, most in zip(shares, micro, strict=True)
    )
    return Layout(kind, shares, micro=() if rows == shares else rows)


class Probe(msgspec.Struct, frozen=True):
    """A request to time some training steps of one layout.

    Two equal probes ask for the same measurement. So if a layout is measured repeatedly, each
    measurement has a different `turn`. The same holds for repeated rounds in which each device runs
    alone.
    """

    layout: Layout
    stage: Stage
    seconds: float  # maximum measuring time, without warm-up
    turn: int = 0
    whole: bool = False  # measure for the full time, even if the result is precise earlier
    # number of steps to measure instead of a time; `seconds` then limits only the warm-up
    steps: int = 0
    after: int = -1  # the turn of the last probe of the check stage; -1: none


Doubt = Literal[  # in the order in which they are reported
    "not_finite",
    "ran_out",  # of a plan: its layout also ran out of memory
    "short_of_memory",  # an allocator had to free cached memory in most steps
    "disturbed",
    "throttled",
    "capped",
    "drift",
    "changed",
    "noisy",
    "slow_start",
    "stalled",
    "few_steps",  # of a plan: the budget left time only for single steps of its layout
    "too_short",
]


class MeasurementDoubt(msgspec.Struct, frozen=True):
    """A warning about a measurement, such as throttling, with the device that it concerns."""

    code: Doubt
    value: float = 0.0  # the measured value: a relative size, a fraction of time, or a step number
    device: int = -1  # position; -1: the whole step
    taken: float = 0.0  # the fraction of the CPU time that other processes took; 0: unknown


class Power(msgspec.Struct, frozen=True):
    """Mean electric power of all devices of a request, in watts."""

    active_watts: float  # power of the devices that compute
    idle_watts: float  # power of unused devices

    @property
    def watts(self) -> float:
        """Power of all devices together."""
        return self.active_watts + self.idle_watts

    def samples_per_joule(self, samples_per_second: float) -> float | None:
        """Return the samples computed per joule, or None if the power is 0."""
        return samples_per_second / self.watts if self.watts else None

    @classmethod
    def mean(cls, measurements: Sequence[Power]) -> Power | None:
        """Return the mean of several power measurements, or None if there are none."""
        return (
            cls(
                fmean(one.active_watts for one in measurements),
                fmean(one.idle_watts for one in measurements),
            )
            if measurements
            else None
        )


class PartSeconds(msgspec.Struct, frozen=True):
    """The parts of one device's step time other than computing, in seconds per step.

    The parts may overlap. None means unknown.
    """

    input_seconds: Amount | None = None  # waiting for the rows of a batch
    update_seconds: Amount | None = None  # the optimizer's own step
    starved_seconds: Amount = 0.0  # its threads were ready to run but had no core
    # neither CPU, input nor other devices were busy; None if that can't be measured
    idle_seconds: Amount | None = None
    taken_by: str = ""  # the programs that used the cores meanwhile
    # seconds of full-speed work lost to lower clocks, by heat and by a power limit or brake
    heat_seconds: Amount = 0.0
    power_seconds: Amount = 0.0
    # fraction of the time in which kernels of other processes ran on the device
    neighbour: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # the same for its own kernels; if None (unknown), `neighbour` is the fraction of the time that
    # they waited
    busy: Annotated[float, Meta(ge=0, le=1)] | None = None
    neighbours: str = ""  # the names of those processes


class KeptBatch(msgspec.Struct, frozen=True):
    """Time of a step that trains on a batch kept in memory, so that no data is loaded.

    `low_seconds` and `high_seconds` bound the 95 % interval.
    """

    step_seconds: Amount
    low_seconds: Amount
    high_seconds: Amount


class Timed(msgspec.Struct, frozen=True, tag="timed", tag_field="outcome"):
    """Outcome of a probe that succeeded.

    `step_seconds` is the estimated time of a step; `low_seconds` and `high_seconds` bound its 95 %
    interval.
    """

    probe: Probe
    step_seconds: Annotated[float, Meta(gt=0, le=10**15)]
    low_seconds: Amount
    high_seconds: Amount
    steps: Count  # timed steps, without warm-up
    # peak of each device of the request; None: unknown or unused
    memory_bytes: tuple[Count | None, ...]
    # compute time (own work) of each device per step, without waiting; None: unknown
    device_seconds: tuple[Amount | None, ...]
    first_step_seconds: Amount  # the first step of this shape: tracing, autotuning, compiling
    elapsed_seconds: Amount  # duration of the whole probe, including its start and warm-up
    warnings: tuple[MeasurementDoubt, ...] = ()
    # part of `elapsed_seconds`: starting and building new children, which later probes don't repeat
    start_seconds: float = 0.0
    # part of `start_seconds`: imports, which later children don't repeat
    import_seconds: float = 0.0
    # bytes of each device that other processes held at the start; empty: unknown
    short_bytes: tuple[Count, ...] = ()
    work: tuple[Work | None, ...] = ()  # per device and step, if rows have lengths
    # mean power of each device of the request, including idle ones; None: unknown
    watts: tuple[float | None, ...] = ()
    parts: tuple[PartSeconds | None, ...] = ()  # per device; empty: unknown
    kept: KeptBatch | None = None  # the same step without input, if input takes a part of it
    # a GPU's step on that batch with all kernels enqueued beforehand; None: unknown
    enqueued_seconds: Amount | None = None
    link_bytes_per_second: Amount | None = None  # speed of an all-reduce between the devices
    link_path: str = ""  # the path between them, such as NVLink; empty: unknown

    @property
    def restart_seconds(self) -> float:
        """Time to start this layout's processes again, without their imports, in seconds."""
        return self.start_seconds - self.import_seconds

    @property
    def is_single_step(self) -> bool:
        """Whether the probe timed only a single step, so that its error can't be measured."""
        return self.steps == 1

    def is_short_of_memory(self, position: int | None = None) -> bool:
        """Whether a device's allocator had to free cached memory in most steps.

        `position` is the device; None means any device.
        """
        return any(
            warning.code == "short_of_memory" and position in (None, warning.device)
            for warning in self.warnings
        )

    def was_throttled(self, position: int = -1) -> bool:
        """Return whether the device at `position` was throttled during the probe.

        With a negative position, return whether any device was.
        """
        throttled = [warning.device for warning in self.warnings if warning.code == "throttled"]
        slowed = [device for device in throttled if device >= 0]
        return bool(slowed) if position < 0 else position in slowed

    @property
    def power(self) -> Power | None:
        """Mean power of the devices that the layout uses, and of those that it doesn't use.

        It is None if the power of any device is unknown.
        """
        watts = [watt for watt in self.watts if watt is not None]
        if not watts or len(watts) < len(self.watts):
            return None
        active = sum(watts[i] for i in self.probe.layout.active)
        return Power(active, sum(watts) - active)

    @property
    def tokens(self) -> float:
        """Tokens per step on all devices, without padding.

        It is 0 if rows have no lengths.
        """
        return sum(each.tokens for each in self.work if each)

    @property
    def padding(self) -> float:
        """Fraction of the computed tokens that is padding.

        It is 0 for rows without lengths.
        """
        padded = sum(each.padded for each in self.work if each)
        return 1 - self.tokens / padded if padded else 0.0

    @property
    def samples_per_second(self) -> float:
        """Throughput of all devices and processes together."""
        return self.probe.layout.global_batch * self.probe.layout.processes / self.step_seconds

    @property
    def throughput(self) -> Interval:
        """Throughput in samples/s, with its 95 % interval.

        The interval has the same relative width as that of the step time.
        """
        value = self.samples_per_second
        half = value * (self.high_seconds - self.low_seconds) / 2 / self.step_seconds
        return Interval(value, max(0.0, value - half), value + half)


class OutOfMemory(msgspec.Struct, frozen=True, tag="out_of_memory", tag_field="outcome"):
    """Outcome of a probe that ran out of memory on some devices."""

    probe: Probe
    devices: tuple[Position, ...]
    detail: str
    elapsed_seconds: Amount
    # bytes of each device that other processes held then; empty: unknown
    short_bytes: tuple[Count, ...] = ()
    goes_on: bool = False  # its children have recovered and needn't start again
    # memory ran out as the model was built or moved to the device, or in the optimizer's update:
    # fewer rows wouldn't help
    fits_no_rows: bool = False


HOST_MEMORY = "the host's memory is short"  # in the detail of a failed probe


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="outcome"):
    """Outcome of a probe that failed, but not because it ran out of memory."""

    probe: Probe
    cause: Cause
    detail: str  # one line, readable for users
    devices: tuple[Position, ...]
    elapsed_seconds: Amount
    user_code: bool = False  # the workload's own code or settings are wrong, on any device


Observation = Timed | OutOfMemory | Failed
KNOBS_BEGAN_AT = 1000  # journals up to 0.1: race turns from this number on compared knobs


def upgrade_probe(probe: Probe) -> Probe:
    """Convert a probe from an old journal to today's stages and turn numbers.

    Old journals recorded single devices as SPLIT, and comparisons of options as RACE.
    """
    if probe.stage == Stage.SPLIT and probe.layout.traits.alone:
        return msgspec.structs.replace(probe, stage=Stage.REST)
    if probe.stage == Stage.RACE and probe.turn >= KNOBS_BEGAN_AT:
        return msgspec.structs.replace(probe, stage=Stage.KNOBS, turn=probe.turn - KNOBS_BEGAN_AT)
    return probe


def upgrade_observation(observation: Observation) -> Observation:
    """Convert an outcome from an old journal: its probe gets today's stages and turn numbers."""
    probe = upgrade_probe(observation.probe)
    return (
        observation
        if probe is observation.probe
        else msgspec.structs.replace(observation, probe=probe)
    )


class Interval(msgspec.Struct, frozen=True):
    """An estimate with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


class Result(msgspec.Struct, frozen=True):
    """A layout's throughput in samples/s.

    `turns` is how often it was measured.
    """

    layout: Layout
    throughput: Interval
    turns: int


class PredictedCurve(msgspec.Struct, frozen=True):
    """The step time of one device as a function of the batch size, as the search predicts it."""

    device: int
    # (batch, seconds) that the search expects, for plotting, in increasing order of batch
    points: tuple[tuple[int, float], ...]
    largest_batch: int | None  # the largest batch that ran or is predicted to fit in memory
    smallest_failed: int | None  # the smallest batch that ran out of memory


class Belief(msgspec.Struct, frozen=True):
    """What the search currently predicts for each device, and what it will measure next."""

    curves: tuple[PredictedCurve, ...]
    doing: str  # a message: what is being measured and why


# the fraction of the state on a device that is measured alone, so that its other memory shows
MEASURED_PART = 1 / 64


class ModelState(msgspec.Struct, frozen=True):
    """Memory of a model that can be sharded over several devices, in bytes."""

    state_bytes: int  # parameters, gradients and the optimizer's state
    gathered_bytes: int  # the model's own parameters and two whole units, with their gradients
    step_bytes: int = 0  # temporary memory of the optimizer's step, for the whole model
    parameters: int = 0  # number of the model's parameters; 0: unknown
    trained: int = 0  # trained parameters: few if adapters are trained beside a frozen model
    # part of `state_bytes`: gradients that don't exist yet at the peak of the activations in a
    # step's first pass
    gradient_bytes: int = 0
    # bytes of a rank outside of the framework's allocator: the driver's context and the buffers of
    # the exchange; they count for a device without a memory limit
    beside_bytes: int = 0


class KnownLink(msgspec.Struct, frozen=True):
    """Bandwidth and latency of an all-reduce between devices, as measured."""

    ranks: int
    # of the data that crosses a link: 2 (n - 1) / n times the tensor's bytes
    bytes_per_second: float
    latency_seconds: float = 0.0


class Problem(msgspec.Struct, frozen=True):
    """Input of the search: devices, memory, batch limits, budget and objective.

    `memory_bytes` has the usable bytes of each device; None means unknown.
    """

    devices: int
    memory_bytes: tuple[int | None, ...]
    global_batch: int | None = None  # fixed: the shares sum to it
    max_global_batch: int | None = None
    multiple_of: int = 1  # each share, and so the global batch, is a multiple of it
    tolerance: float = 0.02  # within this of the best layout, the smallest global batch wins
    budget_seconds: float | None = None  # for probing; None: until the results are precise enough
    # the largest batch that the workload can make for one device; None: no limit
    largest_share: int | None = None
    # measure the best layouts until the budget is spent, however certain the plan is
    spend_all: bool = False
    micro: bool = True  # a share may be computed in several passes; False: it must fit in one
    hosts: tuple[int, ...] = ()  # index of each device's host; empty: all are on one host
    # devices with equal numbers may use equal fractions in the training; empty: all are equal
    limits: tuple[int, ...] = ()
    # row lengths in tokens, an even sample in increasing order; empty: shares count rows
    lengths: tuple[int, ...] = ()
    longest_row: int = -1  # the index of the longest row in the data; -1: unknown
    objective: str = "throughput"  # the name of the metric to maximize
    # the speed that an objective may trade away, as a fraction of the fastest layout's
    max_slowdown: float = 0.0
    shards: bool = False  # the workload can be trained in shards
    state: ModelState | None = None  # None until a sharded workload was built
    # every layout uses all devices, because each holds a part of the model
    all_together: bool = False
    link: KnownLink | None = None  # between the devices; None: unknown
    gradient_bytes: int = 0  # exchanged in each step; 0: unknown
    parameter_bytes: int = 0  # of the whole model; 0: unknown
    labels: tuple[str, ...] = ()  # the devices' names in sentences; empty: "device 0" and so on

    def label(self, position: int) -> str:
        """Return a device's name in sentences, such as "GPU:1"."""
        return self.labels[position] if self.labels else f"device {position}"


class Facts(msgspec.Struct, frozen=True):
    """What probe processes reported about the software, the workload and its data."""

    versions: dict[str, str] = {}  # framework -> version
    driver: str = ""
    engine: str = ""  # how split layouts were synchronized: towers | multiworker | ddp | simulated
    workload_digest: str = ""
    # a layer that computes statistics over the rows of a pass, such as batch normalization
    batch_statistics: str = ""
    bfloat16: bool = False  # the workload is known to compute in bfloat16
    rows: int = 0  # in the training data; 0: unknown, or generated for the measurement
    # row lengths in tokens, an even sample in increasing order; empty: none, or all equal
    lengths: tuple[int, ...] = ()
    longest_row: int = -1  # the index of the longest row in the data; -1: unknown
    # the state that a sharded training divides; None until a sharded workload was built
    state: ModelState | None = None
    link: KnownLink | None = None  # between the devices; None: unknown
    gradient_bytes: int = 0  # of the model's trained parameters; 0: unknown
    parameter_bytes: int = 0  # of all of the model's parameters; 0: unknown
    # why each process builds the model again, and how long that takes; "": it needn't, or unknown
    builds_again: str = ""
    build_seconds: float = 0.0


class Stop(StrEnum):
    """Why a search ended; each value is a sentence for the user."""

    SETTLED = "Nothing left to measure is expected to gain more than --tolerance."
    UNSURE = (
        "Nothing left to measure is expected to pay for its time, but the plan may be off by more "
        "than --tolerance"
    )
    TIED = "The leading layouts tie, and the turns that are left would not change that."
    UNCERTAIN = (
        "The leading layouts are measured too roughly to rank them, and the turns that are left "
        "would not change that."
    )
    UNSTEADY = (
        "The plan was measured as often as a search repeats it, and its samples/s are still "
        "uncertain."
    )
    ONLY_ONE = "There is one way to train on these devices, and it was measured."
    BUDGET = "No further measurement fits into the rest of the budget (--budget)."
    NO_FIT = "No layout of the global batch asked for fits the memory of these devices."
    ROW_TOO_LONG = "A row is longer than any device can hold"
    OUT_OF_MEMORY = "Every device ran out of memory at the smallest batch it was given"
    ALL_LOST = "Every device failed"
    LATE = "The budget (--budget) was spent before the search had ended."
    INTERRUPTED = "The search was interrupted."
    CUT_OFF = "The run was cut off."


class End(msgspec.Struct, frozen=True):
    """The reason why a search ended, and an optional detail."""

    stop: Stop
    detail: str = ""

    @property
    def code(self) -> str:
        """The reason for the end as a lowercase identifier, for JSON."""
        return self.stop.name.lower()

    @property
    def words(self) -> str:
        """The reason for the end as a sentence."""
        return f"{self.stop.value}: {self.detail}." if self.detail else self.stop.value
