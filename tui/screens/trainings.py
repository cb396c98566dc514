"""The Trainings screen and its panels: every training, who waits for whom in one of them, and what
would mend it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.devices.types import Snapshot
from evener.printable import plain

from ..view.cells import Line, whole_lines
from ..view.ranks import RankRow
from ..view.table import Grid
from ..view.training_lines import (
    TRAININGS,
    arrange_trainings,
    rank_grid,
    training_graph_lines,
    training_lines,
)
from ..view.trainings import TrainingRow, join_trainings
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel
from .base import SnapshotScreen
from .dialogs import confirm

_BARS = 2  # rows of the bar on top and the keys
_LEAST_LOG = 5


class TrainingsScreen(SnapshotScreen):
    """The training under the cursor is shown in full."""

    NAME = "trainings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("x", "stop_training", "Stop")]

    def panels(self) -> Iterable[Widget]:
        """Trainings, ranks, causes, graphs."""
        yield TrainingPanel()
        yield RankPanel()
        yield Lines("What holds it up", id="causes", classes="panel")
        yield Lines("Last minutes", id="training-graphs", classes="panel")
        yield Lines("Log", id="training-log", classes="panel")

    def redraw(self) -> None:
        """Draw the trainings of the snapshot."""
        if (snapshot := self.shown) is not None:
            with self.app.batch_update():
                self.query_one(TrainingPanel).take(join_trainings(snapshot), self.state)
                self._show_chosen(snapshot)

    def on_list_panel_moved(self) -> None:
        """The ranks are those of the training under the cursor."""
        if self.shown is not None:
            self._show_chosen(self.shown)

    def _show_chosen(self, snapshot: Snapshot) -> None:
        trainings, app = self.query_one(TrainingPanel), self.evener
        row = trainings.chosen
        ranks = len(row.ranks) if row is not None else 0
        frame = self.settle_frames()
        height = app.size.height - _BARS
        log = self._log_rows(height, shares_rows=row is not None)
        rows = arrange_trainings(height - log, frame, trainings.count, ranks)
        self.place_panels({**rows, "#training-log": log})
        self._show_log()
        self.query_one(RankPanel).take(row)
        causes, graphs = self.query_one("#causes", Lines), self.query_one("#training-graphs", Lines)
        causes.show(
            training_lines(row, snapshot.at_seconds, causes.size.width) if row is not None else ()
        )
        if row is None or not graphs.display:
            graphs.show(())
        else:
            graphs.show(
                training_graph_lines(row, snapshot.devices, app.publisher.history, *graphs.size)
            )

    def _log_rows(self, height: int, *, shares_rows: bool) -> int:
        """Rows for the log of a training that was started here; most of them until it reports."""
        if self.evener.training is None:
            return 0
        return max(_LEAST_LOG, height // 3) if shares_rows else max(_LEAST_LOG, height - 8)

    def _show_log(self) -> None:
        """Draw the end of that log, with how the training is."""
        training, panel = self.evener.training, self.query_one("#training-log", Lines)
        if training is None:
            return
        panel.entitle(training.command, training.state_words())
        width, height = panel.size
        text = "\n".join(training.read_tail(height))
        panel.show(whole_lines(text, max(1, width))[-height:] if height else ())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to stop a training only where one was started here and runs."""
        if action == "stop_training":
            training = self.evener.training
            return training is not None and training.runs and not self.evener.readonly
        return super().check_action(action, parameters)

    def action_stop_training(self) -> None:
        """Stop the training that was started here, after asking."""
        training = self.evener.training
        if training is not None:
            question = f"Stop {training.command}? It gets the signal that Ctrl-C sends."
            confirm(self.evener, "Stop", question, training.stop)

    def action_open_training(self) -> None:
        """Show all that is said of the training under the cursor."""
        chosen = self.query_one(TrainingPanel).rows[self.query_one(TrainingPanel).cursor]

        def draw(width: int) -> tuple[Line, ...]:
            snapshot = self.shown
            there = join_trainings(snapshot) if snapshot is not None else ()
            row = next((each for each in there if each.key == chosen.key), chosen)
            return training_lines(row, snapshot.at_seconds if snapshot is not None else 0.0, width)

        self.open_details("Training", draw)


class TrainingPanel(ListPanel[TrainingRow]):
    """A panel with a row per training; the cursor stays on its training as others come and go."""

    OPEN = "screen.open_training"

    def __init__(self) -> None:
        super().__init__("Trainings", id="trainings")
        self.state = ""

    def take(self, rows: Sequence[TrainingRow], state: str) -> None:
        """Show trainings; `state` is said in the heading."""
        self.state = state
        self.place_rows(rows)
        self.redraw()

    def identity(self, row: TrainingRow) -> Hashable:
        """The training."""
        return row.key

    def grid(self) -> Grid[TrainingRow]:
        """The table of these rows."""
        return TRAININGS

    def redraw(self) -> None:
        """Draw the rows; the heading says the screen's state."""
        self.entitle(subtitle=str(self.count))
        self._draw_table(self.grid(), note=self.state)


class RankPanel(ListPanel[RankRow]):
    """A panel with a row per rank of a training."""

    def __init__(self) -> None:
        super().__init__(id="ranks")

    def take(self, row: TrainingRow | None) -> None:
        """Show the ranks of a training."""
        self.place_rows(row.ranks if row is not None else ())
        if row is not None:
            self.entitle(f"Ranks of {plain(row.workload or row.framework, 60)}", str(self.count))
        self.redraw()

    def grid(self) -> Grid[RankRow]:
        """The table of these rows."""
        return rank_grid(self.rows)

    def redraw(self) -> None:
        """Draw the ranks; nothing without a training."""
        if self.rows:
            super().redraw()
        else:
            self.show(())
