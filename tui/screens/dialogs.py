"""Dialogs over a screen: the frame that they share, and the one that asks before something can't be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button

from evener.tui.view.cells import Line, Span, clean, line, wrap
from evener.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from evener.tui.app.app import EvenerApp

AnswerT = TypeVar("AnswerT")


class Text(Lines):
    """Lines that take as many rows as there are."""

    def show(self, lines: Iterable[Line]) -> None:
        """Draw these lines, on exactly as many rows."""
        kept = tuple(lines)
        self.styles.height = max(1, len(kept))
        super().show(kept)


class Dialog(ModalScreen[AnswerT], Generic[AnswerT]):
    """A box over the screen; Escape leaves it without an answer."""

    TITLE_TEXT = ""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Close")]

    def compose(self) -> ComposeResult:
        """The frame and what is in it."""
        with Vertical(classes="box") as box:
            box.border_title = self.TITLE_TEXT
            box.border_subtitle = "esc close"
            yield from self.content()

    def content(self) -> Iterable[Widget]:
        """What stands in the frame."""
        raise NotImplementedError

    def action_leave(self) -> None:
        """Close without an answer."""
        self.dismiss(None)

    @property
    def evener(self) -> EvenerApp:
        """The app, by its own type."""
        return cast("EvenerApp", self.app)

    @property
    def text_width(self) -> int:
        """Cells for text inside the frame."""
        return max(1, min(72, self.app.size.width - 4))

    @property
    def scrolled_width(self) -> int:
        """Cells for text that a scroll bar may stand beside."""
        return max(1, self.text_width - 1)


class ConfirmDialog(Dialog[bool]):
    """Asks before something that can't be undone; only its own button, or `y`, says yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", "Other", show=False),
    ]

    def __init__(self, title: str, question: str, yes: str) -> None:
        super().__init__()
        self.TITLE_TEXT = title
        self._question = question
        self._yes = yes

    def content(self) -> Iterable[Widget]:
        """The question and two buttons; the harmless one has the focus."""
        yield Text(id="question")
        with Horizontal():
            yield Button("No", id="no", compact=True)
            yield Button(self._yes, id="yes", variant="error", compact=True)

    def on_mount(self) -> None:
        """Ask."""
        rows = wrap(clean(self._question), self.text_width, 8)
        self.query_one(Text).show([*(line(Span(row)) for row in rows), line()])
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """Answer by key."""
        self.dismiss(yes)
