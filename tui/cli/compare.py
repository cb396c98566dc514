"""`evener compare`: single-device, split, packed and placed layouts, ranked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Annotated

import typer

from evener.balancer.events import Finished
from evener.balancer.intake import take_in_comparison
from evener.balancer.manual_run import LayoutProfile, profile_ranking
from evener.balancer.request import Request
from evener.balancer.run import begin
from evener.balancer.session import Session

from ..text.formatting import folded, plain
from ..text.parsing import check_one_form, parse_words
from ..text.ranking_tables import (
    packing_tables,
    ranking_json,
    ranking_table,
    scaling_table,
    transfer_json,
    transfer_tables,
)
from ..text.summaries import frontier_table
from ..text.tables import Form, csv_text
from .options import SEARCH, TRAINING, WHAT, ExportOption, FormatOption, JsonOption, takes_request
from .output import check_export, terminal_columns
from .session_runner import run_session, stopped_by_signals

app = typer.Typer()


@app.command()
@takes_request(*TRAINING, *SEARCH)
def compare(
    request: Request,
    layouts: Annotated[
        str | None,
        WHAT(
            "--layouts",
            help="Some of solo,even,split,pack,place: one device; equal shares; the best shares; several trainings on"
            " one device; parts of the model on several. Default: all that are possible.",
        ),
    ] = None,
    mps: Annotated[bool, WHAT("--mps", help="Also pack under NVIDIA's MPS, which evener starts.")] = False,
    knobs: Annotated[
        str | None, WHAT("--try", help="xla,mixed: also measure the winner with XLA, with mixed precision.")
    ] = None,
    profile: Annotated[bool, WHAT("--profile", help="Also profile the transfers between devices.")] = False,
    export: ExportOption = None,
    form: FormatOption = "table",
    as_json: JsonOption = False,
) -> int:
    """Compare single-device, even, split, packed and placed layouts; the fastest becomes the plan."""
    check_one_form(form, as_json)
    resolved = take_in_comparison(request, parse_words(layouts), mps, parse_words(knobs) or ())

    def show(session: Session, finished: Finished, labels: Sequence[str]) -> None:
        found = session.search
        if form == "csv":
            print(csv_text(ranking_json(found, labels)["layouts"]), end="", flush=True)
            print(f"evener: {plain(finished.verdict, 1000)}", file=sys.stderr)
        else:
            tables = [ranking_table(found, labels), scaling_table(found), *packing_tables(found)]
            tables += [frontier_table(finished.findings)]
            tables += transfer_tables(profiled(session, finished))
            lines = [line for table in tables for line in table.lines(form, terminal_columns())]
            print("\n".join([*lines, *_words(finished, form)]), flush=True)

    def profiled(session: Session, finished: Finished) -> list[LayoutProfile]:
        """The profiles, if any were asked for; a signal ends them early and keeps what was profiled."""
        if not profile or finished.interrupted:
            return []
        stop = threading.Event()
        with stopped_by_signals(stop.set, "stopping the profile"):
            return profile_ranking(resolved, session.search, stop)

    def more(session: Session, finished: Finished, labels: Sequence[str]) -> dict[str, object]:
        profiles = {"profile": transfer_json(profiled(session, finished))} if profile else {}
        return {**ranking_json(session.search, labels), **profiles}

    check_export(export)
    return run_session(Session(begin(resolved)), show, export, as_json, more)


def _words(finished: Finished, form: Form) -> list[str]:
    """The warnings and the verdict."""
    head, width = ("- ", None) if form == "markdown" else ("", terminal_columns())
    warnings = [f"{head}warning: {plain(warning)}" for warning in finished.plan.warnings]
    lines = [line for warning in warnings for line in folded(warning, width, "  ")]
    return [*lines, "", *folded(plain(finished.verdict, 1000), width)]
