"""The Trainings screen: training runs, their ranks, and what slows them down."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from evener.devices.types import Snapshot
from evener.launch.summary import describe_summary, load_summary
from evener.printable import plain

from ..view.cells import Line, whole_lines
from ..view.ranks import RankRow
from ..view.share_history import share_lines
from ..view.step_bars import lane_lines, legend_line
from ..view.table import Grid, table_lines
from ..view.time_graph import nearest_span
from ..view.training_graphs import training_graph_lines
from ..view.training_lines import (
    LEGEND_ROWS,
    TRAININGS,
    PanelRows,
    arrange_trainings,
    rank_grid,
    training_lines,
)
from ..view.trainings import EndedTrainings, TrainingRow, join_trainings
from ..widgets.lines import Lines
from ..widgets.lists import ListPanel
from .base import SnapshotScreen
from .dialogs import confirm

_BARS = 2  # lines for the top bar and the keys
_LEAST_LOG = 5


class TrainingsScreen(SnapshotScreen):
    """The Trainings screen: a table of training runs, with details of the one under the cursor."""

    NAME = "trainings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("x", "stop_training", "Stop")]

    def __init__(self) -> None:
        super().__init__()
        self._ended = EndedTrainings(_find_summary)

    def panels(self) -> Iterable[Widget]:
        """Yield the tables of runs and ranks, and the panels with details."""
        yield TrainingPanel()
        yield RankPanel()
        yield Lines("What holds it up", id="causes", classes="panel")
        yield Lines("Last steps", id="last-steps", classes="panel")
        yield Lines("Shares so far", id="shares", classes="panel")
        yield Lines("Last minutes", id="training-graphs", classes="panel")
        yield Lines("Log", id="training-log", classes="panel")

    def redraw(self) -> None:
        """Redraw the screen with its current reading; does nothing before the first reading."""
        if (snapshot := self.shown) is not None:
            with self.app.batch_update():
                rows = self._ended.add_ended(join_trainings(snapshot), snapshot.at_seconds)
                self.query_one(TrainingPanel).set_data(rows, self.state)
                self._show_chosen(snapshot)

    def on_list_panel_moved(self) -> None:
        """Show details of the training run under the cursor."""
        if self.shown is not None:
            self._show_chosen(self.shown)

    def _show_chosen(self, snapshot: Snapshot) -> None:
        row = self.query_one(TrainingPanel).chosen
        self._place_training_panels(row, snapshot)
        self._show_log()
        self.query_one(RankPanel).set_data(row)
        for name in ("#causes", "#last-steps", "#shares", "#training-graphs"):
            panel = self.query_one(name, Lines)
            shown = row is not None and panel.display
            panel.show(self._draw(name, row, snapshot, panel) if row is not None and shown else ())

    def _place_training_panels(self, row: TrainingRow | None, snapshot: Snapshot) -> None:
        """Divide the height between the detail panels, and hide those without content."""
        frame = self.fit_frames()
        size = self.evener.size
        height = size.height - _BARS
        log = self._log_rows(height, with_details=row is not None)
        wanted = PanelRows()
        if row is not None:
            text = training_lines(row, snapshot.at_seconds, size.width - frame)
            lanes = sum(bool(rank.last_steps) for rank in row.ranks)
            shares = len(row.ranks) if row.changes else 0
            wanted = PanelRows(len(row.ranks), len(text), lanes, shares)
        count = self.query_one(TrainingPanel).count
        rows = arrange_trainings(height - log, frame, count, wanted)
        self.place_panels({**rows, "#training-log": log})

    def _draw(
        self, name: str, row: TrainingRow, snapshot: Snapshot, panel: Lines
    ) -> Sequence[Line]:
        """Return the content of one of the detail panels, chosen by its selector `name`."""
        width, height = panel.size
        match name:
            case "#causes":
                return training_lines(row, snapshot.at_seconds, width)
            case "#last-steps":
                return lane_lines(row.ranks, width, height)
            case "#shares":
                at_seconds = snapshot.at_seconds - row.ended_s
                return share_lines(row.ranks, row.changes, at_seconds, width, height)
            case _:
                app = self.evener
                return training_graph_lines(
                    row,
                    snapshot.devices,
                    app.publisher,
                    panel.size,
                    nearest_span(app.settings.graph_seconds),
                    app.publisher.interval_seconds,
                )

    def _log_rows(self, height: int, *, with_details: bool) -> int:
        """Return the height of the log panel in lines; 0 unless a training run was started here.

        `with_details` leaves room for panels about the training run under the cursor.
        """
        if self.evener.training is None:
            return 0
        return max(_LEAST_LOG, height // 3) if with_details else max(_LEAST_LOG, height - 8)

    def _show_log(self) -> None:
        """Show the last lines of the log."""
        training, panel = self.evener.training, self.query_one("#training-log", Lines)
        if training is None:
            return
        panel.entitle(training.command, training.state_text())
        width, height = panel.size
        text = "\n".join(training.read_tail(height))
        panel.show(whole_lines(text, max(1, width))[-height:] if height else ())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible. Only a run that was started here can be stopped."""
        # In a read-only app, the action is always disabled.
        if action == "stop_training":
            training = self.evener.training
            return training is not None and training.is_running and not self.evener.readonly
        return super().check_action(action, parameters)

    def action_stop_training(self) -> None:
        """Stop the training run that was started here, after a confirmation."""
        training = self.evener.training
        if training is not None:
            question = f"Stop {training.command}? It gets the signal that Ctrl-C sends."
            confirm(self.evener, "Stop", question, training.stop)

    def action_open_training(self) -> None:
        """Open details of the training run under the cursor."""
        chosen = self.query_one(TrainingPanel).rows[self.query_one(TrainingPanel).cursor]

        def draw(width: int) -> tuple[Line, ...]:
            snapshot, panel = self.shown, self.query_one(TrainingPanel)
            there = join_trainings(snapshot) if snapshot is not None else ()
            every = (*there, *panel.rows)
            row = next((each for each in every if each.key == chosen.key), chosen)
            return training_lines(row, snapshot.at_seconds if snapshot is not None else 0.0, width)

        self.open_details("Training", draw)


