"""Graphs of metrics over time, drawn in braille with the newest values on the right.

A tick is one reading of the devices. A cell has two columns of dots. A column stands for one or
more ticks or, in a short history, a tick takes several columns. A cell always begins at the same
tick, so graphs scroll by whole cells and don't flicker.
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
MOST_STRETCH = 8  # maximum number of columns of dots for one tick
_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)  # dots of a braille character's left column, from below
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)


class PastTicks(Protocol):
    """Interface for the stored readings, as `evener.devices.sampler.Sampler` provides them."""

    @property
    def ticks(self) -> int:
        """The number of readings since the sampler was started."""

    def history(self, key: str, metric: str, newest: int) -> tuple[float | None, ...]:
        """Return the last values of a metric, up to `newest` of them, oldest first.

        `key` identifies a device or a training run. Unknown values are None.
        """

    def times(self, newest: int) -> tuple[float, ...]:
        """Return the Unix times of the last readings, up to `newest` of them, oldest first."""


class TickWindow(NamedTuple):
    """The readings that a graph of `width` cells shows."""

    width: int
    per_dot: int  # ticks per column of dots
    ticks: int  # since the start
    stretch: int = 1  # columns of dots per tick; above 1 only if all ticks fit

    @property
    def last_cell(self) -> int:
        """The cell of the newest reading. Cells are counted from the sampler's first reading."""
        return max(0, self.ticks * self.stretch // self.per_dot - 1) // 2

    @property
    def first_cell(self) -> int:
        """The cell at the left edge. Cells are counted from the sampler's first reading.

        It is negative as long as the history doesn't fill the graph.
        """
        return self.last_cell - self.width + 1

    @property
    def newest(self) -> int:
        """How many of the newest readings the graph needs."""
        if self.stretch > 1:
            return self.ticks
        return self.ticks - self.first_cell * 2 * self.per_dot

    @property
    def ticks_per_cell(self) -> float:
        """The number of readings that one cell stands for."""
        return 2 * self.per_dot / self.stretch

    def dots(self, values: Sequence[float | None]) -> list[float | None]:
        """Return the mean of the readings in each column of dots; None if a column has no values.

        `values` has a value for each reading, oldest first.
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
    """Return the mean of the known values, or None if all are unknown."""
    known = [number for number in values if number is not None]
    return sum(known) / len(known) if known else None


def nearest_span(seconds: float) -> float:
    """Return the time span that is nearest to `seconds` among those that the user can choose."""
    return min(SPANS, key=lambda span: abs(span - seconds))


def ticks_per_dot(span_seconds: float, interval_seconds: float, width: int) -> int:
    """Return how many readings each column of dots must combine to show `span_seconds`.

    `interval_seconds` is the time between readings, and `width` the graph's width in cells.
    """
    return max(1, math.ceil(span_seconds / interval_seconds / (2 * width) - 0.05))


def scale_short_history(per_dot: int, ticks: int, width: int) -> tuple[int, int]:
    """Choose the scale of a graph so that a short history fills more of it.

    - `per_dot`: the readings per column of dots that are needed to show a full history.
    - `ticks`: the number of readings so far.
    - `width`: the width of the graph in cells.

    Returns the readings per column of dots, and the columns of dots per reading. At least one of
    them is 1.
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
    """Draw values as filled columns, and return lines of braille from top to bottom.

    `dots` has two values per cell; None leaves a column empty. `low` and `top` are the ends of the
    axis.
    """
    steps = 4 * rows
    scale = steps / (top - low) if top > low else 0.0
    counts = [0 if number is None else _count_dots(number - low, scale, steps) for number in dots]
    stacks = [
        _stack(left, right, rows) for left, right in zip(counts[::2], counts[1::2], strict=True)
    ]
    return tuple(map("".join, zip(*stacks, strict=True)))


def _count_dots(number: float, scale: float, max_dots: int) -> int:
    """Return how many dots of a column to fill for a value, at least one.

    `scale` is the number of dots per unit of the value.
    """
    return max(1, min(max_dots, round(number * scale)))


@lru_cache(maxsize=16384)
def _stack(left: int, right: int, rows: int) -> tuple[str, ...]:
    """Return the characters of one column of cells, from top to bottom.

    `left` and `right` are the numbers of filled dots in its two columns of dots.
    """
    signs = []
    for row in range(rows - 1, -1, -1):
        bits = _LEFT[max(0, min(4, left - 4 * row))] | _RIGHT[max(0, min(4, right - 4 * row))]
        signs.append(chr(0x2800 + bits) if bits else " ")
    return tuple(signs)


def shade_tone(tone: Tone, height: float) -> Tone:
    """Return the shade of a tone for a row of a graph. Lower rows are darker.

    `height` is the upper edge of the row, from 0 (bottom) to 1 (top). `tone` must have shades.
    """
    if height > 2 / 3:
        return tone
    shade = "mid" if height > 1 / 3 else "low"
    return f"{tone}.{shade}"  # type: ignore[return-value]


def time_at(window: TickWindow, times: Sequence[float], column: int) -> float | None:
    """Return the Unix time of the first reading in a column of cells.

    Returns None if the column is outside the history.
    """
    if window.stretch > 1:
        tick = (window.first_cell + column) * 2 // window.stretch
    else:
        tick = column * 2 * window.per_dot - (window.newest - len(times))
    return times[tick] if 0 <= tick < len(times) else None


def axis_text(width: int, window: TickWindow, times: Sequence[float]) -> str:
    """Draw the time axis, with "now" at the right end and labels such as "2 min" before it."""
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
