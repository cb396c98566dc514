"""The line on top of every screen: the product, its screens, and where we are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from evener.tui.view.monitor import status_text, top_line
from evener.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from evener.tui.app.app import EvenerApp

SCREENS = {"monitor": "Monitor", "balance": "Balance", "runs": "Runs"}


class TopBar(Lines):
    """Names the screens with their keys; a click on one opens it."""

    def __init__(self, shown: str) -> None:
        super().__init__(id="top")
        self.shown = shown

    def on_mount(self) -> None:
        """Follow the app's newest snapshot, which carries the clock and the host."""
        self.watch(self.app, "snapshot", self.redraw, init=False)

    def on_resize(self) -> None:
        """Fill the new width."""
        self.redraw()

    def redraw(self) -> None:
        """Work the line out again."""
        app = cast("EvenerApp", self.app)
        right = ""
        if app.snapshot is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(app.snapshot.at_seconds))
            right = status_text(app.snapshot, clock, app.marks)
        self.show((top_line(SCREENS, self.shown, right, self.size.width),))
