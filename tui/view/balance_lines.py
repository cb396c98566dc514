"""Lines about a search, such as its shares, progress, warnings and verdict."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.events import Finished
from evener.balancer.number_format import count_nouns, duration, percent, rate, relative_error
from evener.balancer.result.rivals import list_samples
from evener.balancer.result.sentences import (
    BETWEEN,
    SIMULATED,
    find_training_command,
    recommends_plan,
    write_verdict,
)
from evener.balancer.session_state import (
    RatedLayout,
    SessionState,
    chosen_layout,
    has_split,
    rivals,
    seconds_left,
    timed,
)
from evener.balancer.types import Layout, Observation, OutOfMemory, Timed
from evener.printable import plain
from evener.shares.whole_rows import apportion

from ..text.summaries import budget_left_text, gain_text, layout_text, outcome_text, share_text
from .cells import (
    Line,
    Mark,
    Span,
    Tone,
    cut,
    device_tone,
    line,
    pad,
    span_cells,
    text_lines,
    wrap,
)
from .charts import bar

DETAILED_SHARES = 8  # with more devices, the legend has no percentages
MOST_NAMED = 6  # further devices of a layout are only counted
MOST_ROWS = 6  # maximum number of lines of a layout, enough for many devices


def share_lines(state: SessionState, width: int, height: int) -> tuple[Line, ...]:
    """Draw the shares in the best layout so far, and in the split that is being measured."""
    chosen = chosen_layout(state)
    if _measures_alone(state):
        return (*text_lines(_solo_progress(state), width, 3, "dim"),)
    if chosen is None or not chosen.global_batch or width < 4:
        return (
            line(
                Span(f" No layout has been {'chosen' if timed(state) else 'measured'} yet.", "dim")
            ),
        )
    legend = share_legend(state, chosen, width)
    total = line(Span(f" global batch {chosen.global_batch}", "dim"))
    tried = _tried_layout(state, chosen)
    if tried is None:
        return (shares_bar(chosen.shares, width), *legend, total)
    before = (*total.spans, Span(f"{Mark.DOT:^3}", "dim"), Span(f"{Mark.RUNNING} ", "speed"))
    words = f"now {list_samples(tried)} = {tried.global_batch}"
    if span_cells(before) + len(words) > width:
        words = f"now {tried.global_batch} over {len(tried.active)} devices"
    facts = line(*before, Span(words))
    bars = [shares_bar(layout.shares, width) for layout in (chosen, tried)]
    return (
        *bars[: max(1, min(2, height - len(legend) - 1))],
        *legend,
        Line(pad(facts.spans, width)),
    )


def _measures_alone(state: SessionState) -> bool:
    """Return whether only single devices have been measured so far."""
    # No shares are shown in that case, because they would look like a result.
    best = state.best
    if state.finished is not None or len(state.devices) == 1 or has_split(state):
        return False
    return best is None or len(best.layout.active) == 1


def _solo_progress(state: SessionState) -> str:
    """Describe the progress while devices are measured alone: how many batch sizes are done."""
    sizes = [each.probe.layout.global_batch for each in timed(state)]
    measured = f" {len(set(sizes))} batch sizes so far." if sizes else ""
    return f"No split was measured yet: each device is measured alone first.{measured}"


def shares_bar(shares: Sequence[int], width: int) -> Line:
    """Draw a bar divided in proportion to the shares, one colour for each device."""
    # Each part but the last ends in a half cell, so that the parts are distinct without colours.
    parts = apportion(width - 2, [float(share) for share in shares])
    last = max((device for device, part in enumerate(parts) if part), default=0)
    spans = [Span(" ")]
    for device, part in enumerate(parts):
        blocks = Mark.BLOCK * part
        if device != last and part > 1:
            blocks = Mark.BLOCK * (part - 1) + Mark.WALL
        spans.append(Span(blocks, device_tone(device)))
    return Line(tuple(spans))


def share_legend(state: SessionState, layout: Layout, width: int) -> list[Line]:
    """Return the legend of the share bar: each device's rows and percentage.

    With more than 8 devices, percentages are omitted, and idle devices are counted but not named.
    """
    devices = range(len(layout.shares))
    detailed = len(devices) <= DETAILED_SHARES
    shown = devices if detailed else layout.active
    items = [_share_item(state, layout, device) for device in shown]
    left_out = len(devices) - len(layout.active)
    if left_out and not detailed:
        items.append((Span(f" {left_out} left out ", "dim"),))
    legend: list[Line] = []
    row: tuple[Span, ...] = ()
    for item in items:
        if row and span_cells((*row, *item)) > width:
            legend.append(Line(row))
            row = ()
        row += item
    return [*legend, Line(row)]


def _share_item(state: SessionState, layout: Layout, device: int) -> tuple[Span, ...]:
    share = layout.shares[device]
    words = share_text(layout, device) if device in layout.active else "left out"
    if share and len(layout.shares) <= DETAILED_SHARES:
        words += f" ({percent(share / layout.global_batch, 0)})"
    return (
        Span(f" {Mark.BLOCK} ", device_tone(device)),
        Span(f"{state.devices[device]} ", "strong"),
        Span(f"{words} ", "text" if share else "dim"),
    )


def _tried_layout(state: SessionState, best_layout: Layout) -> Layout | None:
    """Return the split that is being measured, or None if there is none or it is the best one."""
    splits = (each.probe.layout for each in state.running if len(each.probe.layout.active) > 1)
    known = (best_layout.shares, best_layout.pass_rows)
    return next((layout for layout in splits if (layout.shares, layout.pass_rows) != known), None)


def rival_lines(state: SessionState, width: int, height: int) -> tuple[Line, ...]:
    """Draw each compared layout, with its samples/s and the gain of the best layout over it."""
    found = rivals(state)
    if not found:
        return (line(Span(" Nothing has been measured yet.", "dim")),)
    top = max(each.rate.high for each in found)
    name_cells = _count_name_cells(found, width)
    inline = width - _RIVAL_CELLS - name_cells
    lines: list[Line] = []
    for place, each in enumerate(found):
        tone: Tone = "accent" if place else "speed"
        share = each.rate.value / top
        drawn = bar(share, inline, tone) if inline >= 8 else ()
        lines.append(_rival_line(each, found[0], width, drawn, name_cells))
        if not drawn and height >= 2 * len(found):
            lines.append(Line((Span(" "), *bar(share, width - 2, tone))))
    note = format_fastest(state)
    if note and len(lines) < height:
        lines += text_lines(note, width, 1, "dim")
    return tuple(lines)


def _count_name_cells(layouts: Sequence[RatedLayout], width: int) -> int:
    """Return the width of the column with layout names."""
    if width < _WHOLE_CELLS:
        widest_gain = max(len(format_gain_of(layouts[0], each)) for each in layouts)
        return max(1, min(USUAL_NAME, width - _BRIEF_CELLS - widest_gain))
    longest = max(len(each.name) for each in layouts)
    return max(USUAL_NAME, min(longest, USUAL_NAME + width - _ROOMY_CELLS))


def format_fastest(state: SessionState) -> str:
    """Explain why the fastest measurement is above the samples/s shown for the best layout.

    Returns "" if it isn't above, or if the search has a result.
    """
    if state.finished is not None or state.best is None or not has_split(state):
        return ""
    whole = [each for each in timed(state) if not each.probe.layout.length]
    fastest = max(whole, key=lambda each: each.samples_per_second)
    best, layout = state.best, fastest.probe.layout
    gain = fastest.samples_per_second / best.throughput.value - 1
    if rate(fastest.samples_per_second) == rate(best.throughput.value) or gain <= 0:
        return ""
    speed = rate(fastest.samples_per_second)
    if layout == best.layout:
        return f"{speed} in its fastest turn: above is the mean of {best.turns}"
    where = f"{speed} at {'+'.join(str(share) for share in layout.shares if share)}"
    if layout.traits.sharded and fastest.is_short_of_memory():
        return f"{where}: {percent(gain, 1)} more, but its memory was nearly full"
    if layout.global_batch > best.layout.global_batch:
        return f"{where}: a larger batch for {percent(gain, 1)} more"
    return f"{where}: in one measurement, {percent(gain, 1)} more"


USUAL_NAME = 18  # usual cells of a layout's name
_RIVAL_CELLS = 54  # cells that a line takes besides its name and its bar
_ROOMY_CELLS = 80  # a line with more cells has room for longer names
_WHOLE_CELLS = 51  # a narrower line has room only for an interval or a gain
_BRIEF_CELLS = 10  # cells that such a narrow line takes besides its name and its gain


def _rival_line(
    rated: RatedLayout,
    best: RatedLayout,
    width: int,
    drawn: tuple[Span, ...],
    name_cells: int = USUAL_NAME,
) -> Line:
    first = rated is best
    half = relative_error(rated.rate.value, rated.rate.low, rated.rate.high)
    error = f"±{percent(half, 1 if half < 0.1 else 0)}"
    gain = "" if first else format_gain_of(best, rated)
    spans: tuple[Span, ...] = (
        Span(f" {cut(rated.name, name_cells):<{name_cells}}", "strong" if first else "text"),
        Span(f"{rate(rated.rate.value):>8}", "speed"),
    )
    if width < _WHOLE_CELLS:
        last = Span(f" {error}", "dim") if first else Span(f" {gain}", gain_tone(gain))
        return Line(pad((*spans, last), width))
    spans = (
        *spans,
        Span(f" {error:<{7 if drawn else 6}}", "dim"),
        *drawn,
        Span(f" {gain:<12} ", gain_tone(gain)),
    )
    left = width - span_cells(spans)
    where = f"at {rated.where}" if rated.where else ""
    return Line(pad((*spans, Span(cut(where, max(1, min(25, left))), "dim")), width))


def format_gain_of(best: RatedLayout, rated: RatedLayout) -> str:
    """Return the gain of the best layout over another one, such as "plan +20 %" or "turns +3 %".

    It begins with "turns" if the two layouts were measured alternately. Otherwise it begins with
    "plan" or "best", the name of the best layout.
    """
    gain = gain_text(best, rated)
    if not gain.startswith(("+", "-")):
        return gain
    owner = "plan" if best.name == "the plan" else "best"
    return f"{'turns' if rated.paired is not None else owner} {gain}"


def gain_tone(text: str) -> Tone:
    """Return the tone for a gain such as "+20 %": "good" if it is positive, else "dim"."""
    return "good" if "+" in text and "+0.0" not in text else "dim"


def search_lines(state: SessionState, width: int, height: int) -> tuple[Line, ...]:
    """Return the current activity, progress, warnings and newest measurements of a search."""
    warnings = state.notes if state.finished is None else other_warnings(state.finished)
    head = [*_doing_lines(state, width), *_progress_lines(state, width)]
    room = height - len(head)
    head += warning_lines(
        warnings, width, max(0, min(room - (0 if state.ended else 2), height // 3))
    )
    room = max(0, height - len(head))
    newest = state.seen[-room:] if room else ()
    rows = [_seen_line(state, one.seen, one.at_seconds, width) for one in reversed(newest)]
    return (*head, *rows)


def other_warnings(finished: Finished) -> list[str]:
    """Return the plan's warnings that the verdict doesn't mention."""
    doubts = write_verdict(finished.found).doubts if finished.found is not None else ()
    return [warning for warning in finished.plan.warnings if warning not in doubts]


def _doing_lines(state: SessionState, width: int) -> tuple[Line, ...]:
    if state.fault:
        return text_lines(f"{state.fault} {state.remedy}", width, 6, "bad")
    if state.finished is not None:
        return finished_lines(state.finished, width)
    if state.stopping:
        return text_lines("Stopping: the best plan so far is kept.", width, 3, "warn")
    if state.paused:
        return text_lines("Paused: no new probe starts until you resume.", width, 3, "warn")
    return text_lines(_search_progress(state), width, 3)


def finished_lines(finished: Finished, width: int) -> tuple[Line, ...]:
    """Return the verdict, next steps, warnings and remarks of a finished search."""
    if finished.found is None:  # a run by an older version, which stored only the text
        return text_lines(finished.verdict, width, MOST_ROWS, "good")
    written = write_verdict(finished.found)
    lines = verdict_head(finished, width)
    if written.gains:
        lines += text_lines(written.gains, width, MOST_ROWS, "good")
    if recommends_plan(finished):
        train = find_training_command(finished.plan, "plan.toml")
        then = f", then {train}" if train else ""
        lines += text_lines(f"Next: e writes the plan{then}", width, 2)
    lines += warning_lines(written.doubts, width)
    for remark in written.remarks:
        lines += text_lines(remark, width, 3, "dim")
    return tuple(lines)


def verdict_head(finished: Finished, width: int) -> list[Line]:
    """Return the recommendation and the plan's samples/s."""
    # The recommendation usually comes first. If it ends with the layout, it comes after the layout
    # instead, without repeating it.
    if finished.found is None:
        return list(text_lines(finished.verdict, width, MOST_ROWS, "strong"))
    written, found = write_verdict(finished.found), finished.found
    layout = written.description.removeprefix(SIMULATED)
    recommendation = written.recommendation.removeprefix(SIMULATED)
    throughput = _throughput_lines(written.rate, layout, found.simulated, width)
    if recommendation.endswith(f": {layout}."):
        return [
            *throughput,
            *text_lines(f"{recommendation.removesuffix(f': {layout}.')}.", width, 3),
        ]
    return [
        *(text_lines(recommendation, width, 3, "strong") if recommendation else ()),
        *throughput,
    ]


