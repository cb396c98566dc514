"""The panels that show a session, live or in a replay."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widget import Widget

from evener.balancer.session_state import SessionState
from evener.devices.registry import is_simulated
from evener.devices.types import DeviceSample
from evener.printable import plain

from ..base_app import UsesApp
from ..view.balance_lines import DETAILED_SHARES, rival_lines, search_lines, share_lines
from ..view.cells import Mark
from ..view.curves import curve_chart
from ..view.lanes import LANES, Lane, lane_rows
from ..view.table import Grid
from .lines import Lines
from .lists import ListPanel
from .plot import ChartPanel

LEAST_CHART = 7  # rows that a readable curve needs
LEAST_SEARCH = 5  # rows for the search: what it does, how far it is, the latest measurements


class LanePanel(ListPanel[Lane]):
    """A panel with a row per device; they scroll where they don't fit."""

    def __init__(self) -> None:
        super().__init__(id="lanes")
        self._state = SessionState()
        self._samples: Sequence[DeviceSample | None] = ()

    def grid(self) -> Grid[Lane]:
        """The table of these rows."""
        return LANES

    def take(
        self,
        state: SessionState | None = None,
        samples: Sequence[DeviceSample | None] | None = None,
    ) -> None:
        """Show this state, and these readings of each device."""
        self._state = state = self._state if state is None else state
        self._samples = self._samples if samples is None else samples
        self.rows = lane_rows(state, self._samples)
        title = plain(state.workload, 60) or "Devices"
        mark = f"{Mark.SIMULATED} simulated: " if is_simulated(state.devices) else ""
        self.entitle(f"{mark}{title}", f"run {plain(state.run)}" if state.run else "")
        self.redraw()


class BalanceView(UsesApp, Widget):
    """Draws one state; on a small terminal the chart is dropped before the text."""

    def __init__(self) -> None:
        super().__init__(id="balance")
        self.state = SessionState()

    def compose(self) -> ComposeResult:
        """Devices, below them chart and shares, below those the search."""
        yield LanePanel()
        with Horizontal(id="middle"):
            yield ChartPanel("Samples/s of each device alone", id="curves")
            with Vertical(id="side"):
                yield Lines("Shares", id="shares", classes="panel")
                yield Lines("Throughput", id="rivals", classes="panel")
        yield Lines("Search", id="search", classes="panel")

    def take(self, state: SessionState) -> None:
        """Draw this state."""
        self.state = state
        self.redraw()

    def redraw(self) -> None:
        """Rebuild every panel."""
        if not self.is_mounted or not self.size.height:
            return
        state = self.state
        with self.app.batch_update():
            self._place_panels()
            self.query_one(LanePanel).take(state)
            for name, draw in (
                ("shares", share_lines),
                ("rivals", rival_lines),
                ("search", search_lines),
            ):
                panel = self.query_one(f"#{name}", Lines)
                panel.show(draw(state, *panel.size))
            self.query_one(ChartPanel).take(curve_chart(state))

    def _place_panels(self) -> None:
        """Distribute the rows: every device, then the figures, then the chart, then the search."""
        width, height = self.size
        frame = 0 if self.screen.has_class("-bare") else 2
        narrow = self.screen.has_class("-narrow")
        lanes = min(max(1, len(self.state.devices)) + 1 + frame, max(2, height // 3))
        rivals = 4 + frame
        middle = max(0, min(height - lanes - 4 - frame, (height - lanes) * 3 // 5))
        shares = max(1, min(self._share_rows(width, narrow) + frame, middle - rivals))
        chart = middle
        if narrow:
            spare = height - lanes - shares - rivals - LEAST_SEARCH
            chart = max(middle - shares - rivals, min(spare, LEAST_CHART))
            chart = chart if chart >= LEAST_CHART else 0
            middle = max(0, min(shares + rivals + chart, height - lanes - 2))
        curves = self.query_one("#curves")
        curves.display = chart >= 6
        curves.styles.height = chart if narrow else "1fr"
        self.query_one("#lanes").styles.height = lanes
        self.query_one("#middle").styles.height = middle
        self.query_one("#shares").styles.height = shares
        self.query_one("#search").styles.height = max(0, height - lanes - middle)

    def _share_rows(self, width: int, narrow: bool) -> int:
        """The bar, the global batch and the legend; in a wide terminal one more, for a split that
        is being measured.
        """
        each = 26 if len(self.state.devices) <= DETAILED_SHARES else 15
        room = width if narrow else width // 2 - 2
        legend = max(1, -(-len(self.state.devices) // max(1, room // each)))
        return legend + (2 if narrow else 3)

    def on_resize(self) -> None:
        """Distribute the rows again."""
        self.redraw()
