"""The help dialog: the keys, what the marks mean, and every note of the machine."""

from __future__ import annotations

from collections.abc import Iterable

from textual.containers import VerticalScroll
from textual.widget import Widget

from evener.tui.screens.dialogs import Dialog, Text
from evener.tui.view.help import help_lines


class HelpDialog(Dialog[None]):
    """Everything on one page, scrolled where it doesn't fit."""

    TITLE_TEXT = "Help"

    def content(self) -> Iterable[Widget]:
        """The page."""
        with VerticalScroll(id="scroll"):
            yield Text()

    def on_mount(self) -> None:
        """Write it for this terminal."""
        self.redraw()

    def on_resize(self) -> None:
        """Wrap anew."""
        self.redraw()

    def redraw(self) -> None:
        """Work the page out again."""
        app = self.evener
        notes = app.snapshot.notes if app.snapshot is not None else ()
        self.query_one(Text).show(help_lines(notes, app.marks, self.scrolled_width))
