"""The panels that show a session: live on the Balance screen, and again in a replay."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widget import Widget

from evener.balancer.session_state import SessionState, curves
from evener.devices.types import DeviceSample

from ..runtime.base_app import UsesApp
from ..view.balance_lines import DETAILED_SHARES, rival_lines, search_lines, share_lines
from ..view.cells import clean
from ..view.lanes import lane_lines
from .curves import CurvePlot
from .lines import Lines
from .lists import ListPanel

LEAST_CHART = 7  # rows that a readable curve needs
LEAST_SEARCH = 5  # rows for the search: what it does, how far it is, the latest measurements


def _panel(name: str, title: str) -> Lines:
    panel = Lines(id=name, classes="panel")
    panel.border_title = title
    return panel


class LanePanel(ListPanel[str]):
    """A panel with a row per device; they scroll where they don't fit."""

    def __init__(self) -> None:
        super().__init__(id="lanes")
        self.state = SessionState()
        self.samples: tuple[DeviceSample | None, ...] = ()

    def take(self, state: SessionState) -> None:
        """Show this state."""
        self.state, self.rows = state, state.devices
        self.redraw()

    def take_samples(self, samples: Sequence[DeviceSample | None]) -> None:
        """Show these readings, one for each device."""
        self.samples = tuple(samples)
        self.redraw()

    def redraw(self) -> None:
        """Rebuild the rows."""
        state, (width, height) = self.state, self.size
        lines, self.top = lane_lines(state, width, height, self.evener.marks, self.position, self.samples)
        self.entitle(clean(state.workload, 60) or "Devices", f"run {clean(state.run)}" if state.run else "")
        self.show(lines)


class BalanceView(UsesApp, Widget):
    """Draws one state; on a small terminal the chart is dropped before the text."""

    def __init__(self) -> None:
        super().__init__(id="balance")
        self.state = SessionState()

    def compose(self) -> ComposeResult:
        """Devices, below them chart and shares, below those the search."""
        yield LanePanel()
        with Horizontal(id="middle"):
            yield CurvePlot()
            with Vertical(id="side"):
                yield _panel("shares", "Shares")
                yield _panel("rivals", "Throughput")
        yield _panel("search", "Search")

    def take(self, state: SessionState) -> None:
        """Draw this state."""
        self.state = state
        self.redraw()

    def redraw(self) -> None:
        """Rebuild every panel."""
        if not self.is_mounted or not self.size.height:
            return
        state, marks = self.state, self.evener.marks
        with self.app.batch_update():
            self._place_panels()
            self.query_one(LanePanel).take(state)
            for name, draw in (("shares", share_lines), ("rivals", rival_lines), ("search", search_lines)):
                panel = self.query_one(f"#{name}", Lines)
                panel.show(draw(state, *panel.size, marks))
            self.query_one(CurvePlot).take(curves(state))

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
        """The bar, the global batch and the legend; in a wide terminal one more, for a split that is being measured."""
        each = 26 if len(self.state.devices) <= DETAILED_SHARES else 15
        room = width if narrow else width // 2 - 2
        legend = max(1, -(-len(self.state.devices) // max(1, room // each)))
        return legend + (2 if narrow else 3)

    def on_resize(self) -> None:
        """Distribute the rows again."""
        self.redraw()
