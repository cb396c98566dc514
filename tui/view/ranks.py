"""A training's ranks as rows, and what holds them up: silence, input, waiting, exchange, throttling, neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from evener.devices.host.training_rates import OLD_SECONDS
from evener.devices.types import DeviceSample, ProcessSample, Snapshot
from evener.live_files import LiveDevice, Training
from evener.tui.text.formatting import duration, milliseconds, percent
from evener.tui.view.cells import clean

SILENT_STEPS = 3.0  # a report that is late by so many steps: the rank hangs, validates, or has gone
LEAST_PART = 0.05  # of a step, from which it is named
LEAST_EXCHANGE = 0.1  # of a step
LEAST_PERCENT = 5.0  # of the time throttled, or of a device's multiprocessors that a neighbour takes
MOST_PASSES = 1000  # of a share; more are no training's, and would take long to write
Placed = Mapping[tuple[str, str], DeviceSample]  # by host and id


class RankRow(msgspec.Struct, frozen=True):
    """One device of a training. Of what is unknown: 0, an empty text, rank -1."""

    rank: int
    pid: int
    device: str  # GPU:0; one that the monitor doesn't see has the name that the training gives it
    share: int  # samples of a step
    micro: int  # samples of a pass
    samples_per_second: float
    tokens_per_second: float
    own_work_s: float  # of a step, until the last gradient is ready
    waiting_s: float  # of a step, from there to the end of the backward pass
    silent_s: float  # since the last report of a rank that went silent; 0 while it reports


class Cause(msgspec.Struct, frozen=True):
    """One thing that holds a training up."""

    kind: Literal["silent", "input", "waiting", "exchange", "throttled", "neighbour"]
    text: str  # a sentence


class RankPlace(NamedTuple):
    """A rank, what it says of its device, and the device's newest sample where the monitor sees it."""

    row: RankRow
    live: LiveDevice
    sample: DeviceSample | None


def place_ranks(report: Training, samples: Placed, at_seconds: float) -> Iterator[RankPlace]:
    """A row for each device of a process; one that names none is a row without a device."""
    silent_s = silent_seconds(report, at_seconds)
    for live in report.devices or (LiveDevice("", -1, 0, report.samples_per_second),):
        sample = samples.get((live.host, live.id)) or samples.get(("", live.id))
        part = live.samples_per_second / report.samples_per_second if report.samples_per_second else 0.0
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
        )
        yield RankPlace(row, live, sample)


def silent_seconds(report: Training, at_seconds: float) -> float:
    """For how long a rank that went silent hasn't reported; 0 while it does."""
    age = at_seconds - report.updated_at
    return age if age > max(OLD_SECONDS, SILENT_STEPS * report.step_s) else 0.0


def work_by_device(snapshot: Snapshot) -> dict[tuple[str, str], tuple[float, float]]:
    """Own work and waiting of a step on each device, by host and id, where a training that reports tells them."""
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
    return clean("/".join(part for part in (live.host, name) if part), 80)


def find_causes(
    ranks: Sequence[RankPlace], step_s: float, input_s: float, processes: Sequence[ProcessSample]
) -> tuple[Cause, ...]:
    """What holds a training up, most certain first; `step_s` is 0 if unknown."""
    rows = [place.row for place in ranks]
    step_s = step_s or max(row.own_work_s + row.waiting_s for row in rows)
    return (
        *_silent(rows),
        *_input(step_s, input_s),
        *_waiting(rows, step_s),
        *_throttled(ranks),
        *_neighbours(rows, processes),
    )


def _name_rank(row: RankRow, rows: Sequence[RankRow]) -> str:
    """Its device where no other rank is on it, else its rank."""
    if row.device and sum(other.device == row.device for other in rows) == 1:
        return row.device
    return f"Rank {row.rank}" if row.rank >= 0 else f"Process {row.pid}"


def _silent(rows: Sequence[RankRow]) -> Iterator[Cause]:
    for row in rows:
        if row.silent_s:
            yield Cause("silent", f"{_name_rank(row, rows)} has been silent for {duration(row.silent_s)}.")


def _input(step_s: float, input_s: float) -> Iterator[Cause]:
    if step_s and input_s >= LEAST_PART * step_s:
        yield Cause("input", f"Input takes {milliseconds(input_s)} of a step, {percent(input_s / step_s)}.")


def _waiting(rows: Sequence[RankRow], step_s: float) -> Iterator[Cause]:
    """What unequal own work costs against ranks that finish together, and the exchange that isn't hidden."""
    timed = [row for row in rows if row.own_work_s and not row.silent_s]
    if len(timed) < 2:
        return
    slowest = max(timed, key=lambda row: row.own_work_s)
    shares = [row.share or 1 for row in timed]
    together = sum(shares) / sum(share / row.own_work_s for share, row in zip(shares, timed, strict=True))
    if slowest.own_work_s - together >= LEAST_PART * step_s:
        own, waiting = milliseconds(slowest.own_work_s), milliseconds(max(row.waiting_s for row in timed))
        name = _name_rank(slowest, rows)
        yield Cause("waiting", f"{name} takes {own} for its share; others wait up to {waiting} for it.")
    if slowest.waiting_s >= LEAST_EXCHANGE * step_s:
        yield Cause("exchange", f"Exchanging gradients takes {milliseconds(slowest.waiting_s)} that nothing hides.")


def _throttled(ranks: Sequence[RankPlace]) -> Iterator[Cause]:
    for row, _, sample in ranks:
        throttled = sample.throttled_percent.current if sample is not None else None
        if sample is not None and throttled is not None and throttled >= LEAST_PERCENT:
            why = f": {clean(', '.join(sample.throttle_reasons), 60)}" if sample.throttle_reasons else ""
            yield Cause("throttled", f"{row.device} is throttled {throttled:.0f} % of the time{why}.")


def _neighbours(rows: Sequence[RankRow], processes: Sequence[ProcessSample]) -> Iterator[Cause]:
    own = {row.pid for row in rows}
    devices = {row.device for row in rows}
    for each in processes:
        busy = each.sm_percent.current or 0.0
        if each.pid in own or each.device_label not in devices:
            continue
        if busy >= LEAST_PERCENT or each.samples_per_second.current:
            part = f" ({busy:.0f} % of it)" if busy else ""
            who = f"process {each.pid}" + (f" of {clean(each.user, 32)}" if each.user else "")
            yield Cause("neighbour", f"On {each.device_label} {who} computes too{part}.")
