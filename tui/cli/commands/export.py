"""`evener export` and `evener report`: a past run's plan, and its page."""

from __future__ import annotations

import sys
from pathlib import Path

from evener.balancer.store import runs
from evener.errors import RequestError
from evener.plan import Format, to_json, to_toml
from evener.tui.cli.output_files import check_new, check_plan_file, check_replaceable
from evener.tui.report.page import save_report
from evener.tui.text.formatting import plain
from evener.tui.text.safe_documents import harmless_json, toml_text


def run_export(name: str, form: Format | None, output: Path | None, schema: int, force: bool) -> None:
    """Write a run's plan to a file, or to standard output."""
    if output is not None:
        check_plan_file(output, "-o")
        if form is not None and output.suffix != f".{form}":
            raise RequestError(
                f"--format {form} and -o {output} differ.", "Give one of them; the file name's ending is enough."
            )
        if not force:
            check_replaceable(output, "Add --force to replace it, or name another file.")
    plan = runs.load_run(name).require_plan()
    if output is None:
        text = harmless_json(to_json(plan, schema)) if form == "json" else toml_text(to_toml(plan, schema))
        print(text, end="", flush=True)
        return
    plan.save(output, schema=schema)
    print(f"evener: plan written to {plain(str(output))}", file=sys.stderr)


def run_report(name: str, output: Path, force: bool) -> None:
    """Write the report of a run, in the format that the file's ending names."""
    check_new(output, force)
    save_report(name, output)
    print(f"evener: report written to {plain(str(output))}", file=sys.stderr)
