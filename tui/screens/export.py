"""Write a plan to a file: TOML or JSON by its name, with completion of the path."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from textual.suggester import Suggester
from textual.widget import Widget
from textual.widgets import Input

from evener.errors import EvenerError, RequestError
from evener.plan import Plan
from evener.tui.screens.dialogs import ConfirmDialog, Dialog, Text
from evener.tui.view.cells import Span, clean, line, wrap
from evener.tui.view.paths import complete_path


class PathSuggester(Suggester):
    """Offers the first file or folder that goes on from what is typed."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """The longer path, or None."""
        return complete_path(value)


class PathInput(Input):
    """Tab completes, as in a shell, and goes on only where there is nothing to complete."""

    BINDINGS = [("tab", "complete", "Complete")]  # noqa: RUF012 - Textual reads it from the class

    def action_complete(self) -> None:
        """Take what is offered; the next field if nothing is."""
        longer = complete_path(self.value)
        if longer and longer != self.value:
            self.value = longer
            self.cursor_position = len(longer)
        else:
            self.screen.focus_next()


class ExportDialog(Dialog[None]):
    """Asks for a path, and before it replaces a file."""

    TITLE_TEXT = "Export the plan"

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def content(self) -> Iterable[Widget]:
        """A path and what was wrong with the last one."""
        yield PathInput("plan.toml", "plan.toml or plan.json", suggester=PathSuggester(), id="path", compact=True)
        yield Text(id="hint")

    def on_mount(self) -> None:
        """Begin at the path."""
        self._say("Enter writes it; .toml or .json; Tab completes the path.", bad=False)
        self.query_one(PathInput).focus()

    def _say(self, text: str, *, bad: bool) -> None:
        rows = wrap(clean(text), self.text_width, 8)
        self.query_one("#hint", Text).show([line(Span(row, "bad" if bad else "dim")) for row in rows])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Write, or say why not."""
        event.stop()
        path = Path(os.path.expanduser(event.value.strip()))  # one that stands for nobody's home stays as it is
        try:
            self._check(path)
        except RequestError as fault:
            self._say(f"{fault.message} {fault.remedy}", bad=True)
            return
        if os.path.exists(path):  # what can't be looked at is said by the attempt to write it
            question = f"{path} is there already. Replace it?"
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
        self.evener.say(f"The plan is in {path}.")
        self.dismiss(None)
