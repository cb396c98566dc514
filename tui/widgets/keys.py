"""The line of keys below every screen, and what Textual keeps of widgets that are gone."""

from __future__ import annotations

import importlib
from contextlib import suppress

from textual.dom import DOMNode
from textual.widgets import Footer


class KeysBar(Footer):
    """Textual's footer, without what that keeps of every key it ever showed."""

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    async def recompose(self) -> None:
        """Show the keys of now, and let go of those from before.

        Each key watches whether the footer is compact, and closed ones are forgotten only when that changes.
        """
        await super().recompose()
        self.mutate_reactive(Footer.compact)
        forget_drawn()
        for node in self.ancestors:
            forget_found(node)


def forget_drawn() -> None:
    """Let go of the lines of closed widgets: a cache of Textual's holds on to a thousand of them.

    The cache is a private one, for which there is no public call; a Textual without it has nothing to be let go of.
    """
    with suppress(ImportError, AttributeError):
        importlib.import_module("textual._styles_cache").StylesCache.get_inner_outer.cache_clear()


def forget_found(node: DOMNode) -> None:
    """Let go of what `node` was asked for with `query_one`: Textual keeps the last 1024 answers.

    A new line of keys puts every answer of before out of date, in all nodes above. As private as the other cache.
    """
    with suppress(AttributeError):
        node._query_one_cache.clear()