def _find_summary(run: str) -> Sequence[str]:
    """Return the lines of a training run's summary, or no lines if it has none."""
    summary = load_summary(run)
    return describe_summary(summary) if summary is not None else ()


class TrainingPanel(ListPanel[TrainingRow]):
    """Table of the training runs."""

    OPEN = "screen.open_training"

    def __init__(self) -> None:
        super().__init__("Trainings", id="trainings")
        self.state = ""

    def set_data(self, rows: Sequence[TrainingRow], state: str) -> None:
        """Set the rows and the state, which is "paused" or ""."""
        self.state = state
        self.place_rows(rows)
        self.redraw()

    def identity(self, row: TrainingRow) -> Hashable:
        """Return the key of the row's training run."""
        return row.key

    def grid(self) -> Grid[TrainingRow]:
        """Return the column definitions of the table."""
        return TRAININGS

    def redraw(self) -> None:
        """Draw the table and the number of training runs."""
        self.entitle(subtitle=f"{self.count} in all" if self.count > 1 else "")
        self._draw_table(self.grid(), note=self.state)


class RankPanel(ListPanel[RankRow]):
    """Table of the ranks of a training run.

    A bar in each row breaks down the rank's step time. A legend explains the bars.
    """

    def __init__(self) -> None:
        super().__init__(id="ranks")

    def set_data(self, row: TrainingRow | None) -> None:
        """Show the ranks of a training run; None empties the table."""
        self.place_rows(row.ranks if row is not None else ())
        if row is not None:
            self.entitle(f"Ranks of {plain(row.workload or row.framework, 60)}")
        self.redraw()

    def grid(self) -> Grid[RankRow]:
        """Return the column definitions of the table.

        The bar of a step time is full for the longest step of all ranks.
        """
        return rank_grid(self.rows)

    def redraw(self) -> None:
        """Draw the table, and the legend if there is room."""
        if not self.rows:
            self.show(())
            return
        width, height = self.size
        has_legend = height > LEGEND_ROWS + self.HEADING_ROWS and any(
            row.step.step_s for row in self.rows
        )
        room = height - LEGEND_ROWS if has_legend else height
        lines, self.top = table_lines(self.grid(), self.rows, width, room, self.position)
        if has_legend:
            has_ended = any(row.ended_s for row in self.rows)
            lines = (*lines, legend_line(width, has_ended))
        self.show(lines)
