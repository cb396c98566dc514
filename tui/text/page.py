"""A run's report as one self-contained page: inline pictures, no script, no network, dark or
light.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec

from evener.balancer.events import Finished
from evener.balancer.journal import Header, ObservationEntry, Record
from evener.balancer.number_format import duration, percent, rate, write_share
from evener.balancer.result.learning import Point
from evener.balancer.store import runs
from evener.balancer.types import OutOfMemory, Timed
from evener.devices.registry import is_simulated
from evener.devices.terms import write_limit
from evener.devices.types import Device
from evener.errors import RequestError
from evener.plan.file import Evidence, Plan, PlanLayout
from evener.printable import plain
from evener.system.files import write_atomically

from .formatting import energy_cells, unbroken
from .summaries import layout_words, outcome_words

REPORT_FORMATS = (".html",)
THE_PLAN = "the plan"  # in the ranking
SERIES = ("#2f81d6", "#c96f14", "#23947d", "#b05cc4", "#cf4f56", "#7c8c12", "#7a6ff0", "#a0714f")
STAGES = {"solo": SERIES[0], "split": SERIES[2], "pack": SERIES[3], "race": SERIES[1]}
FAILED = SERIES[4]
STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --paper: #ffffff; --lines: #c4c9cf; --soft: #f2f4f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ea; --paper: #15181c; --lines: #49505a; --soft: #20252b; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 60rem; padding: 1.5rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { background: var(--soft); border-left: 4px solid #c96f14; padding: .8rem 1rem; font-size: 1.1rem; }
figure { margin: 0; overflow-x: auto; } svg { max-width: 100%; min-width: 30rem; color: var(--ink); }
svg text { fill: currentColor; font-size: 12px; }
table { border-collapse: collapse; margin-top: 1rem; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--lines); padding: .25rem .8rem .25rem 0; text-align: left; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { display: flex; width: 10rem; height: .9rem; } .bar i { display: block; height: 100%; min-width: 1px; }
@media screen { .long { max-height: 24rem; overflow-y: auto; } }
"""  # noqa: E501


class SoloCurve(msgspec.Struct, frozen=True):
    """A device alone: measured (batch, samples/s), by batch, and the smallest batch that did not
    fit.
    """

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


class Html(str):
    """Text of a page that is markup already."""

    __slots__ = ()


def save_report(name: str, output: Path) -> None:
    """Write the page of a run; RequestError if that can't be done."""
    if output.suffix not in REPORT_FORMATS:
        raise RequestError(f"-o {output} doesn't end in .html.", "Name it report.html.")
    write_atomically(output, html_page(read_report(name)).encode())


def read_report(name: str) -> RunReport:
    """The report of a run by its id, the beginning of one, or `last`; RequestError if it has no
    plan.

    An unfinished run has the plan of what it measured, as in an export.
    """
    found = runs.load_run(name)
    header, plan = found.header, found.require_plan()
    return RunReport(
        header=header,
        labels=tuple(_label(device) for device in header.devices),
        plan=plan,
        verdict=found.end.verdict if found.end else "",
        curves=tuple(_curve(found.record, i) for i in range(len(header.devices))),
        ranking=_rank(plan),
        seen=found.record.seen,
        frontier=_find_frontier(found.end),
    )


def _find_frontier(end: Finished | None) -> Sequence[Point]:
    learning = end.found.learning if end is not None and end.found is not None else None
    return learning.frontier if learning is not None else ()


def _label(device: Device) -> str:
    """A device's label with its limit, as in the plan's table."""
    return (
        f"{device.label} @{limit}"
        if (limit := plain(write_limit(device.limit), 32))
        else device.label
    )


