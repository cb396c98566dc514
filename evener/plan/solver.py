"""The shares of a batch that are done first, by the curves and walls that a plan has for its devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..shares.curves import Curve, PassCurve
from ..shares.waterfill import DeviceCurve, split_fixed
from .layout import Knots, Share


def read_curves(shares: Sequence[Share]) -> tuple[Curve, ...]:
    """The curve of each active share; where one has none, all take times in proportion to rows."""
    return join_curves([share.curve for share in shares], [share.batch for share in shares])


def join_curves(curves: Sequence[Knots], rows: Sequence[int]) -> tuple[Curve, ...]:
    """The curve through each device's knots; where one has none, all take times in proportion to `rows`."""
    if all(len(knots) > 1 for knots in curves):
        return tuple(map(_join_knots, curves))
    return proportional_curves(rows)


def proportional_curves(rows: Sequence[float]) -> tuple[Curve, ...]:
    """Curves without fixed costs, on which these rows take one second on every device."""
    return tuple(Curve((0.0,), (0.0,), 1 / each) for each in rows)


def scale(curve: Curve, factor: float) -> Curve:
    """The curve of a device that takes `factor` times as long."""
    return Curve(curve.batches, tuple(time * factor for time in curve.times), curve.slope * factor)


def solve_shares(
    curves: Sequence[Curve], batch: int, walls: Sequence[int], passes: bool, quantum: int = 1
) -> tuple[int, ...] | None:
    """Rows of each device, `quantum` or more, that sum to `batch` and are done first; None if they don't fit.

    A wall is the most rows of a pass that a device's memory holds, 0 where there is none. Without `passes` no share is
    above its wall.
    """
    devices = [
        DeviceCurve(i, PassCurve(curve, wall, wall), batch)
        if wall and passes
        else DeviceCurve(i, curve, min(wall or batch, batch))
        for i, (curve, wall) in enumerate(zip(curves, walls, strict=True))
    ]
    found = split_fixed(devices, (0.0,) * (len(devices) + 1), batch, quantum, len(devices))
    return tuple(share for _, share in found.shares) if found else None


def pass_rows(shares: Sequence[int], walls: Sequence[int]) -> tuple[int, ...]:
    """The most rows of each pass of these shares: all where they fit at once, else those of the wall."""
    return tuple(min(share, wall or share) for share, wall in zip(shares, walls, strict=True))


def _join_knots(knots: Knots) -> Curve:
    """The broken line through (rows, seconds), straight beyond the last as before it."""
    (rows, seconds), (last, end) = knots[-2:]
    batches, times = zip(*knots, strict=True)
    return Curve(batches, times, (end - seconds) / (last - rows))
