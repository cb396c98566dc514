"""Dialogs that continue a stored run, write its files, train with its plan, or show its errors."""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from textual.widgets import Input

import evener
from evener.balancer.events import Finished
from evener.balancer.number_format import duration
from evener.balancer.result.sentences import (
    find_training_command,
    recommends_plan,
    write_training_step,
)
from evener.balancer.store import runs
from evener.balancer.store.runs import StoredRun
from evener.errors import EvenerError, RequestError
from evener.plan.file import Plan
from evener.system.files import error_file

from ..base_app import BaseApp, UsesApp
from ..local_training import read_command
from ..text.parsing import parse_duration
from ..view.cells import whole_lines
from .dialogs import DetailsDialog, FieldDialog, confirm

MORE_SECONDS = 300.0
MOST_ERROR_BYTES = 1 << 20  # maximum number of bytes shown of what failing child processes wrote
_FRAME = re.compile(r'^  File "([^"\n]+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_FOREIGN = re.compile(
    rf"<|{re.escape(str(Path(evener.__file__).parent))}/|.*/lib/python3|.*/(?:site|dist)-packages/"
)


class ContinueDialog(FieldDialog):
    """Dialog that asks how much longer to measure, and resumes the run."""

    def __init__(self, run: StoredRun) -> None:
        budget = run.header.request.budget_seconds
        seconds = run.record.clock_seconds
        left = budget - seconds if budget is not None and run.state != "finished" else 0.0
        hint = (
            f"{duration(seconds)} were measured. How much longer? Like 90s or 5m. What was "
            f"measured is kept."
        )
        more = f"{left if left >= 1 else MORE_SECONDS:.0f}s"
        super().__init__("Continue the run", Input(more, id="line", compact=True), hint)
        self._run = run

    async def submit(self, text: str) -> bool:
        """Resume the run for the given time, and return True, so that the dialog closes.

        Raises RequestError if the text isn't a duration.
        """
        header, kept = self._run.header, self._run.record.seen
        more = parse_duration(text, "The time")
        self.evener.start_session(
            header.request, header.devices, kept, resume=header.run, extend_seconds=more
        )
        return True


def errors_file(run: str) -> Path | None:
    """Return the file with the errors of a run's probe processes, or None if there is none.

    If `run` is "", this is the file of the last measurement that belonged to no run.
    """
    with suppress(EvenerError):
        path = runs.errors_path(run) if run else error_file()
        return path if path.is_file() else None
    return None


def own_frames(text: str) -> str:
    """Return the traceback lines from the user's own files, below a heading.

    Returns "" if there are none.
    """
    frames = dict.fromkeys(
        found[0] for found in _FRAME.finditer(text) if not _FOREIGN.match(found[1])
    )
    return f"Your own code:\n{''.join(frames)}\n" if frames else ""


def errors_dialog(run: str) -> DetailsDialog:
    """Return a dialog with the errors of a run's probe processes, the user's own frames first."""
    path, text = errors_file(run), ""
    if path is not None:
        with (
            suppress(OSError),
            os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream,
        ):
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MOST_ERROR_BYTES))
            text = stream.read(MOST_ERROR_BYTES).decode(errors="replace")
    text = (
        f"{path}\n\n{own_frames(text)}{text}"
        if text
        else "No process of this run has written an error."
    )
    return DetailsDialog(
        "Traceback", functools.cache(lambda width: whole_lines(text, width)), wide=True
    )


class RunActions(UsesApp):
    """Mixin for screens with actions on a chosen run."""

    @property
    def chosen_run(self) -> str:
        """The id of the run that actions apply to, or ""; subclasses implement it."""
        raise NotImplementedError

    def action_go_on(self) -> None:
        """Ask how much longer to measure, resume the run, and switch to the Balance screen."""

        def show(done: bool | None) -> None:
            if done:
                self.app.switch_mode("balance")

        with self.evener.showing_errors():
            self.app.push_screen(ContinueDialog(runs.load_run(self.chosen_run)), show)

    def action_report(self) -> None:
        """Ask for a file name, and write the run's report."""
        self.app.push_screen(report_dialog(self.chosen_run))

    def action_traceback(self) -> None:
        """Open the errors of the run's probe processes."""
        self.app.push_screen(errors_dialog(self.chosen_run))


