"""The comparison of two stored runs and their plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from evener.balancer.number_format import count_nouns, duration, percent, rate
from evener.balancer.session_state import throughput_interval
from evener.balancer.statistics import is_known
from evener.balancer.store.runs import StoredRun
from evener.plan.file import Plan
from evener.printable import plain

from .cells import Line, Mark, Span, Tone, cut, fit, line, text_lines

LABEL_CELLS = 14
CHANGE_CELLS = 14  # minimum width of the column with the change
MOST_CELLS = 44  # maximum width of a value, so that compared values are close together


class ComparedFact(NamedTuple):
    """A property of two runs, such as their workload, and how it changed."""

    name: str
    before: str
    after: str
    change: str = ""
    tone: Tone = "dim"

    @property
    def differs(self) -> bool:
        """Whether the property has different values in the two runs."""
        return self.before != self.after


def compare_runs(first_run: StoredRun, second_run: StoredRun) -> list[ComparedFact]:
    """Compare the properties of two runs, and those of their plans if both runs have one."""
    found = list(_compare_requests(first_run, second_run))
    if first_run.plan is not None and second_run.plan is not None:
        found += _compare_plans(first_run.plan, second_run.plan)
    return found


def _compare_requests(first_run: StoredRun, second_run: StoredRun) -> Iterator[ComparedFact]:
    yield ComparedFact("workload", first_run.header.workload, second_run.header.workload)
    yield ComparedFact("devices", _name_devices(first_run), _name_devices(second_run))
    yield ComparedFact("settings", _format_settings(first_run), _format_settings(second_run))


def _name_devices(run: StoredRun) -> str:
    return ", ".join(device.label for device in run.header.devices)


def _format_settings(run: StoredRun) -> str:
    pairs = run.header.request.settings.items()
    return ", ".join(f"{name}={text}" for name, text in pairs) or "as they are"


def _compare_plans(before: Plan, after: Plan) -> Iterator[ComparedFact]:
    intervals = [throughput_interval(plan.throughput) for plan in (before, after)]
    speeds = [interval.value for interval in intervals]
    change = _signed(speeds[1] / speeds[0] - 1) if speeds[0] > 0 else ""
    tone: Tone = "good" if speeds[1] >= speeds[0] else "warn"
    if not all(map(is_known, intervals)):
        change, tone = "too uncertain to compare", "dim"
    elif intervals[0].low <= intervals[1].high and intervals[1].low <= intervals[0].high:
        change, tone = f"{change}: a tie", "dim"
    yield ComparedFact("samples/s", rate(speeds[0]), rate(speeds[1]), change, tone)
    batches = [plan.layout.global_batch for plan in (before, after)]
    change = _signed(batches[1] / batches[0] - 1) if all(batches) else ""
    yield ComparedFact("global batch", str(batches[0]), str(batches[1]), change)
    yield ComparedFact("rows", _format_rows(before), _format_rows(after))
    yield ComparedFact("precision", _format_precision(before), _format_precision(after))
    yield ComparedFact("measured", _format_effort(before), _format_effort(after))


def _format_rows(plan: Plan) -> str:
    return " + ".join(map(str, plan.layout.batches))


def _format_precision(plan: Plan) -> str:
    return f"{plan.precision}, XLA" if plan.xla else plan.precision


def _format_effort(plan: Plan) -> str:
    return f"{count_nouns(plan.search.probes, 'probe')}, {duration(plan.search.seconds)}"


def _signed(change: float) -> str:
    if abs(change) < 0.0005:
        return "the same"
    digits = 1 if abs(change) < 0.1 else 0
    return f"{'+' if change > 0 else '-'}{percent(abs(change), digits)}"


def difference_lines(first_run: StoredRun, second_run: StoredRun, width: int) -> tuple[Line, ...]:
    """Return a table of the properties that differ between two runs.

    A warning comes first if their workloads or devices differ.
    """
    found = compare_runs(first_run, second_run)
    lines = list(_warn(found, width))
    shown = [each for each in found if each.differs or each.name == "samples/s"]
    cells = max(6, min(MOST_CELLS, (width - LABEL_CELLS - 4 - CHANGE_CELLS) // 2))
    room = max(6, width - LABEL_CELLS - 4 - 2 * cells)
    lines.append(_heading(first_run.header.run, second_run.header.run, cells))
    lines += [_draw(each, cells, room) for each in shown]
    if not any(each.differs for each in found):
        lines.append(line(Span(" The two runs and their plans are alike.", "dim")))
    return tuple(lines)


def _heading(first_run: str, second_run: str, width: int) -> Line:
    """Return the table's heading, with the ids of the two runs."""
    runs = " ".join(fit(plain(run), width) for run in (first_run, second_run))
    return line(Span(f" {'':<{LABEL_CELLS}}{runs} change", "title"))


def _draw(each: ComparedFact, cells: int, room: int) -> Line:
    return line(
        Span(f" {fit(each.name, LABEL_CELLS)}", "title"),
        Span(fit(_last_part(each.before, cells), cells)),
        Span(" "),
        Span(fit(_last_part(each.after, cells), cells), "strong"),
        Span(" "),
        Span(cut(each.change, room), each.tone),
    )


def _last_part(text: str, width: int) -> str:
    """Shorten a path to its last part if it is wider than `width`."""
    text = plain(text)
    return text if len(text) <= width else text.rpartition("/")[2]


def _warn(found: list[ComparedFact], width: int) -> Iterator[Line]:
    others = [each.name for each in found if each.name in ("workload", "devices") and each.differs]
    if others:
        text = f"{Mark.ALARM} Other {' and '.join(others)}: the rates don't compare the plans."
        yield from text_lines(text, width, 2, "warn")
