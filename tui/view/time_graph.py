"""A graph over time in braille: the newest ticks as columns of dots, with the time axis below.

A tick is one sampling of all devices. A terminal cell has two columns of dots. Depending on the
scale, a column shows one or several ticks, or a tick is drawn over several columns. Cells are
aligned to fixed ticks, so that a graph scrolls by whole cells and doesn't flicker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from .cells import Tone

SPANS = (30.0, 60.0, 120.0, 300.0, 600.0)  # the times in seconds that graphs can show
_ROUND_SECONDS = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 86400)
_CELLS_PER_LABEL = 9
MOST_STRETCH = 8  # most columns of dots that one tick takes
_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)  # dots of a braille character's left column, from below
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)


class PastTicks(Protocol):
    """The readings of the last ticks, as a sampler stores them."""

    @property
    def ticks(self) -> int:
        """The number of ticks since the start."""

    def history(self, key: str, metric: str, newest: int) -> tuple[float | None, ...]:
        """Return the values of a metric at up to `newest` ticks, the oldest first.

        `key` identifies a device or a training. At a tick without a value, the item is None.
        """

    def times(self, newest: int) -> tuple[float, ...]:
        """Return the Unix times of up to `newest` ticks, the oldest first."""


class TickWindow(NamedTuple):
    """The ticks that graphs of `width` cells show.

    The last cell is the newest, and may be half full. A column of dots is drawn only once all of
    its ticks are known, so that it never changes afterwards.
    """

    width: int
    per_dot: int  # ticks per column of dots
    ticks: int  # since the start
    stretch: int = 1  # columns of dots per tick; above 1 only if all ticks fit

    @property
    def last_cell(self) -> int:
        """The index of the newest cell, counted from the first tick."""
        return max(0, self.ticks * self.stretch // self.per_dot - 1) // 2

    @property
    def first_cell(self) -> int:
        """The index of the leftmost cell, counted from the first tick.

        It is negative if the history doesn't fill the graph; such cells are empty.
        """
        return self.last_cell - self.width + 1

    @property
    def newest(self) -> int:
        """How many of the newest ticks the graph shows."""
        if self.stretch > 1:
            return self.ticks
        return self.ticks - self.first_cell * 2 * self.per_dot

    @property
    def ticks_per_cell(self) -> float:
        """The number of ticks that a cell stands for; below 1 if ticks are stretched."""
        return 2 * self.per_dot / self.stretch

    def dots(self, values: Sequence[float | None]) -> list[float | None]:
        """Return the mean of each dot column's ticks; None if unknown.

        `values` has a value for each tick, oldest first. If there are fewer values than ticks, the
        oldest ticks have no value.
        """
        padded = (None,) * (self.newest - len(values)) + tuple(values)
        if self.per_dot > 1:
            whole_dots = len(padded) - len(padded) % self.per_dot
            starts = range(0, whole_dots, self.per_dot)
            padded = tuple([mean(padded[start : start + self.per_dot]) for start in starts])
        if self.stretch > 1:
            before = [None] * (-2 * self.first_cell)
            padded = (*before, *(value for value in padded for _ in range(self.stretch)))
        return [*padded, *[None] * (2 * self.width - len(padded))]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None if no value is known."""
    known = [number for number in values if number is not None]
    return sum(known) / len(known) if known else None


def nearest_span(seconds: float) -> float:
    """Return the number of seconds in `SPANS` that is nearest to `seconds`."""
    return min(SPANS, key=lambda span: abs(span - seconds))


def ticks_per_dot(span_seconds: float, interval_seconds: float, width: int) -> int:
    """Return the ticks per column of dots with which `width` cells show `span_seconds`.

    `interval_seconds` is the time between two ticks. A cell has two columns of dots.
    """
    return max(1, math.ceil(span_seconds / interval_seconds / (2 * width) - 0.05))