class SaveDialog(FieldDialog):
    """Dialog that asks for a file name and writes a document.

    - `what`: the document, such as "plan".
    - `name`: the suggested file name.
    - `endings`: the file name endings to accept.
    - `save`: writes the file; called in a thread.
    - `next_step`: gets the path, and returns what the user can do with the file, or "". The
      message after writing includes it.
    """

    def __init__(
        self,
        what: str,
        name: str,
        endings: Sequence[str],
        save: Callable[[Path], object],
        next_step: Callable[[str], str] = lambda _path: "",
    ) -> None:
        hint = f"Enter writes the file: {' or '.join(endings)}."
        super().__init__(f"Write the {what}", Input(name, name, id="path", compact=True), hint)
        self._document = what
        self._endings = endings
        self._save = save
        self._next_step = next_step

    async def submit(self, text: str) -> bool:
        """Write the file, and return whether that was done.

        If the file exists already, asks for a confirmation first, and returns False. Raises
        RequestError for a folder or an unknown ending.
        """
        path = Path(os.path.expanduser(text))  # ~name of an unknown user stays as it is
        self._check(path)
        if not os.path.exists(path):  # writing to an unreadable path raises an error
            return await self._write(path)
        question = f"{path} already exists. Replace it?"
        confirm(self.evener, "Replace", question, lambda: self._replace(path))
        return False

    def _check(self, path: Path) -> None:
        if path.suffix not in self._endings:
            raise RequestError(
                f"{path} doesn't end in {' or '.join(self._endings)}.",
                "The ending chooses the format.",
            )
        if os.path.isdir(path):
            raise RequestError(f"{path} is a folder.", "Name a file in it.")

    async def _replace(self, path: Path) -> None:
        if await self._write(path):
            self.dismiss(True)

    async def _write(self, path: Path) -> bool:
        self.show_message("Writing it.")
        try:
            await asyncio.to_thread(self._save, path)
        except EvenerError as fault:
            self.show_message(str(fault), is_error=True)
            return False
        then = self._next_step(str(path))
        self.evener.show_message(
            f"The {self._document} was written to {path}{then and f'; {then}'}."
        )
        return True


def plan_dialog(app: BaseApp, plan: Plan, run: str, last_event: Finished | None) -> SaveDialog:
    """Return a dialog that writes the plan of a run, and then shows how to train with it.

    `last_event` is the last event of the search, or None if it never ended.
    """

    def find_step(path: str) -> str:
        app.written_plans[run] = path
        advised = last_event is None or recommends_plan(last_event)
        return write_training_step(plan, path) if advised else ""

    return SaveDialog("plan", "plan.toml", (".toml", ".json"), plan.save, find_step)


class TrainDialog(FieldDialog):
    """Dialog with a command line that trains with a plan. Enter starts the command.

    `path` is the file of the plan. The dialog writes it first unless `is_written` is set.
    """

    def __init__(self, plan: Plan, run: str, path: str, is_written: bool) -> None:
        command = find_training_command(plan, path)
        writes = "" if is_written else f"writes {path} and "
        hint = (
            f"Enter {writes}starts this here; add the script's own arguments. It keeps running "
            f"after you quit evener."
        )
        super().__init__("Train with this plan", Input(command, id="line", compact=True), hint)
        self.add_class("-wide")
        self._plan = plan
        self._run = run
        self._path = path
        self._written = is_written

    async def submit(self, text: str) -> bool:
        """Start the command, and return True, so that the dialog closes.

        Raises RequestError if it isn't `evener launch PLAN SCRIPT`.
        """
        arguments = read_command(text)
        if not self._written and self._path in arguments:
            await asyncio.to_thread(self._plan.save, Path(self._path))
            self.evener.written_plans[self._run] = self._path
        self.evener.start_training(arguments, runs.run_folder(self._run) / "launch.log")
        return True


def ask_to_train(app: BaseApp, plan: Plan, run: str) -> None:
    """Open a dialog that starts training with a run's plan, and then shows the Trainings screen."""
    written = app.written_plans.get(run, "")
    free = "plan.toml" if not os.path.exists("plan.toml") else f"plan-{run}.toml"

    def show(started: bool | None) -> None:
        if started:
            app.switch_mode("trainings")

    app.push_screen(TrainDialog(plan, run, written or free, bool(written)), show)


def report_dialog(run: str) -> SaveDialog:
    """Return a dialog that writes the report of a run."""
    from ..text.page import REPORT_FORMATS, save_report

    return SaveDialog("report", "report.html", REPORT_FORMATS, lambda path: save_report(run, path))
