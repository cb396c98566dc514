"""`evener replay`: a run is played again from its journal, in the app on a terminal, as lines elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from evener.balancer import journal
from evener.balancer.events import Finished
from evener.balancer.intake import read_job
from evener.balancer.journal import Record

from ..runtime.sessions import read_run, recorded_events
from ..text.formatting import plain
from ..text.progress import Progress
from ..text.summaries import summary_lines
from .options import AsciiOption, ThemeOption
from .output import draws_screens, terminal_columns

app = typer.Typer()


@app.command()
def replay(
    source: Annotated[
        str, typer.Argument(metavar="FILE|RUN", help="A journal, or a run's id, the beginning of one, or `last`.")
    ],
    speed: Annotated[
        float, typer.Option("--speed", min=0.1, max=1000.0, help="How many times as fast as the run was.")
    ] = 8.0,
    plain_text: Annotated[bool, typer.Option("--plain", help="Print lines, on a terminal too.")] = False,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = None,
) -> None:
    """Play a run again from its journal: in the app on a terminal, as lines elsewhere. Nothing is measured."""
    record = journal.read(Path(source), foreign=True) if Path(source).is_file() else read_run(source)
    read_job(record.header)  # its faults are raised before the screen opens
    if plain_text or not draws_screens():
        _print_events(record)
        return
    from ..start import run_app

    raise typer.Exit(run_app("auto", theme=theme, played=record, speed=speed, ascii=ascii_only))


def _print_events(record: Record) -> None:
    """The lines that the session printed, at once, and its result."""
    progress = Progress()
    for event in recorded_events(record):
        if (line := progress.take(event)) is not None:
            print(plain(line), file=sys.stderr)
        if isinstance(event, Finished):
            lines = summary_lines(event.plan, progress.devices, event.verdict, terminal_columns())
            print("\n".join(lines))
