"""The device table: a row per device, those of a cluster below their hosts, and why a figure is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, Reading, State

from ..text.formatting import plain
from .cells import Line, Mark, Span, Tone, cells, cut, pad, span_cells
from .charts import (
    bar,
    figure,
    fraction,
    gib,
    nice_ceiling,
    reading_text,
    short,
    short_bytes,
    spark,
    temperature_tone,
    throttle_tone,
    traffic,
    whole,
    work_bar,
)
from .table import NO_CURSOR, Cell, Column, Grid, Position, table_lines, table_row


class HostRow(msgspec.Struct, frozen=True):
    """A host with its devices, which stand below it unless it is folded."""

    host: str
    samples: tuple[DeviceSample, ...]
    folded: bool

    @property
    def is_lost(self) -> bool:
        """True if none of the host's devices can be read."""
        return all(sample.utilization_percent.state is State.LOST for sample in self.samples)


PanelRow = DeviceSample | HostRow


def group_rows(samples: Sequence[DeviceSample], folded: Collection[str]) -> tuple[PanelRow, ...]:
    """The samples, below their hosts where devices name some, without those of folded hosts."""
    rows: list[PanelRow] = []
    for host in dict.fromkeys(sample.device.host for sample in samples):
        own = tuple(sample for sample in samples if sample.device.host == host)
        if host:
            rows.append(HostRow(host, own, host in folded))
        rows += [] if host and host in folded else own
    return tuple(rows)


def draw_host(row: HostRow, width: int, here: bool) -> Line:
    """A host's line: folded or not, its name, and what its devices do together; or why it is lost."""
    count = len(row.samples)
    head = (
        Span(f" {Mark.FOLDED if row.folded else Mark.DESCENDING} ", "dim"),
        Span(f"{plain(row.host, 40)} ", "title"),
        Span(f"{count} device{'s' * (count != 1)} ", "dim"),
    )
    if row.is_lost:
        note = Span(cut(plain(row.samples[0].note, 300), max(0, width - span_cells(head))), "bad")
        return Line(pad((*head, note), width), here)
    busy = _current([sample.utilization_percent for sample in row.samples])
    used = _current([sample.memory_used_bytes for sample in row.samples])
    speed = _current([sample.samples_per_second for sample in row.samples])
    figures = [f"{sum(busy) / len(busy):.0f} % busy"] if busy else []
    figures += [f"{gib(sum(used))} GiB used"] if used else []
    figures += [f"{rate(sum(speed))} samples/s"] if speed else []
    text = cut(f" {Mark.DOT} ".join(figures), max(0, width - span_cells(head)))
    return Line(pad((*head, Span(text, "text")), width), here)


def _current(readings: Sequence[Reading]) -> list[float]:
    return [reading.current for reading in readings if reading.current is not None]


_MAKERS = re.compile(r"^(NVIDIA|AMD|Intel)\s+|\b(GeForce|Tesla|Corporation)\s+")


class DeviceRow(msgspec.Struct, frozen=True):
    """A device's row: its newest sample and its history."""

    sample: DeviceSample
    speeds: tuple[float | None, ...] = ()  # samples/s, oldest first
    busy: tuple[float | None, ...] = ()  # utilisation, percent, oldest first
    work: tuple[float, float] | None = None  # own work and waiting of its training's step, in seconds


def short_name(name: str) -> str:
    """A product name without its maker: "NVIDIA GeForce GTX 1080 Ti" is "GTX 1080 Ti"."""
    return _MAKERS.sub("", plain(name, 80)).strip() or plain(name, 80)


def _id(row: DeviceRow, width: int) -> tuple[Span, ...]:
    device = row.sample.device
    alarm = Mark.ALARM if row.sample.events or row.sample.note else ""
    text = device.label if len(device.label) + len(alarm) <= width else str(device.index)
    return Span(alarm, "bad"), Span(text, "strong")


def _name(row: DeviceRow, width: int) -> tuple[Span, ...]:
    name = short_name(row.sample.device.name)
    if len(name) > width:
        name = name.removeprefix("GTX ").removeprefix("RTX ").replace(" ", "" if width < 8 else " ")
    if host := row.sample.device.host:
        name = f"{plain(host)} {name}"
    limit = row.sample.device.limit
    return (Span(cut(name + ("@" if limit else ""), width), "text"),)


def _utilization(row: DeviceRow, width: int) -> tuple[Span, ...]:
    reading = row.sample.utilization_percent
    if width < 10:
        return _percent(reading, width, "accent")
    blank = (Span(" " * (width - 6)),)
    drawn = blank if reading.value is None else bar(reading.value / 100, width - 6)
    return (*drawn, Span(" "), *_percent(reading, 5, "accent"))


def _percent(reading: Reading, width: int, tone: Tone = "text") -> tuple[Span, ...]:
    if width < 5 or reading.current is None:
        return (figure(reading, width, whole, tone),)
    return figure(reading, width - 2, whole, tone), Span(" %", "dim")


