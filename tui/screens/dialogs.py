"""Base classes of dialogs, the dialogs for signals and confirmations, and the help text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input

from evener.devices.processes import send_signal
from evener.devices.types import ProcessSample
from evener.errors import EvenerError
from evener.printable import plain

from ..base_app import BaseApp, UsesApp
from ..view.cells import Line, Mark, Span, Tone, cut, line, span_cells, text_lines, wrap
from ..widgets.lines import Lines

AnswerT = TypeVar("AnswerT")
WIDEST = 116  # cells of a wide dialog's text


class Text(Lines):
    """Widget with lines of text. Its height is the number of lines."""

    def show(self, lines: Iterable[Line]) -> None:
        """Show the lines, and set the height to fit them."""
        kept = tuple(lines)
        self.styles.height = max(1, len(kept))
        super().show(kept)


class Dialog(UsesApp, ModalScreen[AnswerT], Generic[AnswerT]):
    """Base class of dialogs, which are titled boxes that Escape or q closes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._box_title = title

    def compose(self) -> ComposeResult:
        """Yield the box with its content."""
        with Vertical(classes="box") as box:
            box.border_title = self._box_title
            box.border_subtitle = "Esc closes"
            yield from self.content()

    def content(self) -> Iterable[Widget]:
        """Yield the widgets in the box; subclasses implement it."""
        raise NotImplementedError

    @property
    def text_width(self) -> int:
        """The width in cells for text in the box."""
        return max(1, min(WIDEST if self.has_class("-wide") else 72, self.app.size.width - 4))


class DetailsDialog(Dialog[None]):
    """Dialog with scrolling text, which is redrawn at each reading of the devices.

    `draw` gets a width in cells and returns the lines. The text is up to 72 cells wide, or up to
    116 cells if `wide` is set.
    """

    def __init__(
        self, title: str, draw: Callable[[int], tuple[Line, ...]], *, wide: bool = False
    ) -> None:
        super().__init__(title)
        self._draw = draw
        self.set_class(wide, "-wide")

    def content(self) -> Iterable[Widget]:
        """Yield the scrolling text."""
        with VerticalScroll(id="scroll"):
            yield Text()

    def on_mount(self) -> None:
        """Redraw the text at each reading."""
        self.watch(self.app, "snapshot", self.redraw)

    def on_resize(self) -> None:
        """Wrap the text to the new width."""
        self.redraw()

    def redraw(self) -> None:
        """Redraw the text."""
        self.query_one(Text).show(self._draw(max(1, self.text_width - 1)))


class ChoiceDialog(Dialog[str]):
    """Dialog with a question and a button for each answer. It returns the key of the chosen answer.

    `answers` maps keys to labels. The user can click a button or press the key of an answer. The
    first answer is focused.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "app.focus_next", "Next", show=False),
        Binding("left", "app.focus_previous", "Previous", show=False),
    ]

    def __init__(
        self, title: str, draw: Callable[[int], Iterable[Line]], answers: Mapping[str, str]
    ) -> None:
        super().__init__(title)
        self._draw = draw
        self.answers = answers  # labels of the answers by their keys

    def content(self) -> Iterable[Widget]:
        """Yield the question and the buttons."""
        yield Text(id="question")
        with Horizontal():
            for key, label in self.answers.items():
                yield Button(
                    label,
                    id=f"answer-{key}",
                    compact=True,
                    variant="error" if key == "y" else "default",
                )

    def on_mount(self) -> None:
        """Show the question, and focus the first answer."""
        self.query_one(Text).show([*self._draw(self.text_width), line()])
        self.query(Button).first().focus()

    def on_key(self, event: Key) -> None:
        """Choose the answer whose key was pressed."""
        if event.key in self.answers:
            self.dismiss(event.key)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Close the dialog with the answer of the button that was pressed."""
        self.dismiss((event.button.id or "")[-1])


def confirm(
    app: App[int], action: str, question: str, on_confirm: Callable[[], Any], title: str = ""
) -> None:
    """Ask a question, and call `on_confirm` only if the user confirms the action.

    `action` is the label of the button that confirms. It is also the dialog's title, unless `title`
    is given.
    """

    def draw(width: int) -> Iterable[Line]:
        return (line(Span(row)) for row in wrap(plain(question), width, 8))

    answers = {"n": "No", "y": action}
    app.push_screen(
        ChoiceDialog(title or action, draw, answers),
        lambda key: on_confirm() if key == "y" else None,
    )


