"""The progress of a search, with its phases, the current measurement, and the best speed so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from evener.balancer.number_format import duration, join_words, rate
from evener.balancer.result.rivals import list_samples
from evener.balancer.session_state import SessionState, has_split, seconds_left
from evener.balancer.types import Layout, Stage, Timed
from evener.devices.registry import is_simulated
from evener.printable import plain

from .cells import Line, Mark, Span, Tone, pad, span_cells, spread, text_lines
from .charts import bar
from .plot import Chart, PlotPoint, Series

Phase = Literal["alone", "split", "race", "check"]
PHASES: dict[Phase, tuple[Stage, ...]] = {
    "alone": (Stage.SOLO, Stage.REST, Stage.PART),
    "split": (Stage.SPLIT, Stage.SHARD),
    "race": (Stage.RACE, Stage.PACK, Stage.KNOBS),
    "check": (Stage.CHECK,),
}
LONE_PHASES: tuple[Phase, ...] = ("alone", "race", "check")  # the phases of a search on one device
_PHASE_OF: dict[Stage, Phase] = {
    stage: phase for phase, stages in PHASES.items() for stage in stages
}
MOST_NAMED = 4  # further devices of a layout are only counted
BETWEEN_CELLS = 3  # cells of the line from one phase to the next


def phase_of(stage: Stage) -> Phase:
    """Return the phase of the search to which a probe's stage belongs."""
    return _PHASE_OF[stage]


def current_phase(state: SessionState) -> Phase:
    """Return the phase of the running probe or, if none is running, of the last one."""
    if state.running:
        return phase_of(state.running[-1].probe.stage)
    return phase_of(state.seen[-1].seen.probe.stage) if state.seen else "alone"


class BestPoint(NamedTuple):
    """A measurement that was faster than all measurements before it.

    - `at_seconds`: when it ended, in seconds since the search began.
    - `together`: whether it used several devices.
    """

    at_seconds: float
    samples_per_second: float
    together: bool
    layout: Layout


def best_over_time(state: SessionState) -> tuple[BestPoint, ...]:
    """Return each measurement that was faster than all that ended before it, oldest first."""
    found: list[BestPoint] = []
    for entry in state.seen:
        seen = entry.seen
        if not isinstance(seen, Timed) or seen.probe.layout.length:
            continue
        if not found or seen.samples_per_second > found[-1].samples_per_second:
            together = len(seen.probe.layout.active) > 1
            layout = seen.probe.layout
            found.append(BestPoint(entry.at_seconds, seen.samples_per_second, together, layout))
    return tuple(found)


def name_layout(layout: Layout, labels: Sequence[str]) -> str:
    """Describe a layout briefly, such as "640 + 384 rows on GPU:0 + GPU:1"."""
    active = layout.active
    if not layout.traits.by_shares and not layout.traits.alone:
        return f"{layout.kind} on {_name_devices(active, labels)}"
    samples = list_samples(layout) if len(active) <= MOST_NAMED else str(layout.global_batch)
    words = f"{samples} rows on {_name_devices(layout.computing, labels)}"
    idle = [place for place in active if place not in layout.computing]
    return f"{words}, state also on {_name_devices(idle, labels)}" if idle else words


def _name_devices(active: Sequence[int], labels: Sequence[str]) -> str:
    if len(active) > MOST_NAMED:
        return f"{len(active)} devices"
    return " + ".join(labels[position] for position in active)


def story_lines(state: SessionState, width: int) -> tuple[Line, ...]:
    """Return the progress of the search and its current measurement, or its error."""
    if state.fault:
        return text_lines(f"{state.fault} {state.remedy}", width, 6, "bad")
    head = _phase_line(state, width)
    if state.stopping:
        return (head, *text_lines("Stopping: the best plan so far is kept.", width, 2, "warn"))
    if state.paused:
        return (head, *text_lines(_pause_text(state), width, 2, "warn"))
    doing = f"Now: {_running_text(state)}"
    reason = state.belief.doing if state.belief is not None else ""
    return (head, *text_lines(doing, width, 2, "strong"), *text_lines(reason, width, 2))


def _pause_text(state: SessionState) -> str:
    """Say that the search is paused, or which probes must finish before it pauses."""
    if not state.running:
        return "Paused: nothing is measured until you resume. The budget stands still."
    busy = sorted({place for each in state.running for place in each.probe.layout.active})
    who = join_words([state.devices[place] for place in busy[:MOST_NAMED]])
    longest = max(each.probe.seconds for each in state.running)
    ends = "finishes its probe" if len(busy) == 1 else "finish their probe"
    return f"Pausing: {who} {ends}, which measures for at most {duration(longest)}."


