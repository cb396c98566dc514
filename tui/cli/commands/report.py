"""`evener report`: a run as one page, or as one picture."""

from __future__ import annotations

import sys
from pathlib import Path

from evener.atomic_write import write_atomically
from evener.errors import RequestError

FORMS = (".html", ".png", ".svg")


def run_report(name: str, output: Path) -> int:
    """Write the report of a run; its form is told by the file's ending."""
    if output.suffix not in FORMS:
        raise RequestError(f"-o {output} ends neither in .html, .png nor .svg.", "Name it report.html.")
    from evener.tui.report.contents import read_report
    from evener.tui.report.figures import figure_module, save_sheet
    from evener.tui.report.page import page_of

    figure_module()
    report = read_report(name)
    content = page_of(report).encode() if output.suffix == ".html" else save_sheet(report, output.suffix[1:])
    write_atomically(output, content)
    print(f"evener: report written to {output}", file=sys.stderr)
    return 0
