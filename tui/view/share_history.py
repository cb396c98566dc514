"""A drawing of how the shares of a training run change over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evener.live.files import ShareChange

from .cells import Line, Mark, Span, Tone, cells, device_tone
from .ranks import RankRow

LEAST_LANE = 16  # minimum width of a lane in cells
MARGIN = 0.15  # fraction of the shown time that is before the first change
HIGHEST = 7  # eighths of a cell for the largest share, so that lanes don't touch


def share_lines(
    rows: Sequence[RankRow],
    changes: Sequence[ShareChange],
    at_seconds: float,
    width: int,
    height: int,
) -> tuple[Line, ...]:
    """Draw each rank's share over time, and number the changes.

    Returns no lines if no share has changed or there is no room. `at_seconds` is the current time
    in Unix seconds.
    """
    known = [change for change in changes if len(change.before) == len(change.after) == len(rows)]
    shown = rows[: max(0, height - 1)]
    if not known or not shown:
        return ()
    labels = [row.device or f"rank {row.rank}" for row in shown]
    label_cells = max(map(cells, labels)) + 1
    room = width - label_cells - 2
    text_cells = max(len(str(row.share)) for row in shown) + 3
    if room < LEAST_LANE + text_cells:
        return ()
    last = room - text_cells  # leaves room for the newest share's number
    ends = [min(last, _cell_of_change(each, known, at_seconds, room)) for each in known]
    lines = [
        Line((Span(f" {label:<{label_cells}}", "dim"), *lane))
        for label, lane in zip(labels, _draw_lanes(shown, known, ends, room), strict=True)
    ]
    head = Span(f" {'':<{label_cells}}")
    return (*lines, Line((head, Span(_number_changes(ends, room), "dim"))))


def _draw_lanes(
    rows: Sequence[RankRow], changes: Sequence[ShareChange], change_cells: Sequence[int], room: int
) -> Iterator[tuple[Span, ...]]:
    """For each rank, yield a line that draws its shares over time.

    `change_cells` has the cell at which each change of shares is drawn.
    """
    max_share = max(max(*change.before, *change.after) for change in changes)
    for rank, row in enumerate(rows):
        shares = [*(change.before[rank] for change in changes), changes[-1].after[rank]]
        tone: Tone = "dim" if row.ended_s else device_tone(rank)
        yield tuple(_draw_lane(shares, change_cells, max_share, room, tone))


def _number_changes(change_cells: Sequence[int], room: int) -> str:
    """Return the line below the drawing, with the number of each change at the change's cell."""
    # The sentences about the training's changes use the same numbers.
    marks = [" "] * room
    for number, place in enumerate(change_cells, 1):
        for sign, where in zip(str(number), range(place, room), strict=False):
            marks[where] = sign
    return "".join(marks)


def _cell_of_change(
    change: ShareChange, changes: Sequence[ShareChange], at_seconds: float, room: int
) -> int:
    """Return the cell at which a change is drawn on a time axis that ends at `at_seconds`.

    `changes` are all changes, oldest first.
    """
    first = changes[0].at
    whole = max(at_seconds - first, 1e-9) / (1 - MARGIN)
    part = MARGIN + (change.at - first) / whole
    return min(room - 1, max(0, round(part * room)))


def _draw_lane(
    shares: Sequence[int], change_cells: Sequence[int], max_share: int, room: int, tone: Tone
) -> Iterator[Span]:
    """Yield spans that draw one rank's shares.

    A share lasts from its cell in `change_cells` to the next one. The largest share, `max_share`,
    is drawn highest.
    """
    starts = [0, *change_cells]
    behind = [*change_cells, room]
    for share, start, end in zip(shares, starts, behind, strict=True):
        level = Mark.LEVELS[max(1, round(HIGHEST * share / max(1, max_share)))]
        text = f" {share} " if start else f"{share} "
        length = max(0, end - start)
        if len(text) >= length:
            text = ""
        yield Span(text, "strong" if end == room else "text")
        yield Span(level * (length - len(text)), tone)
