"""Past runs as rows, and a run's plan as lines, narrow enough to be shown next to another one."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.events import Finished
from evener.balancer.session_state import SessionState
from evener.balancer.store.runs import Run, RunSummary
from evener.tui.text.formatting import duration, rate
from evener.tui.view.balance_lines import rival_lines, share_lines, warning_lines
from evener.tui.view.cells import Line, Span, Tone, clean, cut, line, text_lines
from evener.tui.view.marks import Marks
from evener.tui.view.table import NO_CURSOR, Column, Position, column_widths, heading, scrolled, table_row, text_cell

_STATE_TONES: dict[str, Tone] = {
    "running": "speed",
    "finished": "good",
    "stopped": "warn",
    "failed": "bad",
    "unreadable": "bad",
}


class _RunRow:
    """A run in the list, and whether it is marked for comparison."""

    def __init__(self, summary: RunSummary, taken: bool) -> None:
        self.summary = summary
        self.taken = taken


def _taken(row: _RunRow, _width: int, marks: Marks) -> tuple[Span, ...]:
    return (Span(marks.tagged if row.taken else "", "speed"),)


def _created(row: _RunRow) -> str:
    return row.summary.created.replace("T", " ").removesuffix("Z")


def _devices(row: _RunRow, width: int, marks: Marks) -> tuple[Span, ...]:
    listed = clean(", ".join(row.summary.devices))
    return (Span(listed if len(listed) <= width else cut(brief_devices(row.summary.devices), width, marks.ellipsis)),)


def brief_devices(labels: Sequence[str]) -> str:
    """Labels of one kind in short: GPU:0, GPU:1 is GPU:0,1."""
    kinds = {label.partition(":")[0] for label in labels}
    if len(kinds) != 1 or not all(":" in label for label in labels):
        return clean(", ".join(labels))
    return clean(f"{kinds.pop()}:{','.join(label.partition(':')[2] for label in labels)}")


def _workload(row: _RunRow, width: int, marks: Marks) -> tuple[Span, ...]:
    text = row.summary.workload or row.summary.trouble
    return (Span(cut(clean(text), width, marks.ellipsis), "text" if row.summary.workload else "bad"),)


def _state(row: _RunRow, width: int, marks: Marks) -> tuple[Span, ...]:
    return (Span(cut(row.summary.state, width, marks.ellipsis), _STATE_TONES[row.summary.state]),)


def _speed(row: _RunRow, _width: int, marks: Marks) -> tuple[Span, ...]:
    speed = row.summary.samples_per_second
    return (Span(marks.none, "dim"),) if speed is None else (Span(rate(speed), "speed"),)


def _ratios(row: _RunRow, width: int, marks: Marks) -> tuple[Span, ...]:
    text = " : ".join(f"{ratio:.3f}" for ratio in row.summary.ratios)
    if len(text) > width:
        text = ":".join(f"{ratio:.2f}" for ratio in row.summary.ratios)
    return (Span(cut(text, width, marks.ellipsis)),)


_RUN_COLUMNS: tuple[Column[_RunRow], ...] = (
    Column("taken", ("",), 1, _taken, "left"),
    Column("run", ("run",), 20, text_cell(lambda row: row.summary.run, "strong"), "left"),
    Column("created", ("created, UTC",), 19, text_cell(_created, "dim"), "left"),
    Column("devices", ("devices",), 8, _devices, "left"),
    Column("workload", ("workload",), 11, _workload, "left"),
    Column("state", ("state",), 10, _state, "left"),
    Column("probes", ("probes", "n"), 3, text_cell(lambda row: str(row.summary.probes))),
    Column("speed", ("samples/s", "smp/s"), 7, _speed),
    Column("ratios", ("ratios",), 9, _ratios, "left"),
)
_GROWTH = (("ratios", 13), ("devices", 12), ("state", 11), ("speed", 9), ("probes", 6), ("workload", 16))
_DATED = 110  # columns, from which the date has its own column; a run's id begins with it


def _columns(width: int) -> tuple[Column[_RunRow], ...]:
    return tuple(column for column in _RUN_COLUMNS if width >= _DATED or column.key != "created")


def run_lines(
    runs: Sequence[RunSummary], taken: str, width: int, height: int, marks: Marks, position: Position = NO_CURSOR
) -> tuple[tuple[Line, ...], int]:
    """The heading and as many runs as fit in `height`, and the first one shown."""
    columns = _columns(width)
    widths = column_widths(columns, _GROWTH, {"devices": 40, "ratios": 40, "workload": 60}, width - 1)
    head = heading(columns, widths, marks)
    if not runs:
        return (head, line(Span(" No runs yet: make one on the Balance screen, key 2.", "dim"))), 0

    def draw(each: RunSummary, here: bool) -> Line:
        return table_row(columns, widths, _RunRow(each, each.run == taken), marks, cursor=here)

    return scrolled(head, runs, draw, height, position)


def _end_state(run: Run) -> SessionState:
    """A run's end as the Balance screen shows it."""
    finished = None
    if run.plan is not None:
        finished = Finished(run.header.run, run.plan, (), run.verdict, run.interrupted, run.plan.search.seconds)
    return SessionState(
        run=run.header.run,
        devices=tuple(device.label for device in run.header.devices),
        names=tuple(device.name for device in run.header.devices),
        workload=run.header.workload,
        finished=finished,
        ended=True,
    )


def plan_lines(run: Run, width: int, height: int, marks: Marks) -> tuple[Line, ...]:
    """A run's plan: shares, rivals (with bars if `height` allows), verdict and warnings."""
    head = line(Span(f" {clean(run.header.run)} ", "strong"), Span(clean(run.header.workload), "dim"))
    if run.plan is None:
        count = len(run.observations)
        return (head, *text_lines(f"No plan yet, after {count} measurement{'s' * (count != 1)}.", width, 2, "warn"))
    plan, state = run.plan, _end_state(run)
    search = plan.search
    facts = f"{plan.framework}, {plan.precision}{', XLA' if plan.xla else ''}"
    effort = f"{search.probes} probes, {search.out_of_memory} out of memory, {duration(search.seconds)}"
    before = (
        head,
        *text_lines(f"{facts}; {effort}", width, 3, "dim"),
        Line(),
        *share_lines(state, width, 3, marks),
        Line(),
    )
    after = (
        Line(),
        *text_lines(run.verdict, width, 4, "good"),
        *text_lines(search.why_stopped, width, 3, "dim"),
        *warning_lines(plan.warnings, width, marks),
    )
    return (*before, *rival_lines(state, width, height - len(before), marks), *after)
