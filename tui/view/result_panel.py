"""The result of a search, with its verdict, shares, gains over other layouts, and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evener.balancer.events import Finished
from evener.balancer.number_format import rate
from evener.balancer.result.sentences import (
    VerdictText,
    write_next_steps,
    write_verdict,
)
from evener.balancer.session_state import RatedLayout, SessionState, chosen_layout, rivals
from evener.balancer.statistics import is_known
from evener.printable import plain

from ..text.summaries import format_search, share_table
from ..text.summaries import rival_lines as rival_texts
from .balance_lines import (
    format_gain_of,
    gain_tone,
    other_warnings,
    share_legend,
    shares_bar,
    verdict_head,
    warning_lines,
)
from .cells import Line, Mark, Span, cut, fit_rows, line, pad, span_cells, text_lines, whole_lines
from .search_log import LOG, log_rows
from .table import whole_table

WIDEST_NAME = 30
GAIN_CELLS = 14
MOST_LEGEND = 3  # maximum number of lines of the shares' legend
MOST_REMARK = 8  # maximum number of lines of a remark, enough for all remarks
LEAST_BAR = 8
BAR_SIGN = "▇"
PLAN_NAME = "this plan"


class KeyHint(NamedTuple):
    """A key and what it does, as shown below a result."""

    key: str
    words: str
    shown: str = ""  # the key's display name, if it differs from the key


def result_lines(
    state: SessionState, width: int, height: int, keys: Sequence[KeyHint]
) -> tuple[Line, ...]:
    """Return the result in at most `height` lines; the last line lists the keys.

    Returns no lines while the search has no result.
    """
    finished = state.finished
    if finished is None:
        return ()
    body = [*verdict_head(finished, width), *_draw_shares(state, width)]
    bars = gain_bars(state, width)
    body += [Line(), *bars, Line()] if len(body) + len(bars) + 3 <= height else bars
    body += _remarks(finished, width)
    last = _keys_line(keys, width)
    room = max(0, height - 1)
    hint = cut("Enter reads everything", max(1, width - 3))
    return (*fit_rows(body, room, hint), last)


def count_rows(state: SessionState, width: int) -> int:
    """Return how many lines the result takes if nothing is left out."""
    return len(result_lines(state, width, 999, ()))


def _draw_shares(state: SessionState, width: int) -> list[Line]:
    """Draw the plan's shares. Returns no lines for a single device, or if there is no room."""
    chosen = chosen_layout(state)
    if chosen is None or len(chosen.active) < 2 or width < 20:
        return []
    return [shares_bar(chosen.shares, width), *share_legend(state, chosen, width)[:MOST_LEGEND]]


def gain_bars(state: SessionState, width: int) -> list[Line]:
    """Draw a bar for the plan and for each layout that it is compared with."""
    shown = [each for each in rivals(state) if each.kind != "sum"]
    if not shown:
        return []
    plan, top = shown[0], max(each.rate.value for each in shown)
    name_cells = min(WIDEST_NAME, max(len(PLAN_NAME), *(len(each.name) for each in shown)))
    lines = []
    for each in shown:
        name = PLAN_NAME if each is plan else each.name
        lines.append(_gain_bar(each, plan, name, name_cells, width, top))
    return lines


def _gain_bar(
    rated: RatedLayout, plan: RatedLayout, name: str, name_cells: int, width: int, top: float
) -> Line:
    first = rated is plan
    bar_cells = width - name_cells - GAIN_CELLS - 13
    gain = "" if first else format_gain_of(plan, rated)
    spans = [Span(f" {cut(plain(name), name_cells):<{name_cells}} ", "strong" if first else "text")]
    if bar_cells >= LEAST_BAR:
        spans += _draw_bar(rated.rate.value / top, bar_cells, first)
    number = rate(rated.rate.value) if is_known(rated.rate) else f"~{rate(rated.rate.value)}"
    spans += (Span(f"{number:>10}", "speed" if first else "text"),)
    spans += (Span(f"  {gain:<{GAIN_CELLS - 2}}", gain_tone(gain)),)
    return Line(pad(tuple(spans), width))


