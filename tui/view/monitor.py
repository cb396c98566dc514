"""The Monitor screen around its tables: the lines above, the graphs of the chosen device, and who gets which rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from devices.base import DeviceSample, Snapshot
from tui.view.cells import Line, Span, Tone, clean, cut, line, pad, span_cells, spread
from tui.view.charts import bar, graph, nice_ceiling
from tui.view.devices import DeviceRow, short_name
from tui.view.figures import gib, share_of, short
from tui.view.marks import Marks
from tui.words import rate

KEPT_TICKS = 600


class Arrangement(msgspec.Struct, frozen=True):
    """Rows of the terminal for each panel, borders counted; 0 hides it."""

    devices: int
    graphs: int
    processes: int
    framed: bool  # whether panels have room for a frame


def arrange(width: int, height: int, devices: int) -> Arrangement:
    """Share out `height` rows: first every device, then some processes, then graphs, then more processes."""
    framed = height >= 30 and width >= 100
    frame = 2 if framed else 0
    wanted = max(1, devices) + 1 + frame
    least_processes = min(3 + frame, max(0, height - 2))
    devices_rows = max(1, min(wanted, height - least_processes))
    left = max(0, height - devices_rows)
    graphs = min(16, (left - least_processes) * 2 // 3) if framed and left >= 16 else 0
    return Arrangement(devices_rows, graphs, left - graphs, framed)


class Trail(msgspec.Struct, frozen=True):
    """What the newest ticks said of one device, oldest first; None where there was no current value."""

    busy: tuple[float | None, ...] = ()
    speeds: tuple[float | None, ...] = ()
    memory: tuple[float | None, ...] = ()  # percent
    power: tuple[float | None, ...] = ()
    temperature: tuple[float | None, ...] = ()


class Trails:
    """The newest ticks of every device, bounded; a device that goes away keeps its history until it is forgotten."""

    def __init__(self, kept_ticks: int = KEPT_TICKS) -> None:
        self._kept_ticks = kept_ticks
        self._ticks: dict[str, deque[tuple[float | None, ...]]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Take in one tick."""
        for sample in snapshot.devices:
            ticks = self._ticks.setdefault(sample.device.id, deque(maxlen=self._kept_ticks))
            share = share_of(sample.memory_used_bytes, sample.memory_total_bytes)
            ticks.append(
                (
                    sample.utilization_percent.current,
                    sample.samples_per_second.current,
                    None if share is None else share * 100,
                    sample.power_watts.current,
                    sample.temperature_celsius.current,
                )
            )

    def of(self, device_id: str, newest: int = KEPT_TICKS) -> Trail:
        """The newest ticks of one device; empty if it was never seen."""
        ticks = self._ticks.get(device_id)
        if not ticks:
            return Trail()
        return Trail(*zip(*list(ticks)[-newest:], strict=True))

    def rows(self, snapshot: Snapshot, newest: int = 32) -> tuple[DeviceRow, ...]:
        """A table row for each device of the snapshot, with its history."""
        rows = []
        for sample in snapshot.devices:
            trail = self.of(sample.device.id, newest)
            rows.append(DeviceRow(sample, trail.speeds, trail.busy))
        return tuple(rows)


def top_line(screens: Mapping[str, str], shown: str, right: str, width: int) -> Line:
    """The product's name, the screens with their keys, and what stands at the right; each screen can be clicked."""
    left = [Span(" evener ", "strong")]
    for number, (name, title) in enumerate(screens.items(), start=1):
        action = f"app.show('{name}')"
        tone: Tone = "tab" if name == shown else "dim"
        left += [Span(f" {number} ", "key", action), Span(f"{title} ", tone, action), Span(" ")]
    return spread(tuple(left), (Span(f"{right} ", "dim"),), width)


def status_text(snapshot: Snapshot, clock: str, marks: Marks) -> str:
    """Where and when this was seen: host, driver, time."""
    driver = f"NVIDIA {clean(snapshot.driver, 20)}" if snapshot.driver else ""
    parts = (clean(snapshot.host.hostname, 30), driver, clock)
    return f" {marks.dot} ".join(part for part in parts if part)


