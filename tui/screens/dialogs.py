"""Dialogs over a screen: their frame, a page of text, and a question before something that can't be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input

from evener.errors import EvenerError

from ..runtime.base_app import UsesApp
from ..view.cells import Line, Span, clean, line, wrap
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
        rows = wrap(clean(self._question), self.text_width, 8)
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
        rows = wrap(clean(text), self.text_width, 8)
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