def _percent_cell(reading: Callable[[DeviceSample], Reading]) -> Cell[DeviceRow]:
    return lambda row, width: _percent(reading(row.sample), width)


def memory_tone(share: float | None) -> Tone:
    """A warning from 98 % on."""
    return "warn" if share is not None and share >= 0.98 else "memory"


def _memory(row: DeviceRow, width: int) -> tuple[Span, ...]:
    used, total = row.sample.memory_used_bytes, row.sample.memory_total_bytes
    text, current = reading_text(used, gib, width)
    share = fraction(used, total)
    if not current and used.state is not State.STALE:
        return (figure(used, width, gib),)
    if total.value:
        whole_text = gib(total.value)
        text += f"/{whole_text}" if cells(text) + 1 + len(whole_text) <= width else ""
    tone = memory_tone(share) if current else "dim"
    if width < 11:
        return (Span(text, tone),)
    figures = (Span(text.rjust(8), tone), Span(" G", "dim"))
    return figures if width < 18 or share is None else (*bar(share, width - 11, tone), Span(" "), *figures)


def _temperature(row: DeviceRow, width: int) -> tuple[Span, ...]:
    reading = row.sample.temperature_celsius
    if width < 4 or reading.value is None:
        return (figure(reading, width, whole, temperature_tone(row.sample)),)
    unit = "°C"
    return figure(reading, width - len(unit), whole, temperature_tone(row.sample)), Span(unit, "dim")


def _power(row: DeviceRow, width: int) -> tuple[Span, ...]:
    used, limit = row.sample.power_watts, row.sample.power_limit_watts
    text, current = reading_text(used, whole, width)
    tone: Tone = "power" if current else "dim"
    if used.value is None or used.state is State.LOST:
        return (figure(used, width, whole),)
    of = f"/{limit.value:.0f}" if limit.value else ""
    if cells(text) + len(of) > width:
        of = ""
    if width < 9:
        return Span(text, tone), Span(of, "dim")
    figures = (Span(text.rjust(7 - len(of)), tone), Span(f"{of} W", "dim"))
    share = fraction(used, limit)
    return figures if width < 15 or share is None else (*bar(share, width - 10, tone), Span(" "), *figures)


def _clock(row: DeviceRow, width: int) -> tuple[Span, ...]:
    if width < 8 or row.sample.clock_mhz.value is None:
        return (figure(row.sample.clock_mhz, width),)
    return figure(row.sample.clock_mhz, width - 4), Span(" MHz", "dim")


_REASON_LETTERS = {"power": "P", "thermal": "T", "brake": "B", "sync": "S", "hardware": "H", "software": "S"}


def reason_letters(reasons: Sequence[str], room: int) -> str:
    """The reasons for throttling as letters, as many as fit: P power, T thermal, B brake, S sync, H hardware."""
    letters = []
    for reason in reasons:
        word = next((word for word in _REASON_LETTERS if word in reason.lower()), "")
        letter = _REASON_LETTERS.get(word, reason[:1].upper())
        if letter and letter not in letters:
            letters.append(letter)
    return "".join(letters)[: max(0, room)]


def _throttled(row: DeviceRow, width: int) -> tuple[Span, ...]:
    reading, reasons = row.sample.throttled_percent, row.sample.throttle_reasons
    if reading.current is None and not reasons:
        return (figure(reading, width),)
    number, current = reading_text(reading, whole, 3)
    tone: Tone = "warn" if reading.current is None else throttle_tone(reading.current)
    if width < 12:
        return (Span(number.rjust(2) + reason_letters(reasons, width - max(2, len(number))), tone),)
    why = cut(plain(", ".join(reasons), 60), width - 6)
    return Span(f"{number:>3}{' %' if current else '  '}", tone), Span(f" {why:<{width - 6}}", tone)


def _links(row: DeviceRow, width: int) -> tuple[Span, ...]:
    sample = row.sample
    total = traffic(sample)
    if width < 12 or total.value is None:
        return (figure(total, width, short_bytes),)
    received = [sample.link_receive_bytes_per_second, sample.pcie_receive_bytes_per_second]
    sent = [sample.link_send_bytes_per_second, sample.pcie_send_bytes_per_second]
    tone: Tone = "text" if total.state is State.VALUE else "dim"
    spans = []
    for mark, readings in (("↓", received), ("↑", sent)):
        known = [reading.value for reading in readings if reading.value is not None]
        text = short_bytes(sum(known)) if known else Mark.NONE
        spans += [Span(f" {mark}", "dim"), Span(text.rjust(4), tone)]
    return tuple(spans)


