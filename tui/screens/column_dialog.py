"""The dialog that chooses the columns of the device table."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget

from ..view.devices import DEVICES
from ..widgets.lists import Ticks
from .dialogs import Dialog

ALWAYS = ("id",)  # columns that identify a row and can't be hidden


class ColumnDialog(Dialog[None]):
    """Dialog that shows or hides columns of the device table."""

    def __init__(self) -> None:
        super().__init__("Columns of the devices")
        self._keys = [column.key for column in DEVICES.columns if column.key not in ALWAYS]
        self._titles = {column.key: column.titles[0] for column in DEVICES.columns}

    def content(self) -> Iterable[Widget]:
        """Yield the list of columns."""
        yield Ticks(id="columns", title="")

    def on_mount(self) -> None:
        """Tick the columns that are shown."""
        hidden = self.evener.settings.hidden_columns
        shown = frozenset(place for place, key in enumerate(self._keys) if key not in hidden)
        ticks = self.query_one(Ticks)
        ticks.styles.height = min(len(self._keys), max(3, self.app.size.height - 6))
        ticks.offer([(self._titles[key], "") for key in self._keys], shown)
        ticks.focus()

    async def action_dismiss(self, result: None = None) -> None:
        """Save the choice, and close the dialog."""
        ticked = self.query_one(Ticks).ticked
        hidden = tuple(key for place, key in enumerate(self._keys) if place not in ticked)
        self.evener.change_settings(hidden_columns=hidden)
        await super().action_dismiss(result)
