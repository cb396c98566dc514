"""The HTML report of a search, which is a single page without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from evener.balancer.journal import Header
from evener.balancer.number_format import duration, group_digits, percent, rate
from evener.balancer.session_state import RatedLayout
from evener.balancer.statistics import is_known
from evener.balancer.types import Timed
from evener.devices.registry import is_simulated
from evener.errors import RequestError
from evener.plan.file import Evidence
from evener.printable import plain
from evener.system.files import write_atomically

from .formatting import energy_cells, unbroken
from .page_chart import SERIES, draw_curves
from .run_report import THE_PLAN, MeasuredCurve, ReportData, format_layout, read_report
from .stages import STAGE_WORDS
from .summaries import format_device_share, gain_text, layout_text, outcome_text

REPORT_FORMATS = (".html",)
STAGES = {"alone": SERIES[0], "together": SERIES[2], "packed": SERIES[3], "in turn": SERIES[1]}
# colours of the timeline
OTHER = SERIES[5]
FAILED = SERIES[4]
PLAN_NAME = "this plan"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --paper: #ffffff; --lines: #c4c9cf; --soft: #f2f4f6; --faint: #5b6570; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ea; --paper: #15181c; --lines: #49505a; --soft: #20252b;
  --faint: #a2acb8; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 60rem; padding: 1.5rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.faint { color: var(--faint); margin-top: .2rem; }
section { background: var(--soft); border-left: 4px solid #23947d; padding: .8rem 1rem; }
.verdict { font-size: 1.1rem; font-weight: 600; margin: 0; }
pre { margin: .6rem 0 0; white-space: pre-wrap; font: 13px/1.6 ui-monospace, monospace; }
figure { margin: 0; } svg { width: 100%; max-width: 42rem; color: var(--ink); }
svg text { fill: currentColor; font-size: 12px; } .grid { stroke: var(--lines); fill: none; }
ul.legend { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
table { border-collapse: collapse; margin-top: 1rem; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--lines); padding: .25rem .8rem .25rem 0; text-align: left; overflow-wrap: normal; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { display: flex; width: 10rem; height: .9rem; } .bar i { display: block; height: 100%; min-width: 1px; }
.gains .bar { width: min(26rem, 30vw); }
summary { cursor: pointer; margin-top: .6rem; }
@media (max-width: 40rem) { body { padding: 1rem; } .bar { width: 4.5rem; } .rare { display: none; }
  th, td { padding-right: .5rem; } .gains .bar { width: 22vw; } }
"""  # noqa: E501


class Html(str):
    """A table cell that is HTML already and must not be escaped."""

    __slots__ = ()


def save_report(name: str, output: Path) -> None:
    """Write the report of the run called `name` to an .html file.

    Raises RequestError if the file name doesn't end in .html.
    """
    if output.suffix not in REPORT_FORMATS:
        raise RequestError(f"-o {output} doesn't end in .html.", "Name it report.html.")
    write_atomically(output, html_page(read_report(name)).encode())


def html_page(report: ReportData) -> str:
    """Return the HTML page of a report."""
    simulated = is_simulated(device.kind for device in report.header.devices)
    mark = " (simulated)" if simulated else ""
    hosts = sorted({device.host for device in report.header.devices} - {""})
    where = f", on {plain(', '.join(hosts), 200)}" if hosts else ""
    parts = [
        f"<h1>{escape(report.header.workload)}{mark}</h1>",
        f'<p class="faint">evener run {escape(report.header.run)}, {escape(report.header.created)}'
        f"{escape(where)}</p>",
        f"<section>{''.join(_verdict_html(report))}</section>",
        *(f"<p>Warning: {unbroken(escape(words))}</p>" for words in report.plan.warnings),
        *(f"<p>{unbroken(escape(words))}</p>" for words in _remarks(report)),
        _shares(report),
        f"<h2>Throughput of each device alone</h2>{_legend(report)}"
        f"<figure>{draw_curves(report.curves, report.frontier)}</figure>{_curves(report)}",
        _ranking(report),
        _draw_timeline(report),
        _facts(report),
    ]
    title = escape(f"evener run {report.header.run}: {report.header.workload}")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title>'
    )
    body = "".join(parts)
    return (
        f"<!doctype html>\n<html "
        f'lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n'
    )


