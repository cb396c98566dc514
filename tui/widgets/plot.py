"""The widget that shows a chart."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp
from textual.message import Message

from ..view.plot import Chart, draw_chart, frame_chart, nearest, read_out_line
from .lines import Lines


class ChartPanel(Lines):
    """A chart with a cursor. The values of the points under the cursor are shown below it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "step(-1)", "Point before", show=False),
        Binding("right", "step(1)", "Next point", show=False),
        Binding("home", "step(-1000000)", "First point", show=False),
        Binding("end", "step(1000000)", "Last point", show=False),
        Binding("l", "toggle_scale", "Linear or log axes", show=False),
        Binding("escape", "hide_cursor", "Hide the chart's cursor", show=False),
    ]
    can_focus = True

    class Moved(Message):
        """Posted after the cursor has moved to `x`; None means that it was hidden."""

        def __init__(self, x: float | None) -> None:
            super().__init__()
            self.x = x

    class Scaled(Message):
        """Posted after the user has switched between logarithmic and linear axes."""

        def __init__(self, log2: bool) -> None:
            super().__init__()
            self.log2 = log2

    def __init__(self, title: str = "", *, id: str | None = None) -> None:  # noqa: A002 - Textual's name
        super().__init__(title, id=id, classes="panel")
        self.chart = Chart()

    @property
    def log2(self) -> bool:
        """Whether the user's settings ask for logarithmic axes."""
        return self.evener.settings.log_axes

    def set_data(self, chart: Chart) -> None:
        """Show a chart. The cursor stays where it is if the new chart has a point there."""
        cursor = self.chart.cursor if self.chart.cursor in chart.stops() else None
        self.chart = chart._replace(cursor=cursor)
        self.redraw()

    @property
    def shown_chart(self) -> Chart:
        """The chart, with logarithmic or linear axes as the user has chosen."""
        if self.log2:
            return self.chart
        return self.chart._replace(log2_x=False, log2_y=False)

    def redraw(self) -> None:
        """Draw the chart and the values at the cursor."""
        width, height = self.size
        chart = self.shown_chart
        lines = draw_chart(chart, width, height - 1)
        if len(lines) > 1:
            lines = (*lines, read_out_line(chart, width))
        self.show(lines)

    def move_to(self, x: float | None) -> None:
        """Move the cursor to `x`; None hides it."""
        if x != self.chart.cursor:
            self.chart = self.chart._replace(cursor=x)
            self.redraw()
            self.post_message(self.Moved(x))

    def action_step(self, steps: int) -> None:
        """Move the cursor to the right by `steps` points, or to the left if `steps` is negative."""
        stops = self.chart.stops()
        if not stops:
            return
        if self.chart.cursor is None:
            self.move_to(stops[-1] if steps > 0 else stops[max(0, len(stops) + max(steps, -1))])
            return
        place = stops.index(self.chart.cursor) + steps
        self.move_to(stops[max(0, min(place, len(stops) - 1))])

    def action_toggle_scale(self) -> None:
        """Switch between logarithmic and linear axes, and save the choice."""
        self.evener.change_settings(log_axes=not self.log2)
        self.redraw()
        self.post_message(self.Scaled(self.log2))

    def action_hide_cursor(self) -> None:
        """Hide the cursor."""
        self.move_to(None)

    def click_cell(self, x: int, y: int) -> None:
        """Move the cursor to the nearest point."""
        if not self.chart.is_empty:
            frame = frame_chart(self.shown_chart, self.size.width, self.size.height - 1)
            self.move_to(nearest(self.chart.stops(), frame, x - frame.left))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move the cursor to the next point."""
        event.stop()
        self.action_step(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move the cursor to the previous point."""
        event.stop()
        self.action_step(-1)
