"""The Balance screen's panels as lines: shares, throughput, and what the search is doing."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.session_state import BalanceState, Rival, rivals, seconds_left
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Timed
from evener.shares import apportion
from evener.tui.text.formatting import duration, percent, rate
from evener.tui.view.cells import Line, Span, Tone, clean, cut, device_tone, line, pad, span_cells, wrap
from evener.tui.view.charts import bar
from evener.tui.view.marks import Marks

DETAILED_SHARES = 8  # devices; with more the legend tells samples alone
MOST_NAMED = 6  # devices of a layout; of more the last ones are counted


def share_lines(state: BalanceState, width: int, height: int, marks: Marks) -> tuple[Line, ...]:
    """The best layout's shares as one bar, each device in its colour and filling, and a legend under it.

    While another split is measured, its shares are told too: as a second bar where a row is left for it.
    """
    shares = chosen_shares(state)
    if shares is None or not sum(shares) or width < 4:
        return (line(Span(" No layout has been measured yet.", "dim")),)
    legend = _legend(state, shares, width, marks)
    total = line(Span(f" global batch {sum(shares)}", "dim"))
    tried = tried_shares(state)
    if tried is None:
        return (_shares_bar(shares, width, marks), *legend, total)
    before = (*total.spans, Span(f"{marks.dot:^3}", "dim"), Span(f"{marks.running} ", "speed"))
    parts = [str(share) for share in tried if share]
    words = f"now {' + '.join(parts)} = {sum(tried)}"
    if span_cells(before) + len(words) > width:
        words = f"now {sum(tried)} over {len(parts)} devices"
    facts = line(*before, Span(words))
    bars = [_shares_bar(shares, width, marks), _shares_bar(tried, width, marks)]
    return (*bars[: max(1, min(2, height - len(legend) - 1))], *legend, Line(pad(facts.spans, width)))


def _shares_bar(shares: Sequence[int], width: int, marks: Marks) -> Line:
    parts = apportion(width - 2, [float(share) for share in shares])
    fills = marks.fills
    spans = (Span(fills[device % len(fills)] * part, device_tone(device)) for device, part in enumerate(parts))
    return Line((Span(" "), *spans))


def _legend(state: BalanceState, shares: Sequence[int], width: int, marks: Marks) -> list[Line]:
    """What each device computes; of many devices those that are left out are only counted."""
    detailed = len(shares) <= DETAILED_SHARES
    items = [_share_item(state, shares, device, marks) for device, share in enumerate(shares) if share or detailed]
    if not detailed and 0 in shares:
        items.append((Span(f" {shares.count(0)} left out ", "dim"),))
    legend: list[Line] = []
    row: tuple[Span, ...] = ()
    for item in items:
        if row and span_cells((*row, *item)) > width:
            legend.append(Line(row))
            row = ()
        row += item
    return [*legend, Line(row)]


def _share_item(state: BalanceState, shares: Sequence[int], device: int, marks: Marks) -> tuple[Span, ...]:
    share = shares[device]
    part = f" ({percent(share / sum(shares), 0)})" if len(shares) <= DETAILED_SHARES else ""
    return (
        Span(f" {marks.fills[device % len(marks.fills)]} ", device_tone(device)),
        Span(f"{state.devices[device]} ", "strong"),
        Span(f"{share}{part} " if share else "left out ", "text" if share else "dim"),
    )


def tried_shares(state: BalanceState) -> tuple[int, ...] | None:
    """Of the split that is measured now, if it is another than the one that is shown."""
    splits = (each.probe.layout.shares for each in state.running if len(each.probe.layout.active) > 1)
    return next((shares for shares in splits if shares != chosen_shares(state)), None)


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
_WHOLE_CELLS = 47  # below them a row has the best one's interval, or what it gains on another, and no more
_BRIEF_CELLS = 21  # of such a row without its name


def _rival_line(each: Rival, best: Rival, width: int, marks: Marks, drawn: tuple[Span, ...], *, first: bool) -> Line:
    half = (each.high - each.low) / 2 / each.samples_per_second if each.samples_per_second else 0.0
    error = f"{marks.plus_minus}{percent(half, 1 if half < 0.1 else 0)}"
    versus = "" if first else _versus(best.samples_per_second, each)
    room = max(1, min(18, width - _BRIEF_CELLS))
    spans: tuple[Span, ...] = (
        Span(f" {cut(each.name, room, marks.ellipsis):<{room}}", "strong" if first else "text"),
        Span(f"{rate(each.samples_per_second):>9}", "speed"),
    )
    if width < _WHOLE_CELLS:
        last = Span(f" {error}", "dim") if first else Span(f" {versus}", _versus_tone(versus))
        return Line(pad((*spans, last), width))
    spans = (
        *spans,
        Span(f" {error:<7}", "dim"),
        *drawn,
        Span(f" {versus:<7} ", _versus_tone(versus)),
        Span(cut(each.detail, max(1, min(22, width - 45)), marks.ellipsis), "dim"),
    )
    return Line(pad(spans, width))


def _versus(best: float, each: Rival) -> str:
    if each.name == "sum of solos":
        return f"{percent(best / each.samples_per_second)} of it" if each.samples_per_second else ""
    gain = best / each.samples_per_second - 1 if each.samples_per_second else 0.0
    return f"{gain * 100:+.{0 if abs(gain) >= 1 else 1}f} %"


def _versus_tone(text: str) -> Tone:
    return "good" if text.startswith("+") and not text.startswith("+0.0") else "dim"


def search_lines(state: BalanceState, width: int, height: int, marks: Marks) -> tuple[Line, ...]:
    """What the search does and why, how far it is, and the newest measurements.

    While it runs, at least the two newest measurements stand before any warning.
    """
    said = state.finished.plan.warnings if state.finished is not None else state.notes
    head = [*_doing_lines(state, width), *_progress_lines(state, width, marks)]
    room = height - len(head)
    head += warning_lines(said, width, marks, max(0, min(room - (0 if state.ended else 2), height // 3)))
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
    most = 6 if state.fault or state.finished is not None else 3  # what it came to is told whole, for many devices too
    return [line(Span(f" {row}", tones[tone])) for row in wrap(clean(text), max(4, width - 2), most)]


def _progress_lines(state: BalanceState, width: int, marks: Marks) -> list[Line]:
    """How much was measured, and the budget that is left; at the end, why it ended."""
    left = seconds_left(state)
    facts = f"{state.probes} probes, {state.out_of_memory} out of memory, {duration(state.at_seconds)}"
    if state.finished is not None:
        words = f"{facts}. {clean(state.finished.plan.search.why_stopped)}"
        return [line(Span(f" {row}", "dim")) for row in wrap(words, max(4, width - 2), 2)]
    spans: tuple[Span, ...] = (Span(f" {facts}", "dim"),)
    if left is not None and state.budget_seconds:
        used = state.at_seconds / state.budget_seconds
        spans = (*spans, Span(f", at most {duration(left)} left ", "dim"), *bar(used, 16, marks))
    return [Line(pad(spans, width))]


def layout_text(state: BalanceState, layout: Layout, most: int = MOST_NAMED) -> str:
    """The devices that compute, with their shares; of more than `most` some are only counted."""
    words = [f"{state.devices[device]}[{layout.shares[device]}]" for device in layout.active]
    named = most - 1
    return " ".join(words if len(words) <= most else [*words[:named], f"and {len(words) - named} more"])


def _seen_line(state: BalanceState, seen: Observation, at_seconds: float, width: int, marks: Marks) -> Line:
    mark, tone, what = _outcome(state, seen, marks)
    head = (Span(f" {duration(at_seconds):>10} ", "dim"), Span(f"{mark} ", tone), Span(f"{seen.probe.stage:<6}"))
    room = width - span_cells(head) - 2
    texts = [layout_text(state, seen.probe.layout, most) for most in range(MOST_NAMED, 1, -1)]
    where = next((text for text in texts if len(text) + len(what) <= room), texts[-1])
    spans = (*head, Span(f"{where}: "))
    room = width - span_cells(spans)
    return Line(pad((*spans, Span(cut(what, room, marks.ellipsis) if room > 0 else "", tone)), width))


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


def warning_lines(warnings: Sequence[str], width: int, marks: Marks, most: int | None = None) -> tuple[Line, ...]:
    """A plan's warnings, each wrapped; where more than `most` rows would be, the last one shown says so."""
    rows = [
        (marks.alarm if not place else " ", row)
        for warning in warnings
        for place, row in enumerate(wrap(clean(warning), max(4, width - 4), 3))
    ]
    if most is not None and len(rows) > most:
        rows = rows[: max(0, most)]
        rows[-1:] = [
            (sign, cut(f"{row} {marks.ellipsis}", max(4, width - 4), marks.ellipsis)) for sign, row in rows[-1:]
        ]
    return tuple(line(Span(f" {sign} ", "warn"), Span(row, "warn")) for sign, row in rows)
