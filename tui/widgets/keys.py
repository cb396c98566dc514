"""The line of keys below every screen."""

from __future__ import annotations

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
