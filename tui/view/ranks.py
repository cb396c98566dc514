"""A training's ranks as rows, and what holds them up: silence, input, what lies between steps,
waiting, neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from evener.balancer.number_format import duration, milliseconds, percent
from evener.devices.snapshot_builder import OLD_SECONDS
from evener.devices.types import DeviceSample, ProcessSample, Snapshot
from evener.live.files import Doing, LiveDevice, Training
from evener.printable import plain

SILENT_STEPS = 3.0  # steps by which a report is late if its rank hangs, validates, or has gone
LEAST_PART = 0.05  # of a step, from which it is named
LEAST_EXCHANGE = 0.1  # of a step
MEDIAN_ERROR = 0.19  # of a median over 25 steps: its standard error over their interquartile range
NOISE_ERRORS = 3.0  # from which ranks differ
# of the time throttled, or of a device's multiprocessors that a neighbour takes
LEAST_PERCENT = 5.0
MOST_PASSES = 1000  # of a share; more are no training's, and would take long to write
ORDER: tuple[Doing, ...] = get_args(Doing)
Work = Mapping[
    tuple[str, str], tuple[float, float]
]  # of a device, by host and id: own work and waiting in seconds
Placed = Mapping[tuple[str, str], DeviceSample]  # by host and id


class RankRow(msgspec.Struct, frozen=True):
    """A device of a training. Unknown figures are 0, unknown texts empty, an unknown rank is -1."""

    rank: int
    pid: int
    device: str  # GPU:0; one that the monitor doesn't see has the name that the training gives it
    share: int  # samples of a step
    micro: int  # samples of a pass
    samples_per_second: float
    tokens_per_second: float
    own_work_s: float  # of a step, until the last gradient is ready
    waiting_s: float  # of a step, from there to the end of the backward pass
    silent_s: float  # for which its next report has been due; 0 while it reports
    doing: Doing  # in which it is silent; empty if unknown, as for a process that is stopped
    batch: int  # the one in which it is silent
    input_s: float  # of a step, waiting for data
    # of a step, between the backward pass and the next batch, without the optimizer
    between_s: float
    least_waiting_s: float  # the lowest tenth of waiting
    own_spread: float  # interquartile range of own work over its median


Kind = Literal["silent", "input", "between steps", "waiting", "exchange", "throttled", "neighbour"]


DOING: dict[Doing, str] = {  # what a silent rank is at
    "": "silent",
    "own work": "in own work",
    "sum": "waiting in the all-reduce",
    "update": "in the optimizer's step",
    "between steps": "between steps",
    "input": "waiting for data",
}


class Cause(msgspec.Struct, frozen=True):
    """A cause that holds a training up, and its sentence; the figures in it are fields too."""

    kind: Kind
    text: str
    rank: str = ""  # or device that causes it; empty: all of them
    seconds: float = 0.0  # of a step, or of silence
    part: float = 0.0  # of a step, of the time (throttled) or of the device (neighbour)
    others_wait: bool | None = False  # None: where the others are isn't known yet


class RankPlace(NamedTuple):
    """A rank, what it says of its device, and the device's newest sample where the monitor sees
    it.
    """

    row: RankRow
    live: LiveDevice
    sample: DeviceSample | None


def place_ranks(report: Training, samples: Placed, at_seconds: float) -> Iterator[RankPlace]:
    """A row for each device of a process; one that names none is a row without a device."""
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
        )
        yield RankPlace(row, live, sample)


def silent_seconds(report: Training, at_seconds: float) -> float:
    """Seconds for which the next report of a rank that went silent has been due; 0 while it
    reports.
    """
    late_s = report.late_seconds(at_seconds)
    return late_s if late_s > max(OLD_SECONDS, SILENT_STEPS * report.step_s) else 0.0


def work_by_device(snapshot: Snapshot) -> Work:
    """Own work and waiting of a step on each device, by host and id, where a training that reports
    tells them.
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
    """A device that the monitor doesn't see, as its training names it."""
    name = live.id or (f"device {live.index}" if live.index >= 0 else "")
    return plain("/".join(part for part in (live.host, name) if part), 80)


