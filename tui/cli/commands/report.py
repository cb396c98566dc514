"""`evener report`: a run as one page, or as one picture."""

from __future__ import annotations

import sys
from pathlib import Path

from evener.errors import RequestError
from evener.files import write_atomically

FORMS = (".html", ".png", ".svg")


def run_report(name: str, output: Path) -> int:
    """Write the report of a run; its form is told by the file's ending."""
    if output.suffix not in FORMS:
        raise RequestError(f"-o {output} ends neither in .html, .png nor .svg.", "Name it report.html.")
    from tui.report import read_report
    from tui.report_figures import figure_module, save_sheet
    from tui.report_page import page_of

    figure_module()
    report = read_report(name)
    content = page_of(report).encode() if output.suffix == ".html" else save_sheet(report, output.suffix[1:])
    write_atomically(output, content)
    print(f"evener: report written to {output}", file=sys.stderr)
    return 0
