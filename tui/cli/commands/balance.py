"""`evener balance`: a session on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from evener.balancer.events import Finished
from evener.balancer.session import Request, Session
from evener.balancer.store import runs
from evener.errors import NoLayoutError, RequestError
from evener.tui.cli.streams import ReaderGoneError, report_fault, terminal_columns
from evener.tui.text.formatting import plain
from evener.tui.text.plan_summary import summary_lines
from evener.tui.text.progress import Progress
from evener.tui.text.safe_documents import json_text

if TYPE_CHECKING:
    from rich.live import Live

_CHANGEABLE = ("budget_seconds", "pace", "share", "compare")  # without effect on earlier measurements
_OPTIONS = {"settings": "--set"}
_STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def run_balance(request: Request, *, resume: str | None, export: Path | None, as_json: bool) -> int:
    """Run a session; the exit code is 0, or that of the signal that interrupted it."""
    if export is not None:
        check_target(export)
    if resume is not None:
        _check_resumed(request, resume)
    session = Session(request, resume=resume)
    progress = Progress()

    def conclude(finished: Finished) -> None:
        if export is not None:
            finished.plan.save(export)
        _print_result(finished, progress, export, as_json)

    return run_to_end(session, progress, conclude, "stopping; the best plan so far is kept", as_json)


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


def run_to_end(
    session: Session, progress: Progress, conclude: Callable[[Finished], None], stopping: str, as_json: bool
) -> int:
    """Run a session to its end and pass the result to `conclude`; returns the exit code.

    Signals are caught until everything is written, so that none leaves half a file.
    """
    with stopped_by_signals(session.stop, stopping) as caught:
        try:
            finished = show_progress(session, progress, as_json)
        except NoLayoutError as fault:
            if not caught:
                raise
            report_fault(fault, as_json)
            return caught[0]
        finally:
            session.close()
        try:
            conclude(finished)
        except ReaderGoneError:
            if not caught:
                raise
    if not finished.interrupted:
        return 0
    return caught[0] if caught else 130


def check_target(path: Path) -> None:
    """Raise RequestError now, not after minutes of probing, if `path` can't be written."""
    if path.suffix not in (".toml", ".json"):
        raise RequestError(f"--export {path} ends neither in .toml nor in .json.", "Name it plan.toml or plan.json.")
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(path.stat().st_mode):
                raise RequestError(f"--export {path} is a folder.", "Name a file in it.")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError(
            f"--export {path} can't be written: {reason}.", "Name a file in a folder that you may write to."
        ) from None


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None], words: str) -> Iterator[list[int]]:
    """Make Ctrl-C, SIGTERM and SIGHUP call `stop`; a second one ends at once. Yields the exit codes of those caught.

    An ignored SIGHUP, as under `nohup`, stays ignored.
    """
    caught: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(_STOPS[signal.Signals(number)])
        with contextlib.suppress(OSError, ValueError):
            os.write(2, f"\nevener: {words}\n".encode())
        stop()

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in _STOPS if not (ignored and number == signal.SIGHUP)]
    earlier: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield caught
    finally:
        for number, action in earlier.items():
            signal.signal(number, action)


def show_progress(session: Session, progress: Progress, as_json: bool) -> Finished:
    """Show the session's progress; returns its result."""
    finished: Finished | None = None
    on_terminal = sys.stderr.isatty() and not as_json
    with _live_lines(progress) if on_terminal else contextlib.nullcontext() as live:
        for event in session.events():
            line = progress.take(event)
            if line is not None:
                _say(line, live)
            if live is not None:
                live.refresh()
            if isinstance(event, Finished):
                finished = event
    assert finished is not None, "a session without a plan raises"
    return finished


def _live_lines(progress: Progress) -> Live:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)

    def draw() -> Group:
        return Group(*(Text(line, overflow="ellipsis", no_wrap=True) for line in progress.screen()))

    return Live(get_renderable=draw, console=console, transient=True, refresh_per_second=4)


def _say(line: str, live: Live | None) -> None:
    """Print a line above the live ones."""
    if live is not None:
        live.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
    else:
        print(plain(line), file=sys.stderr, flush=True)


def _print_result(finished: Finished, progress: Progress, export: Path | None, as_json: bool) -> None:
    if as_json:
        print(json_text(result_json(finished)), flush=True)
        return
    print("\n".join(summary_lines(finished.plan, progress.devices, finished.verdict, terminal_columns())), flush=True)
    print_next_step(finished, export)


def result_json(finished: Finished, **more: object) -> dict[str, object]:
    """The result as data: the run, `more`, and the plan."""
    head = {"run": finished.run, "verdict": finished.verdict, "interrupted": finished.interrupted}
    return {**head, **more, **msgspec.to_builtins(finished.plan)}


def print_next_step(finished: Finished, export: Path | None) -> None:
    """Print where the plan is, or how to write it."""
    written = f"plan written to {plain(str(export))}" if export is not None else ""
    print(f"evener: {written or f'to write the plan: evener export {finished.run} -o plan.toml'}", file=sys.stderr)
