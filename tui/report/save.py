"""Writes the report of a run to a file."""

from __future__ import annotations

from pathlib import Path

from evener.errors import RequestError
from evener.whole_files import write_atomically

REPORT_FORMATS = (".html", ".png", ".svg")


def save_report(name: str, output: Path) -> None:
    """Write the report in the format that the file's ending names; RequestError if that can't be done."""
    if output.suffix not in REPORT_FORMATS:
        raise RequestError(f"-o {output} ends neither in .html, .png nor .svg.", "Name it report.html.")
    from evener.tui.report.contents import read_report
    from evener.tui.report.figures import figure_module, save_sheet
    from evener.tui.report.page import html_page

    figure_module()
    report = read_report(name)
    content = html_page(report).encode() if output.suffix == ".html" else save_sheet(report, output.suffix[1:])
    write_atomically(output, content)