def _throughput_lines(throughput: str, layout: str, simulated: bool, width: int) -> list[Line]:
    """Return the samples/s and the layout, on one line if they fit."""
    mark = Span(f"{BETWEEN}{Mark.SIMULATED} simulated" if simulated else "", "warn")
    beside = Span(f"{BETWEEN}{plain(layout)}", "strong")
    first = Span(f" {plain(throughput)}", "headline")
    if span_cells((first, beside, mark)) <= width:
        return [line(first, beside, mark)]
    return [line(first, mark), *text_lines(layout, width, MOST_ROWS, "strong")]


def _search_progress(state: SessionState) -> str:
    """Return a sentence about what the search is doing."""
    # If all running probes are still building their models, name the devices on which they do so.
    building = [each for each in state.running if each.phase == "building"]
    if building and len(building) == len(state.running):
        where = {state.devices[i]: None for each in building for i in each.probe.layout.active}
        longest = max(each.phase_seconds for each in building)
        return f"The model is being built on {', '.join(where)}: {duration(longest)}."
    return state.belief.doing if state.belief is not None else "The first probes are starting."


def _progress_lines(state: SessionState, width: int) -> tuple[Line, ...]:
    """Return the number of probes, the time so far, and how much of the budget is used."""
    # After the search, they give the reason why it ended instead of the budget.
    left = seconds_left(state)
    search = state.finished.plan.search if state.finished is not None else None
    seconds = search.seconds if search is not None else state.at_seconds
    facts = (
        f"{count_nouns(state.probes, 'probe')}, {state.out_of_memory} out of memory, "
        f"{duration(seconds)}"
    )
    if search is not None:
        return text_lines(f"{facts}. {search.why_stopped}", width, 2, "dim")
    spans: tuple[Span, ...] = (Span(f" {facts}", "dim"),)
    if left is not None and state.budget_seconds:
        used = state.at_seconds / state.budget_seconds
        spans = (*spans, Span(f"{budget_left_text(state)} ", "dim"), *bar(used, 16))
    return (Line(pad(spans, width)),)


