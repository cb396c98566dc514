"""`evener runs`, `evener export`, `evener report`: past runs and their plans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from evener.atomic_write import write_atomically
from evener.balancer.store import runs
from evener.balancer.store.runs import Run, RunSummary
from evener.errors import RequestError
from evener.plan import Format, Plan, to_json, to_toml
from evener.tui.cli.output_files import check_new, check_plan_file
from evener.tui.cli.streams import terminal_columns
from evener.tui.text.formatting import plain, rate
from evener.tui.text.plan_summary import summary_lines
from evener.tui.text.progress import observation_words
from evener.tui.text.safe_documents import harmless_json, json_text, toml_text
from evener.tui.text.tables import align

REPORT_FORMATS = (".html", ".png", ".svg")


def run_list(as_json: bool) -> int:
    """List every run, the newest first."""
    listed = runs.list_runs()
    if as_json:
        print(json_text({"runs": listed}))
        return 0
    if not listed:
        print("evener: no runs yet; make one with evener balance", file=sys.stderr)
        return 0
    rows = [("run", "state", "workload", "devices", "ratios", "probes", "samples/s")]
    rows += [_row(summary) for summary in listed]
    print("\n".join(align(rows, numbers_from=5)))
    for summary in listed:
        if summary.trouble:
            print(f"evener: {summary.run}: {plain(summary.trouble)}", file=sys.stderr)
    return 0


def _row(summary: RunSummary) -> tuple[str, str, str, str, str, str, str]:
    devices = ", ".join(summary.devices[:4]) + (" …" if len(summary.devices) > 4 else "")
    ratios = ":".join(f"{ratio:.2f}" for ratio in summary.ratios[:4]) + (" …" if len(summary.ratios) > 4 else "")
    figure = rate(summary.samples_per_second) if summary.samples_per_second is not None else "-"
    workload = plain(summary.workload, 40)
    return (summary.run, summary.state, workload, devices, ratios or "-", str(summary.probes), figure)


def run_show(name: str, as_json: bool) -> int:
    """Print what a run measured, and its plan if it has one."""
    run = runs.load_run(name)
    if as_json:
        print(json_text(_as_json(run)))
        return 0
    labels = tuple(device.label for device in run.header.devices)
    print(plain(f"run {run.header.run}: {run.header.workload} on {', '.join(labels)}, {run.header.created}"))
    for seen in run.observations:
        print(f"  {observation_words(seen, labels)}")
    if run.plan is None:
        print("this run has no plan")
        return 0
    print("\n".join(["", *summary_lines(run.plan, labels, run.verdict, terminal_columns())]))
    return 0


def _as_json(run: Run) -> dict[str, Any]:
    header = msgspec.to_builtins(run.header)
    return {
        "run": run.header.run,
        **{key: header[key] for key in ("created", "workload", "framework", "request", "devices")},
        "observations": run.observations,
        "plan": run.plan,
        "verdict": run.verdict,
        "interrupted": run.interrupted,
    }


def run_delete(names: list[str], yes: bool) -> int:
    """Delete runs; asks first on a terminal, and needs --yes elsewhere."""
    found = list(dict.fromkeys(runs.find(name) for name in names))
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError("Deleting runs needs a confirmation.", "Add --yes, or answer on a terminal.")
        answer = input(f"Delete {', '.join(found)}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("evener: nothing deleted", file=sys.stderr)
            return 0
    for name in found:
        runs.delete_run(name)
        print(f"evener: deleted {name}", file=sys.stderr)
    return 0


def run_export(name: str, form: Format | None, output: Path | None, force: bool) -> int:
    """Write a run's plan to a file, or to standard output."""
    if output is not None:
        check_plan_file(output, "-o")
        if form is not None and output.suffix != f".{form}":
            raise RequestError(
                f"--format {form} and -o {output} differ.", "Give one of them; the file name's ending is enough."
            )
        check_new(output, force)
    run = runs.load_run(name)
    if run.plan is None:
        remedy = f"Resume it with evener balance --resume {run.header.run}."
        raise RequestError(f"The run {run.header.run} has no plan.", remedy)
    if output is None:
        _print_plan(run.plan, form or "toml")
        return 0
    run.plan.save(output)
    print(f"evener: plan written to {plain(str(output))}", file=sys.stderr)
    return 0


def _print_plan(plan: Plan, form: str) -> None:
    text = toml_text(to_toml(plan)) if form == "toml" else harmless_json(to_json(plan))
    print(text, end="", flush=True)


def run_report(name: str, output: Path, force: bool) -> int:
    """Write the report of a run, in the format that the file's ending names."""
    if output.suffix not in REPORT_FORMATS:
        raise RequestError(f"-o {output} ends neither in .html, .png nor .svg.", "Name it report.html.")
    check_new(output, force)
    from evener.tui.report.contents import read_report
    from evener.tui.report.figures import figure_module, save_sheet
    from evener.tui.report.page import html_page

    figure_module()
    report = read_report(name)
    content = html_page(report).encode() if output.suffix == ".html" else save_sheet(report, output.suffix[1:])
    write_atomically(output, content)
    print(f"evener: report written to {output}", file=sys.stderr)
    return 0
