"""The bars above and below every screen: the product with its screens, and the keys."""

from __future__ import annotations

import importlib
import time
from contextlib import suppress

from textual.dom import DOMNode
from textual.widgets import Footer

from ..view.monitor import status_texts, top_line
from .lines import Lines

SCREENS = {"monitor": "Monitor", "balance": "Balance", "runs": "Runs", "trainings": "Trainings"}


class TopBar(Lines):
    """Names the screens with their keys; a click on one opens it."""

    def __init__(self, shown: str) -> None:
        super().__init__(id="top")
        self.shown = shown

    def on_mount(self) -> None:
        """Follow the newest snapshot, which has the clock and the host."""
        self.watch(self.app, "snapshot", self._sampled, init=False)

    def _sampled(self) -> None:
        if self.screen.is_current:
            self.redraw()

    def redraw(self) -> None:
        """Rebuild the line."""
        app = self.evener
        right: tuple[str, ...] = ()
        if app.snapshot is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(app.snapshot.at_seconds))
            right = status_texts(app.snapshot, clock, app.marks)
        self.show((top_line(SCREENS, self.shown, right, self.size.width),))


class KeysBar(Footer):
    """Textual's footer, without its references to every key it ever showed."""

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    async def recompose(self) -> None:
        """Show the current keys, and release the previous ones.

        Each key watches whether the footer is compact, and closed ones are released only when that changes.
        """
        await super().recompose()
        self.mutate_reactive(Footer.compact)
        forget_drawn()
        for node in self.ancestors:
            forget_found(node)


def forget_drawn() -> None:
    """Clear a private cache of Textual's that keeps a thousand lines of closed widgets alive.

    There is no public call for it; a Textual without the cache needs none.
    """
    with suppress(ImportError, AttributeError):
        importlib.import_module("textual._styles_cache").StylesCache.get_inner_outer.cache_clear()


def forget_found(node: DOMNode) -> None:
    """Clear the last 1024 answers of `node.query_one`, which Textual keeps; a private cache too.

    A new key bar makes them all outdated, in every node above it.
    """
    with suppress(AttributeError):
        node._query_one_cache.clear()
