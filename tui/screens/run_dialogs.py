"""What is asked about one run: how much longer to measure, a note; and the errors of its children."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

from textual.app import App
from textual.widgets import Input

from evener.balancer.store import runs
from evener.balancer.store.folders import error_file
from evener.balancer.store.notes import RunNote
from evener.balancer.store.runs import Run
from evener.errors import EvenerError
from evener.tui.screens.dialogs import DetailsDialog, FieldDialog
from evener.tui.text.formatting import duration
from evener.tui.text.parsing import parse_duration
from evener.tui.view.cells import whole_lines

MORE_SECONDS = 300.0
MOST_ERROR_BYTES = 1 << 20  # of what failing children wrote; the newest are shown


class ContinueDialog(FieldDialog):
    """Asks how long to go on with a run, and starts that."""

    def __init__(self, run: Run) -> None:
        budget = run.header.request.budget_seconds
        left = budget - run.seconds if budget is not None and run.state != "finished" else 0.0
        hint = f"{duration(run.seconds)} were measured. How much longer? Like 90s or 5m. What was measured is kept."
        more = f"{left if left >= 1 else MORE_SECONDS:.0f}s"
        super().__init__("Continue the run", Input(more, id="line", compact=True), hint)
        self._run = run

    async def take(self, text: str) -> bool:
        """Start the session."""
        header = self._run.header
        more = parse_duration(text, "The time")
        self.evener.start_session(header.request, header.devices, resume=header.run, extend_seconds=more)
        return True


def ask_to_continue(app: App[int], run: Run) -> None:
    """Ask how long to go on with a run, and show its search."""

    def show(done: bool | None) -> None:
        if done:
            app.switch_mode("balance")

    app.push_screen(ContinueDialog(run), show)


class NoteDialog(FieldDialog):
    """Asks for a note; words with # are tags."""

    def __init__(self, name: str, note: RunNote) -> None:
        text = " ".join((*(f"#{tag}" for tag in note.tags), note.note)).strip()
        hint = "A note on the run; words that begin with # are tags. The filter finds both."
        super().__init__("Note", Input(text, id="line", compact=True), hint)
        self._run, self._before = name, note

    async def take(self, text: str) -> bool:
        """Write it beside the run's journal."""
        words = text.split()
        tags = {word[1:] for word in words if word.startswith("#") and len(word) > 1}
        note = " ".join(word for word in words if not word.startswith("#"))
        runs.annotate_run(self._run, note, tags, set(self._before.tags) - tags)
        return True


def errors_file(run: str) -> Path | None:
    """What failing children of a run wrote, without a run those of the last probe; None if there is nothing."""
    with suppress(EvenerError):
        path = runs.errors_path(run) if run else error_file()
        return path if path.is_file() else None
    return None


def errors_dialog(run: str) -> DetailsDialog:
    """The tracebacks of a run, whole."""
    path, text = errors_file(run), ""
    if path is not None:
        with suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MOST_ERROR_BYTES))
            text = stream.read(MOST_ERROR_BYTES).decode(errors="replace")
    text = f"{path}\n\n{text}" if text else "No child of this run has written an error."
    return DetailsDialog("Traceback", functools.cache(lambda width: whole_lines(text, width)), wide=True)