def scale_young(per_dot: int, ticks: int, width: int) -> tuple[int, int]:
    """Return ticks per column of dots, and columns of dots per tick.

    One of them is 1. `ticks` is the length of the history; a short one is stretched over about half
    of the graph's `width` cells. `per_dot` is the number of ticks per column of dots for a history
    that fills the graph.
    """
    # The scale changes only by factors of 2, so that it changes rarely while the history grows.
    while per_dot > 1 and ticks < width * per_dot // 2:
        per_dot //= 2
    stretch = 1
    if per_dot > 1 or not ticks:
        return per_dot, stretch
    while stretch < MOST_STRETCH and ticks * stretch <= width:
        stretch *= 2
    return per_dot, stretch


def draw_columns(
    dots: Sequence[float | None], low: float, top: float, rows: int
) -> tuple[str, ...]:
    """Draw values as columns of dots, and return the rows, top first.

    `dots` has a value between `low` and `top` for each column of dots, or None. A known value has
    at least one dot.
    """
    steps = 4 * rows
    scale = steps / (top - low) if top > low else 0.0
    counts = [0 if number is None else _count(number - low, scale, steps) for number in dots]
    stacks = [
        _stack(left, right, rows) for left, right in zip(counts[::2], counts[1::2], strict=True)
    ]
    return tuple(map("".join, zip(*stacks, strict=True)))


def _count(number: float, scale: float, most: int) -> int:
    """Return a value's height from 1 to `most` dots."""
    return max(1, min(most, round(number * scale)))


@lru_cache(maxsize=16384)
def _stack(left: int, right: int, rows: int) -> tuple[str, ...]:
    """Return a column of braille, top first, for two heights in dots."""
    signs = []
    for row in range(rows - 1, -1, -1):
        bits = _LEFT[max(0, min(4, left - 4 * row))] | _RIGHT[max(0, min(4, right - 4 * row))]
        signs.append(chr(0x2800 + bits) if bits else " ")
    return tuple(signs)


def shade_tone(tone: Tone, height: float) -> Tone:
    """Return the tone for a row of a graph; rows are darker towards the bottom.

    `height` is the row's upper edge, from 0 at the bottom to 1 at the top of the graph. `tone` must
    be a tone that has shades.
    """
    if height > 2 / 3:
        return tone
    shade = "mid" if height > 1 / 3 else "low"
    return f"{tone}.{shade}"  # type: ignore[return-value]


def time_at(window: TickWindow, times: Sequence[float], column: int) -> float | None:
    """Return the time of the first tick in a cell, or None.

    `times` has the times of the shown ticks, and `column` is the cell's position from the left.
    """
    if window.stretch > 1:
        tick = (window.first_cell + column) * 2 // window.stretch
    else:
        tick = column * 2 * window.per_dot - (window.newest - len(times))
    return times[tick] if 0 <= tick < len(times) else None


def axis_text(width: int, window: TickWindow, times: Sequence[float]) -> str:
    """Return the time axis in `width` cells, with "now" at its right end.

    It has labels at round distances from now, such as "30 s" or "2 min". `times` has the times of
    the shown ticks.
    """
    signs = list("─" * width)
    signs[-4:] = " now"
    if len(times) < 2:
        return "".join(signs)[:width]
    now = times[-1]
    per_cell = (now - times[0]) / (len(times) - 1) * window.ticks_per_cell
    step = next(
        (each for each in _ROUND_SECONDS if each >= _CELLS_PER_LABEL * per_cell * 0.9),
        _ROUND_SECONDS[-1],
    )
    seconds = step
    while per_cell > 0 and seconds / per_cell < width:
        label = f"┴{_ago(seconds)} "
        start = width - 1 - round(seconds / per_cell)
        if start >= 0 and start + len(label) <= width - 3:
            signs[start : start + len(label)] = label
        seconds += step
    return "".join(signs)


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        minutes, rest = divmod(int(seconds), 60)
        return f"{minutes}:{rest:02}" if rest else f"{minutes} min"
    return f"{seconds / 3600:g} h"
