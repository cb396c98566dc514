"""The table of stored runs, and the page with the details of one run."""

from __future__ import annotations

import msgspec

from evener.balancer.number_format import count_nouns, duration, rate
from evener.balancer.session_state import SessionState, first_state
from evener.balancer.store.runs import RunSummary, StoredRun
from evener.printable import plain

from ..text.summaries import brief_devices
from .balance_lines import (
    finished_lines,
    other_warnings,
    rival_lines,
    share_lines,
    warning_lines,
)
from .cells import Line, Mark, Span, Tone, cells, cut, line, text_lines, whole_lines
from .result_panel import everything_lines
from .search_log import LOG, log_rows
from .table import TAG, Column, table_lines, text_cell, whole_table

LEAST_MEASUREMENTS = 5  # minimum number of lines below a plan for a list of measurements
_STATE_TONES: dict[str, Tone] = {
    "running": "speed",
    "finished": "good",
    "stopped": "warn",
    "failed": "bad",
    "unreadable": "bad",
}


def _devices(row: RunSummary, width: int) -> tuple[Span, ...]:
    listed = ", ".join(row.devices)
    if row.kind == "training" or len(listed) > width:
        listed = brief_devices(row.devices)
    return (Span(cut(plain(listed), width)),)


def _draw_workload(row: RunSummary, width: int) -> tuple[Span, ...]:
    """Draw the workload without its folder, or the error of an unreadable run."""
    # A run on simulated devices has a mark in front, which is never cut off.
    mark = f"{Mark.SIMULATED} " if row.simulated else ""
    text = row.workload.rpartition("/")[2] or row.trouble
    name = Span(cut(plain(text), width - cells(mark)), "text" if row.workload else "bad")
    return (Span(mark, "warn"), name) if mark else (name,)


def _probes(row: RunSummary, _width: int) -> tuple[Span, ...]:
    return (Span(Mark.NONE, "dim") if row.kind == "training" else Span(str(row.probes)),)


def _state(row: RunSummary, width: int) -> tuple[Span, ...]:
    return (Span(cut(row.state, width), _STATE_TONES[row.state]),)


def _speed(row: RunSummary, _width: int) -> tuple[Span, ...]:
    speed = row.samples_per_second
    return (Span(Mark.NONE, "dim"),) if speed is None else (Span(rate(speed), "speed"),)


def _ratios(row: RunSummary, width: int) -> tuple[Span, ...]:
    text = " : ".join(f"{ratio:.3f}" for ratio in row.ratios)
    if len(text) > width:
        text = ":".join(f"{ratio:.2f}" for ratio in row.ratios)
    return (Span(cut(text, width)),)


def run_search_text(summary: RunSummary) -> str:
    """Return the text that the filter searches: id, devices, workload and state."""
    return " ".join((summary.run, *summary.devices, summary.workload, summary.state))


RUN_COLUMNS: tuple[Column[RunSummary], ...] = (
    TAG,
    Column(
        "run",
        ("run",),
        (20,),
        text_cell(lambda row: row.run, "strong"),
        "left",
        lambda row: row.run,
    ),
    Column(
        "created",
        ("created, UTC",),
        (19,),
        text_cell(lambda row: row.created.replace("T", " ").removesuffix("Z"), "dim"),
        "left",
        needs=110,  # narrower tables show the date only as the beginning of the run's id
    ),
    Column(
        "devices",
        ("devices",),
        (8, 8, 12),
        _devices,
        "left",
        lambda row: ", ".join(row.devices),
        40,
    ),
    Column(
        "workload",
        ("workload",),
        (11, 14, 16, 24),
        _draw_workload,
        "left",
        lambda row: row.workload,
        60,
    ),
    Column("state", ("state",), (8, 10, 11), _state, "left", lambda row: row.state),
    Column(
        "probes",
        ("probes", "n"),
        (3, 6),
        _probes,
        value=lambda row: row.probes,
    ),
    Column(
        "speed",
        ("samples/s", "smp/s"),
        (7, 9),
        _speed,
        value=lambda row: row.samples_per_second or 0,
    ),
    Column("ratios", ("ratios",), (9, 13), _ratios, "left", most=40),
)


def has_failed(summary: RunSummary) -> bool:
    """Return whether a run failed or can't be read."""
    return summary.state in ("failed", "unreadable")


def _end_state(run: StoredRun) -> SessionState:
    """Return the final state of a run's search, but without its measurements."""
    state = first_state(run.header.devices, run.header.workload, run.header.run)
    return msgspec.structs.replace(state, finished=run.end, ended=True)


def _with_measurements(run: StoredRun) -> SessionState:
    """Return the final state of a run's search, including its measurements."""
    seen = run.record.seen
    return msgspec.structs.replace(_end_state(run), seen=seen, probes=len(seen))


def run_page(run: StoredRun, width: int, path: str = "") -> tuple[Line, ...]:
    """Return a page with every detail of a run.

    `path` is the file of its plan, or "" if it wasn't written.
    """
    state = _with_measurements(run)
    head = whole_lines(run.header.workload, width, "strong")
    if run.end is not None:
        return (*head, Line(), *everything_lines(state, width, path))
    tone = _STATE_TONES[run.state]
    words = text_lines(_state_text(run), width, 8, tone)
    return (*head, *words, Line(), *whole_table(LOG, log_rows(state), width))


def _state_text(run: StoredRun) -> str:
    count = len(run.record.observations)
    made = f"after {count} measurement{'s' * (count != 1)}"
    if run.state == "failed":
        return f"Failed {made}. {run.trouble}"
    return (
        f"{'Running,' if run.state == 'running' else 'Stopped'} "
        f"{made}{'' if run.plan else '; there is no plan yet'}."
    )


def plan_lines(run: StoredRun, width: int, height: int) -> tuple[Line, ...]:
    """Return a run's plan, verdict and, if there is room, measurements."""
    name = f" {plain(run.header.run)} "
    title = line(
        Span(name, "strong"), Span(cut(plain(run.header.workload), width - len(name) - 1), "dim")
    )
    head: tuple[Line, ...] = (title,)
    if run.state != "finished":
        head = (*head, *text_lines(_state_text(run), width, 8, _STATE_TONES[run.state]))
    if run.end is None:
        return head
    plan, state = run.end.plan, _end_state(run)
    search = plan.search
    facts = f"{plan.framework}, {plan.precision}{', XLA' if plan.xla else ''}"
    effort = (
        f"{count_nouns(search.probes, 'probe')}, {search.out_of_memory} out of memory, "
        f"{duration(search.seconds)}"
    )
    before = (
        *head,
        *text_lines(f"{facts}; {effort}", width, 3, "dim"),
        Line(),
        *share_lines(state, width, 3),
        Line(),
    )
    after = (
        Line(),
        *finished_lines(run.end, width),
        *(() if run.state == "running" else text_lines(search.why_stopped, width, 3, "dim")),
        *warning_lines(other_warnings(run.end), width),
    )
    lines = (*before, *rival_lines(state, width, height - len(before)), *after)
    return (*lines, *_draw_measurements(run, width, height - len(lines)))


def _draw_measurements(run: StoredRun, width: int, height: int) -> tuple[Line, ...]:
    """Return a table of the run's measurements, or nothing if there is no room."""
    state = _with_measurements(run)
    if not state.seen or height < LEAST_MEASUREMENTS:
        return ()
    lines, _ = table_lines(LOG, log_rows(state), width, height - 1)
    return (Line(), *lines)
