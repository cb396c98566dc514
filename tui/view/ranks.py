"""A training's ranks as rows, and what holds them up: silence, input, what lies between steps,
waiting, neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from evener.balancer.result.words import say
from evener.balancer.types import Finding
from evener.devices.snapshot_builder import OLD_SECONDS
from evener.devices.types import DeviceSample, ProcessSample, Snapshot
from evener.live.files import Doing, LiveDevice, Training

from ..text.formatting import plain

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


class Cause(msgspec.Struct, frozen=True):
    """A cause that holds a training up: its kind, its sentence, and what that says as a code with
    values.
    """

    kind: Kind
    text: str
    finding: Finding


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
        *_longest("input", "input", reporting, step_s, lambda row: row.input_s),
        *_longest("between steps", "between", reporting, step_s, lambda row: row.between_s),
        *_waiting(reporting, step_s),
        *_throttled(ranks),
        *_neighbours(rows, processes),
    )


def _name_rank(row: RankRow, rows: Sequence[RankRow]) -> str:
    """A rank's name: its device where no other rank is on it, else its number."""
    if row.device and sum(other.device == row.device for other in rows) == 1:
        return row.device
    return f"Rank {row.rank}" if row.rank >= 0 else f"Process {row.pid}"


def _cause(kind: Kind, code: str, **values: object) -> Cause:
    """The cause of this code, in the words of the table."""
    finding = Finding(f"held.{code}", values)
    return Cause(kind, say(finding), finding)


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
        yield _cause(_kind(last), "all", missing=missing, doing=last.doing, seconds=last.silent_s)
        return
    for row in holding:
        waits = len(held) > sum(map(held.__contains__, holding))
        name, others = (
            _name_rank(row, rows),
            "unknown" if unknown and row.doing == "sum" else "wait" if waits else "",
        )
        if row.doing or not waits:
            yield _cause(
                _kind(row),
                "silent",
                rank=name,
                doing=row.doing,
                seconds=row.silent_s,
                others=others,
            )
        else:
            yield _cause("silent", "gone", rank=name, seconds=row.silent_s)


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


def _longest(
    kind: Kind,
    code: str,
    rows: Sequence[RankRow],
    step_s: float,
    seconds: Callable[[RankRow], float],
) -> Iterator[Cause]:
    """A part of the step that is long: of all ranks, or of one, and whether the others wait for
    it.
    """
    row = max(_last(rows, step_s), key=seconds, default=None)
    if row is None or not step_s or seconds(row) < LEAST_PART * step_s:
        return
    took = {"seconds": seconds(row), "part": seconds(row) / step_s}
    if min(map(seconds, rows)) >= seconds(row) / 2:
        yield _cause(kind, f"all_{code}", **took)
        return
    waits = max(each.waiting_s for each in rows) - row.waiting_s >= LEAST_PART * step_s
    yield _cause(kind, code, rank=_name_rank(row, rows), others="wait" if waits else "", **took)


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
        yield _cause(
            "waiting", "share", rank=name, own_seconds=slowest.own_work_s, waited_seconds=waited_s
        )
    yield from _exchange(timed, step_s)


def _exchange(timed: Sequence[RankRow], step_s: float) -> Iterator[Cause]:
    """The cost of an exchange that nothing overlaps: even in its best steps every rank waits."""
    exchange_s = min(row.least_waiting_s for row in timed)
    if exchange_s >= LEAST_EXCHANGE * step_s:
        yield _cause("exchange", "exchange", seconds=exchange_s)


def _throttled(ranks: Sequence[RankPlace]) -> Iterator[Cause]:
    for row, _, sample in ranks:
        throttled = sample.throttled_percent.current if sample is not None else None
        if sample is not None and throttled is not None and throttled >= LEAST_PERCENT:
            reasons = plain(", ".join(sample.throttle_reasons), 60)
            yield _cause(
                "throttled", "throttled", device=row.device, percent=throttled, reasons=reasons
            )


def _neighbours(rows: Sequence[RankRow], processes: Sequence[ProcessSample]) -> Iterator[Cause]:
    own = {row.pid for row in rows}
    devices = {row.device for row in rows}
    for each in processes:
        busy = each.sm_percent.current or 0.0
        if each.pid in own or each.device_label not in devices:
            continue
        if busy >= LEAST_PERCENT or each.samples_per_second.current:
            whose = {"pid": each.pid, "user": plain(each.user, 32) if each.user else ""}
            yield _cause("neighbour", "neighbour", **whose, device=each.device_label, percent=busy)
