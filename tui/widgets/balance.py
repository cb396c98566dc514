"""The widgets that show a running search and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from evener.balancer.journal import ObservationEntry
from evener.balancer.session_state import SessionState, rivals
from evener.devices.registry import is_simulated
from evener.devices.types import DeviceSample
from evener.printable import plain

from ..base_app import UsesApp
from ..view.balance_lines import (
    DETAILED_SHARES,
    format_fastest,
    rival_lines,
    share_lines,
    warning_lines,
)
from ..view.cells import Mark
from ..view.curves import curve_chart
from ..view.result_panel import KeyHint, count_rows, result_lines
from ..view.search_devices import SEARCH_DEVICES, SearchDeviceRow, search_device_rows
from ..view.search_log import LOG, LogRow, log_rows
from ..view.search_story import best_chart, story_lines
from ..view.table import Grid
from .lines import Lines
from .lists import ListPanel
from .plot import ChartPanel

LEAST_CHART = 7  # minimum number of lines of a readable chart
MOST_CHART = 26  # maximum number of lines of the charts; higher ones wouldn't show more
LEAST_COMPARED = 2  # minimum number of layouts for a comparison
LEAST_RESULT = 15  # charts get room only if the result keeps at least this number of lines
LEAST_LOG = 3  # minimum number of lines of the log, including the heading


class SearchDevicePanel(ListPanel[SearchDeviceRow]):
    """Table of the devices that a search uses."""

    def __init__(self) -> None:
        super().__init__(id="search-devices")
        self._state = SessionState()
        self._samples: Sequence[DeviceSample | None] = ()

    def grid(self) -> Grid[SearchDeviceRow]:
        """Return the column definitions of the table."""
        return SEARCH_DEVICES

    def set_data(
        self,
        state: SessionState | None = None,
        samples: Sequence[DeviceSample | None] | None = None,
    ) -> None:
        """Set the state of the search and the readings of its devices; None keeps the old ones."""
        self._state = state = self._state if state is None else state
        self._samples = self._samples if samples is None else samples
        self.rows = search_device_rows(state, self._samples)
        title = plain(state.workload, 60) or "Devices"
        mark = f"{Mark.SIMULATED} simulated: " if is_simulated(state.devices) else ""
        run = f"run {plain(state.run)}" if state.run and state.finished is None else ""
        self.entitle(f"{mark}{title}", run)
        self.redraw()


class LogPanel(ListPanel[LogRow]):
    """Table of a search's measurements, newest first."""

    OPEN = "screen.open_probe"

    def __init__(self) -> None:
        super().__init__("Measurements", id="log")
        self._seen: tuple[ObservationEntry, ...] = ()

    def grid(self) -> Grid[LogRow]:
        """Return the column definitions of the table."""
        return LOG

    def identity(self, row: LogRow) -> int:
        """Return the number of the measurement."""
        return row.number

    def set_data(self, state: SessionState) -> None:
        """Show the measurements. A cursor on the newest measurement moves on to each newer one."""
        if state.seen is not self._seen:
            self._seen = state.seen
            follows = self.cursor == 0
            self.place_rows(log_rows(state))
            if follows:
                self.action_move(-self.cursor)
        failed = f", {state.out_of_memory} out of memory" if state.out_of_memory else ""
        self.entitle(subtitle=f"{state.probes} probes{failed}")
        self.redraw()


class ResultPanel(Lines):
    """The result of a search, with the keys that act on it."""

    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "screen.read_all", "Everything", key_display="Enter"),
    ]

    def __init__(self) -> None:
        super().__init__(id="result", classes="panel")

    def set_data(self, state: SessionState, keys: Sequence[KeyHint]) -> None:
        """Show as much of the result as fits, with the keys that act on it."""
        self.entitle("Result", f"run {plain(state.run)}" if state.run else "")
        self.show(result_lines(state, *self.size, keys))

    def click_row(self, row: int, clicks: int) -> None:
        """Open all details of the result on a double click."""
        if clicks >= 2:
            self.call_later(self.run_action, "screen.read_all")


