"""The Monitor screen's top lines, table of processes, and details of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from evener.balancer.number_format import duration, percent, rate, size
from evener.devices.registry import name_maker
from evener.devices.types import DeviceSample, ProcessSample, Reading, Snapshot, State
from evener.plan.file import Link
from evener.printable import plain

from .alerts import Alert
from .cells import Line, Mark, Span, Tone, cells, cut, line, span_cells, spread, text_lines, wrap
from .charts import (
    STATE_WORDS,
    bar,
    celsius,
    draw_reading,
    gib,
    percents,
    run_time,
    samples_rate,
    short,
    short_bytes,
    temperature_tone,
    throttle_tone,
    watts,
    whole,
)
from .devices import memory_tone, together_spans
from .table import TAG, Column, Grid, text_cell
from .teaching import NO_PROCESS, NO_TRAINING, Lesson
from .timelines import LEAST_ROWS, MOST_ROWS

GRAPHS_BESIDE = 2  # lines of the heading and the time axis, besides the graphs
LEAST_TERMINAL = 40  # minimum number of terminal columns for graphs


def arrange(
    width: int, height: int, frame: int, devices: int, processes: int = 1
) -> dict[str, int]:
    """Divide a screen's height between the panels of devices, graphs and processes.

    Returns the height of each panel in lines by its selector; 0 hides the graphs. `frame` is the
    number of lines that a panel's frame takes.
    """
    least_processes = min(3 + frame, max(0, height - 2))
    listed = max(1, min(max(1, devices) + 1 + frame, height - least_processes))
    left = max(0, height - listed)
    wanted = max(least_processes, min(max(1, processes) + 1 + frame, left // 3))
    least_graphs = LEAST_ROWS + GRAPHS_BESIDE + frame
    all_graphs = LEAST_ROWS * max(1, devices) + GRAPHS_BESIDE + frame
    most_graphs = MOST_ROWS * max(1, devices) + GRAPHS_BESIDE + frame
    room = left - least_processes
    graphs = 0
    if width >= LEAST_TERMINAL and room >= least_graphs:
        graphs = min(most_graphs, max(min(all_graphs, room), left - wanted))
    return {"#devices": listed, "#graphs": graphs, "#processes": left - graphs}


def top_line(
    screens: Mapping[str, str], open_screen: str, statuses: Sequence[str], width: int
) -> Line:
    """Draw the names of the screens on the left, and the longest status that fits on the right.

    `open_screen` is a key in `screens`. `statuses` are sorted from the longest to the shortest.
    """
    left = [Span(" evener ", "strong")]
    for number, (name, title) in enumerate(screens.items(), start=1):
        action = f"app.show('{name}')"
        tone: Tone = "tab" if name == open_screen else "dim"
        left += [Span(f" {number} ", "key", action), Span(f"{title} ", tone, action), Span(" ")]
    room = width - span_cells(left) - 2
    status = next((text for text in statuses if cells(text) <= room), "")
    return spread(tuple(left), (Span(f"{status} ", "dim"),), width)


def status_texts(snapshot: Snapshot, clock: str) -> tuple[str, ...]:
    """Return the status (host, driver and time) in several lengths, longest first."""
    maker = name_maker(sample.device for sample in snapshot.devices)
    driver = f"{maker} {plain(snapshot.driver, 20)}".lstrip() if snapshot.driver else ""
    host = plain(snapshot.host.hostname, 30)
    forms = ((host, driver, clock), (host, clock), (clock,))
    return tuple(f" {Mark.DOT} ".join(filter(None, form)) for form in forms)


def alert_line(alert: Alert, unread: int, width: int) -> Line:
    """Draw the newest alert, and the number of other unread alerts."""
    at = time.strftime("%H:%M:%S", time.localtime(alert.at_seconds))
    more = f" (+{unread - 1})" if unread > 1 else ""
    hint = f"{more}  a: all"
    room = max(0, width - 12 - len(hint))
    return line(
        Span(f" {Mark.ALARM} {at} ", "bad"), Span(cut(alert.text, room), "bad"), Span(hint, "dim")
    )


def alert_lines(alerts: Sequence[Alert], width: int) -> tuple[Line, ...]:
    """Return the time and text of each alert, or a hint if there is none."""
    if not alerts:
        words = (
            "No alert so far: devices that are hot, throttled, silent, or idle while a training "
            "waits on them are listed here, and trainings that are slower than their plan."
        )
        return text_lines(words, width, 4, "dim")
    return tuple(
        row
        for alert in alerts
        for row in text_lines(
            time.strftime("%H:%M:%S ", time.localtime(alert.at_seconds)) + alert.text, width, 4
        )
    )


def host_line(snapshot: Snapshot, width: int, state: str = "") -> Line:
    """Draw the host's CPU use, load and memory, and the totals of all devices.

    If `state` is given, such as "paused", it replaces the totals.
    """
    host = snapshot.host
    share = host.memory_used_bytes / host.memory_total_bytes if host.memory_total_bytes else 0.0
    size = 6 if width < 100 else 14
    left = (
        Span(" CPU ", "title"),
        *bar(host.cpu_percent / 100, size),
        Span(f" {host.cpu_percent:3.0f} % ", "text"),
        Span(f"of {host.cores} cores  ", "dim"),
        Span("load ", "title"),
        Span(f"{host.load_1min:.1f}  "),
        Span("memory ", "title"),
        *bar(share, size, "memory"),
        Span(f" {gib(host.memory_used_bytes)}/{gib(host.memory_total_bytes)}"),
        Span(" GiB", "dim"),
    )
    room = width - span_cells(left) - 1
    right = (Span(f"{state} ", "warn"),) if state else together_spans(snapshot.devices, room)
    return spread(left, right, width)


MOST_NOTE_LINES = 3


def note_lines(notes: Sequence[str], width: int) -> tuple[Line, ...]:
    """Return the first warning in up to 3 lines, with the number of other warnings."""
    if not notes:
        return ()
    more = f" (+{len(notes) - 1}: see help)" if len(notes) > 1 else ""
    rows = wrap(plain(notes[0], 400) + more, max(4, width - 4), MOST_NOTE_LINES)
    return tuple(
        line(Span(f" {Mark.ALARM if place == 0 else ' '} ", "warn"), Span(row))
        for place, row in enumerate(rows)
    )


_LABEL_CELLS = 18
_megahertz = "{:.0f} MHz".format


def _fact(label: str, text: str, tone: Tone = "text") -> Line:
    return line(Span(f" {label:<{_LABEL_CELLS}}", "title"), Span(text, tone))


def describe_reading(reading: Reading, format_value: Callable[[float], str]) -> str:
    """Return a reading in words, with its value and age, or why it is missing."""
    if reading.state is State.VALUE and reading.value is not None:
        return format_value(reading.value)
    if reading.state is State.STALE and reading.value is not None:
        return f"{format_value(reading.value)} (stale: {duration(reading.age_seconds)} old)"
    return STATE_WORDS[reading.state]


def _reading(
    label: str,
    reading: Reading,
    draw: Callable[[float], str],
    tone: Callable[[float], Tone] | Tone = "text",
) -> Line:
    number = reading.current
    if number is None:
        return _fact(
            label, describe_reading(reading, draw), "bad" if reading.state is State.LOST else "dim"
        )
    return _fact(label, draw(number), tone(number) if callable(tone) else tone)


def _with_maximum(format_value: Callable[[float], str], maximum: Reading) -> Callable[[float], str]:
    """Return a format function that appends the maximum to a value, as in "40 GiB of 140 GiB"."""
    return lambda number: (
        f"{format_value(number)} of {format_value(maximum.value)}"
        if maximum.value
        else format_value(number)
    )


def _per_second(number: float) -> str:
    return f"{size(number)}/s"


def _energy(joules: float) -> str:
    return (
        f"{joules / 3.6e6:.3f} kWh since the start"
        if joules >= 3.6e5
        else f"{rate(joules)} J since the start"
    )


def device_details(
    sample: DeviceSample, width: int, links: Sequence[Link] = ()
) -> tuple[Line, ...]:
    """Return all metrics of a device, its links, and its last events."""
    device = sample.device
    facts = [
        _fact("name", plain(device.name)),
        _fact("id", plain(device.id), "dim"),
        _reading("utilisation", sample.utilization_percent, percents, "accent"),
        _reading("SM busy", sample.sm_percent, percents),
        _reading("SM occupancy", sample.occupancy_percent, percents),
        _reading("tensor cores", sample.tensor_percent, percents),
        _reading("DRAM bandwidth", sample.dram_percent, percents),
        _reading(
            "memory",
            sample.memory_used_bytes,
            _with_maximum(size, sample.memory_total_bytes),
            memory_tone(sample),
        ),
        _reading("temperature", sample.temperature_celsius, celsius, temperature_tone(sample)),
        _reading("slows down at", sample.temperature_limit_celsius, celsius),
        _reading(
            "power", sample.power_watts, _with_maximum(watts, sample.power_limit_watts), "power"
        ),
        _reading("energy", sample.energy_joules, _energy),
        _reading("clock", sample.clock_mhz, _with_maximum(_megahertz, sample.clock_max_mhz)),
        _reading(
            "throttled",
            sample.throttled_percent,
            lambda number: f"{number:.1f} % of the time",
            throttle_tone,
        ),
        _reading("PCIe received", sample.pcie_receive_bytes_per_second, _per_second),
        _reading("PCIe sent", sample.pcie_send_bytes_per_second, _per_second),
        _reading("NVLink received", sample.link_receive_bytes_per_second, _per_second),
        _reading("NVLink sent", sample.link_send_bytes_per_second, _per_second),
        _reading("fan", sample.fan_percent, percents),
        _reading(
            "ECC errors",
            sample.ecc_errors,
            lambda number: f"{number:.0f} uncorrected",
            lambda number: "bad" if number else "text",
        ),
        _reading("throughput", sample.samples_per_second, samples_rate, "speed"),
    ]
    if sample.throttle_reasons:
        facts.append(_fact("throttled by", plain(", ".join(sample.throttle_reasons))))
    own = [link for link in links if device.label in link.devices]
    facts += [_fact("link", plain(link.describe())) for link in own]
    facts += [_fact("event", plain(event), "warn") for event in sample.events[-5:]]
    note = text_lines(sample.note, width, 4, "bad") if sample.note else ()
    return (*note, *_fold_unreported(facts, width))


def _fold_unreported(facts: Sequence[Line], width: int) -> tuple[Line, ...]:
    """Replace the lines of metrics that the device doesn't support with one sentence at the end."""
    missing = [fact for fact in facts if fact.spans[-1].text == STATE_WORDS[State.UNSUPPORTED]]
    names = ", ".join(fact.spans[0].text.strip() for fact in missing)
    words = text_lines(f"Not reported by this device: {names}.", width, 6, "dim") if names else ()
    return (*(fact for fact in facts if fact not in missing), *words)