def _verdict_html(report: ReportData) -> Iterator[str]:
    """Yield the recommendation, the comparison with other layouts, and the next steps."""
    written = report.written
    first = plain(report.verdict.split("\n")[0], 1000)
    if written is not None:
        first = written.recommendation or written.description
    if first:
        yield f'<p class="verdict">{unbroken(escape(plain(first, 1000)))}</p>'
    if written is not None:
        yield f"<p>{unbroken(escape(plain(f'{written.rate}: {written.description}', 1000)))}</p>"
    top = max(rival.rate.value for rival in report.rivals)
    rows = [_rival_row(report, rival, top) for rival in report.rivals]
    head = ("", "", "samples/s", "plan faster by")
    yield _draw_table(head, rows, range(2, 4), "gains")
    if report.steps:
        yield f"<pre>{escape(chr(10).join(report.steps))}</pre>"


def _rival_row(
    report: ReportData, rival: RatedLayout, max_speed: float
) -> tuple[str, Html, str, str]:
    """Return a layout's name, a bar, its samples/s, and the plan's gain over the layout.

    The bar is full at `max_speed` samples/s.
    """
    plan = report.rivals[0]
    own = rival is plan
    value = rival.rate.value
    words = rate(value) if is_known(rival.rate) else f"~{rate(value)}"
    gain = "" if own else gain_text(plan, rival)
    if rival.paired is not None and gain.startswith(("+", "-")):
        gain = f"{gain} in turns"
    bar = _bar((value, SERIES[2] if own else SERIES[0], 1), full_length=max_speed)
    return PLAN_NAME if own else plain(rival.name, 40), bar, words, gain


def _remarks(report: ReportData) -> Sequence[str]:
    """Return the verdict's remarks, without the recommendation that comes first."""
    if report.written is not None:
        return [plain(words, 1000) for words in report.written.remarks]
    return [plain(line, 1000) for line in report.verdict.split("\n")[1:]]


def _bar(*parts: tuple[float, str, float], full_length: float) -> Html:
    """Return a horizontal bar made of (length, colour, opacity) parts.

    The parts fill the bar if their lengths add up to `full_length`.
    """
    scale = 100 / full_length if full_length else 0
    pieces = (
        f'<i style="width:{length * scale:.2f}%;background:{colour};opacity:{opacity:g}"></i>'
        for length, colour, opacity in parts
    )
    return Html(f'<span class="bar" aria-hidden="true">{"".join(pieces)}</span>')


def _shares(report: ReportData) -> str:
    layout = report.plan.layout
    rows = [
        (
            label,
            plain(share.name, 60),
            format_device_share(share),
            f"{share.ratio:.3f}",
            _bar((share.ratio, SERIES[number % len(SERIES)], 1), full_length=1),
        )
        for number, (label, share) in enumerate(zip(report.labels, layout.share, strict=True))
    ]
    kind = f"{layout.kind}{f', {layout.processes} trainings' if layout.processes > 1 else ''}"
    kind += f", {layout.placement}" if layout.placement else ""
    table = _draw_table(("device", "name", "share", "ratio", ""), rows, range(2, 4))
    return f"<h2>The plan: {escape(kind)}</h2>{table}"