def find_causes(
    ranks: Sequence[RankPlace], step_s: float, processes: Sequence[ProcessSample], missing: int = 0
) -> tuple[Cause, ...]:
    """Causes that hold a training up, most certain first; `step_s` is 0 if unknown, `missing` ranks
    aren't seen.
    """
    rows = [place.row for place in ranks]
    reporting = [row for row in rows if not row.silent_s]
    step_s = step_s or max(row.own_work_s + row.waiting_s for row in rows)
    return (
        *_silent(rows, missing),
        *_input(reporting, step_s),
        *_between(reporting, step_s),
        *_waiting(reporting, step_s),
        *_throttled(ranks),
        *_neighbours(rows, processes),
    )


def _name_rank(row: RankRow, rows: Sequence[RankRow]) -> str:
    """A rank's name: its device where no other rank is on it, else its number."""
    if row.device and sum(other.device == row.device for other in rows) == 1:
        return row.device
    return f"Rank {row.rank}" if row.rank >= 0 else f"Process {row.pid}"


def _silent(rows: Sequence[RankRow], missing: int) -> Iterator[Cause]:
    """The ranks that others wait for: a stopped one says nothing; else those that are least far."""
    silent = [row for row in rows if row.silent_s]
    held = [row for row in silent if row.doing]
    least = min(map(_progress, held), default=None)
    holding = [row for row in silent if not row.doing] or [
        row for row in held if _progress(row) == least
    ]
    unknown = missing or len(rows) > len(silent)  # what some are at
    if len(rows) == len(holding) > 1 and {row.doing for row in rows} in (
        {each} for each in ORDER[1:]
    ):
        last = max(held, key=lambda row: row.silent_s)
        seen = " seen here" if missing else ""
        text = f"All ranks{seen} have been {_at(last)}."
        yield Cause(_kind(last), text, seconds=last.silent_s)
        return
    waits = len(held) > sum(map(held.__contains__, holding))
    for row in holding:
        name = _name_rank(row, rows)
        if waits and not row.doing:
            text = (
                f"{name} has been silent for {duration(row.silent_s)}: stopped, or gone; the "
                f"others wait for it."
            )
            yield Cause("silent", text, name, row.silent_s, others_wait=True)
        elif unknown and row.doing == "sum":
            text = f"{name} has been {_at(row)}; where the others are isn't known yet."
            yield Cause(_kind(row), text, name, row.silent_s, others_wait=None)
        else:
            text = f"{name} has been {_at(row)}{_waiting_for_it(waits)}."
            yield Cause(_kind(row), text, name, row.silent_s, others_wait=waits)


def _at(row: RankRow) -> str:
    """What a silent rank is at, and how long."""
    perhaps = ", perhaps in an evaluation or a checkpoint" if row.doing == "between steps" else ""
    return f"{DOING[row.doing]} for {duration(row.silent_s)}{perhaps}"


def _waiting_for_it(others: bool) -> str:
    return "; the others wait for it" if others else ""


def _kind(row: RankRow) -> Kind:
    """The kind of what a silent rank is at."""
    return row.doing if row.doing in ("input", "between steps") else "silent"


def _progress(row: RankRow) -> tuple[int, int]:
    """A rank's progress in its step; a batch may be asked for before what lies between steps, or
    after it.
    """
    return row.batch, min(ORDER.index(row.doing), ORDER.index("between steps"))


def _last(rows: Sequence[RankRow], step_s: float) -> list[RankRow]:
    """The ranks that come to the sum about last: what the others do before it is hidden."""
    least_s = min((row.waiting_s for row in rows if row.own_work_s), default=0.0)
    return [
        row for row in rows if not row.own_work_s or row.waiting_s <= least_s + LEAST_PART * step_s
    ]


def _input(rows: Sequence[RankRow], step_s: float) -> Iterator[Cause]:
    """Waiting for data: of all ranks, or of one."""
    found = _find_longest(rows, step_s, lambda row: row.input_s)
    if found is None:
        return
    row, everywhere, waits = found
    name = "" if everywhere else _name_rank(row, rows)
    seconds, part = row.input_s, row.input_s / step_s
    took = f"{milliseconds(seconds)} of a step, {percent(part)}"
    text = f"{name} waits for data for {took}{_waiting_for_it(waits)}."
    if everywhere:
        text = f"Input takes {took}."
    yield Cause("input", text, name, seconds, part, waits)


