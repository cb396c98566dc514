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
from evener.tui.cli.fault_output import report_fault
from evener.tui.cli.streams import ReaderGoneError, terminal_columns
from evener.tui.text.formatting import plain
from evener.tui.text.plan_summary import summary_lines
from evener.tui.text.progress import Progress
from evener.tui.text.safe_documents import json_text

if TYPE_CHECKING:
    from rich.live import Live

_GIVEN_ANEW = ("budget_seconds", "pace", "share", "compare")  # they change nothing that was measured
_OPTIONS = {"settings": "--set"}
_STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def run_balance(request: Request, *, resume: str | None, export: Path | None, as_json: bool) -> int:
    """Run a session to its plan; the exit code says whether it was interrupted, and how."""
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

    return see_through(session, progress, conclude, "stopping; the best plan so far is kept", as_json)


def _check_resumed(request: Request, resume: str) -> None:
    """RequestError if an option asks for something else than the run did: its measurements would not fit."""
    header, unsaid = runs.load_run(resume).header, Request()
    kept = msgspec.structs.replace(header.request, workload=header.workload)
    for field in Request.__struct_fields__:
        given = getattr(request, field)
        if field not in _GIVEN_ANEW and given not in (getattr(kept, field), getattr(unsaid, field)):
            option = _OPTIONS.get(field, f"--{field.replace('_', '-')}")
            raise RequestError(
                f"--resume goes on with the run's own request, and {option} is not as it was then.",
                f"Leave {option} out, or begin a new run.",
            )


def see_through(
    session: Session, progress: Progress, conclude: Callable[[Finished], None], stopping: str, as_json: bool
) -> int:
    """Follow a session to its end and `conclude` with what it came to; the exit code, a signal's own if one ended it.

    Signals are caught until everything is written, so that none leaves half a file.
    """
    with stopped_by_signals(session.stop, stopping) as caught:
        try:
            finished = follow(session, progress, as_json)
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
            f"--export {path} can't be written: {reason}.", "Name a file in a folder of yours."
        ) from None


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None], words: str) -> Iterator[list[int]]:
    """Within it, Ctrl-C, SIGTERM and SIGHUP call `stop`; a second Ctrl-C ends at once. Yields the exit codes caught.

    A hang-up that whoever started it has ignored, as `nohup` does, stays ignored.
    """
    caught: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(_STOPS[signal.Signals(number)])
        with contextlib.suppress(OSError, ValueError):
            os.write(2, f"\nevener: {words}\n".encode())
        stop()

    outlasting = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in _STOPS if not (outlasting and number == signal.SIGHUP)]
    earlier: dict[int, Any] = {number: signal.signal(number, handle) for number in heard}
    try:
        yield caught
    finally:
        for number, action in earlier.items():
            signal.signal(number, action)


def follow(session: Session, progress: Progress, as_json: bool) -> Finished:
    """Show events until the last one."""
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
    """A line that stays."""
    if live is not None:
        live.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
    else:
        print(plain(line), file=sys.stderr, flush=True)


def _print_result(finished: Finished, progress: Progress, export: Path | None, as_json: bool) -> None:
    if as_json:
        plan = msgspec.to_builtins(finished.plan)
        answer = {"run": finished.run, "verdict": finished.verdict, "interrupted": finished.interrupted, **plan}
        print(json_text(answer), flush=True)
        return
    print("\n".join(summary_lines(finished.plan, progress.devices, finished.verdict, terminal_columns())), flush=True)
    if export is not None:
        print(f"evener: plan written to {plain(str(export))}", file=sys.stderr)
    else:
        print(f"evener: to write the plan: evener export {finished.run} -o plan.toml", file=sys.stderr)
