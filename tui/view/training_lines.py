"""The tables of training runs and ranks, and sentences about what slows a run down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from evener.balancer.number_format import (
    duration,
    group_digits,
    join_words,
    percent,
    rate,
    step_time,
    write_share,
)
from evener.live.files import ShareChange
from evener.printable import plain
from evener.training.limits import LimitKind
from evener.training.noise_scale import describe

from .cells import Line, Mark, Span, Tone, cells, cut, text_lines
from .ranks import DOING, RankRow
from .step_bars import part_bar
from .table import Cell, Column, Grid, text_cell
from .teaching import NO_TRAINING
from .trainings import AS_PLANNED, TrainingRow

WHOLE_PERCENT = 0.005  # smaller errors aren't shown
_LEAST_TEXT, _LEAST_RANKS, _LEAST_GRAPHS = 4, 3, 5  # lines of a panel
MOST_TEXT = 8  # maximum number of lines of the sentences, if there are other panels
LEGEND_ROWS = 1  # lines below the ranks
LEAST_PART_S = 5e-6  # a shorter part is written as 0 ms
MOST_GAIN = 9.0  # larger gains are all written as "over +900 %"
PANELS_OF_ONE = ("#ranks", "#causes", "#last-steps", "#shares", "#training-graphs")


class PanelRows(NamedTuple):
    """How many lines each panel about a training run needs."""

    ranks: int = 0
    text: int = MOST_TEXT
    lanes: int = 0  # lines of the last steps
    shares: int = 0  # lines of the shares over time


def arrange_trainings(
    height: int, frame: int, trainings: int, needed_rows: PanelRows
) -> dict[str, int]:
    """Divide the height of the Trainings screen between its panels.

    Returns the height of each panel in lines by its selector; 0 hides it.

    - `frame`: the number of lines that a panel's frame takes.
    - `trainings`: the number of training runs.
    - `needed_rows`: what the panels about the chosen training run need.
    """
    # The panels from the top are trainings, ranks, sentences, the last steps, the shares over time,
    # and graphs. The trainings take at most about a quarter of the height. If there are none, their
    # panel takes the whole height, to say how to start one.
    if not trainings:
        return {"#trainings": height, **dict.fromkeys(PANELS_OF_ONE, 0)}
    top = min(max(1, trainings), max(1, height // 4)) + 1 + frame
    ranks = needed_rows.ranks + 1 + LEGEND_ROWS + frame
    middle = max(_LEAST_RANKS, min(ranks, height - top - _LEAST_TEXT - frame))
    left = max(0, height - top - middle)
    text = min(left, max(_LEAST_TEXT, min(needed_rows.text, MOST_TEXT)) + frame)
    left -= text
    placed = {}
    for name, count in (("#last-steps", needed_rows.lanes), ("#shares", needed_rows.shares)):
        rows = count + 1 + frame if count else 0
        placed[name] = rows if rows <= left else 0
        left -= placed[name]
    placed["#training-graphs"] = left if left >= _LEAST_GRAPHS + frame else 0
    sizes = {"#trainings": top, "#ranks": middle, "#causes": text, **placed}
    lowest = [name for name, rows in sizes.items() if rows][-1]
    sizes[lowest] += height - sum(sizes.values())
    return sizes


def _plan(row: TrainingRow, _width: int) -> tuple[Span, ...]:
    if not row.of_plan:
        return (Span(Mark.NONE, "dim"),)
    return (Span(percent(row.of_plan), "good" if row.of_plan >= AS_PLANNED else "warn"),)


def _step_time(row: TrainingRow, width: int) -> tuple[Span, ...]:
    if not row.step_s:
        return (Span(Mark.NONE, "dim"),)
    text, spread = step_time(row.step_s), f"{percent(row.step_spread):>6}"
    return (Span(text), Span(spread if cells(text + spread) <= width else "", "dim"))


def _input(row: TrainingRow, _width: int) -> tuple[Span, ...]:
    return (
        Span(
            percent(row.input_s / row.step_s) if row.step_s else Mark.NONE,
            "text" if row.step_s else "dim",
        ),
    )


def _draw_causes(row: TrainingRow, width: int) -> tuple[Span, ...]:
    """Draw what slows a training run down, in sentences if they fit and otherwise in keywords."""
    # For an ended training, draw how long ago it ended.
    if row.ended_s:
        words = f"ended {duration(row.ended_s)} ago"
        return (Span(words if cells(words) <= width else "ended"),)
    words = " ".join(cause.text for cause in row.causes)
    kinds = ", ".join(dict.fromkeys(cause.kind for cause in row.causes))
    return (Span(words if cells(words) <= width else cut(kinds, width), "warn"),)


def _indent(draw_cell: Cell[TrainingRow]) -> Cell[TrainingRow]:
    """Return a function that draws the same cell as `draw_cell`, with a blank in front."""
    return lambda row, width: (Span(" "), *draw_cell(row, width - 1))


def _name(row: TrainingRow) -> str:
    """Return the workload without its folder, or the framework if the workload has no name."""
    # A narrow column would show only the beginning of a path.
    return row.workload.rpartition("/")[2] or row.framework


def _ranks(row: TrainingRow) -> str:
    there = len({rank.rank for rank in row.ranks}) if row.missing_ranks else len(row.ranks)
    return f"{there} of {there + row.missing_ranks}" if row.missing_ranks else str(there)


def _speed(number: float) -> tuple[Span, ...]:
    return (Span(rate(number), "speed") if number else Span(Mark.NONE, "dim"),)


def _dimmed_if_ended(column: Column[Any]) -> Column[Any]:
    """Return a column that is drawn dim for training runs that have ended."""

    def draw(row: Any, width: int) -> tuple[Span, ...]:
        spans = column.draw(row, width)
        return tuple(Span(span.text, "dim") for span in spans) if row.ended_s else spans

    return column._replace(draw=draw)


_COLUMNS: tuple[Column[TrainingRow], ...] = (
    Column("workload", ("workload",), (12, 16, 24, 32), text_cell(_name, "strong"), "left"),
    Column(
        "framework",
        ("framework",),
        (10,),
        text_cell(lambda row: row.framework, "dim"),
        "left",
        needs=110,
    ),
    Column("ranks", ("ranks",), (6,), text_cell(_ranks)),
    Column("step", ("step",), (7, 9), text_cell(lambda row: group_digits(row.step))),
    Column("speed", ("samples/s",), (9,), lambda row, _: _speed(row.samples_per_second)),
    Column(
        "tokens",
        ("tokens/s",),
        (9,),
        lambda row, _: _speed(row.tokens_per_second),
        there=lambda row: row.tokens_per_second,
    ),
    Column("plan", ("of plan", "plan"), (5, 8), _plan),
    Column("time", ("step time, spread", "step time", "time"), (7, 13, 18), _step_time),
    Column("input", ("input",), (5, 6), _input),
    # the blank in front keeps two words of the heading apart
    Column(
        "causes", (" held up by", " held by"), (10, 16), _indent(_draw_causes), "left", most=1000
    ),
)
TRAININGS: Grid[TrainingRow] = Grid(tuple(map(_dimmed_if_ended, _COLUMNS)), NO_TRAINING)


def _share(row: RankRow, width: int) -> tuple[Span, ...]:
    if not row.share:  # a process without rows holds a part of a sharded model's state
        holds_state = row.rank >= 0 and not row.without_loader
        return (Span("state" if holds_state else Mark.NONE, "dim"),)
    whole = write_share(row.share, row.micro)
    return (Span(whole if cells(whole) <= width else str(row.share)),)


def _rank_value(
    value: Callable[[RankRow], float],
    format_value: Callable[[float], str],
    tone: Tone,
    is_known: Callable[[RankRow], float],
) -> Cell[RankRow]:
    """Return a function that draws the cell of one value in the table of ranks.

    `value` reads the number from a rank's row, and `is_known` returns 0 if the number is unknown.
    An unknown value is drawn as a dash, and the last value of a silent rank is dim.
    """

    def draw(row: RankRow, width: int) -> tuple[Span, ...]:
        # 0 means that the value is unknown
        if not is_known(row):
            return (Span(Mark.NONE, "dim"),)
        text = format_value(value(row))
        return (
            Span(cut(f"{Mark.STALE}{text}", width, ""), "dim")
            if row.silent_s
            else Span(text, tone),
        )

    return draw


def _rank_speed(speed: Callable[[RankRow], float]) -> Cell[RankRow]:
    return _rank_value(speed, rate, "speed", speed)


def _part(seconds: Callable[[RankRow], float]) -> Cell[RankRow]:
    return _rank_value(seconds, _format_duration, "text", lambda row: row.own_work_s)


def _format_duration(seconds: float) -> str:
    """Format the duration of a part of a step. Very short ones become "0 ms"."""
    return step_time(seconds) if seconds >= LEAST_PART_S else "0 ms"


def _waiting_s(row: RankRow) -> float:
    """Return how many seconds of a step a rank waits for other ranks."""
    # if the parts are unknown, this includes the exchange of gradients
    return row.step.waiting_s if row.step.step_s else row.waiting_s


def _bar(longest_s: float) -> Cell[RankRow]:
    def draw(row: RankRow, width: int) -> tuple[Span, ...]:
        if row.silent_s:
            return (Span(cut(f"{DOING[row.doing]} for {duration(row.silent_s)}", width), "bad"),)
        if not row.step.step_s:
            return (Span(cut("reports no own work", width), "dim"),)
        return part_bar(row.step, longest_s, width)

    return draw


def rank_grid(ranks: Sequence[RankRow]) -> Grid[RankRow]:
    """Return the table of ranks. A bar in each row divides the rank's step time into parts.

    All bars have the same scale.
    """
    longest_s = max((row.step.step_s for row in ranks), default=0.0)
    columns: tuple[Column[RankRow], ...] = (
        Column(
            "rank",
            ("rank",),
            (4,),
            text_cell(lambda row: str(row.rank) if row.rank >= 0 else "", "strong"),
        ),
        Column("device", ("device",), (8, 12, 18), text_cell(lambda row: row.device), "left"),
        Column("share", ("share",), (5, 13, 17), _share, "left"),
        Column("speed", ("samples/s",), (9,), _rank_speed(lambda row: row.samples_per_second)),
        Column(
            "tokens",
            ("tokens/s",),
            (9,),
            _rank_speed(lambda row: row.tokens_per_second),
            there=lambda row: row.tokens_per_second,
        ),
        Column("own", ("own work", "own"), (7, 8), _part(lambda row: row.own_work_s)),
        Column("waiting", ("waiting", "wait"), (7,), _part(_waiting_s)),
        Column(
            "bar",
            ("a step in its parts, on one scale", "a step", "step"),
            (20, 24),
            _bar(longest_s),
            "left",
            most=1000,
        ),
    )
    return Grid(tuple(map(_dimmed_if_ended, columns)))


def training_lines(row: TrainingRow, at_seconds: float, width: int) -> tuple[Line, ...]:
    """Return sentences about a training run, such as its speed, what slows it down, and remedies.

    `at_seconds` is the current time in Unix seconds.
    """
    late = 0 < row.of_plan < AS_PLANNED and not row.ended_s
    lines = [*_ended_lines(row, width)] if row.ended_s else []
    tone: Tone = "warn" if late else "text"
    lines += text_lines(_describe_speed(row), width, 3, "dim" if row.ended_s else tone)
    lines += _cause_lines(row, late, width)
    for words in (*_describe_faster_shares(row), *_list_remedies(row)):
        lines += _marked(words, "good", Mark.CURSOR, width)
    if row.noise is not None:
        batch = sum(rank.share for rank in row.ranks)
        noise_text = describe(row.noise, batch, row.step)
        lines += _marked(f"{noise_text[0].upper()}{noise_text[1:]}.", "text", Mark.DOT, width)
    for retreat in row.retreats:
        lines += _marked(f"{retreat}.", "warn", Mark.ALARM, width)
    for number, change in reversed([*enumerate(row.changes, 1)]):
        lines += _marked(_change_text(change, at_seconds), "dim", str(number)[-1], width)
    return tuple(lines)


def _cause_lines(row: TrainingRow, is_late: bool, width: int) -> Iterator[Line]:
    """Yield the lines about what slows a training run down.

    If it is slower than its plan (`is_late`) and no cause is known, yields the causes that were
    ruled out.
    """
    if row.ended_s and row.causes:
        yield from text_lines("As it was in its last steps:", width, 1, "dim")
    if is_late and not row.causes:
        yield from text_lines(_list_excluded_causes(row), width, 4)
    for cause in row.causes:
        yield from _marked(cause.text, "warn", Mark.ALARM, width)


def _ended_lines(row: TrainingRow, width: int) -> Iterator[Line]:
    """Yield a line that says how long ago a training run ended, and then its summary."""
    yield from text_lines(f"Ended {duration(row.ended_s)} ago.", width, 1, "strong")
    for each in row.summary:
        yield from _marked(each, "text", Mark.DOT, width)


def _list_excluded_causes(row: TrainingRow) -> str:
    """Say that no cause was found, and what fraction of a step each usual cause takes.

    The fraction is that of the rank whose own steps have the largest.
    """
    steps = [rank.step for rank in row.ranks if rank.step.step_s]
    if not steps:
        return "No cause was found: this training doesn't report the parts of its steps."
    largest = {
        "input takes at most": max(step.input_s / step.step_s for step in steps),
        "waiting": max(step.waiting_s / step.step_s for step in steps),
        "the exchange": max(step.exchange_s / step.step_s for step in steps),
        "work between steps": max(step.between_s / step.step_s for step in steps),
    }
    parts = join_words([f"{name} {percent(part)}" for name, part in largest.items()])
    return (
        f"No cause was found. Of a step, {parts}. Threads wait for cores "
        f"{percent(row.starved)} of the time; no device is throttled, and no other process is "
        f"seen on one. So own work itself takes longer than when the plan was measured."
    )


def _describe_faster_shares(row: TrainingRow) -> Iterator[str]:
    """Yield sentences that name faster shares and their gain, and say whether they will be used."""
    # For an ended training, yield why it didn't adopt them. If the current shares are the fastest,
    # yield nothing.
    if row.advice is None:
        return
    shares = " + ".join(map(str, row.advice.shares))
    rule = "the plan's curves" if row.advice.by_curves else "the rows"
    error = f" ± {percent(row.advice.error)}" if row.advice.error >= WHOLE_PERCENT else ""
    gain = f"+{percent(row.advice.gain)}{error}"
    if row.ended_s:
        yield f"{shares} would have given {gain}, if own work follows {rule}."
        yield from _explain_stay(row)
        return
    if row.pending is None:
        yield f"{shares} would give {gain}, if own work follows {rule}."
        return
    seen, needed = row.pending.windows, row.pending.needed
    how_far = f"{min(seen, needed)} of {needed} windows of steps seen"
    if seen >= needed:
        how_far = "once they gain in most windows of steps"
    yield f"It is about to change its shares by itself, towards {shares} ({gain}): {how_far}."


def _explain_stay(row: TrainingRow) -> Iterator[str]:
    """Yield a sentence that says why a training run kept its shares until it ended."""
    if row.pending is None:
        if not row.changes:
            yield "It kept its shares: it wasn't asked to change them while it trains."
        return
    seen, needed = row.pending.windows, row.pending.needed
    if seen < needed:
        yield f"It kept its shares: it ended after {seen} of the {needed} windows of steps needed."
        return
    yield "It kept its shares: the gain wasn't there in most windows of steps."


def _list_remedies(row: TrainingRow) -> Iterator[str]:
    """Yield a remedy for each limit on the speed, with the gain to expect."""
    # If several limits have the same remedy, it is given once.
    mentioned = set()
    for limit in row.limits:
        # better shares are described elsewhere
        if limit.kind == LimitKind.UNEQUAL or limit.remedy in mentioned or row.ended_s:
            continue
        mentioned.add(limit.remedy)
        low, high = _format_gain(limit.gain_low), _format_gain(limit.gain_high)
        yield f"{limit.remedy} {_format_gain(limit.gain)} ({low} to {high})."


def _format_gain(gain: float) -> str:
    """Format a gain as a percentage. Very large ones become "over +900 %"."""
    return f"over +{percent(MOST_GAIN)}" if gain >= MOST_GAIN else f"+{percent(gain)}"


def _marked(text: str, tone: Tone, mark: str, width: int) -> Iterator[Line]:
    for place, each in enumerate(text_lines(text, width - 2, 3, tone)):
        yield Line((Span(f" {'' if place else mark:1}", tone), *each.spans))


def _describe_speed(row: TrainingRow) -> str:
    sentences = [_format_rate(row)]
    if row.missing_ranks:
        ranks = "1 rank isn't" if row.missing_ranks == 1 else f"{row.missing_ranks} ranks aren't"
        sentences.append(f"{ranks} seen here: on another host, or ended.")
    if row.step_s:
        sentences.append(_format_step_time(row))
    if row.samples_per_joule:
        sentences.append(f"{row.samples_per_joule:.3g} samples per joule, at {row.watts:.0f} W.")
    return " ".join(sentences)


def _format_rate(row: TrainingRow) -> str:
    """Return samples/s and tokens/s, and the fraction of the plan's speed that is reached."""
    speed = f"{rate(row.samples_per_second)} samples/s"
    if row.step_s and all(each.without_loader for each in row.ranks):
        speed = f"{rate(1 / row.step_s)} steps/s"
    tokens = f" ({rate(row.tokens_per_second)} tokens/s)" if row.tokens_per_second else ""
    if not row.plan_samples_per_second:
        return f"{speed}{tokens}."
    relation = f"{percent(row.of_plan)} of" if row.of_plan else "against"
    return f"{speed}{tokens}, {relation} the plan's {rate(row.plan_samples_per_second)}."


def _format_step_time(row: TrainingRow) -> str:
    """Say how long a step takes and how much that varies.

    If they are known, the time spent on input and the time between steps follow.
    """
    spread = f" (quartiles {percent(row.step_spread)} apart)" if row.step_spread >= 0.005 else ""
    parts = {"of it for input": row.input_s, "between steps": row.between_s}
    spent = "".join(
        f", {step_time(seconds)} {where}" for where, seconds in parts.items() if seconds
    )
    return f"A step takes {step_time(row.step_s)}{spread}{spent}."


def _change_text(change: ShareChange, at_seconds: float) -> str:
    before, after = (" + ".join(map(str, shares)) for shares in (change.before, change.after))
    ago = duration(max(0.0, at_seconds - change.at))
    return (
        f"Step {group_digits(change.step)}, {ago} ago: {plain(change.reason)}; {before} to {after}."
    )