def _running_text(state: SessionState) -> str:
    """Describe the layouts that are being measured, and what their probes are doing."""
    # If several layouts are measured at the same time, the text has the phase that has lasted
    # longest.
    if not state.running:
        return "the next measurement is being chosen."
    names = [name_layout(each.probe.layout, state.devices) for each in state.running]
    slowest = max(state.running, key=lambda each: each.phase_seconds)
    shown = join_words(names[:3]) if len(names) <= 3 else f"{len(names)} devices, each alone"
    together = ", together" if len(state.running[0].probe.layout.active) > 1 else ""
    since = f" for {duration(slowest.phase_seconds)}" if slowest.phase_seconds >= 2 else ""
    return f"{plain(shown)}{together}: {slowest.phase}{since}."


def _phase_line(state: SessionState, width: int) -> Line:
    """Draw the phases of the search (alone, split, race, check) and the remaining time."""
    now, marks = current_phase(state), _phase_marks(state)
    spans: list[Span] = [Span(" ")]
    for phase, (mark, tone) in marks.items():
        if len(spans) > 1:
            joint = Mark.FULL if mark != Mark.WAITING else Mark.TRACK
            spans.append(Span(f" {joint * BETWEEN_CELLS} ", "track"))
        name: Tone = "dim"
        if phase == now and not state.ended:
            name = "strong"
        spans += (Span(f"{mark} ", tone), Span(phase, name))
    spread_line = spread(tuple(spans), _time_spans(state, width - span_cells(spans)), width)
    return Line(pad(spread_line.spans, width))


def _phase_marks(state: SessionState) -> dict[Phase, tuple[str, Tone]]:
    """Return a mark and its tone for each phase: done, running or waiting."""
    # A search on one device measures no splits, so the phase for splits is left out.
    now = current_phase(state)
    seen = {phase_of(entry.seen.probe.stage) for entry in state.seen}
    marks: dict[Phase, tuple[str, Tone]] = {}
    for phase in PHASES if len(state.devices) > 1 else LONE_PHASES:
        if phase == now and not state.ended:
            marks[phase] = Mark.RUNNING, "speed"
        elif phase in seen:
            marks[phase] = Mark.DONE, "good"
        else:
            marks[phase] = Mark.WAITING, "dim"
    return marks


def _time_spans(state: SessionState, room: int) -> tuple[Span, ...]:
    """Draw the time left of the budget, with a bar if it fits.

    Without a budget, draws the time that has passed.
    """
    left = seconds_left(state)
    if left is None:
        return (Span(f"{duration(state.at_seconds)} so far ", "dim"),)
    kind = " of simulated time" if is_simulated(state.devices) else ""
    words = Span(f"at most {duration(left)}{kind} left ", "text")
    if span_cells((words,)) > room - 2:
        words = Span(f"{duration(left)} left ", "text")
    used = state.at_seconds / state.budget_seconds if state.budget_seconds else 1.0
    bar_cells = min(24, room - span_cells((words,)) - 4)
    return (words, *bar(used, bar_cells), Span(" ")) if bar_cells >= 8 else (words,)


def best_text(state: SessionState) -> str:
    """Return the highest samples/s so far, or "" if nothing has been measured."""
    points = best_over_time(state)
    if not points:
        return ""
    kind = "fastest" if has_split(state) else "fastest alone"
    return f"{kind} {rate(points[-1].samples_per_second)} samples/s"


def best_chart(state: SessionState) -> Chart:
    """Return a chart of the highest samples/s so far against the seconds since the search began."""
    points = best_over_time(state)
    alone = [point for point in points if not point.together]
    together = [point for point in points if point.together]
    end = max([state.at_seconds, *(point.at_seconds for point in points)], default=0.0)
    turn = together[0].at_seconds if together else end
    series = []
    if alone:
        series.append(_best_series(state, "alone", "accent", alone, turn))
    if together:
        series.append(_best_series(state, "together", "speed", together, end))
    return Chart(
        tuple(series),
        x_caption="s",
        y_caption=best_text(state) or "samples/s",
        log2_x=False,
        log2_y=False,
        nothing="It appears with the first measurement.",
        draw_x="{:g}".format,
    )


def _best_series(
    state: SessionState, label: str, tone: Tone, points: Sequence[BestPoint], end: float
) -> Series:
    """Return a stepped curve of the highest samples/s over time.

    The curve ends at `end`, in seconds since the search began.
    """
    steps: list[tuple[float, float]] = []
    for place, each in enumerate(points):
        until = points[place + 1].at_seconds if place + 1 < len(points) else end
        steps += (
            (each.at_seconds, each.samples_per_second),
            (until, each.samples_per_second),
        )
    drawn = tuple(
        PlotPoint(point.at_seconds, point.samples_per_second, text=_best_text(state, point))
        for point in points
    )
    return Series(label, tone, drawn, tuple(steps))


def _best_text(state: SessionState, point: BestPoint) -> str:
    """Return the text to show when the cursor is on this point of the chart."""
    layout = point.layout
    return f"{rate(point.samples_per_second)} samples/s: {name_layout(layout, state.devices)}"
