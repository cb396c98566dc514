"""The ranks of a training run, with their devices and step times, and what slows them down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import msgspec

from evener.balancer.number_format import duration, milliseconds, percent, step_time
from evener.devices.snapshot_builder import OLD_SECONDS
from evener.devices.types import DeviceSample, ProcessSample, Snapshot
from evener.live.files import Doing, LastStep, LiveDevice, Training
from evener.live.measured import measure_rank, recent_sums
from evener.plan.layout import label_device
from evener.printable import plain
from evener.training.limits import LEAST_SHARE, LimitKind, TrainingLimit
from evener.training.step_limits import MeasuredRank, TrainingAnalysis
from evener.training.step_sums import RankStep, StepSums

SILENT_STEPS = 3.0  # a rank is silent if its report is late by more steps
# smaller percentages of throttled time, or of a device's use by another process, aren't reported
LEAST_PERCENT = 5.0
MOST_PASSES = 1000  # a report of a share with more passes is wrong, and would take long to format
ORDER: tuple[Doing, ...] = get_args(Doing)
Work = Mapping[
    tuple[str, str], tuple[float, float]
]  # by host and device id: compute time (own work) and waiting in seconds
SamplesByDevice = Mapping[tuple[str, str], DeviceSample]  # by host and device id
NO_STEP = RankStep(0.0, 0.0, 0.0, 0.0, 0.0)


class RankRow(msgspec.Struct, frozen=True):
    """A rank of a training run on one of its devices.

    An unknown number is 0, an unknown string "", and an unknown rank -1. Fields that end in `_s`
    are in seconds.
    """

    rank: int
    pid: int
    device: str  # GPU:0, or the training's name for a device that the monitor doesn't see
    share: int  # samples of a step
    micro: int  # samples of a pass
    samples_per_second: float
    tokens_per_second: float
    own_work_s: float  # seconds of a step until the last gradient is ready
    waiting_s: float  # seconds of a step from there to the end of the backward pass
    silent_s: float  # seconds for which its next report has been overdue; 0 while it reports
    doing: Doing  # phase of the step in which it is silent; empty if unknown (stopped process)
    batch: int  # number of the batch in which it is silent
    input_s: float  # seconds of a step waiting for data
    # seconds of a step between the backward pass and the next batch, without the optimizer
    between_s: float
    least_waiting_s: float  # 10th percentile of waiting, in seconds
    own_spread: float  # interquartile range of compute time (own work), divided by its median
    recent: StepSums = StepSums()  # sums over its last steps
    step: RankStep = NO_STEP  # mean over its last steps, by part
    last_steps: tuple[LastStep, ...] = ()
    ended_s: float = 0.0  # seconds since the training ended; 0 while it runs
    without_loader: bool = False  # its rows come from no DataLoader, so their number is unknown


SILENT = "silent"  # the kind of cause for a rank that doesn't report
HOT = ("thermal", "temperature", "heat")  # words in throttling reasons that mean heat

DOING: dict[Doing, str] = {  # what a silent rank is doing
    "": "silent",
    "own work": "in own work",
    "sum": "waiting in the all-reduce",
    "update": "in the optimizer's step",
    "between steps": "between steps",
    "input": "waiting for data",
}


class Cause(msgspec.Struct, frozen=True):
    """A reason why a training run is slow or has stopped making progress."""

    kind: str  # the kind of a limit, or SILENT
    text: str
    rank: str = ""  # rank or device that is the cause; empty: all ranks
    seconds: float = 0.0  # seconds of a step, or of silence
    part: float = (
        0.0  # fraction of a step, of throttled time, or of the device's use by another process
    )
    others_wait: bool | None = False  # None: the other ranks' progress is unknown


class RankOnDevice(NamedTuple):
    """A rank's row, its report about a device, and the device's reading, if there is one."""

    row: RankRow
    live: LiveDevice
    sample: DeviceSample | None


def place_ranks(
    report: Training, samples: SamplesByDevice, at_seconds: float
) -> Iterator[RankOnDevice]:
    """Yield a row for each device in the report of a rank.

    `samples` are the readings by host and device id; `at_seconds` is their time in Unix seconds.
    """
    silent_s = silent_seconds(report, at_seconds)
    for live in report.devices or (LiveDevice("", -1, 0, report.samples_per_second),):
        sample = samples.get((live.host, live.id)) or samples.get(("", live.id))
        part = (
            live.samples_per_second / report.samples_per_second
            if report.samples_per_second
            else 0.0
        )
        row = RankRow(
            rank=report.rank,
            pid=report.pid,
            device=sample.device.label if sample else _name(live),
            share=live.batch,
            micro=live.micro if live.batch <= MOST_PASSES * live.micro else 0,
            samples_per_second=live.samples_per_second,
            tokens_per_second=report.tokens_per_second * part,
            own_work_s=live.own_work_s,
            waiting_s=live.waiting_s,
            silent_s=silent_s,
            doing=report.doing,
            batch=report.batch,
            input_s=report.input_s,
            between_s=report.between_s,
            least_waiting_s=live.least_waiting_s or live.waiting_s,
            own_spread=live.own_spread,
            recent=recent_sums(report, live),
            last_steps=report.last_steps,
            without_loader=report.without_loader,
        )
        yield RankOnDevice(row, live, sample)


def measure_on_device(
    rank: RankOnDevice, rows: Sequence[RankRow], report: Training
) -> MeasuredRank:
    """Return what a rank measured on one device, in the form that the analysis of steps needs.

    `rows` are all ranks of the training run, and `report` is this rank's report.
    """
    row, name = rank.row, _name_rank(rank.row, rows)
    return measure_rank(report, rank.live, name, row.recent, row.micro, report.starved)


def silent_seconds(report: Training, at_seconds: float) -> float:
    """Return how many seconds a rank's report is overdue, or 0 if it is only slightly late."""
    late_s = report.late_seconds(at_seconds)
    return late_s if late_s > max(OLD_SECONDS, SILENT_STEPS * report.step_s) else 0.0


