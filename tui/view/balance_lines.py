"""The Balance screen's panels as lines: devices and their probes, shares, throughput, and what the search is doing."""

from __future__ import annotations

from collections.abc import Sequence

from balancer.records import Failed, Layout, Observation, OutOfMemory, Timed
from evener.shares import apportion
from tui.view.balance import BalanceState, Rival, best_solo, memory_wall, own_speed, rivals, seconds_left
from tui.view.cells import Line, Span, Tone, cells, clean, cut, device_tone, line, pad, wrap
from tui.view.charts import bar
from tui.view.marks import Marks
from tui.view.table import Column, column_widths, heading, table_row, window
from tui.words import duration, percent, rate

DETAILED_SHARES = 8  # devices; with more the legend tells samples alone


class _Lane:
    """One device's row: the state, and which device it is."""

    def __init__(self, state: BalanceState, device: int) -> None:
        self.state = state
        self.device = device
        self.running = next((each for each in state.running if each.probe.layout.shares[device]), None)


def _lane_name(lane: _Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    label = lane.state.devices[lane.device]
    name = lane.state.names[lane.device] if lane.device < len(lane.state.names) else ""
    fill = marks.fills[lane.device % len(marks.fills)]
    room = width - cells(label) - 3
    return (
        Span(f"{fill} ", device_tone(lane.device)),
        Span(label, "strong"),
        Span(f" {cut(clean(name), max(0, room), marks.ellipsis)}" if room > 3 else "", "dim"),
    )


def _lane_doing(lane: _Lane, width: int, marks: Marks) -> tuple[Span, ...]:
    running = lane.running
    if running is None:
        done = lane.state.ended or lane.state.finished is not None
        return (Span(f"{marks.done} done" if done else f"{marks.waiting} waits", "dim"),)
    words = f"{running.probe.stage}: {running.phase}"
    return Span(f"{marks.running} ", "speed"), Span(cut(words, width - 2, marks.ellipsis))


def _lane_batch(lane: _Lane, _width: int, _marks: Marks) -> tuple[Span, ...]:
    if lane.running is None:
        return (Span(""),)
    return (Span(str(lane.running.probe.layout.shares[lane.device])),)


def _lane_speed(lane: _Lane, _width: int, _marks: Marks) -> tuple[Span, ...]:
    running = lane.running
    if running is None or running.samples_per_second is None:
        return (Span(""),)
    return (Span(rate(own_speed(running, lane.device)), "speed"),)


def _lane_interval(lane: _Lane, _width: int, marks: Marks) -> tuple[Span, ...]:
    running = lane.running
    if running is None or running.relative_interval is None:
        return (Span(""),)
    settled: Tone = "good" if running.relative_interval <= 0.01 else "text"
    return (Span(f"{marks.plus_minus}{percent(running.relative_interval, 1)}", settled),)


def _lane_alone(lane: _Lane, _width: int, marks: Marks) -> tuple[Span, ...]:
    solo = best_solo(lane.state, lane.device)
    if solo is None:
        return (Span(marks.none, "dim"),)
    return Span(rate(solo.samples_per_second), "strong"), Span(f" at {solo.probe.layout.global_batch}", "dim")


def _lane_fits(lane: _Lane, _width: int, marks: Marks) -> tuple[Span, ...]:
    wall = memory_wall(lane.state, lane.device)
    belief = lane.state.belief
    sketch = next((each for each in belief.curves if each.device == lane.device), None) if belief else None
    largest = sketch.largest_batch if sketch is not None else None
    if wall is not None:
        return Span(f"{largest} fits, " if largest is not None else "", "text"), Span(f"{wall} not", "bad")
    if largest is not None:
        return (Span(f"{largest} fits"),)
    return (Span(marks.none, "dim"),)


LANE_COLUMNS: tuple[Column[_Lane], ...] = (
    Column("device", ("device",), 9, _lane_name, "left"),
    Column("doing", ("doing",), 10, _lane_doing, "left"),
    Column("batch", ("batch",), 6, _lane_batch),
    Column("speed", ("samples/s",), 9, _lane_speed),
    Column("interval", ("interval",), 8, _lane_interval),
    Column("alone", ("best alone", "alone"), 14, _lane_alone),
    Column("fits", ("memory",), 12, _lane_fits),
)


def lane_lines(
    state: BalanceState, width: int, height: int, marks: Marks, *, cursor: int = 0, top: int = 0, active: bool = False
) -> tuple[tuple[Line, ...], int]:
    """A row for each device: what is measured on it now, its best alone, where its memory ends; the first row shown."""
    growth = (("doing", 20), ("fits", 22), ("device", 22), ("doing", 26))
    widths = column_widths(LANE_COLUMNS, growth, {"device": 34}, width - 1)
    lanes = [_Lane(state, device) for device in range(len(state.devices))]
    room = max(0, height - 1)
    first = window(len(lanes), cursor, room, top)
    rows = [
        table_row(LANE_COLUMNS, widths, lane, marks, cursor=active and lane.device == cursor)
        for lane in lanes[first : first + room]
    ]
    return (heading(LANE_COLUMNS, widths, marks), *rows), first


def share_lines(state: BalanceState, width: int, marks: Marks) -> tuple[Line, ...]:
    """The best layout's shares as one bar, each device in its colour and filling, and a legend under it."""
    shares = chosen_shares(state)
    if shares is None or not sum(shares) or width < 4:
        return (line(Span(" No layout has been measured yet.", "dim")),)
    total = sum(shares)
    parts = apportion(width - 2, [float(share) for share in shares])
    spans = [
        Span(marks.fills[device % len(marks.fills)] * part, device_tone(device)) for device, part in enumerate(parts)
    ]
    legend: list[Line] = []
    row: list[Span] = []
    for device, share in enumerate(shares):
        part = f" ({percent(share / total, 0)})" if len(shares) <= DETAILED_SHARES else ""
        text = f"{share}{part}" if share else "left out"
        item = (
            Span(f" {marks.fills[device % len(marks.fills)]} ", device_tone(device)),
            Span(f"{state.devices[device]} ", "strong"),
            Span(f"{text} ", "text" if share else "dim"),
        )
        if sum(cells(span.text) for span in (*row, *item)) > width and row:
            legend.append(Line(tuple(row)))
            row = []
        row += item
    legend.append(Line(tuple(row)))
    return (Line((Span(" "), *spans)), *legend, line(Span(f" global batch {total}", "dim")))


def chosen_shares(state: BalanceState) -> tuple[int, ...] | None:
    """Of the plan, or of the best layout so far."""
    if state.finished is not None:
        return state.finished.plan.batches
    return state.best.layout.shares if state.best is not None else None


def rival_lines(state: BalanceState, width: int, height: int, marks: Marks) -> tuple[Line, ...]:
    """Bars of samples/s: the best so far against what else was measured, each with what it gains.

    The bar stands in the row where it fits, under it where there are rows to spare.
    """
    found = rivals(state)
    if not found:
        return (line(Span(" Nothing has been measured yet.", "dim")),)
    top = max(each.high for each in found)
    inline = width - _RIVAL_CELLS
    lines: list[Line] = []
    for place, each in enumerate(found):
        tone: Tone = "accent" if place else "speed"
        share = each.samples_per_second / top
        drawn = bar(share, inline, marks, tone) if inline >= 8 else ()
        lines.append(_rival_line(each, found[0], width, marks, drawn, first=not place))
        if not drawn and height >= 2 * len(found):
            lines.append(Line((Span(" "), *bar(share, width - 2, marks, tone))))
    return tuple(lines)


_RIVAL_CELLS = 68  # of a row without its bar


def _rival_line(each: Rival, best: Rival, width: int, marks: Marks, drawn: tuple[Span, ...], *, first: bool) -> Line:
    half = (each.high - each.low) / 2 / each.samples_per_second if each.samples_per_second else 0.0
    versus = "" if first else _versus(best.samples_per_second, each)
    spans = (
        Span(f" {each.name:<18}", "strong" if first else "text"),
        Span(f"{rate(each.samples_per_second):>9}", "speed"),
        Span(f" {marks.plus_minus}{percent(half, 1):<6}", "dim"),
        *drawn,
        Span(f" {versus:<8}", _versus_tone(versus)),
        Span(cut(each.detail, 22, marks.ellipsis), "dim"),
    )
    return Line(pad(spans, width))


def _versus(best: float, each: Rival) -> str:
    if each.name == "sum of solos":
        return f"{percent(best / each.samples_per_second)} of it" if each.samples_per_second else ""
    gain = best / each.samples_per_second - 1 if each.samples_per_second else 0.0
    return f"{gain * 100:+.1f} %"


def _versus_tone(text: str) -> Tone:
    return "good" if text.startswith("+") and not text.startswith("+0.0") else "dim"


def search_lines(state: BalanceState, width: int, height: int, marks: Marks) -> tuple[Line, ...]:
    """What the search does and why, how far it is, and the newest measurements."""
    said = state.finished.plan.warnings if state.finished is not None else state.notes
    warnings = warning_lines(said, width, marks)[: max(0, height // 3)]
    head = [*_doing_lines(state, width), _progress_line(state, width, marks), *warnings]
    room = max(0, height - len(head))
    newest = state.seen[-room:] if room else ()
    rows = [_seen_line(state, seen.observation, seen.at_seconds, width, marks) for seen in reversed(newest)]
    return (*head, *rows)


def _doing_lines(state: BalanceState, width: int) -> list[Line]:
    if state.fault:
        text, tone = f"{state.fault} {state.remedy}", "bad"
    elif state.finished is not None:
        text, tone = state.finished.verdict, "good"
    elif state.stopping:
        text, tone = "Stopping: the best plan so far is kept.", "warn"
    elif state.paused:
        text, tone = "Paused: no new probe starts until it goes on.", "warn"
    else:
        text, tone = (state.belief.doing if state.belief is not None else "The first probes are starting."), "text"
    tones: dict[str, Tone] = {"bad": "bad", "good": "good", "warn": "warn", "text": "text"}
    return [line(Span(f" {row}", tones[tone])) for row in wrap(clean(text), max(4, width - 2), 3)]


def _progress_line(state: BalanceState, width: int, marks: Marks) -> Line:
    left = seconds_left(state)
    facts = f" {state.probes} probes, {state.out_of_memory} out of memory, {duration(state.at_seconds)}"
    spans: tuple[Span, ...] = (Span(facts, "dim"),)
    if left is not None and state.budget_seconds:
        used = state.at_seconds / state.budget_seconds
        spans = (*spans, Span(f", at most {duration(left)} left ", "dim"), *bar(used, 16, marks))
    if state.finished is not None:
        spans = (*spans, Span(f"  {clean(state.finished.plan.search.why_stopped)}", "dim"))
    return Line(pad(spans, width))


def layout_text(state: BalanceState, layout: Layout) -> str:
    """The devices that compute, with their shares."""
    words = [f"{state.devices[device]}[{layout.shares[device]}]" for device in layout.active]
    return " ".join(words if len(words) <= 6 else [*words[:5], f"and {len(words) - 5} more"])


def _seen_line(state: BalanceState, seen: Observation, at_seconds: float, width: int, marks: Marks) -> Line:
    where = f"{seen.probe.stage:<6}{layout_text(state, seen.probe.layout)}"
    mark, tone, what = _outcome(state, seen, marks)
    spans = (
        Span(f" {duration(at_seconds):>10} ", "dim"),
        Span(f"{mark} ", tone),
        Span(f"{where}: "),
        Span(what, tone),
    )
    return Line(pad(spans, width))


def _outcome(state: BalanceState, seen: Observation, marks: Marks) -> tuple[str, Tone, str]:
    if isinstance(seen, Timed):
        half = (seen.high_seconds - seen.low_seconds) / 2 / seen.step_seconds
        doubts = "".join(f", {warning.code.replace('_', ' ')}" for warning in seen.warnings)
        return (
            marks.done,
            "text",
            f"{rate(seen.samples_per_second)} samples/s {marks.plus_minus}{percent(half, 1)}{doubts}",
        )
    if isinstance(seen, OutOfMemory):
        who = ", ".join(state.devices[device] for device in seen.devices)
        return marks.wall, "warn", "out of memory" + (f" on {who}" if who else "")
    assert isinstance(seen, Failed)
    return marks.failed, "bad", f"failed: {clean(seen.detail, 200)}"


def warning_lines(warnings: Sequence[str], width: int, marks: Marks) -> tuple[Line, ...]:
    """A plan's warnings, each wrapped."""
    return tuple(
        line(Span(f" {marks.alarm if not place else ' '} ", "warn"), Span(row, "warn"))
        for warning in warnings
        for place, row in enumerate(wrap(clean(warning), max(4, width - 4), 3))
    )
