"""The report's SVG chart, which plots samples/s of each device against the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from evener.balancer.number_format import group_digits
from evener.balancer.result.learning import Point

from .run_report import MeasuredCurve
from .ticks import round_log_ticks, round_ticks

SERIES = ("#2f81d6", "#c96f14", "#23947d", "#b05cc4", "#cf4f56", "#7c8c12", "#7a6ff0", "#a0714f")
# size of the chart, in pixels on a phone
WIDE = 480
HIGH = 270
# margins of the chart, in the same pixels
LEFT = 48
RIGHT = 22
ABOVE = 18
BELOW = 34


class _Axes:
    """Map batch sizes (logarithmic) and samples/s (linear) to pixels."""

    def __init__(self, batches: Iterable[float], speeds: Iterable[float]) -> None:
        known = [batch for batch in batches if batch > 0]
        self.low = min(known, default=1.0)
        self.high = max(known, default=2.0)
        if self.low == self.high:
            self.low = self.low / 2
            self.high = self.high * 2
        self.top = 1.04 * max(speeds, default=1.0)

    def x(self, batch: float) -> float:
        """Return the horizontal position of a batch size in pixels."""
        part = math.log(max(batch, self.low) / self.low) / math.log(self.high / self.low)
        return LEFT + (WIDE - LEFT - RIGHT) * min(1.0, part)

    def y(self, speed: float) -> float:
        """Return the vertical position of a speed, given in samples/s, in pixels."""
        return ABOVE + (HIGH - ABOVE - BELOW) * (1 - speed / self.top)


def draw_curves(curves: Sequence[MeasuredCurve], frontier: Sequence[Point] = ()) -> str:
    """Return an SVG chart of each device's samples/s at each batch size.

    The points of `frontier` are tuples (batch size, samples/s, worth) for the fastest layout at
    each batch size. One dashed line shows its samples/s, and another one its worth: the samples/s
    that small batches would need to learn equally fast.
    """
    axes = _find_axes(curves, frontier)
    parts = [*_draw_ticks(axes)]
    for number, curve in reversed(list(enumerate(curves))):  # the first device on top
        parts += _draw_curve(axes, curve, SERIES[number % len(SERIES)], number)
    fast = [(batch, speed) for batch, speed, _ in frontier]
    worth = [(batch, value) for batch, _, value in frontier]
    for line, dashes in ((fast, "8 4"), (worth, "8 3 2 3")):
        if line:
            parts.append(_path(axes, line, f'stroke="currentColor" stroke-dasharray="{dashes}"'))
    label = "Samples/s of each device alone against its batch; a table of its values is below"
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDE} {HIGH}">{"".join(parts)}</svg>'
    )


def _find_axes(curves: Sequence[MeasuredCurve], frontier: Sequence[Point]) -> _Axes:
    """Return axes that cover all points."""
    batches: list[float] = []
    speeds: list[float] = []
    for curve in curves:
        batches += [batch for batch, _ in curve.points]
        speeds += [speed for _, speed in curve.points]
        if curve.failed_batch is not None:
            batches.append(curve.failed_batch)
    for batch, speed, worth in frontier:
        batches.append(batch)
        speeds.append(max(speed, worth))
    return _Axes(batches, speeds)


def _draw_ticks(axes: _Axes) -> Iterable[str]:
    bottom = HIGH - BELOW
    right = WIDE - RIGHT
    for speed in round_ticks(axes.top):
        y = axes.y(speed)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield _text(LEFT - 6, y + 4, _format_tick(speed), "end")
    for batch in round_log_ticks(axes.low, axes.high):
        x = axes.x(batch)
        yield f'<path class="grid" d="M{x:.1f} {bottom}v4"/>'
        yield _text(x, bottom + 17, group_digits(round(batch)), "middle")
    yield _text(LEFT - 6, 11, "samples/s", "middle")
    yield _text(right, HIGH - 3, "batch", "end")


def _format_tick(speed: float) -> str:
    """Return the label of a tick on the speed axis."""
    return group_digits(round(speed)) if speed == round(speed) else f"{speed:g}"


def _draw_curve(axes: _Axes, curve: MeasuredCurve, colour: str, number: int) -> Iterable[str]:
    yield _path(axes, curve.points, f'stroke="{colour}" stroke-width="2"')
    for batch, speed in curve.points:
        at = f'cx="{axes.x(batch):.1f}" cy="{axes.y(speed):.1f}"'
        yield f'<circle {at} r="3" fill="{colour}"/>'
    if curve.failed_batch is not None:
        x = axes.x(curve.failed_batch)
        across = f"M{x:.1f} {ABOVE}V{HIGH - BELOW}"
        yield f'<path d="{across}" fill="none" stroke="{colour}" stroke-dasharray="2 4"/>'
        words = f"{curve.label}: out of memory"
        yield _text(x - 5, ABOVE + 26 + 15 * number, words, "end")


def _path(axes: _Axes, line: Iterable[tuple[float, float]], style: str) -> str:
    points = " ".join(f"{axes.x(batch):.1f},{axes.y(speed):.1f}" for batch, speed in line)
    return f'<polyline fill="none" points="{points}" {style}/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