class FieldDialog(Dialog[bool]):
    """Base class of dialogs with one input field and a hint.

    A dialog returns True once it has used the input, or None if the user closes it before that.
    """

    def __init__(self, title: str, field: Input, hint: str) -> None:
        super().__init__(title)
        self._field, self._hint = field, hint

    def content(self) -> Iterable[Widget]:
        """Yield the field and the hint."""
        yield self._field
        yield Text(id="hint")

    def on_mount(self) -> None:
        """Show the hint, and focus the field."""
        self.show_message(self._hint)
        self._field.focus()

    def show_message(self, text: str, *, is_error: bool = False) -> None:
        """Replace the hint with a message, which looks like an error if `is_error` is set."""
        rows = wrap(plain(text), self.text_width, 8)
        self.query_one("#hint", Text).show(
            [line(Span(row, "bad" if is_error else "dim")) for row in rows]
        )

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Submit the text, and close the dialog or show the error."""
        event.stop()
        try:
            done = await self.submit(event.value.strip())
        except EvenerError as fault:
            self.show_message(str(fault), is_error=True)
        else:
            if done:
                self.dismiss(True)

    async def submit(self, text: str) -> bool:
        """Use the text, and return whether the dialog should close.

        Subclasses implement it. If it raises an EvenerError, the dialog shows that.
        """
        raise NotImplementedError


MOST_NAMED = 8  # further processes are only counted
_MEANINGS = {
    "INT": "like Ctrl-C: most trainings save and stop",
    "TERM": "asks the process to end",
    "KILL": "ends it at once; nothing is saved",
}


def choose_signal(app: BaseApp, processes: Sequence[ProcessSample]) -> None:
    """Ask which signal to send to some processes, and send it after a confirmation."""
    once = tuple(
        {(process.pid, process.start_time): process for process in processes}.values()
    )  # a process may be on several devices

    def draw(width: int) -> Iterable[Line]:
        yield from (_process_line(row, width) for row in once[:MOST_NAMED])
        if len(once) > MOST_NAMED:
            yield line(Span(f"and {len(once) - MOST_NAMED} more", "dim"))
        yield line()
        for name, text in _MEANINGS.items():
            yield line(Span(f"{name[0].lower()} ", "key"), Span(f"{name:<6}"), Span(text, "dim"))

    def ask(key: str | None) -> None:
        name = next((name for name in _MEANINGS if name[0].lower() == key), None)
        if name is None:
            return
        what = (
            f"process {once[0].pid} ({cut(plain(once[0].command), 120)}) of {plain(once[0].user)}"
        )
        if len(once) > 1:
            what = f"{len(once)} processes: {', '.join(str(row.pid) for row in once)}"
        confirm(
            app, f"Send {name}", f"Send SIG{name} to {what}?", lambda: send(name), "Are you sure?"
        )

    def send(name: str) -> None:
        for row in once:
            with app.showing_errors():
                send_signal(row, name)
                app.show_message(f"SIG{name} was sent to process {row.pid}.")

    answers = {"c": "Cancel"} | {name[0].lower(): name for name in _MEANINGS}
    app.push_screen(ChoiceDialog("Send a signal", draw, answers), ask)


def _process_line(row: ProcessSample, width: int) -> Line:
    head = Span(f"{row.pid} ", "strong"), Span(f"{plain(row.user)} {plain(row.device_label)} ")
    return line(*head, Span(cut(plain(row.command), max(1, width - span_cells(head))), "dim"))


_KEYS = {
    "Everywhere": (
        ("1 2 3 4", "Monitor, Balance, Runs, Trainings"),
        ("Tab", "next panel"),
        ("↑ ↓ j k", "move; Page Up, Page Down, Home, End"),
        ("Enter", "details of the row"),
        ("Ctrl-P", "search commands, settings and runs"),
        ("F2 ,", "all settings"),
        ("T", "next theme: dark, light, high contrast"),
        ("? h F1", "this page"),
        ("q, Ctrl-C", "quit, quit at once"),
    ),
    "Lists of processes and runs": (
        ("/", "filter; Esc ends it and removes all marks"),
        ("s F6, S", "sort by the next column, reverse the order"),
        ("Space", "mark: K and d act on all marked rows"),
    ),
    "Monitor, Trainings": (
        ("p", "pause the picture, resume"),
        ("+ -", "sample more or less often"),
        ("r F5", "redraw"),
    ),
    "Monitor": (
        ("← →", "read the graphs at another moment; Shift: ten steps; or click"),
        ("[ ]", "less or more time in the graphs; so does the wheel"),
        ("l", "one scale for all devices, or each its own"),
        ("a", "every alert since the start"),
        ("C", "choose the columns"),
        ("K F9", "send a signal, after asking; not with --readonly"),
    ),
    "Balance": (
        ("Ctrl-S", "start what the form says"),
        ("Ctrl-T", "dry run: ten seconds on one device, and what fits"),
        ("Ctrl-O", "show the other options, or hide them"),
        ("Enter", "all of a result, or of a measurement"),
        ("p", "pause: no new probe starts; resume"),
        ("x", "stop; the best plan so far is kept"),
        ("← →", "read the curves at another point; or click"),
        ("l", "log-2 or linear axes"),
        ("n", "new search, when the last one has ended, or in place of a replay"),
    ),
    "Runs": (
        ("Space", "compare this run with the one under the cursor"),
        ("Enter", "everything that it found"),
        ("r", "replay its journal"),
        ("d Delete", "delete, after asking"),
        ("F5", "reload"),
    ),
    "A run that has ended": (
        ("c", "continue: measure more"),
        ("e", "write the plan as TOML or JSON"),
        ("g", "go: train your script with the plan, here; x on Trainings stops it"),
        ("w", "write the report as HTML"),
        ("t", "the traceback, if something failed"),
    ),
}


def help_lines(notes: Sequence[str], width: int) -> tuple[Line, ...]:
    """Return the help: all keys, the meaning of marks, and warnings about this machine."""
    lines: list[Line] = []
    for title, keys in _KEYS.items():
        lines.append(line(Span(title, "strong")))
        for key, text in keys:
            lines += _entry(key, text, "key", width)
    lines += [line(), line(Span("Figures", "strong")), *_legend(width)]
    if notes:
        lines += [line(), line(Span("This machine", "strong"))]
        lines += [row for note in notes for row in text_lines(note, width, 6, "warn", indent=2)]
    return tuple(lines)


def _entry(sign: str, text: str, tone: Tone, width: int) -> list[Line]:
    rows = wrap(text, max(8, width - 14), 4)
    signs = [sign, *[""] * (len(rows) - 1)]
    return [
        line(Span(f"  {sign:<12}", tone), Span(row)) for sign, row in zip(signs, rows, strict=True)
    ]


def _legend(width: int) -> list[Line]:
    rows: tuple[tuple[str, str, Tone], ...] = (
        (Mark.NONE, "this device doesn't report it", "dim"),
        (Mark.PENDING, "not read yet: a rate needs two readings", "dim"),
        (f"{Mark.DENIED} denied", "this user may not read it", "dim"),
        (f"{Mark.LOST} lost", "the device or its driver is gone", "bad"),
        (f"{Mark.STALE}62", "an old value; details say how old", "dim"),
        (Mark.SIMULATED, "ran on simulated devices, whose speeds are read from a file", "warn"),
        (Mark.ALARM, "the device reported an error; details say which", "bad"),
        (
            "12P",
            (
                "12 % of the time throttled: P power, T thermal, B brake, S sync or software, H "
                "hardware"
            ),
            "warn",
        ),
        ("history", "samples/s where a training reports them, else utilisation", "speed"),
        ("link", "PCIe and NVLink together, both ways, in bytes/s", "text"),
        ("work", "the part of a training's step that isn't waiting for other ranks", "speed"),
        ("SM TC DR", "multiprocessors, tensor cores, memory bandwidth: per cent busy", "text"),
    )
    return [entry for sign, text, tone in rows for entry in _entry(sign, text, tone, width)]
