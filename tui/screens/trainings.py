"""The Trainings screen and its panels: every training, who waits for whom in one of them, and what would mend it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from textual.widget import Widget

from evener.devices.types import Snapshot

from ..text.formatting import plain
from ..view.cells import Line
from ..view.ranks import RankRow
from ..view.training_lines import arrange_trainings, rank_table, training_graph_lines, training_lines, training_table
from ..view.trainings import TrainingRow, join_trainings
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel
from .base import SnapshotScreen

_BARS = 2  # rows of the bar on top and the keys


class TrainingsScreen(SnapshotScreen):
    """The training under the cursor is shown in full."""

    NAME = "trainings"

    def panels(self) -> Iterable[Widget]:
        """Trainings, ranks, causes, graphs."""
        yield TrainingPanel()
        yield RankPanel()
        yield CausePanel()
        yield TrainingGraphs()

    def redraw(self) -> None:
        """Draw the trainings of the snapshot."""
        snapshot = self.shown
        if snapshot is None:
            return
        with self.app.batch_update():
            trainings = self.query_one(TrainingPanel)
            trainings.take(join_trainings(snapshot), self.state)
            self._show_chosen(trainings.chosen)

    def on_list_panel_moved(self) -> None:
        """The ranks are those of the training under the cursor."""
        self._show_chosen(self.query_one(TrainingPanel).chosen)

    def _show_chosen(self, row: TrainingRow | None) -> None:
        trainings, ranks = self.query_one(TrainingPanel).count, len(row.ranks) if row is not None else 0
        width, height = self.app.size
        rows = arrange_trainings(width, height - _BARS, trainings, ranks)
        upper = (TrainingPanel, rows.trainings), (RankPanel, rows.ranks)
        self.place_panels(rows.framed, *upper, (CausePanel, rows.text), (TrainingGraphs, rows.graphs))
        self.query_one(RankPanel).take(row)
        snapshot = self.shown
        self.query_one(CausePanel).take(row, snapshot.at_seconds if snapshot is not None else 0.0)
        self.query_one(TrainingGraphs).take(row, snapshot)

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

    def redraw(self) -> None:
        """Rebuild the rows."""
        lines, self.top = training_table(self.rows, *self.size, self.position, self.state)
        self.entitle(subtitle=str(self.count))
        self.show(lines)


class RankPanel(ListPanel[RankRow]):
    """A panel with a row per rank of a training."""

    def __init__(self) -> None:
        super().__init__(id="ranks")
        self.training: TrainingRow | None = None

    def take(self, row: TrainingRow | None) -> None:
        """Show the ranks of a training."""
        self.training = row
        self.place_rows(row.ranks if row is not None else ())
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows."""
        row = self.training
        if row is None:
            self.show(())
            return
        lines, self.top = rank_table(row, *self.size, self.position)
        self.entitle(f"Ranks of {plain(row.workload or row.framework, 60)}", str(self.count))
        self.show(lines)


class CausePanel(Lines):
    """A training's figures, what holds it up, and the history of its shares, as far as they fit."""

    def __init__(self) -> None:
        super().__init__(id="causes", classes="panel")
        self.border_title = "What holds it up"

    def take(self, row: TrainingRow | None, at_seconds: float) -> None:
        """Show what is found of a training."""
        self.show(training_lines(row, at_seconds, self.size.width) if row is not None else ())


class TrainingGraphs(Lines):
    """The last minutes of a training and its devices."""

    def __init__(self) -> None:
        super().__init__(id="training-graphs", classes="panel")
        self.border_title = "Last minutes"

    def take(self, row: TrainingRow | None, snapshot: Snapshot | None) -> None:
        """Show the graphs of a training."""
        if row is None or snapshot is None or not self.display:
            self.show(())
            return
        app = self.evener
        self.show(training_graph_lines(row, snapshot.devices, app.publisher.history, *self.size))