def process_details(row: ProcessSample, started: str, width: int) -> tuple[Line, ...]:
    """Return all metrics of a process, and its command line."""
    facts = [
        _fact("pid", str(row.pid), "strong"),
        _fact("user", plain(row.user)),
        _fact("started", started),
        _fact("device", plain(f"{row.device_label}  {row.device_id}")),
        _reading("device memory", row.memory_bytes, size, "memory"),
        _reading("SM busy", row.sm_percent, percents, "accent"),
        _reading("CPU", row.cpu_percent, lambda number: f"{percent(number / 100)} of a core"),
        _reading("throughput", row.samples_per_second, samples_rate, "speed"),
        *(_token_facts(row) if row.tokens_per_second.value is not None else ()),
        _fact("command", ""),
    ]
    return (*facts, *text_lines(row.command, width, 12, indent=3))


def _token_facts(row: ProcessSample) -> tuple[Line, ...]:
    return (
        _reading(
            "tokens", row.tokens_per_second, lambda number: f"{rate(number)} tokens/s", "speed"
        ),
        _reading(
            "padding",
            row.padding_percent,
            lambda number: f"{percents(number)} of the computed tokens",
        ),
    )


Identity = tuple[int, float, str]  # pid, start, device: a pid may be reused, with another start


class ProcessRow(NamedTuple):
    """A process on a device.

    - `seconds`: for how long it has run, or None if unknown.
    - `ended`: whether it has ended; if so, its values are the last ones that were read.
    """

    sample: ProcessSample
    seconds: float | None = None
    ended: bool = False