def work_by_device(snapshot: Snapshot) -> Work:
    """Return how many seconds of a step each training device computes, and how many it waits.

    The keys are (host, device id), and the host is "" for devices of this machine. Devices with
    overdue reports are left out.
    """
    local = not any(sample.device.host for sample in snapshot.devices)
    return {
        ("" if local else live.host, live.id): (live.own_work_s, live.waiting_s)
        for report in snapshot.reports
        if not silent_seconds(report, snapshot.at_seconds)
        for live in report.devices
        if live.own_work_s > 0
    }


def _name(live: LiveDevice) -> str:
    """Return a name for a device that the monitor doesn't see."""
    name = label_device(live.id, live.index)
    name = name or (f"device {live.index}" if live.index >= 0 else "")
    return plain("/".join(part for part in (live.host, name) if part), 80)


def find_causes(
    ranks: Sequence[RankOnDevice],
    analysis: TrainingAnalysis,
    processes: Sequence[ProcessSample],
    missing_ranks: int = 0,
) -> tuple[Cause, ...]:
    """Return the reasons why a training run is slow, such as silent ranks or other processes.

    - `analysis`: the analysis of its steps.
    - `processes`: all processes on the devices.
    - `missing_ranks`: the number of ranks that don't report on this machine.
    """
    rows = [place.row for place in ranks]
    return (
        *_find_stall_causes(rows, missing_ranks),
        *(_describe_limit(limit, analysis, rows) for limit in analysis.limits),
        *_throttled(ranks),
        *_neighbours(rows, processes),
    )


def _name_rank(row: RankRow, rows: Sequence[RankRow]) -> str:
    """Return a rank's name: its device or, if several ranks share it, a name such as "Rank 3"."""
    if row.device and sum(other.device == row.device for other in rows) == 1:
        return row.device
    return f"Rank {row.rank}" if row.rank >= 0 else f"Process {row.pid}"


def _find_stall_causes(rows: Sequence[RankRow], missing_ranks: int) -> Iterator[Cause]:
    """Yield a cause for each silent rank that the other ranks wait for.

    A rank is silent if its report is overdue. If all ranks are silent in the same phase of a step,
    there is one cause for all of them.
    """
    silent = [row for row in rows if row.silent_s]
    blocking = _find_blocking_ranks(silent)
    if _are_all_in_one_phase(rows, blocking):
        yield _describe_all(rows, missing_ranks)
        return
    held = [row for row in silent if row.doing]
    others_wait = any(row not in blocking for row in held)
    others_unknown = missing_ranks > 0 or len(rows) > len(
        silent
    )  # the progress of some ranks is unknown
    for row in blocking:
        yield _describe_silent(row, _name_rank(row, rows), others_wait, others_unknown)