def _between(rows: Sequence[RankRow], step_s: float) -> Iterator[Cause]:
    """Time between steps: of all ranks, or of one."""
    found = _find_longest(rows, step_s, lambda row: row.between_s)
    if found is None:
        return
    row, everywhere, waits = found
    name = "" if everywhere else _name_rank(row, rows)
    seconds, part = row.between_s, row.between_s / step_s
    what = f"between steps, {percent(part)} of the time, for example in logging or clipping"
    text = f"{name} takes {milliseconds(seconds)} {what}{_waiting_for_it(waits)}."
    if everywhere:
        text = f"{milliseconds(seconds)} pass {what}."
    yield Cause("between steps", text, name, seconds, part, waits)


def _find_longest(
    rows: Sequence[RankRow], step_s: float, seconds: Callable[[RankRow], float]
) -> tuple[RankRow, bool, bool] | None:
    """The rank in which a part of the step is longest, whether it is long in all of them, and
    whether the others wait for that rank; None if it isn't worth naming.
    """
    row = max(_last(rows, step_s), key=seconds, default=None)
    if row is None or not step_s or seconds(row) < LEAST_PART * step_s:
        return None
    if min(map(seconds, rows)) >= seconds(row) / 2:
        return row, True, False
    waits = max(each.waiting_s for each in rows) - row.waiting_s >= LEAST_PART * step_s
    return row, False, waits


def _waiting(rows: Sequence[RankRow], step_s: float) -> Iterator[Cause]:
    """The cost of unequal own work, against ranks that finish together, and of an exchange."""
    timed = [row for row in rows if row.own_work_s]
    if len(timed) < 2:
        return
    slowest = max(_last(timed, step_s), key=lambda row: row.own_work_s)
    shares = [row.share or 1 for row in timed]
    together = sum(shares) / sum(
        share / row.own_work_s for share, row in zip(shares, timed, strict=True)
    )
    waited_s = max(row.waiting_s for row in timed) - slowest.waiting_s
    noise_s = NOISE_ERRORS * MEDIAN_ERROR * max(row.own_spread * row.own_work_s for row in timed)
    if min(slowest.own_work_s - together, waited_s) >= max(LEAST_PART * step_s, noise_s):
        name = _name_rank(slowest, rows)
        text = (
            f"{name} takes {milliseconds(slowest.own_work_s)} for its share; others wait up to "
            f"{milliseconds(waited_s)} for it."
        )
        yield Cause("waiting", text, name, waited_s, waited_s / step_s, True)
    yield from _exchange(timed, step_s)


def _exchange(timed: Sequence[RankRow], step_s: float) -> Iterator[Cause]:
    """The cost of an exchange that nothing overlaps: even in its best steps every rank waits."""
    exchange_s = min(row.least_waiting_s for row in timed)
    if exchange_s >= LEAST_EXCHANGE * step_s:
        took = milliseconds(exchange_s)
        text = f"Exchanging gradients takes {took} that no computation overlaps."
        yield Cause("exchange", text, "", exchange_s, exchange_s / step_s)


def _throttled(ranks: Sequence[RankPlace]) -> Iterator[Cause]:
    for row, _, sample in ranks:
        throttled = sample.throttled_percent.current if sample is not None else None
        if sample is not None and throttled is not None and throttled >= LEAST_PERCENT:
            reasons = plain(", ".join(sample.throttle_reasons), 60)
            why = f": {reasons}" if reasons else ""
            text = f"{row.device} is throttled {throttled:.0f} % of the time{why}."
            yield Cause("throttled", text, row.device, part=throttled / 100)


def _neighbours(rows: Sequence[RankRow], processes: Sequence[ProcessSample]) -> Iterator[Cause]:
    own = {row.pid for row in rows}
    devices = {row.device for row in rows}
    for each in processes:
        busy = each.sm_percent.current or 0.0
        if each.pid in own or each.device_label not in devices:
            continue
        if busy >= LEAST_PERCENT or each.samples_per_second.current:
            whose = f" of {plain(each.user, 32)}" if each.user else ""
            how_much = f" ({busy:.0f} % of it)" if busy else ""
            where = each.device_label
            text = f"Process {each.pid}{whose} also computes on {where}{how_much}."
            yield Cause("neighbour", text, where, part=busy / 100)
