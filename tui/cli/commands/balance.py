"""`evener balance`: search for the fastest split, or resume such a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from evener.balancer.events import Finished
from evener.balancer.session import Request, Session
from evener.balancer.store import runs
from evener.errors import RequestError
from evener.tui.cli.commands.dry_run import run_dry
from evener.tui.cli.session_runner import result_json, run_session
from evener.tui.cli.streams import terminal_columns
from evener.tui.text.parsing import parse_budget, parse_duration
from evener.tui.text.plan_summary import summary_lines
from evener.tui.text.safe_documents import json_text

_CHANGEABLE = ("budget_seconds", "pace", "share", "compare")  # without effect on earlier measurements
_OPTIONS = {"settings": "--set"}


def run_balance(
    request: Request, budget: str | None, *, resume: str | None, dry_run: bool, export: Path | None, as_json: bool
) -> int:
    """Run a session and print its plan; returns the exit code."""
    request, extend_seconds = _read_budget(request, budget, resume)
    if dry_run:
        if resume is not None or export is not None:
            raise RequestError("--dry-run makes no plan and goes on with no run.", "Leave --resume and --export out.")
        return run_dry(request, as_json)

    def make() -> Session:
        if resume is not None:
            _check_resumed(request, resume)
        return Session(request, resume=resume, extend_seconds=extend_seconds)

    def show(_session: Session, finished: Finished, labels: Sequence[str]) -> None:
        lines = summary_lines(finished.plan, labels, finished.verdict, terminal_columns())
        print(json_text(result_json(finished)) if as_json else "\n".join(lines), flush=True)

    return run_session(make, show, export, as_json)


def _read_budget(request: Request, budget: str | None, resume: str | None) -> tuple[Request, float | None]:
    """The request with the budget that was typed, and the seconds from here on that a resumed run gets."""
    if budget is None:
        return request, None
    if budget.startswith("+"):
        if resume is None:
            raise RequestError(
                f"--budget {budget} is added to a run's time, and no run is named.", "Add --resume, or drop the +."
            )
        return request, parse_duration(budget[1:], "--budget")
    seconds = parse_budget(budget)
    if resume is not None and seconds is not None and seconds == Request().budget_seconds:
        run = runs.load_run(resume)  # a session takes the default for no budget at all
        if seconds > (run.header.request.budget_seconds or math.inf):
            return request, seconds - run.seconds
    return msgspec.structs.replace(request, budget_seconds=seconds), None


def _check_resumed(request: Request, resume: str) -> None:
    """RequestError if an option differs from the run's own, whose measurements would not apply."""
    header, unsaid = runs.load_run(resume).header, Request()
    kept = msgspec.structs.replace(header.request, workload=header.workload)
    for field in Request.__struct_fields__:
        given = getattr(request, field)
        if field not in _CHANGEABLE and given not in (getattr(kept, field), getattr(unsaid, field)):
            option = _OPTIONS.get(field, f"--{field.replace('_', '-')}")
            raise RequestError(
                f"--resume continues the run's own request, and {option} differs from it.",
                f"Leave {option} out, or start a new run.",
            )
