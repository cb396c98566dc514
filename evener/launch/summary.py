"""Summarize a training run when it has ended: its speed, its bottlenecks and its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from evener.balancer.number_format import (
    duration,
    group_digits,
    milliseconds,
    percent,
    rate,
    size,
    write_share,
)

from ..live.files import LiveDevice, LiveRecord, ShareChange, parse_record
from ..live.journal import TRAINING_JOURNAL
from ..live.measured import measure_rank, recent_sums
from ..plan.layout import label_device
from ..printable import plain
from ..system.files import runs_folder, write_atomically
from ..training.limits import LimitKind, TrainingLimit
from ..training.step_limits import MeasuredRank, judge_training
from ..training.step_record import Comparison
from ..training.step_sums import RankStep

SUMMARY, SUMMARY_TEXT = "summary.json", "summary.txt"  # in the run's folder
# minimum number of steps for meaningful metrics, without the first ones
FEWEST_STEPS = 20
FEWEST_LONG_STEPS, LONG_SECONDS = 5, 10.0  # the same if they took at least this many seconds
MOST_NAMED = 3  # maximum number of bottlenecks to name
MOST_GAIN = 9.0  # larger gains aren't distinguished

End = Literal["finished", "interrupted", "failed"]


class RankSummary(msgspec.Struct, frozen=True):
    """The summary of one device in a training run that has ended.

    Unknown values are 0.
    """

    device: str
    share: int  # rows per step at the end
    micro: int  # rows per pass
    step: RankStep | None  # its mean step, in five parts
    memory_bytes: int  # peak memory use
    memory_of_bytes: int  # the device's memory


class FirstShares(msgspec.Struct, frozen=True, kw_only=True):
    """A training run's first shares, and how their speed compares with that of the last shares."""

    shares: tuple[int, ...]  # rows of every rank
    own_work_s: tuple[float, ...]  # median compute time (own work) of a step with these shares
    last_own_work_s: tuple[float, ...]  # the same with the last shares
    samples_per_second: float  # 0: unknown
    changes: int  # number of changes
    compared: Comparison  # steps with the last shares against steps with the first


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The speed, bottlenecks and shares of a training run that has ended.

    The run's first steps aren't included. `of_plan` is the speed divided by the speed that the plan
    expects. Unknown values are 0.
    """

    run: str
    end: End
    steps: int
    seconds: float  # including the time between steps
    samples_per_second: float
    plan_samples_per_second: float
    of_plan: float
    step_s: float
    limits: tuple[TrainingLimit, ...]  # bottlenecks, the largest first
    parts_known: bool  # True if the ranks reported the parts of their steps
    # True if the rows come from no DataLoader: their number is unknown, and a step is an update
    without_loader: bool = False
    ranks: tuple[RankSummary, ...]
    missing_ranks: int  # number of ranks on other hosts or without a record
    changes: tuple[ShareChange, ...]
    first: FirstShares | None = None  # None: shares weren't compared

    @property
    def is_short(self) -> bool:
        """True if too few steps were timed to judge the run."""
        fewest = FEWEST_LONG_STEPS if self.seconds >= LONG_SECONDS else FEWEST_STEPS
        return self.steps < fewest


def read_records(folder: Path) -> list[LiveRecord]:
    """Read the last record that each rank has left in `folder`, ordered by rank.

    A script may train several times. Only records of the newest training run are returned.
    """
    records = []
    for path in folder.glob("*.json"):
        with suppress(OSError):
            found = parse_record(path.read_bytes())
            if found is not None:
                records.append(found)
    if not records:
        return []
    newest = max(records, key=lambda record: record.updated_at)
    ranks = {}
    for record in sorted(records, key=lambda record: record.updated_at):
        if record.training == newest.training and record.world == newest.world:
            ranks[record.rank] = record
    return [ranks[rank] for rank in sorted(ranks)]


def summarize_training(
    records: Sequence[LiveRecord],
    run: str,
    end: End,
    labels: Mapping[str, str],
    plan_samples_per_second: float = 0.0,
    competitors: str = "",
    first: FirstShares | None = None,
) -> TrainingSummary | None:
    """Summarize a training run from the last records of its ranks.

    - `run`, `end`: the run's name, and how it ended.
    - `labels`: names of the devices, by device id.
    - `plan_samples_per_second`: the speed that the plan expects, in case no record contains it.
    - `competitors`: names of other programs that used the CPU cores.
    - `first`: the first shares and their speed, if they are known.

    Returns None if there are no records.
    """
    if not records:
        return None
    matched = _match_all(records, labels)
    missing = max(0, max(record.world for record in records) - len(records))
    judged = judge_training([rank.measured for rank in matched], not missing, competitors)
    steps = judged.steps or (None,) * len(matched)
    counted = max(records, key=lambda each: each.counted_steps)
    speed = sum(map(_speed, records))
    plan = _find_plan_rate(records) or plan_samples_per_second
    return TrainingSummary(
        run=run,
        end=end,
        steps=counted.counted_steps,
        seconds=counted.counted_seconds,
        samples_per_second=speed,
        plan_samples_per_second=plan,
        of_plan=speed / plan if plan and not missing else 0.0,
        step_s=judged.step_s,
        limits=judged.limits,
        parts_known=any(rank.measured.sums.steps for rank in matched),
        without_loader=any(each.without_loader for each in records),
        ranks=tuple(map(_MatchedRank.summarize, matched, steps)),
        missing_ranks=missing,
        changes=_find_changes(records),
        first=first,
    )


class _MatchedRank(NamedTuple):
    """A device of a rank, with the rank's record and the device's measurements."""

    # `live` is the device's entry in the record

    record: LiveRecord
    live: LiveDevice
    measured: MeasuredRank

    def summarize(self, step: RankStep | None) -> RankSummary:
        """Return the summary of this device. `step` is its mean step, or None if it is unknown."""
        live, record = self.live, self.record
        memory = record.memory_bytes, record.memory_of_bytes
        return RankSummary(self.measured.name, live.batch, live.micro, step, *memory)


def _find_plan_rate(records: Sequence[LiveRecord]) -> float:
    """Return the samples/s that the plan expects, or 0 if unknown."""
    return max(record.plan_samples_per_second for record in records)


def _find_changes(records: Sequence[LiveRecord]) -> tuple[ShareChange, ...]:
    """Return the share changes of the training run, from the record that lists the most changes."""
    return max((record.changes for record in records), key=len)


def _match_all(records: Sequence[LiveRecord], labels: Mapping[str, str]) -> list[_MatchedRank]:
    return [_match(record, live, labels) for record in records for live in record.devices]


def _match(record: LiveRecord, live: LiveDevice, labels: Mapping[str, str]) -> _MatchedRank:
    return _MatchedRank(record, live, _measure(record, live, _name(record, live, labels)))


def _speed(record: LiveRecord) -> float:
    """Return the samples/s over all counted steps, or 0 if there are none."""
    return record.counted_samples / record.counted_seconds if record.counted_seconds else 0.0


def _measure(record: LiveRecord, live: LiveDevice, name: str) -> MeasuredRank:
    """Return a device's measurements over the whole training run.

    If the record has no times for the whole run, those of the last steps are used.
    """
    sums = record.whole if record.whole.steps else recent_sums(record, live)
    return measure_rank(record, live, name, sums, live.micro, record.starved_so_far)


def _name(record: LiveRecord, live: LiveDevice, labels: Mapping[str, str]) -> str:
    known = labels.get(live.id) or plain(label_device(live.id, live.index), 80)
    return known or f"rank {max(0, record.rank)}"


def describe_summary(summary: TrainingSummary) -> list[str]:
    """Return a summary as lines of text for the terminal."""
    if summary.is_short:
        steps = f"{group_digits(summary.steps)} step{'' if summary.steps == 1 else 's'}"
        few = f"{steps} after the first ones, too few to say more: {FEWEST_STEPS} are needed"
        return [few, *_describe_ranks(summary), *_describe_record(summary)]
    lines = [_describe_speed(summary), _describe_limits(summary), _describe_remedies(summary)]
    return [*filter(None, lines), *_describe_ranks(summary), *_describe_record(summary)]


def _describe_speed(summary: TrainingSummary) -> str:
    plan = ""
    if summary.plan_samples_per_second:
        of = f"{percent(summary.of_plan)} of" if summary.of_plan else "beside"
        plan = f", {of} the plan's {rate(summary.plan_samples_per_second)}"
    steps = f"{group_digits(summary.steps)} steps in {duration(summary.seconds)}"
    if summary.without_loader:
        per_second = summary.steps / summary.seconds if summary.seconds else 0.0
        return f"speed: {rate(per_second)} steps/s; {steps}; its rows don't come from a DataLoader"
    return f"speed: {rate(summary.samples_per_second)} samples/s{plan}; {steps}"


def _describe_limits(summary: TrainingSummary) -> str:
    if not summary.parts_known:
        return "limited by: not known, as this training doesn't report the parts of its steps"
    if not summary.limits and summary.without_loader:
        text = "nothing that can be seen without a DataLoader: making rows counts as own work"
        return f"limited by: {text}, of {milliseconds(summary.step_s)} a step"
    if not summary.limits:
        return f"limited by: nothing besides own work, of {milliseconds(summary.step_s)} a step"
    named = [
        f"{limit.kind.noun}{_by(limit)}, {milliseconds(limit.milliseconds / 1e3)} of a step "
        f"({percent(limit.share)})"
        for limit in summary.limits[:MOST_NAMED]
    ]
    rest = 1 - sum(limit.share for limit in summary.limits)
    if len(summary.limits) <= MOST_NAMED and rest > 0:
        rows = ", including making rows," if summary.without_loader else ""
        named.append(f"the rest, {percent(rest)}, is own work{rows} and small parts")
    return f"limited by: {'; '.join(named)}"


def _by(limit: TrainingLimit) -> str:
    if not limit.by:
        return ""
    if limit.kind == LimitKind.HOST_STARVED:
        return f" (taken by {plain(limit.by, 120)})"
    if limit.kind == LimitKind.UNEQUAL:
        return f", {limit.by}"
    return f" on {limit.by}"


def _describe_remedies(summary: TrainingSummary) -> str:
    if not summary.limits:
        return ""
    first = summary.limits[0]
    low, high = _write_gain(first.gain_low), _write_gain(first.gain_high)
    return f"would help: {first.remedy} {_write_gain(first.gain)} (between {low} and {high})"


def _write_gain(gain: float) -> str:
    """Return a gain as text, such as "+12 %"."""
    # gains from MOST_GAIN on are written with "over"
    return f"over +{percent(MOST_GAIN)}" if gain >= MOST_GAIN else f"+{percent(gain)}"


def _describe_ranks(summary: TrainingSummary) -> list[str]:
    held = [_describe_memory(rank) for rank in summary.ranks if rank.memory_bytes]
    memory = [f"memory: {', '.join(held)}"] if held else []
    if not summary.ranks:
        return memory
    if summary.without_loader:
        return [*(_describe_device(rank) for rank in summary.ranks), *memory]
    shares = ", ".join(map(_describe_share, summary.ranks))
    missing = f"; {summary.missing_ranks} ranks aren't seen here" if summary.missing_ranks else ""
    return [f"shares: {shares}{_describe_changes(summary)}{missing}", *memory]


def _describe_share(rank: RankSummary) -> str:
    """Describe a device's share. If it computes no rows, say that it holds a part of the state."""
    if not rank.share:
        return f"none on {rank.device}, which holds a part of the state"
    return f"{write_share(rank.share, rank.micro)} on {rank.device}{_describe_own_work(rank)}"


