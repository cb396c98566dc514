"""The table of devices: one row for each device and, on a cluster, for each host."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from evener.balancer.number_format import rate
from evener.devices.types import DeviceSample, Reading, Snapshot, State
from evener.printable import plain

from .cells import Line, Mark, Span, Tone, cells, cut, pad, span_cells
from .charts import (
    History,
    bar,
    draw_reading,
    gib,
    graph,
    nice_ceiling,
    reading_text,
    short,
    short_bytes,
    temperature_tone,
    throttle_tone,
    traffic,
    whole,
    work_bar,
)
from .ranks import Work, work_by_device
from .table import Column, Grid, table_row

NEWEST_TICKS = 48  # maximum number of ticks in the history of a row


class DeviceRow(msgspec.Struct, frozen=True):
    """The row of a device, with its reading, its history, and how it spends a training step."""

    sample: DeviceSample
    speeds: tuple[float | None, ...] = ()  # samples/s, oldest first
    busy: tuple[float | None, ...] = ()  # utilisation, percent, oldest first
    # compute time (own work) and waiting of its training's step, in seconds
    work: tuple[float, float] | None = None
    below: bool = False  # True if its host has a row of its own
    alarmed: bool = False  # True while an alert about the device lasts


class HostRow(msgspec.Struct, frozen=True):
    """The row of a host in a cluster. Its devices follow it, unless `folded` hides them."""

    host: str
    rows: tuple[DeviceRow, ...]
    folded: bool


PanelRow = DeviceRow | HostRow


def device_rows(
    snapshot: Snapshot, history: History = lambda *_: (), alarmed_keys: Collection[str] = ()
) -> tuple[DeviceRow, ...]:
    """Return a row for each device of a reading.

    - `history`: returns the earlier values of a metric, oldest first.
    - `alarmed_keys`: the keys of devices with an alert.
    """
    work = work_by_device(snapshot)
    return tuple(
        _device_row(sample, history, work, sample.device.key in alarmed_keys)
        for sample in snapshot.devices
    )


def _device_row(sample: DeviceSample, history: History, work: Work, alarmed: bool) -> DeviceRow:
    device = sample.device
    speeds = history(device.key, "samples_per_second", NEWEST_TICKS)
    busy = () if any(speeds) else history(device.key, "utilization_percent", NEWEST_TICKS)
    return DeviceRow(sample, speeds, busy, work.get((device.host, device.id)), False, alarmed)


def group_rows(rows: Sequence[DeviceRow], folded_hosts: Collection[str]) -> tuple[PanelRow, ...]:
    """Insert a row for each host in front of its devices, and drop the devices of folded hosts.

    The devices of this machine get no row for their host.
    """
    grouped: list[PanelRow] = []
    for host in dict.fromkeys(row.sample.device.host for row in rows):
        own = [row for row in rows if row.sample.device.host == host]
        if host:
            own = [msgspec.structs.replace(row, below=True) for row in own]
            grouped.append(HostRow(host, tuple(own), host in folded_hosts))
        grouped += [] if host and host in folded_hosts else own
    return tuple(grouped)


def draw_host(row: HostRow, width: int, has_cursor: bool) -> Line:
    """Draw a host's row with the totals of its devices, or with the reason if all are lost."""
    count = len(row.rows)
    head = (
        Span(f" {Mark.FOLDED if row.folded else Mark.DESCENDING} ", "dim"),
        Span(f"{plain(row.host, 40)} ", "title"),
        Span(f"{count} device{'s' * (count != 1)} ", "dim"),
    )
    room = max(0, width - span_cells(head))
    samples = [each.sample for each in row.rows]
    if all(sample.utilization_percent.state is State.LOST for sample in samples):
        return Line(
            pad((*head, Span(cut(plain(samples[0].note, 300), room), "bad")), width), has_cursor
        )
    busy = _current_values(samples, "utilization_percent")
    used = _current_values(samples, "memory_used_bytes")
    speed = _current_values(samples, "samples_per_second")
    totals = [f"{sum(busy) / len(busy):.0f} % busy"] if busy else []
    totals += [f"{gib(sum(used))} GiB used"] if used else []
    totals += [f"{rate(sum(speed))} samples/s"] if speed else []
    return Line(pad((*head, Span(cut(f" {Mark.DOT} ".join(totals), room))), width), has_cursor)


