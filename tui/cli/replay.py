"""`evener replay`: a run is played again from its journal, in the app on a terminal, as lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evener.balancer import journal
from evener.balancer.events import Event, Finished
from evener.balancer.intake import read_job

from ..runtime.sessions import read_run, recorded_events
from ..text.formatting import plain
from ..text.summaries import Progress, summary_lines
from .options import AsciiOption, ThemeOption
from .output import draws_screens, terminal_columns

if TYPE_CHECKING:
    from ..screens.runs import ReplayScreen

app = typer.Typer()


@app.command()
def replay(
    source: Annotated[str, typer.Argument(metavar="FILE|RUN", help="A journal, or a run by its id, or `last`.")],
    speed: Annotated[float, typer.Option("--speed", min=0.1, max=1000.0, help="Times faster than it ran.")] = 8.0,
    as_text: Annotated[bool, typer.Option("--plain", help="Print text, on a terminal too.")] = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Replay a run from its journal: in the app on a terminal, as text elsewhere. Nothing is measured."""
    named = Path(source).is_file() or "/" in source
    record = journal.read(Path(source), foreign=True) if named else read_run(source)
    read_job(record.header)  # its faults are raised before the screen opens
    if as_text or not draws_screens():
        print_events(recorded_events(record))
        return
    from ..start import run_app

    raise typer.Exit(run_app("auto", theme=theme, opens=lambda: _screen(record, speed), ascii=ascii_only))


def _screen(record: journal.Record, speed: float) -> ReplayScreen:
    from ..screens.runs import ReplayScreen

    return ReplayScreen(record, speed)


def print_events(events: Iterable[Event]) -> Finished | None:
    """Print the lines of a session at once, and its result, which is returned."""
    progress = Progress()
    for event in events:
        if (line := progress.take(event)) is not None:
            print(plain(line), file=sys.stderr)
    if (finished := progress.state.finished) is not None:
        lines = summary_lines(finished.plan, progress.devices, finished.verdict, terminal_columns(), finished.findings)
        print("\n".join(lines))
    return finished
