"""The widget that shows the graphs of the Monitor screen."""

from __future__ import annotations

from collections.abc import Sequence

from textual.events import MouseScrollDown, MouseScrollUp

from evener.devices.types import DeviceSample

from ..view.charts import run_time
from ..view.time_graph import SPANS, TickWindow, nearest_span, scale_short_history, ticks_per_dot
from ..view.timelines import GraphPlan, TimeView, draw_timelines, place_graphs
from .lines import Lines


class TimelinePanel(Lines):
    """Graphs of the devices' metrics over time, with a cursor that shows earlier values."""

    def __init__(self) -> None:
        super().__init__(id="graphs", classes="panel")
        self.cursor: int | None = None  # index of a cell, counted from the first tick
        self._samples: Sequence[DeviceSample] = ()
        self._chosen: DeviceSample | None = None
        self._plan: GraphPlan | None = None
        self._scale = 1, 1  # ticks per column of dots, and columns of dots per tick

    @property
    def span(self) -> float:
        """The time range that the user has chosen for the graphs, in seconds.

        It is the entry of `SPANS` nearest to the user's setting. Wide graphs cover more time
        if there are enough readings.
        """
        return nearest_span(self.evener.settings.graph_seconds)

    @property
    def shows_all(self) -> bool:
        """Whether there is room for the graphs of every device."""
        plan = self._plan
        return self.display and plan is not None and len(plan.devices) == len(self._samples)

    def set_data(self, samples: Sequence[DeviceSample], chosen: DeviceSample | None) -> None:
        """Show a new reading; `chosen` is the device to highlight, or None."""
        self._samples, self._chosen = samples, chosen
        self.redraw()

    def redraw(self) -> None:
        """Draw as many graphs as fit into the panel."""
        width, height = self.size
        chosen = self._chosen.device.key if self._chosen is not None else ""
        self._plan = place_graphs(self._samples, self.evener.publisher, width, height, chosen)
        if self._plan is None:
            self.show(())
            return
        self._choose_scale(self._plan)
        common = self.evener.settings.common_scale
        per_dot, stretch = self._scale
        view = TimeView(per_dot, self.cursor, common, chosen, stretch)
        self.show(draw_timelines(self._plan, self.evener.publisher, view, width))
        self._entitle(self._plan)

    def _choose_scale(self, plan: GraphPlan) -> None:
        """Choose how many readings are combined in a column of dots.

        If that changes, the cursor is hidden, because its cell would stand for another time.
        """
        publisher = self.evener.publisher
        per_dot = ticks_per_dot(self.span, publisher.interval_seconds, plan.graph)
        scale = scale_short_history(per_dot, publisher.ticks, plan.graph)
        if scale != self._scale:
            self.cursor = None
        self._scale = scale

    def _entitle(self, plan: GraphPlan) -> None:
        per_dot, stretch = self._scale
        ticks = plan.graph * 2 * per_dot / stretch
        hidden = len(self._samples) - len(plan.devices)
        more = f", {hidden} more device{'s' * (hidden > 1)}" if hidden else ""
        seconds = ticks * self.evener.publisher.interval_seconds
        self.entitle(f"Last {run_time(seconds)}{more}", "← → read, [ ] time")

    def _window(self) -> TickWindow | None:
        if self._plan is None:
            return None
        per_dot, stretch = self._scale
        return TickWindow(self._plan.graph, per_dot, self.evener.publisher.ticks, stretch)

    def step(self, cells: int) -> None:
        """Move the time cursor by `cells`, to the left if negative.

        If the cursor is hidden, show it at the newest reading instead.
        """
        window = self._window()
        if window is None:
            return
        place = window.last_cell if self.cursor is None else self.cursor + cells
        self._move_to(place, window)

    def _move_to(self, place: int, window: TickWindow) -> None:
        self.cursor = max(window.first_cell, 0, min(place, window.last_cell))
        self.redraw()

    def hide_cursor(self) -> None:
        """Hide the time cursor."""
        self.cursor = None
        self.redraw()

    def change_span(self, direction: int) -> None:
        """Switch to the next longer (1) or shorter (-1) time span, and save the choice."""
        place = SPANS.index(self.span) + direction
        self.evener.change_settings(graph_seconds=SPANS[max(0, min(place, len(SPANS) - 1))])
        self.cursor = None
        self.redraw()

    def toggle_scale(self) -> None:
        """Switch between one scale for all devices and a scale for each, and save the choice."""
        self.evener.change_settings(common_scale=not self.evener.settings.common_scale)
        self.redraw()

    def click_cell(self, x: int, y: int) -> None:
        """Move the time cursor to the clicked cell."""
        window = self._window()
        if window is None or self._plan is None:
            return
        cell = self._plan.cell_at(x)
        if cell is not None:
            self._move_to(window.first_cell + cell, window)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Show a longer time span."""
        event.stop()
        self.change_span(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Show a shorter time span."""
        event.stop()
        self.change_span(-1)