def _curve(record: Record, position: int) -> SoloCurve:
    points: dict[int, float] = {}
    failed: list[int] = []
    for entry in record.seen:
        layout = entry.seen.probe.layout
        if not layout.traits.alone or layout.active != (position,) or layout.knobs or layout.length:
            continue
        if isinstance(entry.seen, Timed):
            points[layout.global_batch] = max(
                entry.seen.samples_per_second, points.get(layout.global_batch, 0.0)
            )
        elif isinstance(entry.seen, OutOfMemory):
            failed.append(layout.global_batch)
    label = _label(record.header.devices[position])
    return SoloCurve(label, tuple(sorted(points.items())), min(failed, default=None))


def _rank(plan: Plan) -> tuple[Evidence, ...]:
    """The plan and its rivals, without the solos, which are in the curves, and without a second
    name of one of them.
    """
    own = [
        rival
        for rival in plan.evidence
        if rival.layout.batches == plan.layout.batches and rival.gain is None
    ]
    rivals = [
        msgspec.structs.replace(rival, name=plain(rival.name, 40))
        for rival in plan.evidence
        if rival.kind not in ("one_device", "larger_batch") and rival not in own
    ]
    bars = [Evidence(THE_PLAN, plan.layout, plan.throughput), *rivals]
    return tuple(sorted(bars, key=lambda bar: bar.throughput.samples_per_second, reverse=True))


def write_layout(layout: PlanLayout, header: Header) -> str:
    """The devices of a layout with their shares: GPU:0[820] + GPU:1[568]."""
    parts = zip(header.devices, layout.share, strict=True)
    where = " + ".join(
        f"{each.label}[{write_share(share.batch, share.micro)}]"
        for each, share in parts
        if share.batch
    )
    return f"{layout.processes} x {where}" if layout.processes > 1 else where


def html_page(report: RunReport) -> str:
    """The whole page."""
    title = f"evener run {report.header.run}"
    simulated = is_simulated(device.kind for device in report.header.devices)
    mark = " (simulated)" if simulated else ""
    first, *remarks = [plain(line, 1000) for line in report.verdict.split("\n")]
    parts = [
        f"<h1>{escape(title)}: {escape(report.header.workload)}{mark}</h1>",
        f'<p class="verdict">{unbroken(escape(first))}</p>',
        *(f"<p>{unbroken(escape(words))}</p>" for words in remarks),
        *(f"<p>Warning: {unbroken(escape(words))}</p>" for words in report.plan.warnings),
        _shares(report),
        (
            f"<h2>Throughput of each device "
            f"alone</h2><figure>{_chart(report)}</figure>{_curves(report)}"
        ),
        _ranking(report),
        _probes(report),
        _facts(report),
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{escape(title)}</title>'
    )
    body = "".join(parts)
    return (
        f"<!doctype html>\n<html "
        f'lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n'
    )


def _bar(*parts: tuple[float, str, float], most: float) -> Html:
    """Pieces of (length, colour, opacity) one after the other, of a bar whose whole width is
    `most`.
    """
    scale = 100 / most if most else 0
    pieces = (
        f'<i style="width:{length * scale:.2f}%;background:{colour};opacity:{opacity:g}"></i>'
        for length, colour, opacity in parts
    )
    return Html(f'<span class="bar" aria-hidden="true">{"".join(pieces)}</span>')


def _shares(report: RunReport) -> str:
    layout = report.plan.layout
    rows = [
        (
            label,
            plain(share.name, 60),
            write_share(share.batch, share.micro) if share.batch else "left out",
            f"{share.ratio:.3f}",
            _bar((share.ratio, SERIES[number % len(SERIES)], 1), most=1),
        )
        for number, (label, share) in enumerate(zip(report.labels, layout.share, strict=True))
    ]
    kind = f"{layout.kind}{f', {layout.processes} trainings' if layout.processes > 1 else ''}"
    kind += f", {layout.placement}" if layout.placement else ""
    return (
        f"<h2>The plan: "
        f"{escape(kind)}</h2>{_table(('device', 'name', 'share', 'ratio', ''), rows, range(2, 4))}"
    )


