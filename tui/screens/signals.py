"""The dialog that sends a signal to one process: choose it, then confirm it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Button

from evener.devices.process_signals import send_signal
from evener.devices.types import ProcessSample
from evener.errors import RequestError
from evener.tui.screens.dialogs import ConfirmDialog, Dialog, Text
from evener.tui.view.cells import Span, clean, cut, line

_MEANINGS = {
    "INT": "like Ctrl-C: most trainings save and stop",
    "TERM": "asks the process to end",
    "KILL": "ends it at once; nothing is saved",
}


class SignalDialog(Dialog[None]):
    """Asks which signal to send."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "choose('INT')", "Interrupt"),
        Binding("t", "choose('TERM')", "Terminate"),
        Binding("k", "choose('KILL')", "Kill"),
        Binding("right", "app.focus_next", "Next", show=False),
        Binding("left", "app.focus_previous", "Previous", show=False),
    ]

    def __init__(self, chosen: ProcessSample) -> None:
        super().__init__("Send a signal")
        self._chosen = chosen

    def content(self) -> Iterable[Widget]:
        """The process, what each signal means, a button for each."""
        yield Text()
        with Horizontal():
            yield Button("Cancel", id="cancel", compact=True)
            for name in _MEANINGS:
                yield Button(name, id=name, compact=True)

    def on_mount(self) -> None:
        """Show which process it is."""
        row = self._chosen
        what = cut(clean(row.command), max(1, self.text_width - 2))
        head = line(Span(f"{row.pid} ", "strong"), Span(f"of {clean(row.user)} on {clean(row.device_label)}"))
        signals = [
            line(Span(f"{name[0].lower()} ", "key"), Span(f"{name:<6}"), Span(text, "dim"))
            for name, text in _MEANINGS.items()
        ]
        self.query_one(Text).show([head, line(Span(what, "dim")), line(), *signals, line()])
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Continue with the chosen signal."""
        if event.button.id in _MEANINGS:
            self.action_choose(event.button.id)
        else:
            self.dismiss(None)

    def action_choose(self, name: str) -> None:
        """Ask for confirmation."""
        row = self._chosen
        question = f"Send SIG{name} to process {row.pid} ({cut(clean(row.command), 120)}) of {clean(row.user)}?"
        self.app.push_screen(
            ConfirmDialog("Are you sure?", question, f"Send {name}"), lambda yes: self._send(name, yes)
        )

    def _send(self, name: str, confirmed: bool | None) -> None:
        if confirmed:
            try:
                send_signal(self._chosen, name)
            except RequestError as fault:
                self.evener.say(str(fault), severity="error")
            else:
                self.evener.say(f"SIG{name} was sent to process {self._chosen.pid}.")
        self.dismiss(None)