def host_line(snapshot: Snapshot, width: int, marks: Marks, state: str = "") -> Line:
    """CPU, load and memory of the machine; `state` ("paused", "replay 3/20") stands at the right."""
    host = snapshot.host
    share = host.memory_used_bytes / host.memory_total_bytes if host.memory_total_bytes else 0.0
    size = 6 if width < 100 else 14
    left = (
        Span(" CPU ", "title"),
        *bar(host.cpu_percent / 100, size, marks),
        Span(f" {host.cpu_percent:3.0f} % ", "text"),
        Span(f"of {host.cores} cores  ", "dim"),
        Span("load ", "title"),
        Span(f"{host.load_1min:.1f}  "),
        Span("memory ", "title"),
        *bar(share, size, marks, "memory"),
        Span(f" {gib(host.memory_used_bytes)}/{gib(host.memory_total_bytes)}"),
        Span(" GiB", "dim"),
    )
    return spread(left, (Span(f"{state} ", "warn"),) if state else (), width)


def note_line(notes: Sequence[str], width: int, marks: Marks) -> Line:
    """The first note of the machine; the others are counted."""
    if not notes:
        return Line()
    more = f" (+{len(notes) - 1}: see help)" if len(notes) > 1 else ""
    room = max(0, width - 3 - len(more))
    return line(
        Span(f" {marks.alarm} ", "warn"), Span(cut(clean(notes[0], 400), room, marks.ellipsis)), Span(more, "dim")
    )


def graph_lines(sample: DeviceSample, trail: Trail, width: int, height: int, marks: Marks) -> tuple[Line, ...]:
    """Graphs of one device, side by side: samples/s, utilisation, memory, and power where there is room."""
    panels = _graph_panels(sample, trail)[: 2 if width < 90 else 3 if width < 150 else 4]
    each = (width - 2 * (len(panels) - 1)) // len(panels)
    columns = [_graph_column(*panel, each, height, marks) for panel in panels]
    return tuple(
        Line(
            tuple(
                span for place, column in enumerate(columns) for span in ((Span("  "),) if place else ()) + column[row]
            )
        )
        for row in range(height)
    )


def _graph_panels(sample: DeviceSample, trail: Trail) -> list[tuple[str, str, tuple[float | None, ...], float, Tone]]:
    """Caption, newest figure, values, top of the axis, tone."""
    fastest = nice_ceiling(max((speed for speed in trail.speeds if speed is not None), default=1.0))
    limit = sample.power_limit_watts.value or nice_ceiling(
        max((watts for watts in trail.power if watts is not None), default=1.0)
    )

    def newest(values: tuple[float | None, ...], unit: str) -> str:
        if not values or values[-1] is None:
            return "not told"
        return f"{rate(values[-1])} {unit}" if unit == "samples/s" else f"{values[-1]:.0f} {unit}"

    return [
        ("throughput", newest(trail.speeds, "samples/s"), trail.speeds, fastest, "speed"),
        ("utilisation", newest(trail.busy, "%"), trail.busy, 100.0, "accent"),
        ("memory", newest(trail.memory, "%"), trail.memory, 100.0, "memory"),
        ("power", newest(trail.power, "W"), trail.power, limit, "power"),
    ]


def _graph_column(
    caption: str,
    newest: str,
    values: tuple[float | None, ...],
    highest: float,
    tone: Tone,
    width: int,
    height: int,
    marks: Marks,
) -> list[tuple[Span, ...]]:
    axis = short(highest)
    caption_spans = (Span(f"{caption} ", "title"), Span(newest, tone))
    head = (*pad(caption_spans, width - len(axis) - 1), Span(f" {axis}", "dim"))
    if span_cells(caption_spans) > width - len(axis) - 1:
        head = pad(caption_spans, width)
    rows = graph(values, width, height - 1, marks, highest)
    return [head, *((Span(row, tone),) for row in rows)]


def device_caption(sample: DeviceSample) -> str:
    """How a panel's title names a device."""
    return f"{sample.device.label} {short_name(sample.device.name)}"