def _legend(report: ReportData) -> str:
    """Return the legend of the chart: each device's colour and best speed."""
    entries = []
    for number, curve in enumerate(report.curves):
        colour = SERIES[number % len(SERIES)]
        words = f"{curve.label}{_describe_curve(curve)}"
        entries.append(f'<li><i style="background:{colour}"></i>{unbroken(escape(words))}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _describe_curve(curve: MeasuredCurve) -> str:
    """Return the highest samples/s of a curve, and the batch size at which it was reached."""
    if not curve.points:
        return ": not measured alone"
    batch, speed = max(curve.points, key=lambda point: point[1])
    return f": {rate(speed)} samples/s at {group_digits(batch)}"


def _curves(report: ReportData) -> str:
    rows: list[tuple[str, ...]] = []
    for curve in report.curves:
        rows += [
            (curve.label, str(batch), rate(speed), f"{batch / speed * 1000:.2f}")
            for batch, speed in curve.points
        ]
        rows += (
            [(curve.label, str(curve.failed_batch), "out of memory", "")]
            if curve.failed_batch is not None
            else []
        )
    table = _draw_table(("device", "batch", "samples/s", "step ms"), rows, range(1, 4))
    worth = [(str(batch), rate(speed), rate(value)) for batch, speed, value in report.frontier]
    head = (
        "batch of the fastest layout (dashed)",
        "samples/s",
        "worth, in small batches (dash-dotted)",
    )
    tables = table + (_draw_table(head, worth, range(3)) if worth else "")
    return f"<details><summary>The values of the curves</summary>{tables}</details>"


def _ranking(report: ReportData) -> str:
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
    head = ("layout", "where", "", "samples/s", *heads, "95 % interval", *energy, "step ms")
    rare = range(4, len(head))
    return f"<h2>Ranking</h2>{_draw_table(head, rows, range(3, len(head)), hidden_on_phones=rare)}"


def _ranking_row(
    evidence: Evidence, header: Header, with_tokens: bool, with_energy: bool, max_speed: float
) -> tuple[str, ...]:
    """Return the table cells of a layout in the ranking.

    `with_tokens` and `with_energy` add cells for tokens/s and energy. One cell has a bar, which is
    full at `max_speed` samples/s.
    """
    # The faint end of the bar is the 95 % interval.
    throughput = evidence.throughput
    speed = evidence.throughput.samples_per_second
    colour = SERIES[2] if evidence.name == THE_PLAN else SERIES[0]
    samples = evidence.layout.global_batch * evidence.layout.processes
    step_ms = samples / speed * 1000 if speed else 0.0
    return (
        evidence.name,
        format_layout(evidence.layout, header),
        _bar(
            (throughput.low, colour, 1),
            (throughput.high - throughput.low, colour, 0.5),
            full_length=max_speed,
        ),
        rate(speed),
        *(
            (rate(throughput.tokens_per_second), percent(throughput.padding, 1))
            if with_tokens
            else ()
        ),
        f"{rate(throughput.low)} – {rate(throughput.high)}",
        *(
            energy_cells(speed, throughput.active_watts, throughput.idle_watts)
            if with_energy
            else ()
        ),
        f"{step_ms:.2f}",
    )


def _draw_timeline(report: ReportData) -> str:
    """Return a table of all probes, with bars that show when each one ran."""
    labels = [device.label for device in report.header.devices]
    most = max((entry.at_seconds for entry in report.seen), default=0.0)
    rows = []
    for entry in report.seen:
        probe = entry.seen.probe
        result = plain(outcome_text(entry.seen, labels))
        stage = STAGE_WORDS[probe.stage]
        start = max(0.0, entry.at_seconds - entry.seen.elapsed_seconds)  # on the session's clock
        colour = STAGES.get(stage, OTHER) if isinstance(entry.seen, Timed) else FAILED
        when = _bar((start, colour, 0), (entry.at_seconds - start, colour, 1), full_length=most)
        times = f"{start:.1f}", f"{entry.at_seconds:.1f}"
        rows.append((when, *times, stage, plain(layout_text(probe.layout, labels)), result))
    head = ("", "from s", "to s", "measured", "layout", "result")
    table = _draw_table(head, rows, range(1, 3), hidden_on_phones=range(1, 4))
    return f"<h2>Timeline of probes</h2>{_stage_legend(report)}{table}"


def _stage_legend(report: ReportData) -> str:
    """Return the legend that explains the timeline's colours."""
    stages = dict.fromkeys(STAGE_WORDS[entry.seen.probe.stage] for entry in report.seen)
    colours = {stage: STAGES.get(stage, OTHER) for stage in stages}
    if not all(isinstance(entry.seen, Timed) for entry in report.seen):
        colours["out of memory, or failed"] = FAILED
    entries = "".join(
        f'<li><i style="background:{colour}"></i>{escape(stage)}</li>'
        for stage, colour in colours.items()
    )
    return f'<ul class="legend">{entries}</ul>'


def _facts(report: ReportData) -> str:
    plan = report.plan
    rows = [
        ("probes", f"{plan.search.probes}, {plan.search.out_of_memory} out of memory"),
        ("time", duration(plan.search.seconds)),
        ("ended", plan.search.why_stopped),
        ("precision", plan.precision + (", XLA" if plan.xla else "")),
        ("devices", ", ".join(plan.fingerprint.devices)),
        ("driver", plan.fingerprint.driver or "-"),
        *sorted(plan.fingerprint.versions.items()),
    ]
    return f"<h2>How it was measured</h2>{_draw_table(('', ''), rows, range(0))}"


def _draw_table(
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    numbers: range,
    css_class: str = "",
    hidden_on_phones: range = range(0),
) -> str:
    """Return an HTML table.

    - `numbers`: the columns that are aligned to the right.
    - `css_class`: a CSS class of the table.
    - `hidden_on_phones`: the columns that are hidden on phones.
    """

    def classes(column: int) -> str:
        names = (("number", column in numbers), ("rare", column in hidden_on_phones))
        chosen = " ".join(name for name, applies in names if applies)
        return f' class="{chosen}"' if chosen else ""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        scope = " scope=col" if tag == "th" else ""
        texts = (
            f"<{tag}{scope}{classes(column)}>"
            f"{text if isinstance(text, Html) else unbroken(escape(text))}</{tag}>"
            for column, text in enumerate(row)
        )
        return f"<tr>{''.join(texts)}</tr>"

    first = cells("th", head) if any(head) else ""
    body = "".join(cells("td", row) for row in rows)
    return f'<div class="wide {css_class}" tabindex="0"><table>{first}{body}</table></div>'