def _draw_bar(fraction: float, width: int, is_plan: bool) -> tuple[Span, ...]:
    """Draw a bar that fills a `fraction` of the width, in the plan's colour if `is_plan` is set."""
    # It is lower than a line of text, so that bars don't touch.
    count = max(1, round(min(1.0, fraction) * width))
    return Span(BAR_SIGN * count, "speed" if is_plan else "dim"), Span(" " * (width - count))


def _remarks(finished: Finished, width: int) -> list[Line]:
    """Return the warnings and remarks of the verdict."""
    written = _written(finished)
    doubts = written.doubts if written is not None else ()
    remarks = written.remarks if written is not None else ()
    lines = list(warning_lines([*doubts, *other_warnings(finished)], width))
    for remark in remarks:
        lines += text_lines(remark, width, MOST_REMARK, "dim")
    return lines


def _written(finished: Finished) -> VerdictText | None:
    return write_verdict(finished.found) if finished.found is not None else None


def _keys_line(keys: Sequence[KeyHint], width: int) -> Line:
    """Return a line with as many keys as fit. Clicking a key is the same as pressing it."""
    spans: list[Span] = []
    for hint in keys:
        action = f"app.simulate_key('{hint.key}')"
        more = [
            Span(f" {hint.shown or hint.key}", "key", action),
            Span(f" {hint.words}  ", "text", action),
        ]
        if span_cells([*spans, *more]) > width:
            break
        spans += more
    return Line(tuple(spans))


def everything_lines(state: SessionState, width: int, path: str = "") -> tuple[Line, ...]:
    """Return every detail of a finished search, including all of its measurements.

    `path` is the file of the plan, or "" if it wasn't written.
    """
    finished = state.finished
    if finished is None:
        return ()
    head = verdict_head(finished, width)
    if finished.found is None:
        head = list(whole_lines(finished.verdict, width, "strong"))
    lines = [*head, Line(), *gain_bars(state, width), Line()]
    lines += _text_section("", _verdict_texts(finished), width)
    steps = write_next_steps(state.run, finished, path, True)
    lines += _text_section("Next", steps, width)
    lines += [_title("Shares")]
    labels = state.devices
    lines += [
        Line((Span(" "), *row.spans))
        for text in share_table(finished.plan, labels, width - 2)
        for row in whole_lines(text, width - 1)
    ]
    lines += [Line(), _title("Compared with")]
    lines += [
        row
        for text in rival_texts(finished.plan, labels, with_gains=finished.found is None)
        for row in text_lines(text, width, 3)
    ]
    lines += [Line(), _title("Every measurement")]
    if finished.plan.search.probes:
        lines += text_lines(format_search(finished.plan.search), width, 4, "dim")
    lines += whole_table(LOG, log_rows(state), width)
    return tuple(lines)


def _verdict_texts(finished: Finished) -> list[str]:
    """Return the gains, warnings and remarks of the verdict, without its recommendation."""
    written = _written(finished)
    if written is None:
        # a run of an older version has only the verdict's text
        return []
    doubts = [f"{Mark.ALARM} {doubt}" for doubt in written.doubts]
    warnings = [f"{Mark.ALARM} {warning}" for warning in other_warnings(finished)]
    texts = (written.gains, *doubts, *warnings, *written.remarks)
    return [text for text in texts if text]


def _text_section(title: str, texts: Sequence[str], width: int) -> list[Line]:
    if not texts:
        return []
    rows = [row for text in texts for row in text_lines(text, width, 12)]
    return [*([_title(title)] if title else []), *rows, Line()]


def _title(text: str) -> Line:
    return line(Span(f" {text}", "title"))