def _reading_column(
    key: str,
    titles: tuple[str, ...],
    widths: tuple[int, ...],
    reading: Callable[[ProcessSample], Reading],
    draw: Callable[[float], str] = whole,
    tone: Tone = "text",
) -> Column[ProcessRow]:
    def cell(row: ProcessRow, width: int) -> tuple[Span, ...]:
        return (
            draw_reading(
                reading(row.sample), width, rate if draw is short and width >= 9 else draw, tone
            ),
        )

    return Column(key, titles, widths, cell, value=lambda row: _sort_value(reading(row.sample)))


def _sort_value(reading: Reading) -> float:
    """Return the number to sort a reading by, or -1 if the reading is unknown."""
    return -1.0 if reading.value is None else reading.value


def _text(
    key: str, widths: tuple[int, ...], text: Callable[[ProcessSample], str]
) -> Column[ProcessRow]:
    return Column(
        key,
        (key,),
        widths,
        text_cell(lambda row: text(row.sample)),
        "left",
        lambda row: text(row.sample).lower(),
    )


def _draw_busy(row: ProcessRow, width: int) -> tuple[Span, ...]:
    """Draw a bar with the percentage of the device's multiprocessor time that a process uses."""
    busy = row.sample.sm_percent.current
    return () if busy is None else bar(busy / 100, width)