class BalanceView(UsesApp, Widget):
    """View of a search, with its progress or result, devices, charts, shares and measurements.

    `keys` returns the keys that act on the result.
    """

    def __init__(self, keys: Callable[[], Sequence[KeyHint]]) -> None:
        super().__init__(id="balance")
        self.state = SessionState()
        self._keys = keys

    def compose(self) -> ComposeResult:
        """Yield the panels."""
        yield Lines("Search", id="story", classes="panel")
        yield ResultPanel()
        yield SearchDevicePanel()
        with Horizontal(id="charts"):
            yield ChartPanel("Samples/s of each device alone", id="curves")
            yield ChartPanel("Fastest measurement so far", id="best")
        with Horizontal(id="facts"):
            yield Lines("Shares", id="shares", classes="panel")
            yield Lines("Throughput", id="rivals", classes="panel")
        yield LogPanel()

    def set_data(self, state: SessionState) -> None:
        """Show a new state of the search."""
        self.state = state
        self.redraw()

    @property
    def shows_result(self) -> bool:
        """Whether the view shows the result of the search instead of its progress."""
        return self.state.finished is not None and not self.state.fault

    def redraw(self) -> None:
        """Place and draw all panels."""
        if not self.is_mounted or not self.size.height:
            return
        state = self.state
        with self.app.batch_update():
            self._place_panels()
            self.query_one(ResultPanel).set_data(state, self._keys())
            self.query_one(SearchDevicePanel).set_data(state)
            story = self.query_one("#story", Lines)
            notes = [] if state.ended else warning_lines(state.notes, story.size.width, 2)
            story.show((*story_lines(state, story.size.width), *notes))
            for name, draw in (("shares", share_lines), ("rivals", rival_lines)):
                panel = self.query_one(f"#{name}", Lines)
                panel.show(draw(state, *panel.size))
            self.query_one("#curves", ChartPanel).set_data(curve_chart(state))
            self.query_one("#best", ChartPanel).set_data(best_chart(state))
            self.query_one(LogPanel).set_data(state)

    def _place_panels(self) -> None:
        """Divide the height between the panels, and hide those for which there is no room."""
        width, height = self.size
        frame = 0 if self.screen.has_class("-bare") else 2
        narrow = self.screen.has_class("-narrow")
        lanes = min(max(1, len(self.state.devices)) + 1 + frame, max(2, height // 3))
        top = self._top_rows(width - frame, frame, height - lanes - LEAST_LOG - frame)
        left = height - top - lanes
        facts = self._fact_rows(width, frame, narrow) if left >= 9 + frame else 0
        charts = left - facts - max(LEAST_LOG + 1, left // 4) - frame
        charts = min(charts, MOST_CHART)
        if charts < LEAST_CHART + frame:
            charts = 0
        self.query_one("#story").display = not self.shows_result
        self.query_one("#result").display = self.shows_result
        self.query_one("#story").styles.height = top
        self.query_one("#result").styles.height = top
        self.query_one("#search-devices").styles.height = lanes
        self.query_one("#charts").display = charts > 0
        self.query_one("#charts").styles.height = charts
        self.query_one("#best").display = not narrow
        self.query_one("#facts").display = facts > 0
        self.query_one("#facts").styles.height = facts
        self.query_one("#shares").display = not narrow
        self.query_one("#log").styles.height = max(0, left - charts - facts)

    def _top_rows(self, width: int, frame: int, max_rows: int) -> int:
        """Return the height of the panel with the progress or the result, in lines.

        A result takes at most `max_rows` lines, or fewer if that leaves room for charts below it.
        """
        if self.shows_result:
            with_charts = max_rows - LEAST_CHART - frame - 2
            if with_charts >= LEAST_RESULT:
                max_rows = with_charts  # the page that Enter opens has the other remarks
            return max(3, min(count_rows(self.state, width) + frame, max_rows))
        notes = 0 if self.state.ended else len(warning_lines(self.state.notes, width, 2))
        return max(2, min(len(story_lines(self.state, width)), 6) + notes) + frame

    def _fact_rows(self, width: int, frame: int, is_narrow: bool) -> int:
        """Return the height in lines of the panels with the shares and the compared layouts.

        The panels are side by side and equally high. 0 hides them.
        """
        # They are hidden as long as there is nothing to compare, and after the search, because the
        # result contains them. A narrow terminal shows only the compared layouts.
        if self.shows_result or len(rivals(self.state)) < LEAST_COMPARED:
            return 0
        compared = len(rivals(self.state)) + bool(format_fastest(self.state))
        if is_narrow:
            return compared + frame
        return max(4, compared, self._share_rows(width)) + frame

    def _share_rows(self, width: int) -> int:
        """Return how many lines the bars of the shares and their legend take."""
        # One line is always reserved for a second bar, which shows the split being measured.
        each = 26 if len(self.state.devices) <= DETAILED_SHARES else 15
        legend = max(1, -(-len(self.state.devices) // max(1, (width // 2 - 2) // each)))
        return legend + 3

    def on_resize(self) -> None:
        """Fit the panels into the new size."""
        self.redraw()
