"""The dialog that writes a plan or a report to a file; its name's ending chooses the format, Tab completes the path."""

from __future__ import annotations

import asyncio
import glob
import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from textual.suggester import Suggester
from textual.widgets import Input

from evener.errors import EvenerError, RequestError
from evener.plan.file import Plan

from ..text.launch_line import launch_hint
from .dialogs import FieldDialog, confirm

MOST_ENTRIES = 5000  # of a folder that is searched for completions


class PathSuggester(Suggester):
    """Suggests the first file or folder that starts with what is typed."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """The longer path, or None."""
        return complete_path(value)


class PathInput(Input):
    """Tab completes as in a shell; with nothing to complete it moves to the next field."""

    BINDINGS = [("tab", "complete", "Complete")]  # noqa: RUF012 - Textual reads it from the class

    def action_complete(self) -> None:
        """Take the suggestion; without one, go to the next field."""
        longer = complete_path(self.value)
        if longer and longer != self.value:
            self.value = longer
            self.cursor_position = len(longer)
        else:
            self.screen.focus_next()


class SaveDialog(FieldDialog):
    """Asks for a path, and again before it replaces a file; `save` may take a while."""

    def __init__(
        self,
        what: str,
        name: str,
        endings: Sequence[str],
        save: Callable[[Path], object],
        next_step: Callable[[str], str] = lambda _path: "",
    ) -> None:
        hint = f"Enter writes the file: {' or '.join(endings)}. Tab completes the path."
        super().__init__(
            f"Write the {what}", PathInput(name, name, suggester=PathSuggester(), id="path", compact=True), hint
        )
        self._what, self._endings, self._save, self._next_step = what, endings, save, next_step

    async def take(self, text: str) -> bool:
        """Write, or ask first."""
        path = Path(os.path.expanduser(text))  # ~name of an unknown user stays as it is
        self._check(path)
        if not os.path.exists(path):  # writing to an unreadable path says what is wrong
            return await self._write(path)
        question = f"{path} already exists. Replace it?"
        confirm(self.evener, "Replace", question, lambda: self._replace(path))
        return False

    def _check(self, path: Path) -> None:
        if path.suffix not in self._endings:
            known = " nor in ".join(self._endings)
            raise RequestError(f"{path} ends neither in {known}.", "The ending chooses the format.")
        if os.path.isdir(path):
            raise RequestError(f"{path} is a folder.", "Name a file in it.")

    async def _replace(self, path: Path) -> None:
        if await self._write(path):
            self.dismiss(True)

    async def _write(self, path: Path) -> bool:
        self.tell("Writing it.")
        try:
            await asyncio.to_thread(self._save, path)
        except EvenerError as fault:
            self.tell(str(fault), bad=True)
            return False
        then = self._next_step(str(path))
        self.evener.say(f"The {self._what} was written to {path}{then and f'; {then}'}.")
        return True


def plan_dialog(plan: Plan) -> SaveDialog:
    """Writes a plan."""
    return SaveDialog("plan", "plan.toml", (".toml", ".json"), plan.save, partial(launch_hint, plan))


def report_dialog(run: str) -> SaveDialog:
    """Writes the report of a run."""
    from ..report.page import REPORT_FORMATS, save_report

    return SaveDialog("report", "report.html", REPORT_FORMATS, lambda path: save_report(run, path))


def complete_path(typed: str) -> str | None:
    """`typed` completed by what all matches have in common, or by the first match; None without a match.

    A folder ends in a slash; hidden names match only if their dot is typed.
    """
    folder, slash, start = typed.rpartition("/")
    begin = os.path.expanduser(folder + slash) + start
    found = itertools.islice(glob.iglob(f"{glob.escape(begin)}*"), MOST_ENTRIES)
    names = [os.path.basename(path) + ("/" if os.path.isdir(path) else "") for path in found]
    if not names:
        return None
    common = os.path.commonprefix(names)  # noqa: RUF071 - by characters, as a shell does
    return folder + slash + (common if len(common) > len(start) else min(names))
