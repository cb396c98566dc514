"""A run's report: what its journal says, and the pictures that matplotlib draws of it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from evener.balancer import journal
from evener.balancer.journal import Header, ObservationEntry, Record
from evener.balancer.number_format import percent, rate, write_share
from evener.balancer.result.learning import Point, find_frontier
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Timed
from evener.devices.terms import write_limit
from evener.devices.types import Device
from evener.errors import RequestError
from evener.plan.file import LARGER_BATCH, SOLO_PREFIX, Evidence, Plan, PlanLayout

from ..text.formatting import plain
from ..text.summaries import outcome_name

THE_PLAN = "the plan"  # in the ranking


class SoloCurve(msgspec.Struct, frozen=True):
    """A device alone: measured (batch, samples/s), by batch, and the smallest batch that did not fit."""

    label: str
    points: tuple[tuple[int, float], ...]
    wall_batch: int | None


class RunReport(msgspec.Struct, frozen=True):
    """A run, ready to be drawn."""

    header: Header
    labels: tuple[str, ...]
    plan: Plan
    verdict: str
    curves: tuple[SoloCurve, ...]
    ranking: tuple[Evidence, ...]  # the plan and its rivals, the fastest first
    seen: tuple[ObservationEntry, ...]
    frontier: Sequence[Point] = ()  # where the noise scale is known


def read_report(name: str) -> RunReport:
    """The report of a run by its id, the beginning of one, or `last`; RequestError if it has no plan.

    An unfinished run has the plan of what it measured, as in an export.
    """
    found = runs.load_run(name)
    header, plan = found.header, found.require_plan()
    record = journal.read(runs.journal_path(header.run))
    return RunReport(
        header=header,
        labels=tuple(_label(device) for device in header.devices),
        plan=plan,
        verdict=plain(found.verdict, 1000),
        curves=tuple(_curve(record, i) for i in range(len(header.devices))),
        ranking=_ranking(plan),
        seen=record.seen,
        frontier=find_frontier(found.findings),
    )


def _label(device: Device) -> str:
    """A device's label with its limit, as in the plan's table."""
    return f"{device.label} @{limit}" if (limit := plain(write_limit(device.limit), 32)) else device.label


def _curve(record: Record, position: int) -> SoloCurve:
    points: dict[int, float] = {}
    failed: list[int] = []
    for entry in record.seen:
        layout = entry.seen.probe.layout
        if not layout.traits.alone or layout.active != (position,) or layout.knobs or layout.length:
            continue
        if isinstance(entry.seen, Timed):
            points[layout.global_batch] = max(entry.seen.samples_per_second, points.get(layout.global_batch, 0.0))
        elif isinstance(entry.seen, OutOfMemory):
            failed.append(layout.global_batch)
    label = _label(record.header.devices[position])
    return SoloCurve(label, tuple(sorted(points.items())), min(failed, default=None))


def _ranking(plan: Plan) -> tuple[Evidence, ...]:
    """The plan and its rivals, without the solos, which are in the curves, and without a second name of one of them."""
    own = [rival for rival in plan.evidence if rival.layout.batches == plan.layout.batches and rival.gain is None]
    rivals = [
        msgspec.structs.replace(rival, name=plain(rival.name, 40))
        for rival in plan.evidence
        if not rival.name.startswith(SOLO_PREFIX) and rival.name != LARGER_BATCH and rival not in own
    ]
    bars = [Evidence(THE_PLAN, plan.layout, plan.throughput), *rivals]
    return tuple(sorted(bars, key=lambda bar: bar.throughput.samples_per_second, reverse=True))


def write_layout(layout: PlanLayout, header: Header) -> str:
    """The devices of a layout with their shares: GPU:0[820] + GPU:1[568]."""
    parts = zip(header.devices, layout.share, strict=True)
    where = " + ".join(f"{each.label}[{write_share(share.batch, share.micro)}]" for each, share in parts if share.batch)
    return f"{layout.processes} x {where}" if layout.processes > 1 else where


def start_of(entry: ObservationEntry) -> float:
    """The start of a probe on the session's clock, in seconds."""
    return max(0.0, entry.at_seconds - entry.seen.elapsed_seconds)


INK, LINES = "#010203", "#040506"  # placeholders for the page's colours
PAPER_LINES = "#d0d4d9"  # on white
SERIES = ("#2f81d6", "#c96f14", "#23947d", "#b05cc4", "#cf4f56", "#7c8c12", "#7a6ff0", "#a0714f")
STAGES = {"solo": SERIES[0], "split": SERIES[2], "pack": SERIES[3], "race": SERIES[1]}
FAILED = SERIES[4]
Axes = Any  # matplotlib is not typed
Draw = Callable[[RunReport, Axes], None]


