"""The settings dialog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, get_args

import msgspec
from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import DescendantBlur
from textual.widget import Widget
from textual.widgets import Input, Static

from ..base_app import INTERVALS_SECONDS, BaseApp
from ..settings import ThemeName
from ..view.cells import text_lines
from ..view.time_graph import SPANS
from ..widgets.lists import OneOf
from .dialogs import Dialog, Text

THROTTLED_PERCENTS = (5.0, 10.0, 20.0, 50.0)
PLAN_PERCENTS = (70.0, 80.0, 90.0, 95.0)


class Choice(NamedTuple):
    """A setting with a few values to choose from. `format_value` converts a value to its label."""

    key: str  # a field of the settings, or "alerts." and a field of the alert settings
    label: str
    values: tuple[Any, ...]
    format_value: Callable[[Any], str] = str


def _switch(value: bool) -> str:
    return "on" if value else "off"


def _seconds(value: float) -> str:
    return f"{value / 60:g} min" if value >= 60 else f"{value:g} s"


def _percent(value: float) -> str:
    return f"{value:g} %"


CHOICES = (
    Choice("theme", "theme", get_args(ThemeName)),
    Choice("interval_seconds", "time between readings", INTERVALS_SECONDS, _seconds),
    Choice("graph_seconds", "time in graphs", SPANS, _seconds),
    Choice("common_scale", "one scale for all devices' graphs", (True, False), _switch),
    Choice("log_axes", "log-2 axes of a search's curves", (True, False), _switch),
    Choice("alerts.bell", "ring the bell on an alert", (False, True), _switch),
    Choice("alerts.throttled_percent", "alert: throttled above", THROTTLED_PERCENTS, _percent),
    Choice("alerts.plan_percent", "alert: training below its plan", PLAN_PERCENTS, _percent),
)
COMMAND_LABEL = "program on an alert"
LABELS = (*(choice.label for choice in CHOICES), COMMAND_LABEL)


def read_setting(app: BaseApp, key: str) -> Any:
    """Return the value of a setting by its key, such as "alerts.bell"."""
    value: Any = app.settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


class SettingsDialog(Dialog[None]):
    """Dialog with all settings. Changes take effect immediately.

    The setting with the label `first` is focused, or the first one if no setting has it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
    ]

    def __init__(self, first: str = "") -> None:
        super().__init__("Settings")
        self._first = first  # label of the row that is focused first

    def content(self) -> Iterable[Widget]:
        """Yield a row for each setting, and a hint."""
        for place, choice in enumerate(CHOICES):
            value = read_setting(self.evener, choice.key)
            words = [choice.format_value(each) for each in self._values(choice)]
            field = OneOf(words, id=f"choice-{place}", value=choice.format_value(value))
            yield self._row(choice.label, field)
        command = self.evener.settings.alerts.command
        yield self._row(COMMAND_LABEL, Input(command, "none", id="command", compact=True))
        yield Text(id="hint")

    def _row(self, label: str, field: Widget) -> Widget:
        return Horizontal(Static(label, classes="label", markup=False), field, classes="field")

    def _values(self, choice: Choice) -> Sequence[Any]:
        """Return the values to choose from for a setting.

        The current value is put in front if it isn't among them.
        """
        value = read_setting(self.evener, choice.key)
        return choice.values if value in choice.values else (value, *choice.values)

    def on_mount(self) -> None:
        """Show where the settings are kept, and focus a row."""
        path = self.evener.settings_file
        kept = f"Kept in {path}." if path is not None else "They hold until the app ends."
        hint = f"Up and down choose a setting, left and right change it. {kept} Columns: key C."
        self.query_one("#hint", Text).show(text_lines(hint, self.text_width, 4, "dim", 0))
        fields = [*self.query(OneOf), self.query_one(Input)]
        fields[LABELS.index(self._first) if self._first in LABELS else 0].focus()

    @on(OneOf.Changed)
    def _changed(self) -> None:
        """Apply the settings that the user has changed."""
        for place, choice in enumerate(CHOICES):
            word = self.query_one(f"#choice-{place}", OneOf).value
            for value in self._values(choice):
                if choice.format_value(value) == word:
                    self._set(choice.key, value)

    def _set(self, key: str, value: Any) -> None:
        app = self.evener
        if read_setting(app, key) == value:
            return
        alert, _, field = key.rpartition(".")
        if alert:
            app.change_settings(
                alerts=msgspec.structs.replace(app.settings.alerts, **{field: value})
            )
        else:
            app.change_settings(**{key: value})
        app.apply_settings()

    @on(Input.Submitted)
    @on(DescendantBlur)
    def _take_command(self) -> None:
        """Apply the command for alerts once the user has left its input field."""
        self._set("alerts.command", self.query_one(Input).value.strip())

    async def action_dismiss(self, result: None = None) -> None:
        """Apply the command for alerts, and close the dialog."""
        self._take_command()
        await super().action_dismiss(result)
