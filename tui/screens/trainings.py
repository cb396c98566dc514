"""The Trainings screen: every training, who waits for whom in one of them, and what would mend it."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget

from ..view.cells import Line
from ..view.training_lines import arrange_trainings, training_lines
from ..view.trainings import TrainingRow, join_trainings
from ..widgets.trainings import CausePanel, RankPanel, TrainingGraphs, TrainingPanel
from .base import SnapshotScreen

_BARS = 2  # rows of the bar on top and the keys


class TrainingsScreen(SnapshotScreen):
    """The training under the cursor is shown in full."""

    NAME = "trainings"

    def __init__(self) -> None:
        super().__init__()
        self._placed: tuple[object, ...] = ()

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
        if (placed := (self.app.size, trainings, ranks)) != self._placed:
            self._placed = placed
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
            return training_lines(row, snapshot.at_seconds if snapshot is not None else 0.0, width, self.evener.marks)

        self.open_details("Training", draw)