WIDE, HIGH, LEFT, BELOW = 720, 280, 64, 40  # of the chart, and of its margins, in pixels


def _chart(report: RunReport) -> str:
    """Samples/s against batch, a line for each device; a dotted line where it ran out of memory."""
    points = [point for curve in report.curves for point in curve.points]
    fast = [(batch, speed) for batch, speed, _ in report.frontier]
    worth = [(batch, value) for batch, _, value in report.frontier]
    walls = [curve.wall_batch for curve in report.curves if curve.wall_batch is not None]
    last = 1.05 * max([*(batch for batch, _ in (*points, *fast)), *walls], default=1)
    top = 1.1 * max((speed for _, speed in (*points, *fast, *worth)), default=1.0)

    def at(batch: float, speed: float) -> tuple[str, str]:
        x, y = LEFT + (WIDE - LEFT) * batch / last, (HIGH - BELOW) * (1 - speed / top)
        return f"{x:.1f}", f"{y:.1f}"

    def path(line: Iterable[tuple[float, float]], style: str) -> str:
        return (
            f'<polyline fill="none" '
            f'points="{" ".join(",".join(at(*point)) for point in line)}" {style}/>'
        )

    def text(batch: float, speed: float, words: str, shift: tuple[int, int], anchor: str) -> str:
        x, y = at(batch, speed)
        return (
            f'<text x="{x}" y="{y}" dx="{shift[0]}" dy="{shift[1]}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    parts = [
        path([(0, top), (0, 0), (last, 0)], 'stroke="currentColor"'),
        text(0, top, "samples/s", (6, 14), "start"),
    ]
    parts += [
        text(last * part / 4, 0, f"{last * part / 4:.0f}", (0, 18), "end") for part in range(1, 5)
    ]
    parts += [text(0, top * part / 4, rate(top * part / 4), (-6, 4), "end") for part in range(1, 4)]
    parts.append(text(last, 0, "batch", (0, 34), "end"))
    for number, curve in enumerate(report.curves):
        colour = SERIES[number % len(SERIES)]
        parts.append(path(curve.points, f'stroke="{colour}" stroke-width="2"'))
        for x, y in (at(*point) for point in curve.points):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        if curve.points:
            best = max(curve.points, key=lambda point: point[1])
            parts.append(text(*best, f"{curve.label}: {rate(best[1])}", (0, -8), "end"))
        if curve.wall_batch is not None:
            wall = curve.wall_batch
            parts.append(
                path([(wall, 0), (wall, top)], f'stroke="{colour}" stroke-dasharray="2 4"')
            )
            parts.append(
                text(wall, top, f"{curve.label}: out of memory", (-6, 28 + 16 * number), "end")
            )
    parts += [path(fast, 'stroke="currentColor" stroke-dasharray="8 4"')] if fast else []
    parts += [path(worth, 'stroke="currentColor" stroke-dasharray="8 3 2 3"')] if worth else []
    label = "Throughput of each device alone; a table of its figures is below"
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDE} {HIGH}">{"".join(parts)}</svg>'
    )


def _curves(report: RunReport) -> str:
    rows: list[tuple[str, ...]] = []
    for curve in report.curves:
        rows += [
            (curve.label, str(batch), rate(figure), f"{batch / figure * 1000:.2f}")
            for batch, figure in curve.points
        ]
        rows += (
            [(curve.label, str(curve.wall_batch), "out of memory", "")]
            if curve.wall_batch is not None
            else []
        )
    table = _table(("device", "batch", "samples/s", "step ms"), rows, range(1, 4), "long")
    worth = [(str(batch), rate(speed), rate(value)) for batch, speed, value in report.frontier]
    head = (
        "batch of the fastest layout (dashed)",
        "samples/s",
        "worth, in small batches (dash-dotted)",
    )
    return table + (_table(head, worth, range(3), "long") if worth else "")