def together_spans(samples: Sequence[DeviceSample], room: int) -> tuple[Span, ...]:
    """Return as many totals of all devices as fit in `room` cells, or none for a single device."""
    if len(samples) < 2:
        return ()
    spans: tuple[Span, ...] = (Span(f"{len(samples)} devices", "title"),)
    for fact in _total_spans(samples):
        if span_cells((*spans, *fact)) >= room:
            break
        spans += fact
    return (*spans, Span(" ")) if len(spans) > 1 else ()


def _total_spans(samples: Sequence[DeviceSample]) -> Iterator[tuple[Span, ...]]:
    """Yield the total speed, mean utilisation, total power and total memory of some devices."""
    speed = _current_values(samples, "samples_per_second")
    if any(speed):
        yield Span(f"  {rate(sum(speed))}", "speed"), Span(" samples/s", "dim")
    busy = _current_values(samples, "utilization_percent")
    if busy:
        yield Span(f"  {sum(busy) / len(busy):.0f} %", "accent"), Span(" busy", "dim")
    drawn = _current_values(samples, "power_watts")
    if drawn:
        yield Span(f"  {sum(drawn):.0f}", "power"), Span(" W", "dim")
    own = [sample for sample in samples if not sample.device.on_cpu]
    used, there = (
        _current_values(own, "memory_used_bytes"),
        _current_values(own, "memory_total_bytes"),
    )
    if used and there:
        yield Span(f"  {gib(sum(used))}", "memory"), Span(f"/{gib(sum(there))} G", "dim")


def _current_values(samples: Sequence[DeviceSample], field: str) -> list[float]:
    """Return the current values of a metric, without the devices that have none."""
    return _current([getattr(sample, field) for sample in samples])


def _current(readings: Sequence[Reading]) -> list[float]:
    return [reading.current for reading in readings if reading.current is not None]


_MAKERS = re.compile(r"^(NVIDIA|AMD|Intel)\s+|\b(GeForce|Tesla|Corporation)\s+")


def short_name(name: str) -> str:
    """Return a product name without its maker, such as "H200" for "NVIDIA H200"."""
    return _MAKERS.sub("", plain(name, 80)).strip() or plain(name, 80)


def _id(row: DeviceRow, width: int) -> tuple[Span, ...]:
    device = row.sample.device
    alarm = Mark.ALARM if row.sample.events or row.sample.note or row.alarmed else ""
    label = device.label.rpartition("/")[2] if row.below else device.label
    text = label if len(label) + len(alarm) <= width else str(device.index)
    return Span(alarm, "bad"), Span(text, "bad" if row.alarmed else "strong")


def _name(row: DeviceRow, width: int) -> tuple[Span, ...]:
    name = short_name(row.sample.device.name)
    if len(name) > width:
        name = name.removeprefix("GTX ").removeprefix("RTX ").replace(" ", "" if width < 8 else " ")
    if row.sample.device.host and not row.below:
        name = f"{plain(row.sample.device.host)} {name}"
    limit = row.sample.device.limit
    return (Span(cut(name + ("@" if limit else ""), width), "text"),)


LINKS = tuple(
    f"{link}_{way}_bytes_per_second" for link in ("link", "pcie") for way in ("receive", "send")
)


def _devices(row: PanelRow) -> tuple[DeviceRow, ...]:
    return row.rows if isinstance(row, HostRow) else (row,)