def _find_blocking_ranks(silent: Sequence[RankRow]) -> list[RankRow]:
    """Return the silent ranks that the other ranks wait for.

    These are the ranks that have stopped or, if none has stopped, those that are furthest behind.
    """
    stopped = [row for row in silent if not row.doing]
    if stopped or not silent:
        return stopped
    least = min(map(_progress, silent))
    return [row for row in silent if _progress(row) == least]


def _are_all_in_one_phase(rows: Sequence[RankRow], blocking: Sequence[RankRow]) -> bool:
    """Return whether there are several ranks, all of them silent in the same phase of a step.

    `blocking` are the ranks that are furthest behind.
    """
    # Nobody waits for a single rank.
    at = {row.doing for row in rows}
    return len(rows) == len(blocking) > 1 and len(at) == 1 and "" not in at


def _describe_all(rows: Sequence[RankRow], missing_ranks: int) -> Cause:
    last = max(rows, key=lambda row: row.silent_s)
    seen = " seen here" if missing_ranks else ""
    text = f"All ranks{seen} have been {_describe_silence(last)}."
    return Cause(_silence_kind(last), text, seconds=last.silent_s)


def _describe_silent(row: RankRow, name: str, others_wait: bool, others_unknown: bool) -> Cause:
    """Describe how long a rank has been silent, in which phase of a step, and whether others wait.

    `others_unknown` means that the progress of some other ranks is unknown.
    """
    if others_wait and not row.doing:
        silent = f"{name} has been silent for {duration(row.silent_s)}"
        text = f"{silent}: stopped, or gone; the others wait for it."
        return Cause(SILENT, text, name, row.silent_s, others_wait=True)
    if others_unknown and row.doing == "sum":
        text = f"{name} has been {_describe_silence(row)}; where the others are isn't known yet."
        return Cause(_silence_kind(row), text, name, row.silent_s, others_wait=None)
    text = f"{name} has been {_describe_silence(row)}{_waiting_for_it(others_wait)}."
    return Cause(_silence_kind(row), text, name, row.silent_s, others_wait=others_wait)


def _describe_silence(row: RankRow) -> str:
    """Describe the phase of a step in which a rank has been silent, and for how long."""
    perhaps = ", perhaps in an evaluation or a checkpoint" if row.doing == "between steps" else ""
    return f"{DOING[row.doing]} for {duration(row.silent_s)}{perhaps}"


def _waiting_for_it(others_wait: bool) -> str:
    return "; the others wait for it" if others_wait else ""


def _silence_kind(row: RankRow) -> str:
    """Return the `Cause.kind` for a silent rank.

    This is `INPUT` if the rank fell silent while it waited for input, `BETWEEN` if that happened
    between steps, and `SILENT` otherwise.
    """
    kinds: dict[Doing, str] = {"input": LimitKind.INPUT, "between steps": LimitKind.BETWEEN}
    return kinds.get(row.doing, SILENT)


def _progress(row: RankRow) -> tuple[int, int]:
    """Return how far a silent rank has got: its batch, and its phase of the step as an index.

    A rank that is further behind has a smaller tuple.
    """
    # Some ranks request their next batch before their work between steps, others after it, so these
    # two phases count as equally far.
    return row.batch, min(ORDER.index(row.doing), ORDER.index("between steps"))


_WHAT = {  # sentences about what takes time in a step, for all ranks and for a single one
    LimitKind.INPUT: ("Input takes", "waits for data for"),
    LimitKind.RANK_INPUT: ("Input takes", "waits for data for"),
    LimitKind.OPTIMIZER: ("The optimizer's step takes", "is in the optimizer's step for"),
    LimitKind.CHECKPOINTS: ("Writing checkpoints takes", "writes checkpoints for"),
    LimitKind.VALIDATION: ("Validation takes", "validates for"),
    LimitKind.OWN_CODE: (
        "Waiting in the model's own code takes",
        "waits in the model's own code for",
    ),
}