def _ranking(report: RunReport) -> str:
    heads = ("tokens/s", "padding") if report.plan.throughput.tokens_per_second else ()
    energy = (
        ("samples/J", "W", "idle W")
        if any(bar.throughput.samples_per_joule for bar in report.ranking)
        else ()
    )
    most = max(bar.throughput.high for bar in report.ranking)
    rows = [
        _ranking_row(bar, report.header, bool(heads), bool(energy), most) for bar in report.ranking
    ]
    head = ("layout", "where", "", *heads, "samples/s", "95 % interval", *energy, "step ms")
    return f"<h2>Ranking</h2>{_table(head, rows, range(3, len(head)))}"


def _ranking_row(
    bar: Evidence, header: Header, tokens: bool, energy: bool, most: float
) -> tuple[str, ...]:
    """One layout; the faint end of its bar is the 95 % interval."""
    figure, speed = bar.throughput, bar.throughput.samples_per_second
    colour = SERIES[1] if bar.name == THE_PLAN else SERIES[0]
    return (
        bar.name,
        write_layout(bar.layout, header),
        _bar((figure.low, colour, 1), (figure.high - figure.low, colour, 0.5), most=most),
        *((rate(figure.tokens_per_second), percent(figure.padding, 1)) if tokens else ()),
        rate(speed),
        f"{rate(figure.low)} – {rate(figure.high)}",
        *(energy_cells(speed, figure.active_watts, figure.idle_watts) if energy else ()),
        f"{bar.layout.global_batch * bar.layout.processes / speed * 1000 if speed else 0.0:.2f}",
    )


def _probes(report: RunReport) -> str:
    """The timeline: when each probe ran, coloured by its stage, and its result."""
    labels = [device.label for device in report.header.devices]
    most = max((entry.at_seconds for entry in report.seen), default=0.0)
    rows = []
    for entry in report.seen:
        probe, result = entry.seen.probe, plain(outcome_words(entry.seen, labels))
        start = max(0.0, entry.at_seconds - entry.seen.elapsed_seconds)  # on the session's clock
        colour = STAGES.get(probe.stage, SERIES[5]) if isinstance(entry.seen, Timed) else FAILED
        when = _bar((start, colour, 0), (entry.at_seconds - start, colour, 1), most=most)
        times = f"{start:.1f}", f"{entry.at_seconds:.1f}"
        rows.append((when, *times, probe.stage, plain(layout_words(probe.layout, labels)), result))
    head = ("", "from s", "to s", "stage", "layout", "result")
    return f"<h2>Timeline of probes</h2>{_table(head, rows, range(1, 3), 'long')}"


def _facts(report: RunReport) -> str:
    plan = report.plan
    rows = [
        ("made", report.header.created),
        ("probes", f"{plan.search.probes}, {plan.search.out_of_memory} out of memory"),
        ("time", duration(plan.search.seconds)),
        ("ended", plan.search.why_stopped),
        ("precision", plan.precision + (", XLA" if plan.xla else "")),
        *(("devices", words) for words in plan.fingerprint.devices),
        ("driver", plan.fingerprint.driver or "-"),
        *sorted(plan.fingerprint.versions.items()),
    ]
    return f"<h2>How it was measured</h2>{_table(('', ''), rows, range(0))}"


def _table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: range, kind: str = ""
) -> str:
    """A table whose columns `numbers` hold numbers; one of `kind` "long" scrolls by itself."""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        scope = " scope=col" if tag == "th" else ""
        texts = (
            f"<{tag}{scope}{' class=number' if column in numbers else ''}>"
            f"{text if isinstance(text, Html) else unbroken(escape(text))}</{tag}>"
            for column, text in enumerate(row)
        )
        return f"<tr>{''.join(texts)}</tr>"

    first = cells("th", head) if any(head) else ""
    body = "".join(cells("td", row) for row in rows)
    return f'<div class="wide {kind}" tabindex="0"><table>{first}{body}</table></div>'
