"""`evener replay`: a run is played again from its journal, in the app on a terminal, as lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from evener.balancer import journal
from evener.balancer.events import Event, Finished
from evener.balancer.intake import read_job
from evener.errors import RequestError

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
    record = _read(source)
    read_job(record.header)  # its faults are raised before the screen opens
    if plain_text or not draws_screens():
        print_events(recorded_events(record))
        return
    from ..start import run_app

    raise typer.Exit(run_app("auto", theme=theme, played=record, speed=speed, ascii=ascii_only))


def _read(source: str) -> journal.Record:
    """The journal in a file or of a run; RequestError if it can't be read."""
    path = Path(source)
    if path.is_file():
        return journal.read(path, foreign=True)
    try:
        return read_run(source)
    except RequestError as fault:
        if path.exists() and any(one.code.startswith("request.no_run") for one in fault.findings):
            kind = "a folder" if path.is_dir() else "not a plain file"
            raise RequestError(f"{source} is {kind}.", journal.NAME_ONE) from None
        raise


def print_events(events: Iterable[Event]) -> Finished | None:
    """Print the lines of a session at once, and its result, which is returned."""
    progress = Progress()
    for event in events:
        if (line := progress.take(event)) is not None:
            print(plain(line), file=sys.stderr)
    finished = progress.state.finished
    if finished is not None:
        lines = summary_lines(finished.plan, progress.devices, finished.verdict, terminal_columns(), finished.findings)
        print("\n".join(lines))
    return finished
