"""The panels that show a session, live or in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual_plotext import PlotextPlot

from evener.balancer.session_state import CurvePoints, SessionState, curves
from evener.devices.registry import is_simulated
from evener.devices.types import DeviceSample
from evener.printable import plain

from ..base_app import UsesApp
from ..view.balance_lines import DETAILED_SHARES, rival_lines, search_lines, share_lines
from ..view.cells import DEVICE_TONES, Mark, to_ascii
from ..view.charts import axis_ticks, short
from ..view.lanes import LANES, Lane, lane_rows
from ..view.table import Grid
from .lines import Lines
from .lists import ListPanel

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
            yield CurvePlot()
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


TICKS = 5
FRAMED = 10  # rows, below which only the two axes are drawn


class CurvePlot(PlotextPlot, UsesApp):  # type: ignore[misc] # the library has no types
    """A plot with each device in its colour, its measured points marked by its number; predictions
    are dotted.
    """

    TITLE = "Samples/s against batch"
    can_focus = False

    def __init__(self) -> None:
        # mypy takes it for UsesApp's
        super().__init__(id="curves", classes="panel")  # type: ignore[call-arg]
        self.border_title = self.TITLE
        self._curves: tuple[CurvePoints, ...] = ()

    def take(self, curves: Sequence[CurvePoints]) -> None:
        """Draw these curves, if they have changed."""
        if tuple(curves) != self._curves:
            self._curves = tuple(curves)
            self.refresh()

    def render(self) -> Text:
        """The plot in the current size and colours."""
        if not self._curves or self.size.width < 20 or self.size.height < 5:
            return Text(
                " Curves appear when the first probes have ended." if self.size.width >= 20 else "",
                "dim",
            )
        self._draw()
        text = cast(Text, super().render())
        if not self.evener.ascii:
            return text
        plain = Text(to_ascii(text.plain))
        for span in text.spans:
            plain.stylize(span.style, span.start, span.end)
        return plain

    def _draw(self) -> None:
        plt = self.plt
        plt.clear_data()
        plt.clear_figure()
        colours = self._colours()
        for curve in self._curves:
            colour = colours[curve.device % len(colours)]
            known = [point for point in curve.believed if point[0] <= curve.largest_tested]
            predicted = [
                *known[-1:],
                *(point for point in curve.believed if point[0] > curve.largest_tested),
            ]
            if len(known) > 1:
                plt.plot(
                    *zip(*known, strict=True),
                    color=colour,
                    marker="." if self.evener.ascii else "hd",
                )
            if len(predicted) > 1:
                plt.plot(
                    *zip(*predicted, strict=True),
                    color=colour,
                    marker="~" if self.evener.ascii else "·",
                )
            if curve.wall is not None:
                plt.vline(curve.wall, color=colour)
        for curve in self._curves:
            if curve.measured:
                mark = str(curve.device) if curve.device < 10 else "+"
                plt.scatter(
                    *zip(*curve.measured, strict=True),
                    color=colours[curve.device % len(colours)],
                    marker=mark,
                )
        self._draw_axes()

    def _draw_axes(self) -> None:
        everything = [
            point for curve in self._curves for point in (*curve.believed, *curve.measured)
        ]
        walls = [(curve.wall, 0.0) for curve in self._curves if curve.wall is not None]
        top = max((speed for _, speed in everything), default=1.0) * 1.08
        last = max((batch for batch, _ in (*everything, *walls)), default=1) * 1.03
        self.plt.ylim(0, top)
        self.plt.xlim(0, last)
        speeds, batches = axis_ticks(top, TICKS), axis_ticks(last, TICKS)
        self.plt.yticks(speeds, [short(tick) for tick in speeds])
        self.plt.xticks(batches, [f"{tick:.0f}" for tick in batches])
        framed = self.size.height >= FRAMED
        self.plt.xaxes(lower=True, upper=framed)
        self.plt.yaxes(left=True, right=framed)
        self.plt.xlabel("batch" if not self.screen.has_class("-bare") else self.TITLE)

    def _colours(self) -> list[tuple[int, int, int]]:
        from textual.color import Color

        variables = self.app.theme_variables
        return [Color.parse(variables[f"ev-{tone}"]).rgb for tone in DEVICE_TONES]
