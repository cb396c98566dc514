"""The dialog of a dry run, which tries a model before a search."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Button

from evener.balancer.events import ProbeProgress
from evener.balancer.jobs import make_job
from evener.balancer.number_format import duration
from evener.balancer.request import Request
from evener.balancer.trials import DryRunResult, dry_run
from evener.errors import EvenerError

from ..text.dry_run import dry_run_lines
from ..view.cells import Line, Tone, line, text_lines, whole_lines
from .dialogs import Dialog, Text


class DryRunDialog(Dialog[bool]):
    """Dialog that tries a model for a few steps on one device, and shows what fits in memory.

    It returns True if the user then starts the search. Closing it stops the dry run.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "start", "Start the search", key_display="Ctrl-S"),
    ]

    def __init__(self, request: Request) -> None:
        super().__init__("Dry run")
        self.add_class("-wide")
        self._request = request
        self._stop = threading.Event()

    def content(self) -> Iterable[Widget]:
        """Yield the text and the buttons."""
        yield Text(id="findings")
        with Horizontal():
            yield Button("Close", id="close", compact=True)
            yield Button("Start the search", id="begin", variant="success", compact=True)

    def on_mount(self) -> None:
        """Begin the dry run."""
        self.query_one("#begin").display = False
        self._show_text("The model is being built, and takes a few steps on one device.")
        self.run_worker(self._try())

    def on_unmount(self) -> None:
        """Stop the dry run."""
        self._stop.set()

    async def _try(self) -> None:
        try:
            result = await asyncio.to_thread(self._measure)
        except EvenerError as fault:
            self._show_text(str(fault), "bad")
            return
        if result is None:
            return
        width = self.text_width
        rows: list[Line] = []
        for text in dry_run_lines(result):
            rows += whole_lines(text, width) if text else (line(),)
        self.query_one(Text).show([*rows, line()])
        self.query_one("#begin").display = True
        self.query_one("#begin", Button).focus()

    def _measure(self) -> DryRunResult | None:
        return dry_run(make_job(self._request), self._report, self._stop)

    def _report(self, progress: ProbeProgress) -> None:
        """Show the progress of the dry run. Called in its thread."""
        if not self._stop.is_set():
            words = f"{progress.phase}, {duration(progress.at_seconds)}"
            self.app.call_later(self._show_text, f"The model on one device: {words}.")

    def _show_text(self, text: str, tone: Tone = "text") -> None:
        if self.is_mounted:
            self.query_one(Text).show([*text_lines(text, self.text_width, 12, tone, 0), line()])

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Close the dialog. Its result says whether the search should start."""
        event.stop()
        self.dismiss(event.button.id == "begin")

    def action_start(self) -> None:
        """Close the dialog and start the search."""
        self.dismiss(True)