def _command(row: ProcessRow, width: int) -> tuple[Span, ...]:
    program, space, rest = plain(row.sample.command).partition(" ")
    program = f"ended: {program.rpartition('/')[2]}" if row.ended else program
    text = cut(program.rpartition("/")[2] + space + rest, width)
    return (Span(text, "dim" if row.ended else "text"),)


PROCESS_COLUMNS: tuple[Column[ProcessRow], ...] = (
    TAG,
    Column(
        "pid",
        ("pid",),
        (7,),
        text_cell(lambda row: str(row.sample.pid), "strong"),
        value=lambda row: row.sample.pid,
    ),
    _text("user", (8, 12), lambda sample: sample.user),
    _text("device", (6,), lambda sample: sample.device_label),
    _reading_column(
        "memory", ("memory", "mem"), (7,), lambda sample: sample.memory_bytes, short_bytes, "memory"
    ),
    Column("busy", ("",), (12,), _draw_busy, "left", needs=150),
    _reading_column("sm", ("SM %", "SM"), (5,), lambda sample: sample.sm_percent, tone="accent"),
    _reading_column("cpu", ("CPU %", "CPU"), (6,), lambda sample: sample.cpu_percent),
    _reading_column(
        "speed",
        ("samples/s", "smp/s"),
        (6, 9),
        lambda sample: sample.samples_per_second,
        short,
        "speed",
    ),
    Column(
        "time",
        ("run time", "time"),
        (6, 8),
        text_cell(lambda row: run_time(row.seconds)),
        value=lambda row: row.seconds or 0,
    ),
    _text("command", (16,), lambda sample: sample.command)._replace(draw=_command, most=1000),
)
PROCESSES = Grid(PROCESS_COLUMNS)


def process_search_text(row: ProcessRow) -> str:
    """Return the text that the filter searches: pid, user, device and command."""
    return f"{row.sample.pid} {row.sample.user} {row.sample.device_label} {row.sample.command}"


def identity(sample: ProcessSample) -> Identity:
    """Return the pid, start time and device of a process, which together identify it."""
    return (sample.pid, sample.start_time, f"{sample.host}/{sample.device_id}")


def process_rows(
    snapshot: Snapshot, ended_processes: Sequence[ProcessSample] = ()
) -> tuple[ProcessRow, ...]:
    """Return the table rows of a reading's processes, and of processes that have just ended."""
    return tuple(
        ProcessRow(
            _as_old(each) if each in ended_processes else each,
            snapshot.at_seconds - each.start_time if each.start_time else None,
            ended=each in ended_processes,
        )
        for each in sorted((*snapshot.processes, *ended_processes), key=identity)
    )


def _as_old(sample: ProcessSample) -> ProcessSample:
    """Return the last sample of an ended process, with its readings marked as stale."""
    fields = ("memory_bytes", "sm_percent", "cpu_percent", "samples_per_second")
    known = {
        field: reading for field in fields if (reading := getattr(sample, field)).value is not None
    }
    old = {
        field: msgspec.structs.replace(reading, state=State.STALE)
        for field, reading in known.items()
    }
    return msgspec.structs.replace(sample, **old)


def empty_process_text(devices: Sequence[DeviceSample]) -> Lesson:
    """Return the help to show if there are no processes: how to start a training run."""
    only_cpu = bool(devices) and all(sample.device.on_cpu for sample in devices)
    return NO_TRAINING if only_cpu else NO_PROCESS
