"""The dialog that writes a plan to a file: TOML or JSON by its name, with completion of the path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from textual.suggester import Suggester
from textual.widget import Widget
from textual.widgets import Input

from evener.errors import EvenerError, RequestError
from evener.plan import Plan
from evener.tui.screens.dialogs import ConfirmDialog, Dialog, Text
from evener.tui.view.cells import Span, clean, line, wrap

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


class ExportDialog(Dialog[None]):
    """Asks for a path, and again before it replaces a file."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("Export the plan")
        self._plan = plan

    def content(self) -> Iterable[Widget]:
        """The path, and a hint or what is wrong with it."""
        yield PathInput("plan.toml", "plan.toml or plan.json", suggester=PathSuggester(), id="path", compact=True)
        yield Text(id="hint")

    def on_mount(self) -> None:
        """Focus the path."""
        self._say("Enter writes the file, .toml or .json; Tab completes the path.", bad=False)
        self.query_one(PathInput).focus()

    def _say(self, text: str, *, bad: bool) -> None:
        rows = wrap(clean(text), self.text_width, 8)
        self.query_one("#hint", Text).show([line(Span(row, "bad" if bad else "dim")) for row in rows])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Write, or say why not."""
        event.stop()
        path = Path(os.path.expanduser(event.value.strip()))  # ~name of an unknown user stays as it is
        try:
            self._check(path)
        except RequestError as fault:
            self._say(f"{fault.message} {fault.remedy}", bad=True)
            return
        if os.path.exists(path):  # writing to an unreadable path says what is wrong
            question = f"{path} already exists. Replace it?"
            self.app.push_screen(
                ConfirmDialog("Replace", question, "Replace"), lambda yes: self._write(path) if yes else None
            )
        else:
            self._write(path)

    def _check(self, path: Path) -> None:
        if path.suffix not in (".toml", ".json"):
            raise RequestError(f"{path} ends neither in .toml nor in .json.", "The ending chooses the format.")
        if os.path.isdir(path):
            raise RequestError(f"{path} is a folder.", "Name a file in it.")

    def _write(self, path: Path) -> None:
        try:
            self._plan.save(path)
        except EvenerError as fault:
            self._say(f"{fault.message} {fault.remedy}", bad=True)
            return
        self.evener.say(f"The plan was written to {path}.")
        self.dismiss(None)


def complete_path(typed: str) -> str | None:
    """`typed` completed by what all matches have in common, or by the first match; None without a match.

    A folder ends in a slash; hidden names match only if their dot is typed.
    """
    folder, _, start = typed.rpartition("/")
    place = os.path.expanduser(f"{folder}/" if folder or typed.startswith("/") else ".")
    try:
        with os.scandir(place) as entries:
            names = []
            for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
                if entry.name.startswith(start) and (start.startswith(".") or not entry.name.startswith(".")):
                    names.append(entry.name + ("/" if entry.is_dir() else ""))
    except OSError:
        return None
    if not names:
        return None
    head = typed[: len(typed) - len(start)]
    common = _shared_start(names)
    return head + (common if len(common) > len(start) else min(names))


def _shared_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    same = next((place for place, sign in enumerate(first) if last[place : place + 1] != sign), len(first))
    return first[:same]
