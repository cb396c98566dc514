"""Dialogs over a screen: a page of text, a question before what can't be undone, a line to type, a signal to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input

from evener.devices.processes import send_signal
from evener.devices.types import ProcessSample
from evener.errors import EvenerError

from ..base_app import UsesApp
from ..text.formatting import plain
from ..view.cells import Line, Span, cut, line, wrap
from ..widgets.lines import Lines

AnswerT = TypeVar("AnswerT")
WIDEST = 116  # cells of a wide dialog's text


class Text(Lines):
    """Lines that take as many rows as there are."""

    def show(self, lines: Iterable[Line]) -> None:
        """Draw these lines, on exactly as many rows."""
        kept = tuple(lines)
        self.styles.height = max(1, len(kept))
        super().show(kept)


class Dialog(UsesApp, ModalScreen[AnswerT], Generic[AnswerT]):
    """A box over the screen; Escape closes it without an answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._box_title = title

    def compose(self) -> ComposeResult:
        """The frame and its content."""
        with Vertical(classes="box") as box:
            box.border_title = self._box_title
            box.border_subtitle = "esc close"
            yield from self.content()

    def content(self) -> Iterable[Widget]:
        """The widgets inside the frame."""
        raise NotImplementedError

    @property
    def text_width(self) -> int:
        """Cells for text inside the frame."""
        return max(1, min(WIDEST if self.has_class("-wide") else 72, self.app.size.width - 4))


class DetailsDialog(Dialog[None]):
    """A page of text, scrolled where it doesn't fit; `draw(width)` gives its lines, again at each new snapshot."""

    def __init__(self, title: str, draw: Callable[[int], tuple[Line, ...]], *, wide: bool = False) -> None:
        super().__init__(title)
        self._draw = draw
        self.set_class(wide, "-wide")

    def content(self) -> Iterable[Widget]:
        """The page."""
        with VerticalScroll(id="scroll"):
            yield Text()

    def on_mount(self) -> None:
        """Follow the newest snapshot."""
        self.watch(self.app, "snapshot", self.redraw)

    def on_resize(self) -> None:
        """Wrap the text again."""
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the page, leaving a column for the scroll bar."""
        self.query_one(Text).show(self._draw(max(1, self.text_width - 1)))


class ConfirmDialog(Dialog[bool]):
    """Asks before something that can't be undone; only its own button, or `y`, says yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n", "dismiss(False)", "No"),
        Binding("left,right", "app.focus_next", "Other", show=False),
    ]

    def __init__(self, title: str, question: str, yes: str) -> None:
        super().__init__(title)
        self._question = question
        self._yes = yes

    def content(self) -> Iterable[Widget]:
        """The question and two buttons."""
        yield Text(id="question")
        with Horizontal():
            yield Button("No", id="no", compact=True)
            yield Button(self._yes, id="yes", variant="error", compact=True)

    def on_mount(self) -> None:
        """Show the question, and focus the harmless button."""
        rows = wrap(plain(self._question), self.text_width, 8)
        self.query_one(Text).show([*(line(Span(row)) for row in rows), line()])
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer by button."""
        self.dismiss(event.button.id == "yes")


def confirm(app: App[int], action: str, question: str, then: Callable[[], Any]) -> None:
    """Ask, and call `then` if the answer is yes; `action` is the title and the button."""
    app.push_screen(ConfirmDialog(action, question, action), lambda yes: then() if yes else None)


class FieldDialog(Dialog[bool]):
    """Asks for one line; what is wrong with it is said below."""

    def __init__(self, title: str, field: Input, hint: str) -> None:
        super().__init__(title)
        self._field, self._hint = field, hint

    def content(self) -> Iterable[Widget]:
        """The line, and the hint."""
        yield self._field
        yield Text(id="hint")

    def on_mount(self) -> None:
        """Focus the line."""
        self.tell(self._hint)
        self._field.focus()

    def tell(self, text: str, *, bad: bool = False) -> None:
        """Say this below the line."""
        rows = wrap(plain(text), self.text_width, 8)
        self.query_one("#hint", Text).show([line(Span(row, "bad" if bad else "dim")) for row in rows])

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Do it, or say why not."""
        event.stop()
        try:
            done = await self.take(event.value.strip())
        except EvenerError as fault:
            self.tell(str(fault), bad=True)
        else:
            if done:
                self.dismiss(True)

    async def take(self, text: str) -> bool:
        """Do what the line says, and whether that is all; EvenerError says what is wrong with it."""
        raise NotImplementedError


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
        head = Span(f"{row.pid} ", "strong"), Span(f"{plain(row.user)} {plain(row.device_label)} ")
        room = max(1, self.text_width - sum(len(span.text) for span in head))
        return line(*head, Span(cut(plain(row.command), room), "dim"))

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Continue with the chosen signal."""
        if event.button.id in _MEANINGS:
            self.action_choose(event.button.id)
        else:
            self.dismiss(None)

    def action_choose(self, name: str) -> None:
        """Ask for confirmation."""
        first = self._chosen[0]
        what = f"process {first.pid} ({cut(plain(first.command), 120)}) of {plain(first.user)}"
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