def _work(row: DeviceRow, width: int) -> tuple[Span, ...]:
    """The part of a step that isn't waiting."""
    if row.work is None:
        return (Span(Mark.NONE, "dim"),)
    own, waiting = row.work
    text = f"{100 * own / (own + waiting):.0f} %"
    if width < 10:
        return (Span(text if len(text) <= width else text.removesuffix(" %"), "speed"),)
    return (*work_bar(own, waiting, own + waiting, width - 6), Span(f" {text:>5}"))


def _speed(row: DeviceRow, width: int) -> tuple[Span, ...]:
    return (figure(row.sample.samples_per_second, width, rate if width >= 9 else short, "speed"),)


def _history(row: DeviceRow, width: int) -> tuple[Span, ...]:
    fastest = max((speed for speed in row.speeds if speed is not None), default=0.0)
    if fastest > 0:
        return (Span(spark(row.speeds, width, nice_ceiling(fastest)), "speed"),)
    return (Span(spark(row.busy, width, 100.0), "accent"),)


DEVICE_COLUMNS: tuple[Column[DeviceRow], ...] = (
    Column("id", ("device", "id"), 3, _id),
    Column("name", ("name",), 6, _name, "left"),
    Column("util", ("utilisation", "util", "use"), 4, _utilization),
    Column("sm", ("SM",), 3, _percent_cell(lambda sample: sample.sm_percent)),
    Column("tensor", ("tensor", "tens", "TC"), 3, _percent_cell(lambda sample: sample.tensor_percent)),
    Column("dram", ("DRAM", "DR"), 3, _percent_cell(lambda sample: sample.dram_percent)),
    Column("memory", ("memory", "mem"), 7, _memory),
    Column("temperature", ("temp", "°C"), 3, _temperature),
    Column("power", ("power of limit", "power/W", "power"), 7, _power),
    Column("clock", ("clock", "MHz"), 4, _clock),
    Column("throttled", ("throttled, why", "thr%"), 4, _throttled, "left"),
    Column("links", ("links in, out", "links", "link"), 4, _links),
    Column("work", ("own work, waiting", "own work", "work"), 4, _work),
    Column("speed", ("samples/s", "smp/s"), 5, _speed),
    Column("history", ("history", "hist"), 4, _history, "left"),
)
DEVICES = Grid(
    DEVICE_COLUMNS,
    (
        ("history", 6),
        ("id", 6),
        ("name", 8),
        ("temperature", 5),
        ("speed", 9),
        ("util", 6),
        ("name", 11),
        ("tensor", 6),
        ("util", 14),
        ("work", 6),
        ("memory", 11),
        ("power", 9),
        ("sm", 5),
        ("dram", 5),
        ("throttled", 14),
        ("work", 17),
        ("links", 12),
        ("history", 12),
        ("clock", 8),
        ("memory", 20),
        ("power", 17),
        ("name", 16),
        ("throttled", 20),
    ),
    {"history": 32, "util": 30, "memory": 30, "name": 24, "power": 26},
)
_READINGS = {  # of columns that aren't drawn where no device reports them
    "sm": ("sm_percent",),
    "tensor": ("tensor_percent",),
    "dram": ("dram_percent",),
    "temperature": ("temperature_celsius",),
    "power": ("power_watts",),
    "clock": ("clock_mhz",),
    "throttled": ("throttled_percent",),
    "links": tuple(f"{link}_{way}_bytes_per_second" for link in ("link", "pcie") for way in ("receive", "send")),
}


def _is_there(key: str, rows: Sequence[DeviceRow]) -> bool:
    """True if a device has anything in this column."""
    if key == "work":
        return any(row.work for row in rows)
    fields = _READINGS.get(key, ())
    return not (rows and fields) or any(
        getattr(row.sample, field).state is not State.UNSUPPORTED for row in rows for field in fields
    )


def device_lines(
    rows: Sequence[DeviceRow | HostRow], width: int, height: int, position: Position = NO_CURSOR
) -> tuple[tuple[Line, ...], int]:
    """The heading and as many rows as fit in `height`, and the first row shown; a host has a row of its own.

    A lost device shows what happened instead of its figures. What no device reports, and own work that no training
    tells, has no column.
    """
    shown = [row for row in rows if isinstance(row, DeviceRow)]
    grid: Grid[Any] = DEVICES._replace(columns=tuple(each for each in DEVICE_COLUMNS if _is_there(each.key, shown)))

    def draw(row: DeviceRow | HostRow, widths: Mapping[str, int], here: bool) -> Line:
        if isinstance(row, HostRow):
            return draw_host(row, width, here)
        sample = row.sample
        if not sample.note or sample.utilization_percent.state is not State.LOST:
            return table_row(grid.columns, widths, row, cursor=here)
        head = table_row(DEVICE_COLUMNS[:2], widths, row, cursor=here).spans
        note = cut(plain(sample.note, 300), max(0, width - span_cells(head) - 1))
        return Line(pad((*head, Span(" "), Span(note, "bad")), width), here)

    return table_lines(grid, rows, width, height, position, draw=draw)
