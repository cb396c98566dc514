"""A report as one self-contained page (inline pictures, no script, no network, dark or light), or as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from evener.balancer.journal import Header
from evener.balancer.number_format import duration, percent, rate, write_share
from evener.errors import RequestError
from evener.plan.file import Evidence, Throughput
from evener.system.files import write_atomically

from ..text.formatting import energy_cells, plain, unbroken
from ..text.summaries import layout_words, outcome_words
from .figures import (
    PICTURES,
    RunReport,
    draw_ranking,
    draw_shares,
    draw_svg,
    draw_throughput,
    draw_timeline,
    figure_module,
    read_report,
    save_sheet,
    start_of,
    write_layout,
)

REPORT_FORMATS = (".html", ".png", ".svg")
STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --paper: #ffffff; --lines: #c4c9cf; --soft: #f2f4f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ea; --paper: #15181c; --lines: #49505a; --soft: #20252b; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 60rem; padding: 1.5rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { background: var(--soft); border-left: 4px solid #c96f14; padding: .8rem 1rem; font-size: 1.1rem; }
figure { margin: 0; overflow-x: auto; } svg { max-width: 100%; min-width: 30rem; height: auto; color: var(--ink); }
table { border-collapse: collapse; margin-top: 1rem; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--lines); padding: .25rem .8rem .25rem 0; text-align: left; }
@media screen { figure + .wide { max-height: 24rem; overflow-y: auto; } }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
"""


def save_report(name: str, output: Path) -> None:
    """Write the report in the format that the file's ending names; RequestError if that can't be done."""
    if output.suffix not in REPORT_FORMATS:
        raise RequestError(f"-o {output} ends neither in .html, .png nor .svg.", "Name it report.html.")
    figure_module()
    report = read_report(name)
    content = html_page(report).encode() if output.suffix == ".html" else save_sheet(report, output.suffix[1:])
    write_atomically(output, content)


def html_page(report: RunReport) -> str:
    """The whole page."""
    title = f"evener run {report.header.run}"
    parts = [
        f"<h1>{escape(title)}: {escape(report.header.workload)}</h1>",
        f'<p class="verdict">{unbroken(escape(report.verdict))}</p>',
        *(f"<p>Warning: {unbroken(escape(words))}</p>" for words in report.plan.warnings),
        _shares(report),
        *(_figure(report, number) for number in range(len(PICTURES))),
        _facts(report),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n'


def _figure(report: RunReport, number: int) -> str:
    """A picture and the table of its figures, which those read who can't see it."""
    title, draw = PICTURES[number]
    label = f"{title}; a table of its figures is {'above' if draw is draw_shares else 'below'}"
    svg = draw_svg(report, draw).replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    tables = {draw_throughput: _curves, draw_ranking: _ranking, draw_timeline: _probes}
    table = tables[draw](report) if draw in tables else ""
    return f"<h2>{escape(title)}</h2><figure>{_own_names(svg, number)}</figure>{table}"


def _own_names(svg: str, number: int) -> str:
    """Give a picture's ids a prefix, since all pictures share the page's ids."""
    for before in ('id="', 'href="#', "url(#"):
        svg = svg.replace(before, f"{before}p{number}-")
    return svg


def _shares(report: RunReport) -> str:
    rows = [
        (
            label,
            plain(share.name, 60),
            write_share(share.batch, share.micro) if share.batch else "left out",
            f"{share.ratio:.3f}",
        )
        for label, share in zip(report.labels, report.plan.layout.share, strict=True)
    ]
    layout = report.plan.layout
    kind = f"{layout.kind}{f', {layout.processes} trainings' if layout.processes > 1 else ''}"
    kind += f", {layout.placement}" if layout.placement else ""
    return f"<h2>The plan: {escape(kind)}</h2>{_table(('device', 'name', 'share', 'ratio'), rows, numbers_from=2)}"


def _curves(report: RunReport) -> str:
    rows: list[tuple[str, ...]] = []
    for curve in report.curves:
        rows += [
            (curve.label, str(batch), rate(figure), f"{batch / figure * 1000:.2f}") for batch, figure in curve.points
        ]
        rows += [(curve.label, str(curve.wall_batch), "out of memory", "")] if curve.wall_batch is not None else []
    table = _table(("device", "batch", "samples/s", "step ms"), rows, numbers_from=1)
    worth = [(str(batch), rate(speed), rate(value)) for batch, speed, value in report.frontier]
    head = ("batch of the fastest layout", "samples/s", "worth, in small batches")
    return table + (_table(head, worth, numbers_from=0) if worth else "")


def _probes(report: RunReport) -> str:
    labels = [device.label for device in report.header.devices]
    rows = []
    for entry in report.seen:
        probe, result = entry.seen.probe, plain(outcome_words(entry.seen, labels))
        times = f"{start_of(entry):.1f}", f"{entry.at_seconds:.1f}"
        rows.append((*times, probe.stage, plain(layout_words(probe.layout, labels)), result))
    return _table(("from s", "to s", "stage", "layout", "result"), rows, numbers_from=9)


def _ranking(report: RunReport) -> str:
    heads = ("tokens/s", "padding") if report.plan.throughput.tokens_per_second else ()
    energy = ("samples/J", "W", "idle W") if any(bar.throughput.samples_per_joule for bar in report.ranking) else ()
    rows = [_ranking_row(bar, report.header, bool(heads), bool(energy)) for bar in report.ranking]
    return _table(("layout", "where", *heads, "samples/s", "95 % interval", *energy, "step ms"), rows, numbers_from=2)


def _ranking_row(bar: Evidence, header: Header, tokens: bool, energy: bool) -> tuple[str, ...]:
    figure = bar.throughput
    return (
        bar.name,
        write_layout(bar.layout, header),
        *((rate(figure.tokens_per_second), percent(figure.padding, 1)) if tokens else ()),
        rate(figure.samples_per_second),
        f"{rate(figure.low)} – {rate(figure.high)}",
        *(_energy(figure) if energy else ()),
        _step_milliseconds(bar),
    )


def _energy(figure: Throughput) -> tuple[str, str, str]:
    return energy_cells(figure.samples_per_second, figure.active_watts, figure.idle_watts)


def _step_milliseconds(bar: Evidence) -> str:
    """The time of one optimizer step."""
    rate = bar.throughput.samples_per_second
    return f"{bar.layout.global_batch * bar.layout.processes / rate * 1000 if rate else 0.0:.2f}"


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
    return f"<h2>How it was measured</h2>{_table(('', ''), rows, numbers_from=9)}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers_from: int) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        scope = " scope=col" if tag == "th" else ""
        texts = (
            f"<{tag}{scope}{' class=number' if column >= numbers_from else ''}>{unbroken(escape(text))}</{tag}>"
            for column, text in enumerate(row)
        )
        return f"<tr>{''.join(texts)}</tr>"

    first = cells("th", head) if any(head) else ""
    return f'<div class="wide" tabindex="0"><table>{first}{"".join(cells("td", row) for row in rows)}</table></div>'
