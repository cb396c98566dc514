"""Bars that show how the time of a training step is spent.

In a step, a rank waits for input, does its own computations, waits for other ranks, exchanges
gradients, and does the work between steps. There are bars for the mean step of a rank, and for its
last steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evener.balancer.number_format import duration, milliseconds
from evener.live.files import LastStep
from evener.training.step_sums import RankStep

from .cells import Line, Mark, Span, Tone, cells, cut
from .ranks import RankRow


class PartStyle(NamedTuple):
    """The name, tone and character that represent one part of a step."""

    name: str
    tone: Tone
    sign: str


INPUT = PartStyle("input", "memory", "▓")
OWN_WORK = PartStyle("own work", "speed", "▇")  # lower than a cell, so that ranks don't touch
WAITING = PartStyle("waiting", "warn", "▒")
EXCHANGE = PartStyle("exchange", "accent", "▚")
BETWEEN = PartStyle("between steps", "dim", Mark.DOT)
PARTS = (INPUT, OWN_WORK, WAITING, EXCHANGE, BETWEEN)  # in the order of a step
LEAST_LANE = 10  # minimum width of a lane in cells
STEP_CELLS = 9  # approximate cells of a step in a lane
LEAST_IN_COMMON = 3  # lanes show the same steps if all ranks report at least this number of them
LEAST_WITH_GAP = 4  # steps that are at least this wide are followed by a blank


def legend_line(width: int, has_ended: bool = False) -> Line:
    """Return the legend of the bars' parts. It is dim if the training run has ended."""
    spans: list[Span] = []
    for part in PARTS:
        tone: Tone = "dim" if has_ended else part.tone
        spans += [Span(f" {part.sign * 2}", tone), Span(f" {part.name} ", "dim")]
    if sum(cells(span.text) for span in spans) <= width:
        return Line(tuple(spans))
    short = []
    for part in PARTS:
        tone = "dim" if has_ended else part.tone
        short += [Span(f" {part.sign}", tone), Span(part.name.split()[0], "dim")]
    whole = Line(tuple(short))
    return whole if cells(whole.text) <= width else Line((Span(cut(whole.text, width), "dim"),))


def part_bar(step: RankStep, longest_s: float, width: int) -> tuple[Span, ...]:
    """Draw a bar that divides the time of a rank's step into its parts.

    The bar is full at `longest_s` seconds.
    """
    return _stack_parts(tuple(step), longest_s, width)


def _stack_parts(seconds: Sequence[float], longest_s: float, width: int) -> tuple[Span, ...]:
    """Draw a bar of the parts of a step, whose times are given in seconds.

    The bar is full at `longest_s` seconds.
    """
    if longest_s <= 0 or width <= 0:
        return (Span(" " * max(0, width)),)
    counts = _count_cells(seconds, longest_s, width)
    spans = [
        Span(part.sign * count, part.tone)
        for part, count in zip(PARTS, counts, strict=True)
        if count
    ]
    return (*spans, Span(" " * (width - sum(counts))))


def _count_cells(seconds: Sequence[float], longest_s: float, width: int) -> list[int]:
    """Return how many cells of the bar each part of a step takes.

    The whole bar of `width` cells stands for `longest_s` seconds.
    """
    counts, so_far_s, drawn = [], 0.0, 0
    for part_s in seconds:
        so_far_s += part_s
        end = min(width, round(width * min(1.0, so_far_s / longest_s)))
        counts.append(max(0, end - drawn))
        drawn = max(drawn, end)
    # own work is always visible
    own = PARTS.index(OWN_WORK)
    if seconds[own] > 0 and not counts[own]:
        _widen_to_one_cell(counts, own, width)
    return counts


def _widen_to_one_cell(counts: list[int], part: int, width: int) -> None:
    """Give an empty part of the bar one cell; in a full bar, take it from the widest part.

    `counts` are the cells of all parts, and `part` is the index of the empty one.
    """
    if sum(counts) >= width:
        counts[max(range(len(counts)), key=counts.__getitem__)] -= 1
    counts[part] += 1


def lane_lines(rows: Sequence[RankRow], width: int, height: int) -> tuple[Line, ...]:
    """Draw the last steps of each rank on the same time scale, with a caption that numbers them.

    Returns no lines if there are no steps or there is no room.
    """
    lanes = [row for row in rows if row.last_steps][: max(0, height - 1)]
    if not lanes:
        return ()
    labels = [row.device or f"rank {row.rank}" for row in lanes]
    label_cells = max(map(cells, labels)) + 1
    room = width - label_cells - 1
    if room < LEAST_LANE:
        return ()
    shown, words = _choose_steps(lanes, max(1, room // STEP_CELLS))
    span_s = max(sum(map(_seconds, steps)) for steps in shown)
    lines = []
    for label, steps, row in zip(labels, shown, lanes, strict=True):
        lane = _draw_lane(steps, row.step.exchange_s, span_s, room)
        if row.ended_s:
            lane = [Span(span.text, "dim") for span in lane]
        lines.append(Line((Span(f" {label:<{label_cells}}", "dim"), *lane)))
    written = duration(span_s) if span_s >= 1 else milliseconds(span_s)
    below = cut(f" {'':<{label_cells}}{words}, {written}", width)
    return (*lines, Line((Span(below, "dim"),)))


def _choose_steps(rows: Sequence[RankRow], max_steps: int) -> tuple[list[Sequence[LastStep]], str]:
    """Return the last steps to draw for each rank, and a caption such as "steps 90 to 96"."""
    # All ranks show the same steps if enough steps are in all reports. Otherwise, each rank shows
    # its own last steps.
    first = max(row.last_steps[0].number for row in rows)
    last = min(row.last_steps[-1].number for row in rows)
    if last - first + 1 >= LEAST_IN_COMMON:
        first = max(first, last - max_steps + 1)
        shown: list[Sequence[LastStep]] = [
            [step for step in row.last_steps if first <= step.number <= last] for row in rows
        ]
        if all(shown):
            return shown, f"steps {first} to {last}"
    count = min(max_steps, *(len(row.last_steps) for row in rows))
    own = [row.last_steps[-count:] for row in rows]
    what = "last step" if count == 1 else f"last {count} steps"
    return [*own], f"the {what} of each rank, which may have different numbers"


def _seconds(step: LastStep) -> float:
    return step.input_s + step.own_work_s + step.meeting_s + step.between_s


def _draw_lane(
    steps: Sequence[LastStep], exchange_s: float, span_s: float, width: int
) -> list[Span]:
    """Draw the steps of one rank in `width` cells, which stand for `span_s` seconds.

    `exchange_s` is the time of the gradient exchange in each step.
    """
    if span_s <= 0:
        return [Span(" " * width)]
    spans: list[Span] = []
    at_s, drawn = 0.0, 0
    for step in steps:
        at_s += _seconds(step)
        end = min(width, round(width * min(1.0, at_s / span_s)))
        room, drawn = end - drawn, end
        gap = int(room >= LEAST_WITH_GAP)
        spans += _stack_parts(_parts(step, exchange_s), _seconds(step), room - gap)
        spans.append(Span(" " * gap))
    return [*spans, Span(" " * (width - drawn))]


def _parts(step: LastStep, exchange_s: float) -> tuple[float, ...]:
    """Return how many seconds each part of a step takes.

    The step reports waiting and exchange as one time, `meeting_s`. Up to `exchange_s` seconds of it
    count as exchange, and the rest as waiting.
    """
    exchange_s = min(exchange_s, step.meeting_s)
    waiting_s = step.meeting_s - exchange_s
    return step.input_s, step.own_work_s, waiting_s, exchange_s, step.between_s
