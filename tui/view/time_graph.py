"""A graph over time in braille: columns of dots of the newest ticks, and the time axis below them.

A cell has two columns of dots; a column of dots is one tick, or several. Cells lie on fixed ticks,
so a picture moves on by whole cells and doesn't flicker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from .cells import Tone

SPANS = (30.0, 60.0, 120.0, 300.0, 600.0)  # seconds that graphs may show
_ROUND_SECONDS = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 86400)
_CELLS_PER_LABEL = 9
MOST_STRETCH = 8  # columns of dots of one tick
_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)  # dots of a braille sign's left column, from below
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)


class PastTicks(Protocol):
    """The readings of the last ticks, as a sampler keeps them."""

    @property
    def ticks(self) -> int:
        """How many ticks there were since the start."""

    def history(self, key: str, metric: str, newest: int) -> tuple[float | None, ...]:
        """A metric of a device, oldest first."""

    def times(self, newest: int) -> tuple[float, ...]:
        """When these ticks were, oldest first."""


class TickWindow(NamedTuple):
    """The ticks that graphs of `width` cells show; the last cell is the newest, perhaps half full.

    Only whole columns of dots are drawn, so that those that are there never change.
    """

    width: int
    per_dot: int
    ticks: int  # so far
    stretch: int = 1  # columns of dots of each tick, where there are few; more than one fit all

    @property
    def last_cell(self) -> int:
        """The number of the newest cell since the start."""
        return max(0, self.ticks * self.stretch // self.per_dot - 1) // 2

    @property
    def first_cell(self) -> int:
        """The number of the cell at the left end; below 0 there is nothing."""
        return self.last_cell - self.width + 1

    @property
    def newest(self) -> int:
        """How many of the newest ticks are shown."""
        if self.stretch > 1:
            return self.ticks
        return self.ticks - self.first_cell * 2 * self.per_dot

    @property
    def ticks_per_cell(self) -> float:
        """The ticks that lie in a cell."""
        return 2 * self.per_dot / self.stretch

    def dots(self, values: Sequence[float | None]) -> list[float | None]:
        """The figure of each column of dots: the mean of its ticks, None where there is none."""
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
    """The mean of the figures that there are, None without any."""
    known = [number for number in values if number is not None]
    return sum(known) / len(known) if known else None


def nearest_span(seconds: float) -> float:
    """The one of `SPANS` that is nearest to so many seconds."""
    return min(SPANS, key=lambda span: abs(span - seconds))


def ticks_per_dot(span_seconds: float, interval_seconds: float, width: int) -> int:
    """The ticks of a column of dots with which graphs of `width` cells show at least this time."""
    return max(1, math.ceil(span_seconds / interval_seconds / (2 * width) - 0.05))


def scale_young(per_dot: int, ticks: int, width: int) -> tuple[int, int]:
    """Ticks of a column of dots, and columns of dots of a tick, for a history that is too short to
    fill `width` cells: it fills about half of them, in few steps as it grows.
    """
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
    """The rows of a graph from the top down, filled from below up to each figure; what was read has
    one dot at least.
    """
    steps = 4 * rows
    scale = steps / (top - low) if top > low else 0.0
    counts = [0 if number is None else _count(number - low, scale, steps) for number in dots]
    stacks = [
        _stack(left, right, rows) for left, right in zip(counts[::2], counts[1::2], strict=True)
    ]
    return tuple(map("".join, zip(*stacks, strict=True)))


def _count(number: float, scale: float, most: int) -> int:
    """The height of a figure in dots; what was read has one at least."""
    return max(1, min(most, round(number * scale)))


@lru_cache(maxsize=16384)
def _stack(left: int, right: int, rows: int) -> tuple[str, ...]:
    """The signs of one cell's column, from the top down, for two heights in dots."""
    signs = []
    for row in range(rows - 1, -1, -1):
        bits = _LEFT[max(0, min(4, left - 4 * row))] | _RIGHT[max(0, min(4, right - 4 * row))]
        signs.append(chr(0x2800 + bits) if bits else " ")
    return tuple(signs)


def shade_tone(tone: Tone, height: float) -> Tone:
    """The tone of a row, brighter from below; `height` is that of its upper end, 1 at the top.

    Only tones that have shades may be given.
    """
    if height > 2 / 3:
        return tone
    shade = "mid" if height > 1 / 3 else "low"
    return f"{tone}.{shade}"  # type: ignore[return-value]


def time_at(window: TickWindow, times: Sequence[float], column: int) -> float | None:
    """When the first tick of a cell was."""
    if window.stretch > 1:
        tick = (window.first_cell + column) * 2 // window.stretch
    else:
        tick = column * 2 * window.per_dot - (window.newest - len(times))
    return times[tick] if 0 <= tick < len(times) else None


def axis_text(width: int, window: TickWindow, times: Sequence[float]) -> str:
    """The axis with round times before now, each at its cell."""
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
