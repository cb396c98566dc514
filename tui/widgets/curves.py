"""The chart of samples/s against batch: curves, measured points, and where memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rich.text import Text
from textual_plotext import PlotextPlot

from evener.balancer.session_state import CurvePoints

from ..runtime.base_app import UsesApp
from ..view.cells import DEVICE_TONES
from ..view.charts import axis_ticks
from ..view.figures import short
from ..view.marks import to_ascii

TICKS = 5
FRAMED = 10  # rows, below which only the two axes are drawn


class CurvePlot(PlotextPlot, UsesApp):  # type: ignore[misc] # the library has no types
    """A plot with each device in its colour, its measured points marked by its number; predictions are dotted."""

    TITLE = "Samples/s against batch"
    can_focus = False

    def __init__(self) -> None:
        super().__init__(id="curves", classes="panel")  # type: ignore[call-arg] # mypy takes it for UsesApp's
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
            return Text(" Curves appear when the first probes have ended." if self.size.width >= 20 else "", "dim")
        self._draw()
        text = cast(Text, super().render())
        if not self.evener.marks.plain:
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
            predicted = [*known[-1:], *(point for point in curve.believed if point[0] > curve.largest_tested)]
            if len(known) > 1:
                plt.plot(*zip(*known, strict=True), color=colour, marker=self.evener.marks.curve)
            if len(predicted) > 1:
                plt.plot(*zip(*predicted, strict=True), color=colour, marker=self.evener.marks.predicted)
            if curve.wall is not None:
                plt.vline(curve.wall, color=colour)
        for curve in self._curves:
            if curve.measured:
                mark = str(curve.device) if curve.device < 10 else "+"
                plt.scatter(*zip(*curve.measured, strict=True), color=colours[curve.device % len(colours)], marker=mark)
        self._draw_axes()

    def _draw_axes(self) -> None:
        everything = [point for curve in self._curves for point in (*curve.believed, *curve.measured)]
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
