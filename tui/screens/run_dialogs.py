"""Dialogs for one run: it is continued and annotated; its report and its children's errors are shown."""

from __future__ import annotations

import functools
import os
import re
from contextlib import suppress
from pathlib import Path

from textual.widgets import Input

import evener
from evener.balancer.session_state import Seen
from evener.balancer.store import runs
from evener.balancer.store.notes import RunNote
from evener.balancer.store.runs import StoredRun
from evener.errors import EvenerError
from evener.system.state_folders import error_file

from ..runtime.base_app import UsesApp
from ..runtime.run_replay import read_run
from ..text.formatting import duration, note_words
from ..text.parsing import parse_duration
from ..view.cells import whole_lines
from .dialogs import DetailsDialog, FieldDialog
from .export import report_dialog

MORE_SECONDS = 300.0
MOST_ERROR_BYTES = 1 << 20  # of what failing children wrote; the newest are shown
_FRAME = re.compile(r'^  File "([^"\n]+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_FOREIGN = re.compile(rf"<|{re.escape(str(Path(evener.__file__).parent))}/|.*/lib/python3|.*/(?:site|dist)-packages/")


class ContinueDialog(FieldDialog):
    """Asks how long to go on with a run, and starts that."""

    def __init__(self, run: StoredRun) -> None:
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
        kept = [Seen(entry.seen, entry.at_seconds) for entry in read_run(header.run).seen]
        self.evener.start_session(header.request, header.devices, kept, resume=header.run, extend_seconds=more)
        return True


class NoteDialog(FieldDialog):
    """Asks for a note; words with # are tags."""

    def __init__(self, name: str, note: RunNote) -> None:
        hint = "A note on the run; words that begin with # are tags. The filter finds both."
        super().__init__("Note", Input(note_words(note.note, note.tags), id="line", compact=True), hint)
        self._run, self._before = name, note

    async def take(self, text: str) -> bool:
        """Write it beside the run's journal."""
        words = text.split()
        tags = {word[1:] for word in words if word.startswith("#") and len(word) > 1}
        note = " ".join(word for word in words if not word.startswith("#"))
        runs.annotate_run(self._run, note, tags, set(self._before.tags) - tags)
        return True


def errors_file(run: str) -> Path | None:
    """The errors that children of a run wrote, without a run those of the last probe; None if there are none."""
    with suppress(EvenerError):
        path = runs.errors_path(run) if run else error_file()
        return path if path.is_file() else None
    return None


def own_frames(text: str) -> str:
    """The frames of tracebacks that are neither in evener nor in Python's or installed packages, each once."""
    frames = dict.fromkeys(found[0] for found in _FRAME.finditer(text) if not _FOREIGN.match(found[1]))
    return f"Your own code:\n{''.join(frames)}\n" if frames else ""


def errors_dialog(run: str) -> DetailsDialog:
    """The tracebacks of a run, whole."""
    path, text = errors_file(run), ""
    if path is not None:
        with suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MOST_ERROR_BYTES))
            text = stream.read(MOST_ERROR_BYTES).decode(errors="replace")
    text = f"{path}\n\n{own_frames(text)}{text}" if text else "No child of this run has written an error."
    return DetailsDialog("Traceback", functools.cache(lambda width: whole_lines(text, width)), wide=True)


class RunActions(UsesApp):
    """A screen's actions on one run: continue it, write its report, show its tracebacks."""

    @property
    def chosen_run(self) -> str:
        """The run that keys act on; empty without one."""
        raise NotImplementedError

    def action_go_on(self) -> None:
        """Ask how long to go on with the run, and show its search."""

        def show(done: bool | None) -> None:
            if done:
                self.app.switch_mode("balance")

        with self.evener.saying_faults():
            self.app.push_screen(ContinueDialog(runs.load_run(self.chosen_run)), show)

    def action_report(self) -> None:
        """Write the report of the run."""
        self.app.push_screen(report_dialog(self.chosen_run))

    def action_traceback(self) -> None:
        """Show what failing children of the run wrote."""
        self.app.push_screen(errors_dialog(self.chosen_run))
