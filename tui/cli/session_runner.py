"""Run a search for a command: show its progress, handle signals, and print the result."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evener.balancer.events import Finished
from evener.balancer.journal import UnwrittenError
from evener.balancer.result.sentences import write_next_steps
from evener.balancer.session import Session
from evener.balancer.session_state import SessionState, advance
from evener.errors import NoLayoutError
from evener.printable import plain
from evener.system.signals import handled_signals

from ..text.formatting import json_text
from ..text.summaries import event_line
from ..view.balance_lines import rival_lines, search_lines
from ..view.cells import Line
from ..view.search_devices import SEARCH_DEVICES, search_device_rows
from ..view.table import whole_table
from .output import ReaderGoneError, report_fault

if TYPE_CHECKING:
    from rich.live import Live

MOST_DEVICES = 20  # maximum number of devices shown
PRESSED_TWICE_SECONDS = 1.0  # a second signal within this time is ignored


class _Progress:
    """The state of a search, and messages to print below its live progress lines."""

    def __init__(self) -> None:
        self.state = SessionState()
        self.messages: list[str] = []
        self.drawn = False  # True while there are live lines on a terminal

    def show_message(self, text: str) -> None:
        """Show a message below the live lines, or on standard error if there are none.

        It can be called from a signal handler.
        """
        if self.drawn:
            self.messages.append(text)
        else:
            _write_error(text)


def run_session(
    session: Session,
    show: Callable[[Session, Finished, Sequence[str], Sequence[str]], None],
    export: Path | None,
    as_json: bool,
    extra_fields: Callable[
        [Session, Finished, Sequence[str]], Mapping[str, object]
    ] = lambda *_: {},
) -> int:
    """Run a search to its end, write its plan, print the result, and return the exit code.

    The first Ctrl-C, SIGTERM or SIGHUP stops the search and keeps the best result so far; a second
    one ends the process at once.

    - `show`: prints the result; gets the session, its last event, the device labels, and the
      commands to run next.
    - `export`: where to write the plan; None doesn't write it.
    - `extra_fields`: returns further fields of the JSON document; gets the session, its last event,
      and the device labels.

    Raises NoLayoutError if nothing could be measured.
    """
    progress = _Progress()
    first_message = "stopping; the best result so far is kept"
    lost = "the plan is not written; " if export else ""
    second_message = f"ended at once; {lost}to go on: evener balance --resume {session.run_id}"
    with stopped_by_signals(
        session.stop, first_message, second_message, progress.show_message
    ) as caught:
        try:
            finished, unwritten = _run_to_its_end(session, progress, as_json)
        except NoLayoutError as fault:
            if not caught:
                raise
            report_fault(fault, as_json)
            return caught[0]
        path = ""
        if export is not None:
            path = str(export)
            finished.plan.save(export)
        labels = progress.state.devices
        measured = progress.state.replayed < finished.plan.search.probes
        steps = write_next_steps(session.run_id, finished, path, measured)
        try:
            if as_json:
                found = extra_fields(session, finished, labels)
                print(json_text(result_json(session.run_id, finished, steps, found)), flush=True)
            else:
                show(session, finished, labels, steps)
        except ReaderGoneError:
            if not caught:
                raise
    if unwritten is not None:
        return report_fault(unwritten, as_json=False)  # the result is on standard output
    if not finished.interrupted:
        return 0
    return caught[0] if caught else 130


def _run_to_its_end(
    session: Session, progress: _Progress, as_json: bool
) -> tuple[Finished, UnwrittenError | None]:
    """Run the session, close it, and return the event with its result.

    If there is a result but the journal couldn't be completed, returns that error too.
    """
    try:
        return _show_progress(session, progress, as_json), None
    except UnwrittenError as fault:
        if progress.state.finished is None:
            raise
        return progress.state.finished, fault
    finally:
        session.close()


def result_json(
    run: str, finished: Finished, next_commands: Sequence[str], extra_fields: Mapping[str, object]
) -> dict[str, object]:
    """Return the JSON document of a finished search, with `extra_fields` added.

    `next_commands` are the commands that the user can run next.
    """
    return {
        "run": run,
        "verdict": finished.found,
        "text": finished.verdict.split("\n"),
        "interrupted": finished.interrupted,
        **extra_fields,
        **msgspec.to_builtins(finished.plan),
        "next": next_commands,
    }


def _write_error(text: str) -> None:
    """Write a line to standard error without buffering, which is safe in a signal handler."""
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"\nevener: {text}\n".encode())


@contextlib.contextmanager
def stopped_by_signals(
    stop: Callable[[], None],
    first_message: str,
    second_message: str = "ended at once",
    show: Callable[[str], None] = _write_error,
) -> Iterator[list[int]]:
    """Context manager: the first Ctrl-C, SIGTERM or SIGHUP calls `stop`.

    A second signal, more than a second later, raises KeyboardInterrupt. Yields an empty list. The
    first signal appends its exit code to the list: 128 plus the signal's number.

    - `first_message`: what to show at the first signal.
    - `second_message`: what to show at the second signal.
    - `show`: shows a message; called in a signal handler.
    """
    caught: list[int] = []
    first_at = 0.0

    def handle(number: int) -> None:
        nonlocal first_at
        if caught:
            if time.monotonic() - first_at > PRESSED_TWICE_SECONDS:
                show(second_message)
                raise KeyboardInterrupt
            return
        first_at = time.monotonic()
        caught.append(128 + number)
        show(first_message)
        stop()

    with handled_signals(handle):
        yield caught


def _show_progress(session: Session, progress: _Progress, as_json: bool) -> Finished:
    """Print the events of a session until it ends, and return the last one."""
    on_terminal = sys.stderr.isatty() and not as_json
    with _live_lines(progress) if on_terminal else contextlib.nullcontext() as live:
        progress.drawn = on_terminal
        for event in session.events():
            progress.state = advance(progress.state, event)
            line = event_line(event, progress.state.devices)
            if line is not None:
                _print_line(line, live)
            if live is not None:
                live.refresh()
    assert progress.state.finished is not None, "a session without a plan raises"
    return progress.state.finished


@contextlib.contextmanager
def _live_lines(progress: _Progress) -> Iterator[Live]:
    """Context manager: redraw the progress at the bottom of the terminal, four times a second."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)

    def draw() -> Group:
        lines = [
            *(line.text for line in search_screen(progress.state, console.width)),
            *progress.messages,
        ]
        return Group(*(Text(line, overflow="ellipsis", no_wrap=True) for line in lines))

    try:
        with Live(
            get_renderable=draw, console=console, transient=True, refresh_per_second=4
        ) as live:
            yield live
    finally:
        progress.drawn = False
        for text in progress.messages:
            print(f"evener: {text}", file=sys.stderr)


def search_screen(state: SessionState, width: int) -> tuple[Line, ...]:
    """Return the lines about a search in progress: its devices, the best layouts, and its state."""
    lanes = whole_table(SEARCH_DEVICES, search_device_rows(state)[:MOST_DEVICES], width)
    return (*lanes, *rival_lines(state, width, 0), *search_lines(state, width, 1))


def _print_line(line: str, live: Live | None) -> None:
    """Print a line above the live lines or, if `live` is None, to standard error."""
    if live is not None:
        live.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
    else:
        print(plain(line), file=sys.stderr, flush=True)