def _describe_device(rank: RankSummary) -> str:
    """Describe a device whose share is unknown, because its rows don't come from a DataLoader."""
    return f"device: {rank.device}{_describe_own_work(rank)}"


def _describe_own_work(rank: RankSummary) -> str:
    own_s = rank.step.own_work_s if rank.step is not None else 0.0
    return f" ({milliseconds(own_s)} of own work)" if own_s else ""


def _describe_changes(summary: TrainingSummary) -> str:
    """Describe the first shares, how many times they changed, and the gain.

    Returns "" if the shares didn't change.
    """
    first = summary.first
    if first is None:
        times = len(summary.changes)
        if not times:
            return ""
        before = "+".join(map(str, summary.changes[0].before))
        return f"; {before} at first, changed {'once' if times == 1 else f'{times} times or more'}"
    if not first.changes:
        return ""
    is_even = len(set(first.shares)) == 1
    shares = "equal" if is_even else "+".join(map(str, first.shares))
    speed = f", {rate(first.samples_per_second)} samples/s" if first.samples_per_second else ""
    often = "once" if first.changes == 1 else f"{first.changes} times"
    now = tuple(rank.share for rank in summary.ranks)
    if first.compared.outcome == "same shares" and now != first.shares:
        # the newest shares haven't had enough steps to be compared
        return f"; {shares} at first{speed}; changed {often}: too few steps since to compare"
    return f"; {shares} at first{speed}; changed {often}{_describe_gain(first.compared)}"


