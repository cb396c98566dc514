"""The log of a search, with a row for each measurement, and the details of a measurement."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.balancer.journal import ObservationEntry
from evener.balancer.number_format import (
    count_nouns,
    duration,
    half_width,
    percent,
    rate,
    size,
    step_time,
)
from evener.balancer.session_state import SessionState
from evener.balancer.types import Observation, OutOfMemory, Stage, Timed
from evener.printable import plain

from ..text.stages import STAGE_WORDS
from ..text.summaries import list_doubts, share_text
from .cells import Line, Mark, Span, Tone, cut, line, text_lines
from .search_story import name_layout
from .table import Column, Grid

REASONS: dict[Stage, str] = {
    Stage.SOLO: "Each device alone, all at once: how its speed and memory grow with the batch.",
    Stage.REST: "One device alone, with the others idle: what has to be beaten.",
    Stage.PART: "One device alone on its rows of a model that is cut over the devices.",
    Stage.SPLIT: "A real step over several devices: what exchanging gradients costs.",
    Stage.SHARD: "A whole step of a model that is cut over the devices.",
    Stage.RACE: "The candidates in turns, so that a machine that slows down affects all of them "
    "alike.",
    Stage.PACK: "Several trainings side by side on one device.",
    Stage.KNOBS: "The winner with another precision or compiler.",
    Stage.CHECK: "The chosen layout once more: this rate had no part in choosing it.",
}


class LogRow(msgspec.Struct, frozen=True):
    """A measurement in the log. `news` is a remark, such as "the fastest so far, +3 %", or ""."""

    number: int  # number of the measurement, from 1, in the order in which measurements ended
    entry: ObservationEntry
    labels: tuple[str, ...]
    news: str = ""

    @property
    def seen(self) -> Observation:
        """The measurement that this row shows."""
        return self.entry.seen


def log_rows(state: SessionState) -> list[LogRow]:
    """Return the rows of all measurements, newest first."""
    first = state.probes - len(state.seen) + 1
    fastest, alone = 0.0, dict[int, dict[int, float]]()
    rows: list[LogRow] = []
    for number, entry in enumerate(state.seen, max(1, first)):
        rows.append(LogRow(number, entry, state.devices, _find_news(entry.seen, fastest, alone)))
        seen = entry.seen
        if not isinstance(seen, Timed):
            continue
        layout = seen.probe.layout
        if layout.length:  # a probe of rows of one length doesn't measure a whole batch
            continue
        fastest = max(fastest, seen.samples_per_second)
        if len(layout.active) == 1:
            before = alone.setdefault(layout.active[0], {})
            before[layout.global_batch] = seen.samples_per_second
    return rows[::-1]


def _find_news(
    observation: Observation, fastest: float, solo_speeds: dict[int, dict[int, float]]
) -> str:
    """Return a remark about a measurement, such as its warnings or its gain, or "".

    - `fastest`: the highest samples/s of all earlier measurements.
    - `solo_speeds`: the samples/s of each device when it trained alone in earlier measurements, by
      device and batch size.
    """
    if not isinstance(observation, Timed):
        return ""
    doubts = ", ".join(list_doubts(observation))
    if doubts:
        return doubts
    layout, speed = observation.probe.layout, observation.samples_per_second
    if layout.length:
        return ""
    # compare one device with its next smaller batch, several with the fastest so far
    if len(layout.active) == 1:
        smaller = {
            batch: rate_before
            for batch, rate_before in solo_speeds.get(layout.active[0], {}).items()
            if batch < layout.global_batch
        }
        if not smaller:
            return ""
        batch = max(smaller)
        return f"{_signed(speed / smaller[batch] - 1)} over {count_nouns(batch, 'row')}"
    if speed > fastest > 0:
        return f"the fastest so far, {_signed(speed / fastest - 1)}"
    return ""


def _signed(gain: float) -> str:
    return f"{'+' if gain >= 0 else '-'}{percent(abs(gain))}"


def _outcome(row: LogRow) -> tuple[str, Tone]:
    seen = row.seen
    if isinstance(seen, Timed):
        error = half_width(seen.throughput.value, seen.throughput.low, seen.throughput.high)
        return f"{rate(seen.samples_per_second)} ± {error}", "speed"
    if isinstance(seen, OutOfMemory):
        return "out of memory", "warn"
    return "failed", "bad"


def _draw_outcome(row: LogRow, width: int) -> tuple[Span, ...]:
    text, tone = _outcome(row)
    if len(text) > width:
        text = text.partition(" ±")[0]
    return (Span(cut(text, width), tone),)


def _draw_layout(row: LogRow, width: int) -> tuple[Span, ...]:
    layout = row.seen.probe.layout
    text = plain(name_layout(layout, row.labels))
    if len(text) > width:
        text = text.replace(" rows on ", " on ").replace(" + ", "+")
    return (Span(cut(text, width)),)


def _draw_news(row: LogRow, width: int) -> tuple[Span, ...]:
    seen = row.seen
    if isinstance(seen, Timed):
        return (Span(cut(row.news, width), "good" if "fastest" in row.news else "dim"),)
    if isinstance(seen, OutOfMemory):
        who = ", ".join(row.labels[place] for place in seen.devices)
        return (Span(cut(f"on {who}" if who else "", width), "dim"),)
    return (Span(cut(plain(seen.detail), width), "bad"),)


def _draw_kind(row: LogRow, width: int) -> tuple[Span, ...]:
    return (Span(cut(STAGE_WORDS[row.seen.probe.stage], width)),)


LOG: Grid[LogRow] = Grid(
    (
        Column(
            "at",
            ("time",),
            (7, 11),
            lambda row, width: (Span(cut(duration(row.entry.at_seconds), width), "dim"),),
        ),
        Column("kind", ("phase",), (6,), _draw_kind, "left"),
        Column("layout", ("rows",), (22, 30, 34), _draw_layout, "left", most=60),
        Column("speed", ("samples/s",), (13, 16), _draw_outcome),
        Column("news", ("",), (18, 24), _draw_news, "left", most=60),
    ),
    "The first measurements appear when they have ended.",
)


def probe_lines(row: LogRow, width: int) -> tuple[Line, ...]:
    """Return the details of a measurement, such as its reason, layout, speed and memory."""
    seen = row.seen
    layout, probe = seen.probe.layout, seen.probe
    head = f"Probe {row.number}, at {duration(row.entry.at_seconds)}: {STAGE_WORDS[probe.stage]}"
    lines = [
        line(Span(head, "strong")),
        *text_lines(REASONS[probe.stage], width, 3, "dim", 0),
        line(),
    ]
    lines += [_device_line(row, place) for place in layout.active]
    if layout.knobs or layout.placement or layout.processes > 1:
        extra = [layout.placement, *layout.knobs]
        if layout.processes > 1:
            extra.append(f"{layout.processes} trainings side by side")
        lines += text_lines(", ".join(filter(None, extra)), width, 3, "text", 0)
    lines.append(line())
    if not isinstance(seen, Timed):
        tone: Tone = "warn" if isinstance(seen, OutOfMemory) else "bad"
        return (*lines, *text_lines(_outcome(row)[0], width, 1, tone, 0), *_reason(seen, width))
    facts = _timed_facts(seen)
    name_cells = max(len(name) for name, _ in facts)
    lines += [line(Span(f"{name:<{name_cells}}  ", "title"), Span(text)) for name, text in facts]
    if row.news:
        lines += text_lines(row.news, width, 2, "dim", 0)
    return tuple(lines)


def _reason(seen: Observation, width: int) -> tuple[Line, ...]:
    detail = "" if isinstance(seen, Timed) else seen.detail
    return text_lines(detail, width, 12, "text", 0)


def _device_line(row: LogRow, device: int) -> Line:
    """Return a line with a device's rows, compute time and memory in a measurement."""
    seen = row.seen
    spans = [
        Span(f"{plain(row.labels[device])}  ", "strong"),
        Span(count_nouns(share_text(seen.probe.layout, device), "row")),
    ]
    if isinstance(seen, Timed):
        own, held = seen.device_seconds[device], seen.memory_bytes[device]
        if own is not None:
            spans.append(Span(f"   own work {step_time(own)}", "dim"))
        if held is not None:
            spans.append(Span(f"   {size(held)}", "memory"))
    return line(*spans)


def _timed_facts(seen: Timed) -> Sequence[tuple[str, str]]:
    low, high = seen.throughput.low, seen.throughput.high
    return (
        ("speed", f"{rate(seen.samples_per_second)} samples/s, 95 %: {rate(low)} to {rate(high)}"),
        ("step", f"{step_time(seen.step_seconds)}, from {seen.steps} steps"),
        ("first step", f"{step_time(seen.first_step_seconds)}: tracing and compiling"),
        ("it took", duration(seen.elapsed_seconds)),
        *((Mark.ALARM, words) for words in list_doubts(seen)),
    )
