"""Reads the lines of tables on the app's screens, and which row is the first one in view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.tui.view.devices import DEVICES, PanelRow
from evener.tui.view.search_devices import SEARCH_DEVICES, search_device_rows
from evener.tui.view.table import table_lines
from evener.tui.view.training_lines import TRAININGS, rank_grid
from evener.tui.view.trainings import TrainingRow

Table = tuple[Any, int]


def device_lines(rows: Sequence[PanelRow], width: int, height: int, *position: Any) -> Table:
    return table_lines(DEVICES, rows, width, height, *position)


def lane_lines(state: Any, width: int, height: int, samples: Any = ()) -> Table:
    return table_lines(SEARCH_DEVICES, search_device_rows(state, samples), width, height)


def training_table(rows: Sequence[TrainingRow], width: int, height: int, *position: Any) -> Table:
    return table_lines(TRAININGS, rows, width, height, *position)


def rank_table(row: TrainingRow, width: int, height: int, *position: Any) -> Table:
    return table_lines(rank_grid(row.ranks), row.ranks, width, height, *position)
