"""The shares of a training over time: a lane for each device, and the changes by number."""

from __future__ import annotations

from collections.abc import Sequence

from evener.live.files import ShareChange

from .cells import Line, Mark, Span, cells, device_tone
from .ranks import RankRow

LEAST_LANE = 16  # cells
MARGIN = 0.15  # of the time shown: before the first change
LOWEST, HIGHEST = 2, 7  # eighths of a cell, for the least and the most of a share


def share_lines(
    rows: Sequence[RankRow],
    changes: Sequence[ShareChange],
    at_seconds: float,
    width: int,
    height: int,
) -> tuple[Line, ...]:
    """Each rank's rows of a step from a while before the first change until now, with the changes'
    numbers below; nothing where shares haven't changed, or ranks aren't those that changed.
    """
    known = [each for each in changes if len(each.before) == len(each.after) == len(rows)]
    lanes = max(0, height - 1)
    if not known or not lanes:
        return ()
    labels = [row.device or f"rank {row.rank}" for row in rows[:lanes]]
    label_cells = max(map(cells, labels)) + 1
    figures = [
        f" {each.before[rank]} → {row.share}" for each in known[:1] for rank, row in enumerate(rows)
    ]
    room = width - label_cells - 1 - max(map(cells, figures))
    if room < LEAST_LANE:
        return ()
    ends = [_place(each, known, at_seconds, room) for each in known]
    lines = []
    for rank, label in enumerate(labels):
        shares = [each.before[rank] for each in known] + [known[-1].after[rank]]
        lane = _draw_lane(shares, ends, room)
        first, figure = Span(f" {label:<{label_cells}}", "dim"), Span(figures[rank])
        lines.append(Line((first, Span(lane, device_tone(rank)), figure)))
    marks = [" "] * room
    for number, place in enumerate(ends, 1):
        for sign, where in zip(str(number), range(place, room), strict=False):
            marks[where] = sign
    return (*lines, Line((Span(f" {'':<{label_cells}}"), Span("".join(marks), "dim"))))


def _place(change: ShareChange, every: Sequence[ShareChange], at_seconds: float, room: int) -> int:
    """The cell in which a change lies."""
    first = every[0].at
    whole = max(at_seconds - first, 1e-9) / (1 - MARGIN)
    part = MARGIN + (change.at - first) / whole
    return min(room - 1, max(0, round(part * room)))


def _draw_lane(shares: Sequence[int], ends: Sequence[int], room: int) -> str:
    """A share's level in each cell, between the least and the most that it was; it ends where the
    next one begins.
    """
    least, most = min(shares), max(shares)
    signs = []
    for place in range(room):
        newest = sum(place >= end for end in ends)
        part = (shares[newest] - least) / (most - least) if most > least else 0.5
        signs.append(Mark.LEVELS[round(LOWEST + part * (HIGHEST - LOWEST))])
    return "".join(signs)