def _supports_any(*fields: str) -> Callable[[PanelRow], bool]:
    """Return a function that says whether any device of a row supports one of these metrics."""
    return lambda row: any(
        getattr(each.sample, field).state is not State.UNSUPPORTED
        for each in _devices(row)
        for field in fields
    )


def _has_work(row: PanelRow) -> bool:
    return any(each.work for each in _devices(row))


def memory_tone(sample: DeviceSample) -> Callable[[float], Tone]:
    """Return a function that picks the tone for a device's used memory in bytes.

    The tone is a warning if at least 98 % of the device's memory is used.
    """
    most = sample.memory_total_bytes.value
    return lambda number: "warn" if most and number >= 0.98 * most else "memory"


def _metric_column(
    key: str,
    titles: tuple[str, ...],
    widths: tuple[int, ...],
    field: str,
    unit: str,
    least_width: int,
    format_value: Callable[[float], str] = whole,
    tone: Tone | Callable[[DeviceSample], Callable[[float], Tone]] = "text",
    limit: str = "",
    full_bar: float = 0.0,
    max_width: int = 0,
) -> Column[Any]:
    """Return a column of the device table that shows the metric `field`.

    A wide column also shows the metric's limit, its unit, and a bar.

    - `titles`: the column's title in several lengths, longest first.
    - `widths`: the column's widths in cells, narrowest first.
    - `least_width`: the column shows the unit if it is at least this wide.
    - `limit`: the field with the limit, at which the bar is full.
    - `full_bar`: the value at which the bar is full if there is no limit.
    - `max_width`: how wide the column may get.
    """

    def cell(row: DeviceRow, width: int) -> tuple[Span, ...]:
        reading: Reading = getattr(row.sample, field)
        if reading.value is None or reading.state is State.LOST:
            return (draw_reading(reading, width, format_value),)
        text, current = reading_text(reading, format_value, width)
        most = getattr(row.sample, limit).value if limit else None
        of = f"/{format_value(most)}" if most else ""
        of = of if cells(text + of) <= width else ""
        shade: Tone = "dim"
        if current:
            shade = tone if isinstance(tone, str) else tone(row.sample)(reading.value)
        spans: tuple[Span, ...] = (Span(text, shade), Span(of, "dim"))
        needed = max(least_width, cells(text + of) + len(unit))
        if width < needed:
            return spans
        spans = (*pad(spans, needed - len(unit), "right"), Span(unit, "dim"))
        left = width - needed - 1
        whole_bar = most or full_bar
        if left <= 3 or not whole_bar:
            return spans
        return (*bar(reading.value / whole_bar, left, shade), Span(" "), *spans)

    return Column(key, titles, widths, cell, most=max_width, there=_supports_any(field))


_REASON_LETTERS = {
    "power": "P",
    "thermal": "T",
    "brake": "B",
    "sync": "S",
    "hardware": "H",
    "software": "S",
}


def reason_letters(reasons: Sequence[str], room: int) -> str:
    """Abbreviate throttling reasons to one letter each. The help text explains the letters."""
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
        return (draw_reading(reading, width),)
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
        return (draw_reading(total, width, short_bytes),)
    received = [sample.link_receive_bytes_per_second, sample.pcie_receive_bytes_per_second]
    sent = [sample.link_send_bytes_per_second, sample.pcie_send_bytes_per_second]
    tone: Tone = "text" if total.state is State.VALUE else "dim"
    spans = []
    for mark, readings in (("↓", received), ("↑", sent)):
        known = [reading.value for reading in readings if reading.value is not None]
        text = short_bytes(sum(known)) if known else Mark.NONE
        spans += [Span(f" {mark}", "dim"), Span(text.rjust(4), tone)]
    return tuple(spans)