def figure_module() -> Any:
    """matplotlib.figure; RequestError if it isn't installed."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise RequestError("A report needs matplotlib.", "Install it: pip install 'evener[plot]'.") from None
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    matplotlib.rcParams["svg.hashsalt"] = "evener"  # the same report is the same file
    return matplotlib.figure


def draw_throughput(report: RunReport, axes: Axes) -> None:
    """Samples/s against batch of each device alone; a dotted line where it ran out of memory."""
    for number, curve in enumerate(report.curves):
        colour = SERIES[number % len(SERIES)]
        if curve.points:
            batches, rates = zip(*curve.points, strict=True)
            axes.plot(batches, rates, marker="o", markersize=4, color=colour, label=curve.label)
            best = max(curve.points, key=lambda point: point[1])
            axes.annotate(rate(best[1]), best, (0, 5), textcoords="offset points", ha="center", color=INK, fontsize=8)
        if curve.wall_batch is not None:
            axes.axvline(curve.wall_batch, color=colour, linestyle=":", label=f"{curve.label}: out of memory")
    if report.frontier:
        batches, rates, values = zip(*report.frontier, strict=True)
        axes.plot(batches, rates, linestyle="--", color=INK, label="fastest layout")
        axes.plot(batches, values, linestyle="-.", color=INK, label="its worth in learning")
    axes.set_xlabel("batch (samples)")
    axes.set_ylabel("samples/s")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")


def draw_shares(report: RunReport, axes: Axes) -> None:
    """Draw the shares of the global batch on the devices."""
    shares = report.plan.layout.share
    rows = range(len(shares))
    colours = [SERIES[number % len(SERIES)] for number in rows]
    bars = axes.barh(rows, [share.batch for share in shares], color=colours, height=0.6)
    words = [
        f"{write_share(share.batch, share.micro)} ({percent(share.ratio, 1)})" if share.batch else "left out"
        for share in shares
    ]
    axes.bar_label(bars, words, padding=4, color=INK, fontsize=9)
    axes.set_yticks(rows, report.labels)
    axes.invert_yaxis()
    axes.set_xlabel("samples of each step")
    axes.margins(x=0.3)


def draw_ranking(report: RunReport, axes: Axes) -> None:
    """Every layout measured, with its 95 % interval; the plan in the second colour."""
    figures = [bar.throughput for bar in report.ranking]
    values = [figure.samples_per_second for figure in figures]
    low = [figure.samples_per_second - figure.low for figure in figures]
    high = [figure.high - figure.samples_per_second for figure in figures]
    colours = [SERIES[1] if bar.name == THE_PLAN else SERIES[0] for bar in report.ranking]
    rows = range(len(values))
    bars = axes.barh(rows, values, xerr=(low, high), color=colours, height=0.6, ecolor=INK, capsize=3)
    axes.bar_label(bars, [rate(value) for value in values], padding=4, color=INK, fontsize=8)
    axes.margins(x=0.15)
    axes.set_yticks(rows, [bar.name for bar in report.ranking])
    axes.invert_yaxis()
    axes.set_xlabel("samples/s")


def draw_timeline(report: RunReport, axes: Axes) -> None:
    """Draw when each device was probed, coloured by stage; failures are hatched."""
    seen: set[str] = set()
    for entry in report.seen:
        failed, probe, start = not isinstance(entry.seen, Timed), entry.seen.probe, start_of(entry)
        colour = FAILED if failed else STAGES.get(probe.stage, SERIES[5])
        label = outcome_name(entry.seen) if failed else probe.stage
        for lane in probe.layout.active:
            axes.barh(
                lane,
                max(entry.at_seconds - start, 1e-3),
                left=start,
                height=0.5,
                color=colour,
                edgecolor=INK,
                linewidth=0.4,
                hatch="///" if failed else None,
                label=None if label in seen else label,
            )
            seen.add(label)
    axes.set_yticks(range(len(report.labels)), report.labels)
    axes.set_ylim(len(report.labels) - 0.5, -1.2)  # the first lane below the legend
    axes.set_xlabel("seconds since the start")
    if seen:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8, ncols=len(seen), loc="upper left")


PICTURES: tuple[tuple[str, Draw], ...] = (
    ("Throughput of each device alone", draw_throughput),
    ("Shares of the plan", draw_shares),
    ("Ranking", draw_ranking),
    ("Timeline of probes", draw_timeline),
)


def draw_svg(report: RunReport, draw: Draw) -> str:
    """A picture as an SVG element whose ink is `currentColor` and whose lines are `var(--lines)`."""
    figure = figure_module().Figure(figsize=(7.2, _height(report, draw)), layout="constrained")
    _draw(report, draw, figure.subplots())
    text = _saved(figure, "svg").decode()
    element = text[text.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    return _page_colours(element)


def save_sheet(report: RunReport, form: str) -> bytes:
    """All pictures on one sheet: png on white; svg for a dark or a light viewer."""
    figure = figure_module().Figure(figsize=(13, 8.5), layout="constrained")
    figure.suptitle(f"evener run {report.header.run}: {report.header.workload}", color=INK)
    for (title, draw), axes in zip(PICTURES, figure.subplots(2, 2).flat, strict=True):
        _draw(report, draw, axes, LINES if form == "svg" else PAPER_LINES)
        axes.set_title(title, color=INK, fontsize=10)
    if form == "png":
        figure.set_facecolor("white")
        for each in figure.axes:
            each.set_facecolor("white")
        return _saved(figure, "png")
    style = (
        "<style>svg{color:#1c2128;--lines:#c4c9cf;background:#fff}"
        "@media(prefers-color-scheme:dark){svg{color:#e2e6ea;--lines:#49505a;background:#15181c}}</style>"
    )
    text = _saved(figure, "svg").decode()
    start = text.index(">", text.index("<svg")) + 1
    return (text[:start] + style + _page_colours(text[start:])).encode()


def _page_colours(svg: str) -> str:
    return svg.replace(INK, "currentColor").replace(LINES, "var(--lines)")


def _height(report: RunReport, draw: Draw) -> float:
    rows = {draw_shares: len(report.labels), draw_ranking: len(report.ranking), draw_timeline: len(report.labels) + 1}
    return 3.4 if draw not in rows else min(12.0, 1.2 + 0.38 * rows[draw])


def _draw(report: RunReport, draw: Draw, axes: Axes, lines: str = LINES) -> None:
    axes.set_facecolor("none")
    draw(report, axes)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(axis="x", color=lines, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(lines)


def _saved(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    options = {"metadata": {"Date": None}} if form == "svg" else {"dpi": 120}
    figure.savefig(buffer, format=form, transparent=form == "svg", **options)
    return buffer.getvalue()
