"""The dialog that sends a signal to some processes: choose it, then confirm it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Button

from evener.devices.process_signals import send_signal
from evener.devices.types import ProcessSample

from ..view.cells import Line, Span, clean, cut, line
from .dialogs import ConfirmDialog, Dialog, Text

MOST_NAMED = 8  # processes; the others are counted
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

    def __init__(self, chosen: Sequence[ProcessSample]) -> None:
        super().__init__("Send a signal")
        self._chosen = tuple({(each.pid, each.start_time): each for each in chosen}.values())  # once, on all devices

    def content(self) -> Iterable[Widget]:
        """The processes, what each signal means, a button for each."""
        yield Text()
        with Horizontal():
            yield Button("Cancel", id="cancel", compact=True)
            for name in _MEANINGS:
                yield Button(name, id=name, compact=True)

    def on_mount(self) -> None:
        """Show which processes they are."""
        named = [self._process_line(row) for row in self._chosen[:MOST_NAMED]]
        if len(self._chosen) > MOST_NAMED:
            named.append(line(Span(f"and {len(self._chosen) - MOST_NAMED} more", "dim")))
        signals = [
            line(Span(f"{name[0].lower()} ", "key"), Span(f"{name:<6}"), Span(text, "dim"))
            for name, text in _MEANINGS.items()
        ]
        self.query_one(Text).show([*named, line(), *signals, line()])
        self.query_one("#cancel").focus()

    def _process_line(self, row: ProcessSample) -> Line:
        head = Span(f"{row.pid} ", "strong"), Span(f"{clean(row.user)} {clean(row.device_label)} ")
        room = max(1, self.text_width - sum(len(span.text) for span in head))
        return line(*head, Span(cut(clean(row.command), room, self.evener.marks.ellipsis), "dim"))

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Continue with the chosen signal."""
        if event.button.id in _MEANINGS:
            self.action_choose(event.button.id)
        else:
            self.dismiss(None)

    def action_choose(self, name: str) -> None:
        """Ask for confirmation."""
        first = self._chosen[0]
        what = f"process {first.pid} ({cut(clean(first.command), 120)}) of {clean(first.user)}"
        if len(self._chosen) > 1:
            what = f"{len(self._chosen)} processes: {', '.join(str(row.pid) for row in self._chosen)}"
        self.app.push_screen(
            ConfirmDialog("Are you sure?", f"Send SIG{name} to {what}?", f"Send {name}"),
            lambda yes: self._send(name, yes),
        )

    def _send(self, name: str, confirmed: bool | None) -> None:
        for row in self._chosen if confirmed else ():
            with self.evener.saying_faults():
                send_signal(row, name)
                self.evener.say(f"SIG{name} was sent to process {row.pid}.")
        self.dismiss(None)
