"""The commands `balance` and `compare`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import typer

from evener.balancer.events import Finished, ProbeProgress
from evener.balancer.jobs import make_comparison_job, make_job, make_job_with_knobs
from evener.balancer.request import Job, Request
from evener.balancer.run import OpenRun, begin, open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.balancer.trials import DryRunResult, dry_run
from evener.errors import RequestError
from evener.printable import print_notice

from ..text.dry_run import dry_run_lines
from ..text.formatting import json_text
from ..text.parsing import REQUEST_HELP, parse_budget, parse_duration, parse_words
from ..text.ranking_tables import packing_tables, ranking_json, ranking_table, scaling_table
from ..text.summaries import about_lines, frontier_table, summary_lines, verdict_lines
from .options import LENGTH, SEARCH, TRAINING, WHAT, ExportOption, JsonOption, takes_request
from .output import check_export, terminal_columns
from .session_runner import run_session, stopped_by_signals

app = typer.Typer()


@app.command()
@takes_request(*TRAINING, *(name for name in SEARCH if name != "budget"))
def balance(
    request: Request,
    budget: Annotated[
        str | None,
        LENGTH(
            "--budget",
            help=f"{REQUEST_HELP['budget']} Default: 120s. With --resume, +5m adds to it.",
        ),
    ] = None,
    resume: Annotated[
        str | None, LENGTH("--resume", help="Continue a run: its id, or `last`.")
    ] = None,
    knobs: Annotated[
        str | None,
        WHAT(
            "--try",
            help="workers: also measure the winner with 0, 2, 4 and 8 DataLoader workers.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        LENGTH(
            "--dry-run",
            help="Only build and take a few steps on one device; print what fits.",
        ),
    ] = False,
    export: ExportOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure real training steps, find the fastest split of the batch over the devices, and write
    it as a plan.

    Your own model: evener help workload.
    """
    request, extend_seconds = _read_budget(request, budget, resume)
    if dry_run:
        if resume is not None or export is not None:
            raise RequestError(
                "--dry-run makes no plan and can't continue a run.",
                "Leave --resume and --export out.",
            )
        return _run_dry(make_job(request), as_json)

    def show(
        _session: Session, finished: Finished, labels: Sequence[str], steps: Sequence[str]
    ) -> None:
        width = terminal_columns()
        lines = summary_lines(finished.plan, labels, finished.verdict, width, finished.found, steps)
        print("\n".join(lines), flush=True)

    check_export(export)
    if knobs is not None and resume is not None:
        raise RequestError(
            "A continued run keeps the --try that it started with.",
            "Leave --try out, or start a new one.",
        )
    if knobs is not None:
        run = begin(make_job_with_knobs(request, parse_words(knobs) or ()))
    else:
        run = open_run(request, resume=resume, extend_seconds=extend_seconds)
    return run_session(Session(run), show, export, as_json)


def _read_budget(
    request: Request, budget: str | None, resume: str | None
) -> tuple[Request, float | None]:
    """Parse `--budget`. Return the request with that budget, and seconds to add to a resumed run.

    The seconds are None unless the budget extends a resumed run. Raises RequestError for `+5m`
    without a run to resume.
    """
    if budget is None:
        return request, None
    if budget.startswith("+") and resume is None:
        fault = f"--budget {budget} is added to a run's time, and no run is named."
        raise RequestError(fault, "Add --resume, or drop the +.")
    if budget.startswith("+"):
        return request, parse_duration(budget[1:], "--budget")
    seconds = parse_budget(budget)
    if resume is not None and seconds is not None and seconds == Request().budget_seconds:
        run = runs.load_run(resume)  # a resumed session treats the default as no budget
        if seconds > (run.header.request.budget_seconds or math.inf):
            return request, seconds - run.record.clock_seconds
    return msgspec.structs.replace(request, budget_seconds=seconds), None


def _run_dry(job: Job, as_json: bool) -> int:
    """Do a dry run, print what fits in memory, and return the exit code."""
    stop = threading.Event()
    with stopped_by_signals(stop.set, "stopping") as caught:
        result = dry_run(job, _phase_printer(), stop)
    if result is None:
        return caught[0] if caught else 1
    text = json_text(_dry_run_json(result)) if as_json else "\n".join(dry_run_lines(result))
    print(text, flush=True)
    return 0


def _phase_printer() -> Callable[[ProbeProgress], None]:
    """Return a progress callback that prints each new phase, such as "building" or "measuring"."""
    phases = set[str]()

    def report(progress: ProbeProgress) -> None:
        if progress.phase not in phases:
            phases.add(progress.phase)
            print_notice(progress.phase)

    return report


def _dry_run_json(result: DryRunResult) -> dict[str, object]:
    text = f"{result.write_tried()} {result.write_rest()}"
    return {**msgspec.to_builtins(result), "text": text}


@app.command()
@takes_request(*TRAINING, *SEARCH)
def compare(
    request: Request,
    layouts: Annotated[
        str | None,
        WHAT(
            "--layouts",
            help="Some of solo,even,split,shard,pack,place: one device; equal shares; the best "
            "shares; these with part"
            " of the model's state on each device; several trainings on one device; parts of "
            "the model on several."
            " Default: all that are possible, shard only where nothing else fits.",
        ),
    ] = None,
    knobs: Annotated[
        str | None,
        WHAT(
            "--try",
            help="xla,mixed,workers: also measure the winner with XLA, with mixed precision, with "
            "0, 2, 4 and 8 DataLoader workers.",
        ),
    ] = None,
    resume: Annotated[
        str | None, LENGTH("--resume", help="Continue a comparison: its run's id, or `last`.")
    ] = None,
    export: ExportOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare single-device, even, split, packed and placed layouts; the fastest becomes the
    plan.
    """

    def show(
        session: Session, finished: Finished, labels: Sequence[str], steps: Sequence[str]
    ) -> None:
        width = terminal_columns()
        found = session.report()
        tables = [ranking_table(found, labels), scaling_table(found), *packing_tables(found)]
        tables.append(frontier_table(finished.found))
        lines = about_lines(finished.plan, finished.found, width)
        lines += [line for table in tables for line in table.lines(width)]
        words = verdict_lines(finished.plan, finished.verdict, width, finished.found, steps)
        print("\n".join([*lines, *words]), flush=True)

    def more(session: Session, _finished: Finished, labels: Sequence[str]) -> dict[str, object]:
        return ranking_json(session.report(), labels)

    check_export(export)
    if resume is not None:
        run = _resume_comparison(request, resume, layouts or knobs)
    else:
        chosen = parse_words(layouts)
        run = begin(make_comparison_job(request, chosen, parse_words(knobs) or ()))
    return run_session(Session(run), show, export, as_json, more)


def _resume_comparison(request: Request, resume: str, fixed_option: str | None) -> OpenRun:
    """Open a stored comparison of layouts, to continue it.

    `fixed_option` is the text of `--layouts` or `--try`, which a resumed comparison can't change.
    Raises RequestError if it is given, or if the run is a search instead of a comparison.
    """
    if fixed_option:
        raise RequestError(
            "A continued comparison keeps the layouts that it started with.",
            "Leave --layouts and --try out, or start a new one.",
        )
    if runs.load_run(resume).header.request.compare is None:
        raise RequestError(
            f"The run {resume} is a search, not a comparison.",
            f"Continue it: evener balance --resume {resume}",
        )
    return open_run(request, resume=resume)