def _seen_line(state: SessionState, seen: Observation, at_seconds: float, width: int) -> Line:
    mark, tone = _mark(seen)
    what = plain(outcome_text(seen, state.devices, "±"))
    head = (
        Span(f" {duration(at_seconds):>10} ", "dim"),
        Span(f"{mark} ", tone),
        Span(f"{seen.probe.stage:<6}"),
    )
    room = width - span_cells(head) - 2
    texts = [
        layout_text(seen.probe.layout, state.devices, most) for most in range(MOST_NAMED, 1, -1)
    ]
    where = next((text for text in texts if len(text) + len(what) <= room), texts[-1])
    spans = (*head, Span(f"{where}: "))
    room = width - span_cells(spans)
    return Line(pad((*spans, Span(cut(what, room) if room > 0 else "", tone)), width))


def _mark(seen: Observation) -> tuple[str, Tone]:
    if isinstance(seen, Timed):
        return Mark.DONE, "text"
    return (Mark.WALL, "warn") if isinstance(seen, OutOfMemory) else (Mark.FAILED, "bad")


def warning_lines(
    warnings: Sequence[str], width: int, max_lines: int | None = None
) -> tuple[Line, ...]:
    """Return the warnings, each with an alarm mark in front.

    They are cut to `max_lines` lines, unless that is None.
    """
    rows = [
        (Mark.ALARM if not place else " ", row)
        for warning in warnings
        for place, row in enumerate(wrap(plain(warning), max(4, width - 4), 3))
    ]
    if max_lines is not None and len(rows) > max_lines:
        rows = rows[: max(0, max_lines)]
        rows[-1:] = [(sign, cut(f"{row} …", max(4, width - 4))) for sign, row in rows[-1:]]
    return tuple(line(Span(f" {sign} ", "warn"), Span(row, "warn")) for sign, row in rows)