def _describe_limit(
    limit: TrainingLimit, analysis: TrainingAnalysis, rows: Sequence[RankRow]
) -> Cause:
    """Return a `Cause` that describes a limit on a training run's speed."""
    # For a limit of one rank, the description says whether the other ranks wait for it.
    seconds, part = limit.milliseconds / 1e3, limit.share
    blamed_rows = [row for row in rows if limit.by and limit.by == _name_rank(row, rows)]
    waited_s, own_s = 0.0, 0.0
    if blamed_rows:
        waiting = [step.waiting_s for step in analysis.steps]
        waited_s = max(waiting, default=0.0)
        if len(rows) == len(waiting):
            own_s = waiting[rows.index(blamed_rows[0])]
    others = bool(blamed_rows) and waited_s - own_s >= LEAST_SHARE * analysis.step_s
    text = _format_limit(limit, blamed_rows, waited_s)
    if limit.kind != LimitKind.UNEQUAL and others:
        text += _waiting_for_it(others)
    return Cause(
        limit.kind.value, f"{text}.", limit.by if blamed_rows else "", seconds, part, others
    )


def _format_limit(
    limit: TrainingLimit, blamed_rows: Sequence[RankRow], longest_wait_s: float
) -> str:
    """Describe a limit in words, with its milliseconds or its percentage of a step.

    - `blamed_rows`: the row of the rank that causes the limit; empty if several ranks cause it.
    - `longest_wait_s`: the longest time in seconds that a rank waits in a step.
    """
    took = milliseconds(limit.milliseconds / 1e3)
    if limit.kind == LimitKind.UNEQUAL and blamed_rows:
        own, waited = step_time(blamed_rows[0].own_work_s), step_time(longest_wait_s)
        return f"{limit.by} takes {own} for its share; others wait up to {waited} for it"
    if limit.kind == LimitKind.EXCHANGE:
        return f"The exchange of gradients takes {took} that computing doesn't hide"
    if limit.kind == LimitKind.HOST_STARVED:
        by = f"; taken by: {plain(limit.by, 120)}" if limit.by else ""
        return f"Threads wait for cores {percent(limit.share)} of the time{by}"
    if limit.kind == LimitKind.HOST_LAUNCHES:
        return f"The GPU waits for the host that starts kernels, in {took} of own work"
    if limit.kind == LimitKind.BETWEEN:
        example = f"{percent(limit.share)} of the time, for example in logging or clipping"
        whose = f"{limit.by}'s work" if blamed_rows else "Work"
        return f"{whose} between steps takes {took}, {example}"
    everywhere, alone = _WHAT[limit.kind]
    begin = f"{limit.by} {alone}" if blamed_rows else everywhere
    return f"{begin} {took} of a step, {percent(limit.share)}"


def _throttled(ranks: Sequence[RankOnDevice]) -> Iterator[Cause]:
    for row, _, sample in ranks:
        throttled = sample.throttled_percent.current if sample is not None else None
        if sample is not None and throttled is not None and throttled >= LEAST_PERCENT:
            reasons = plain(", ".join(sample.throttle_reasons), 60)
            why = f": {reasons}" if reasons else ""
            text = f"{row.device} is throttled {throttled:.0f} % of the time{why}."
            hot = any(word in reasons.lower() for word in HOT)
            kind = LimitKind.HEAT if hot else LimitKind.POWER
            yield Cause(kind.value, text, row.device, part=throttled / 100)


def _neighbours(rows: Sequence[RankRow], processes: Sequence[ProcessSample]) -> Iterator[Cause]:
    own = {row.pid for row in rows}
    devices = {row.device for row in rows}
    for process in processes:
        busy = process.sm_percent.current or 0.0
        if process.pid in own or process.device_label not in devices:
            continue
        if process.serves_others:
            continue  # the kernels may be the ranks' own
        if busy >= LEAST_PERCENT or process.samples_per_second.current:
            whose = f" of {plain(process.user, 32)}" if process.user else ""
            how_much = f" ({busy:.0f} % of it)" if busy else ""
            where = process.device_label
            text = f"Process {process.pid}{whose} also computes on {where}{how_much}."
            yield Cause(LimitKind.NEIGHBOUR.value, text, where, part=busy / 100)
