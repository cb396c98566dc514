"""Bars, sparklines and graphs made of single cells, beside and below each other; charts with axes use plotext."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .cells import Line, Marks, Span, Tone, pad, span_cells


def bar(share: float, width: int, marks: Marks, tone: Tone = "accent") -> tuple[Span, ...]:
    """A bar of `width` cells filled to `share` of 1, readable without colour."""
    if width <= 0:
        return ()
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    if share > 0 and halves == 0:
        halves = 1  # anything above 0 is visible
    full, half = divmod(halves, 2)
    if not marks.half:
        full, half = min(width, full + half), 0
    filled = marks.full * full + marks.half * half
    return Span(filled, tone), Span(marks.track * (width - full - half), "track")


def work_bar(own_work_s: float, waiting_s: float, longest_s: float, width: int, marks: Marks) -> tuple[Span, ...]:
    """Own work, then waiting; `width` cells are `longest_s`, such as those of the slowest rank."""
    own, both = (
        round(width * min(1.0, seconds / longest_s)) if longest_s > 0 else 0
        for seconds in (own_work_s, own_work_s + waiting_s)
    )
    own = max(own, int(own_work_s > 0))  # anything above 0 is visible
    both = max(own, both)
    return Span(marks.full * own, "speed"), Span(marks.shade * (both - own), "warn"), Span(" " * (width - both))


def spark(values: Sequence[float | None], width: int, marks: Marks, highest: float | None = None) -> str:
    """The newest `width` values as heights between 0 and the highest; a missing one is a space."""
    shown = list(values)[-width:]
    top = highest or max((number for number in shown if number is not None), default=0.0)
    steps = len(marks.spark) - 1
    signs = [
        " " if number is None else marks.spark[round(min(1.0, max(0.0, number / top)) * steps) if top > 0 else 0]
        for number in shown
    ]
    return "".join(signs).rjust(width)


def graph(values: Sequence[float | None], width: int, height: int, marks: Marks, highest: float) -> tuple[str, ...]:
    """A filled graph of the newest values, one per column, as `height` lines from the top down."""
    if width <= 0 or height <= 0:
        return ()
    newest = values[-width:]
    most = height * (len(marks.levels) - 1)
    steps = [0] * (width - len(newest)) + [_count_steps(number, highest, most) for number in newest]
    stacks = [_stack(count, height, marks.levels, marks.shade) for count in steps]
    return tuple(map("".join, zip(*stacks, strict=True)))


def _count_steps(number: float | None, highest: float, most: int) -> int:
    """The height of a value in steps, `most` for the highest; anything that is there has one at least."""
    if number is None or highest <= 0 or not math.isfinite(number):
        return 0
    return most if number >= highest else max(1, round(max(0.0, number) / highest * most))


@lru_cache(maxsize=4096)
def _stack(count: int, height: int, levels: str, shade: str) -> tuple[str, ...]:
    """A column of cells from the top down, `count` steps high: an edge, and shade below it."""
    each = len(levels) - 1
    belows = range((height - 1) * each, -1, -each)
    return tuple(shade if count - below > each else levels[max(0, min(each, count - below))] for below in belows)


def nice_ceiling(number: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten, so that an axis rarely changes."""
    if number <= 0 or not math.isfinite(number):
        return 1.0
    power = 10.0 ** math.floor(math.log10(number))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if number <= step * power * (1 + 1e-9))


def axis_ticks(highest: float, most: int) -> list[float]:
    """Round numbers from 0 to at most `highest`, about `most` of them."""
    step = nice_ceiling(highest / max(1, most))
    return [step * place for place in range(int(highest / step + 1e-9) + 1)]


class Graph(NamedTuple):
    """A graph: caption, newest figure, values oldest first, the top of its axis as number and text, tone."""

    caption: str
    newest: str
    values: tuple[float | None, ...]
    highest: float
    axis: str
    tone: Tone

    @property
    def is_empty(self) -> bool:
        """True for a graph without any value."""
        return all(value is None for value in self.values)


def draw_graphs(graphs: Sequence[Graph], width: int, height: int, columns: int, marks: Marks) -> tuple[Line, ...]:
    """Rows of `columns` graphs, all of one size, that fill the height."""
    rows = -(-len(graphs) // columns)
    each = (width - 2 * (columns - 1)) // columns
    lines: list[Line] = []
    for row in range(rows):
        own = height * (row + 1) // rows - height * row // rows
        drawn = [_draw(one, each, own, marks) for one in graphs[row * columns : (row + 1) * columns]]
        beside = zip(*drawn, strict=True)
        lines += [Line(tuple(span for part in parts for span in (Span("  "), *part))[1:]) for parts in beside]
    return tuple(lines)


def _draw(one: Graph, width: int, height: int, marks: Marks) -> list[tuple[Span, ...]]:
    caption = (Span(f"{one.caption} ", "title"), Span(one.newest, one.tone))
    room = width - len(one.axis) - 1
    head = pad(caption, width)
    if span_cells(caption) <= room and not one.is_empty:
        head = (*pad(caption, room), Span(f" {one.axis}", "dim"))
    rows = graph(one.values, width, height - 1, marks, one.highest)
    return [head, *((Span(row, one.tone),) for row in rows)]
