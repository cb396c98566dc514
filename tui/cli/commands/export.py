"""`evener export` and `evener report`: a past run's plan, and its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.balancer.store import runs
from evener.errors import RequestError
from evener.plan.file import Format, to_json, to_toml

from ...report.page import save_report
from ...text.formatting import plain
from ...text.launch_line import launch_hint
from ...text.safe_documents import harmless_json, toml_text
from ..options import RunName
from ..output_files import check_new, check_plan_file, check_replaceable

ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it is there.")]
app = typer.Typer()


@app.command()
def export(
    run_id: RunName,
    form: Annotated[Format | None, typer.Option("--format", help="Default: by the file's ending, or toml.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A .toml or .json file. Default: standard output.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Write a past run's plan as TOML or JSON."""
    if output is not None:
        check_plan_file(output, "-o")
        if form is not None and output.suffix != f".{form}":
            raise RequestError(
                f"--format {form} and -o {output} differ.", "Give one of them; the file name's ending is enough."
            )
        if not force:
            check_replaceable(output, "Add --force to replace it, or name another file.")
    plan = runs.load_run(run_id).require_plan()
    if output is None:
        text = harmless_json(to_json(plan)) if form == "json" else toml_text(to_toml(plan))
        print(text, end="", flush=True)
        return
    plan.save(output)
    print(f"evener: plan written to {plain(str(output))}", file=sys.stderr)
    if hint := launch_hint(plan, str(output)):
        print(f"evener: {plain(hint)}", file=sys.stderr)


@app.command()
def report(
    run_id: RunName,
    output: Annotated[Path, typer.Option("-o", "--output", help="An .html, .png or .svg file.")],
    force: ForceOption = False,
) -> None:
    """Write a report of a run: a page with pictures (.html), or one picture (.png, .svg)."""
    check_new(output, force)
    save_report(run_id, output)
    print(f"evener: report written to {plain(str(output))}", file=sys.stderr)
