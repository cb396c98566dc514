"""The Trainings screen's panels: the trainings, and of one its ranks, what holds it up, and its last minutes."""

from __future__ import annotations

from collections.abc import Sequence

from evener.devices.types import Snapshot

from ..view.cells import clean
from ..view.ranks import RankRow
from ..view.training_graphs import training_graph_lines
from ..view.training_lines import rank_table, training_lines, training_table
from ..view.trainings import TrainingRow
from .lines import Lines
from .lists import ListPanel


class TrainingPanel(ListPanel[TrainingRow]):
    """A panel with a row per training; the cursor stays on its training as others come and go."""

    OPEN = "screen.open_training"

    def __init__(self) -> None:
        super().__init__("Trainings", id="trainings")
        self.state = ""

    def take(self, rows: Sequence[TrainingRow], state: str) -> None:
        """Show these; `state` is said in the heading."""
        before = self.chosen
        keys = [row.key for row in rows]
        self.rows, self.state = rows, state
        if before is not None and before.key in keys:
            self.cursor = keys.index(before.key)
        self.cursor = max(0, min(self.cursor, self.count - 1))
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows."""
        lines, self.top = training_table(self.rows, *self.size, self.evener.marks, self.position, self.state)
        self.entitle(subtitle=str(self.count))
        self.show(lines)


class RankPanel(ListPanel[RankRow]):
    """A panel with a row per rank of a training."""

    def __init__(self) -> None:
        super().__init__(id="ranks")
        self.training: TrainingRow | None = None

    def take(self, row: TrainingRow | None) -> None:
        """Show the ranks of this one."""
        self.training = row
        self.rows = row.ranks if row is not None else ()
        self.cursor = max(0, min(self.cursor, self.count - 1))
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows."""
        row = self.training
        if row is None:
            self.show(())
            return
        lines, self.top = rank_table(row, *self.size, self.evener.marks, self.position)
        self.entitle(f"Ranks of {clean(row.workload or row.framework, 60)}", str(self.count))
        self.show(lines)


class CausePanel(Lines):
    """A training's figures, what holds it up, and the history of its shares, as far as they fit."""

    def __init__(self) -> None:
        super().__init__(id="causes", classes="panel")
        self.border_title = "What holds it up"

    def take(self, row: TrainingRow | None, at_seconds: float) -> None:
        """Show this one."""
        self.show(training_lines(row, at_seconds, self.size.width, self.evener.marks) if row is not None else ())


class TrainingGraphs(Lines):
    """The last minutes of a training and its devices."""

    def __init__(self) -> None:
        super().__init__(id="training-graphs", classes="panel")
        self.border_title = "Last minutes"

    def take(self, row: TrainingRow | None, snapshot: Snapshot | None) -> None:
        """Show this one."""
        if row is None or snapshot is None or not self.display:
            self.show(())
            return
        app = self.evener
        self.show(training_graph_lines(row, snapshot.devices, app.publisher.history, *self.size, app.marks))