def _draw_work(row: DeviceRow, width: int) -> tuple[Span, ...]:
    """Draw the compute time as a percentage of compute plus waiting, with a bar if it fits."""
    if row.work is None:
        return (Span(Mark.NONE, "dim"),)
    own, waiting = row.work
    text = f"{100 * own / (own + waiting):.0f} %"
    if width < 10:
        return (Span(text if len(text) <= width else text.removesuffix(" %"), "speed"),)
    return (*work_bar(own, waiting, own + waiting, width - 6), Span(f" {text:>5}"))


def _speed(row: DeviceRow, width: int) -> tuple[Span, ...]:
    return (
        draw_reading(row.sample.samples_per_second, width, rate if width >= 9 else short, "speed"),
    )


def _history(row: DeviceRow, width: int) -> tuple[Span, ...]:
    fastest = max((speed for speed in row.speeds if speed is not None), default=0.0)
    values, top = (row.speeds, nice_ceiling(fastest)) if fastest > 0 else (row.busy, 100.0)
    return (Span(graph(values, width, 1, top)[0], "speed" if fastest > 0 else "accent"),)


DEVICE_COLUMNS: tuple[Column[Any], ...] = (
    Column("id", ("device", "id"), (3, 6), _id),
    Column("name", ("name",), (6, 8, 11, 16), _name, "left", most=20),
    _metric_column(
        "util",
        ("utilisation", "util", "use"),
        (4, 6, 14),
        "utilization_percent",
        " %",
        5,
        tone="accent",
        full_bar=100.0,
        max_width=40,
    ),
    _metric_column("sm", ("SM",), (3, 5), "sm_percent", " %", 5),
    _metric_column("tensor", ("tensor", "tens", "TC"), (3, 6), "tensor_percent", " %", 5),
    _metric_column("dram", ("DRAM", "DR"), (3, 5), "dram_percent", " %", 5),
    _metric_column(
        "memory",
        ("memory", "mem"),
        (7, 11, 20),
        "memory_used_bytes",
        " G",
        10,
        gib,
        memory_tone,
        "memory_total_bytes",
        max_width=30,
    ),
    _metric_column(
        "temperature",
        ("temp", "°C"),
        (3, 5),
        "temperature_celsius",
        "°C",
        4,
        whole,
        temperature_tone,
    ),
    _metric_column(
        "power",
        ("power of limit", "power/W", "power"),
        (7, 9, 17),
        "power_watts",
        " W",
        9,
        whole,
        "power",
        "power_limit_watts",
        max_width=26,
    ),
    _metric_column("clock", ("clock", "MHz"), (4, 8), "clock_mhz", " MHz", 8),
    Column(
        "throttled",
        ("throttled, why", "thr%"),
        (4, 4, 16),
        _throttled,
        "left",
        most=20,
        there=_supports_any("throttled_percent"),
    ),
    Column(
        "links", ("links in, out", "links", "link"), (4, 4, 12), _links, there=_supports_any(*LINKS)
    ),
    Column(
        "work", ("own work, waiting", "own work", "work"), (4, 6, 17), _draw_work, there=_has_work
    ),
    Column("speed", ("samples/s", "smp/s"), (5, 9), _speed),
    Column("history", ("history", "hist"), (4, 6, 12), _history, most=NEWEST_TICKS),
)


def _draw_row(row: PanelRow, widths: Mapping[str, int], width: int, has_cursor: bool) -> Line:
    if isinstance(row, HostRow):
        return draw_host(row, width, has_cursor)
    sample = row.sample
    if not sample.note or sample.utilization_percent.state is not State.LOST:
        return table_row(DEVICE_COLUMNS, widths, row, has_cursor)
    # a lost device: say what happened to it
    head = table_row(DEVICE_COLUMNS[:2], widths, row, has_cursor).spans
    note = cut(plain(sample.note, 300), max(0, width - span_cells(head) - 1))
    return Line(pad((*head, Span(" "), Span(note, "bad")), width), has_cursor)


DEVICES = Grid(DEVICE_COLUMNS, draw=_draw_row)
