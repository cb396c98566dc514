"""Bars, sparklines and small graphs out of single cells; for axes and labels there is plotext."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from tui.view.cells import Span, Tone
from tui.view.marks import Marks

_LEFT_DOTS = (0x00, 0x40, 0x44, 0x46, 0x47)  # a braille cell's left column, filled from the bottom
_RIGHT_DOTS = (0x00, 0x80, 0xA0, 0xB0, 0xB8)


def bar(share: float, width: int, marks: Marks, tone: Tone = "accent") -> tuple[Span, ...]:
    """A bar of `width` cells filled to `share` of 1; the filled part differs from the rest without colour too."""
    if width <= 0:
        return ()
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    if share > 0 and halves == 0:
        halves = 1  # what is above nothing shows
    full, half = divmod(halves, 2)
    if not marks.half:
        full, half = min(width, full + half), 0
    filled = marks.full * full + marks.half * half
    return Span(filled, tone), Span(marks.track * (width - full - half), "track")


def spark(values: Sequence[float | None], width: int, marks: Marks, highest: float | None = None) -> str:
    """The newest `width` values as heights between 0 and the highest; a missing one is a blank."""
    shown = list(values)[-width:]
    top = highest or max((number for number in shown if number is not None), default=0.0)
    steps = len(marks.spark) - 1
    signs = [
        " " if number is None else marks.spark[round(min(1.0, max(0.0, number / top)) * steps) if top > 0 else 0]
        for number in shown
    ]
    return "".join(signs).rjust(width)


def graph(values: Sequence[float | None], width: int, height: int, marks: Marks, highest: float) -> tuple[str, ...]:
    """A filled graph of the newest values, `height` lines from the top down; two values a cell in braille."""
    if width <= 0 or height <= 0:
        return ()
    wide, tall = (2, 4) if marks.braille else (1, 2)
    newest = list(values)[-width * wide :]
    columns = [None] * (width * wide - len(newest)) + newest
    dots = [_dots(number, highest, height * tall) for number in columns]
    if marks.braille:
        stacks = [_braille_stack(*pair, height) for pair in zip(dots[::2], dots[1::2], strict=True)]
    else:
        stacks = [_ascii_stack(count, height) for count in dots]
    return tuple(map("".join, zip(*stacks, strict=True)))


def _dots(number: float | None, highest: float, most: int) -> int:
    if number is None or highest <= 0 or not math.isfinite(number):
        return 0
    return max(1, round(min(1.0, max(0.0, number / highest)) * most))


@lru_cache(maxsize=4096)
def _braille_stack(left: int, right: int, height: int) -> tuple[str, ...]:
    """One column of cells, from the top down."""
    belows = range((height - 1) * 4, -1, -4)
    codes = [_LEFT_DOTS[max(0, min(4, left - below))] | _RIGHT_DOTS[max(0, min(4, right - below))] for below in belows]
    return tuple(chr(0x2800 + code) if code else " " for code in codes)


@lru_cache(maxsize=512)
def _ascii_stack(count: int, height: int) -> tuple[str, ...]:
    return tuple(" .:"[max(0, min(2, count - below))] for below in range((height - 1) * 2, -1, -2))


def nice_ceiling(number: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten: an axis that doesn't move at each tick."""
    if number <= 0 or not math.isfinite(number):
        return 1.0
    power = 10.0 ** math.floor(math.log10(number))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if number <= step * power * (1 + 1e-9))


def axis_ticks(highest: float, most: int) -> list[float]:
    """Round numbers from 0 to at most `highest`, about `most` of them."""
    step = nice_ceiling(highest / max(1, most))
    return [step * place for place in range(int(highest / step + 1e-9) + 1)]