def _describe_gain(compared: Comparison) -> str:
    match compared.outcome:
        case "faster" | "slower":
            error = percent((compared.high - compared.low) / 2)
            word = "more" if compared.gain > 0 else "fewer"
            return f": {percent(abs(compared.gain))} {word} samples/s at the end (± {error})"
        case "not comparable":
            return ": not comparable, as the devices' speed changed"
        case "unclear":
            return ": no clear difference"
        case _:
            return ": the same shares again"


def _describe_memory(rank: RankSummary) -> str:
    held = size(rank.memory_bytes)
    if not rank.memory_of_bytes:
        return f"{held} on {rank.device}"
    part = percent(rank.memory_bytes / rank.memory_of_bytes)
    return f"{held} of {size(rank.memory_of_bytes)} ({part}) on {rank.device}"


def _describe_record(summary: TrainingSummary) -> list[str]:
    """Return a line with the command that shows the run's journal, or [] if it has none."""
    if not (runs_folder() / summary.run / TRAINING_JOURNAL).exists():
        return []
    return [f"record: evener runs show {summary.run}"]


def save_summary(summary: TrainingSummary) -> None:
    """Write a summary as JSON and as text into the folder of the run's journal.

    Does nothing if the run has no journal or the files can't be written.
    """
    folder = runs_folder() / summary.run
    if not (folder / TRAINING_JOURNAL).exists():
        return
    text = "".join(f"{line}\n" for line in describe_summary(summary))
    with suppress(OSError):
        write_atomically(folder / SUMMARY, msgspec.json.encode(summary))
        write_atomically(folder / SUMMARY_TEXT, text.encode())


def load_summary(run: str) -> TrainingSummary | None:
    """Read the saved summary of a run, or return None if there is none or it can't be read."""
    with suppress(OSError, msgspec.MsgspecError):
        content = (runs_folder() / run / SUMMARY).read_bytes()
        return msgspec.json.decode(content, type=TrainingSummary)
    return None
