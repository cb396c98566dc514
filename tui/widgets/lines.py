"""The widget that draws lines of text, fast enough for many updates per second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Self

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.content import Content
from textual.events import Click
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ..base_app import UsesApp
from ..view.cells import BLANK, Line, join_spans, to_ascii

# theme variables for tones without a variable of their own; not CSS classes, which Textual would
# match again and again for each widget
_VARIABLES = {
    "text": "foreground",
    "good": "success",
    "warn": "warning",
    "bad": "error",
    "key": "primary",
    "headline": "ev-speed",
    "tab": "ev-strong",
}
_SHADES = {"mid": 0.75, "low": 0.5}  # fraction of the tone; the rest is the background
_BOLD = ("strong", "headline", "bad", "key", "tab")


class _Drawn(NamedTuple):
    """The rows that were drawn last, kept to be reused in the next drawing."""

    crop: Region
    rows: list[Strip]  # frame included
    lines: range  # the indices of the rows with the lines, without the frame
    left: list[Segment]  # the frame to the left of each line
    right: list[Segment]


class Lines(UsesApp, Widget):
    """Base class of panels. It draws `Line` objects of `evener.tui.view.cells`.

    Only lines that have changed are drawn again. Subclasses override `redraw`, `click_cell` and
    `click_row`.
    """

    class Resized(Message):
        """Posted after the widget's size has changed."""

    def __init__(
        self,
        title: str = "",
        *,
        id: str | None = None,  # noqa: A002 - Textual's name
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.border_title = title
        self._lines: tuple[Line, ...] = ()
        self._changed: set[int] = set()  # indices of the lines that must be drawn again
        self._drawn: _Drawn | None = None  # None: everything must be drawn again
        self._styles_by_tone: dict[tuple[str, bool], Style] = {}
        self._title: str | None = None
        self._subtitle: str | None = None

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines that are shown."""
        return self._lines

    @property
    def text(self) -> str:
        """The shown text, without colours."""
        return "\n".join(line.text for line in self._lines)

    def redraw(self) -> None:
        """Draw the content again, for example after a change of size; subclasses override it."""

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the shown lines."""
        before, self._lines = self._lines, tuple(lines)
        pairs = zip_longest(before, self._lines, fillvalue=BLANK)
        changed = [y for y, (old, new) in enumerate(pairs) if old != new]
        self._changed.update(changed)
        if self.outer_size.width and changed:
            # whole rows of the widget: cutting the frame off takes longer than drawing it
            left, width = -self.content_offset.x, self.outer_size.width
            self.refresh(*(Region(left, y, width, 1) for y in changed))

    def entitle(self, title: str | None = None, subtitle: str | None = None) -> None:
        """Change the title and subtitle in the frame; None keeps the current one."""
        if title is not None and title != self._title:
            self._title = title
            self.border_title = Content(self.evener.to_drawable(title))
        if subtitle is not None and subtitle != self._subtitle:
            self._subtitle = subtitle
            self.border_subtitle = Content(self.evener.to_drawable(subtitle))

    def refresh(self, *regions: Region, **options: Any) -> Self:
        """Redraw the given regions of the widget, or all of it if none are given."""
        if not regions:
            self._drawn = None
        return super().refresh(*regions, **options)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the rows in a region of the widget, including the frame."""
        # If only lines have changed, the other rows of the last drawing are reused. Textual's own
        # method isn't called then, because it looks up the styles of every row.
        drawn = self._drawn
        if drawn is None or drawn.crop != crop:
            rows = super().render_lines(crop)
            self._drawn = self._rows_to_reuse(crop, rows)
        else:
            rows, width = drawn.rows, crop.width - len(drawn.left) - len(drawn.right)
            for y in self._changed:
                place = drawn.lines.start + y
                if place in drawn.lines:
                    rows[place] = Strip(
                        [*drawn.left, *self._draw(y, width), *drawn.right], crop.width
                    )
        self._changed.clear()
        return rows

    def _rows_to_reuse(self, crop: Region, rows: list[Strip]) -> _Drawn | None:
        """Return drawn rows to reuse later, or None if filters or cropping have changed them."""
        top, right, bottom, left = self.gutter
        lines = range(top, crop.height - bottom)
        if (
            crop.size != self.outer_size
            or not lines
            or max(left, right) > 1
            or self.get_line_filters()
        ):
            return None
        segments = list(rows[top])
        return _Drawn(crop, rows, lines, segments[:left], segments[len(segments) - right :])

    def render_line(self, y: int) -> Strip:
        """Return row `y` of the content, without the frame."""
        return self._draw(y, self.size.width)

    def _draw(self, y: int, width: int) -> Strip:
        """Draw line `y` in the theme's colours."""
        line = self._lines[y] if y < len(self._lines) else BLANK
        draws_ascii, cursor = self.evener.ascii, line.cursor
        styles = self._styles_by_tone
        segments = []
        for text, tone, action in join_spans(line.spans):
            style = styles.get((tone, cursor)) or self._tone(tone, cursor)
            if action:
                style += Style.from_meta({"@click": action})
            segments.append(Segment(to_ascii(text) if draws_ascii else text, style))
        return Strip(segments).adjust_cell_length(width, self._tone("text", cursor))

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the widget's filters, except the one for ANSI colours."""
        # No tone uses ANSI colours, so that filter would only cost time.
        return [
            each for each in super().get_line_filters() if not isinstance(each, ANSIToTruecolor)
        ]

    def _tone(self, tone: str, on_cursor: bool) -> Style:
        known = self._styles_by_tone.get((tone, on_cursor))
        if known is None:
            variables = self.app.theme_variables
            name, _, shade = tone.partition(".")
            mixed = Color.parse(variables[_VARIABLES.get(name, f"ev-{name}")])
            if shade:
                background = Color.parse(variables["background"])
                mixed = background.blend(mixed, _SHADES[shade])
            colour = mixed.rich_color
            known = self.rich_style + Style(
                color=colour, bold=tone in _BOLD or None, underline=tone == "tab" or None
            )
            if on_cursor:
                known += Style(bgcolor=Color.parse(variables["ev-cursor"]).rich_color)
            self._styles_by_tone[tone, on_cursor] = known
        return known

    def notify_style_update(self) -> None:
        """Forget the colours of an earlier theme, and redraw the widget."""
        super().notify_style_update()
        self._styles_by_tone = {}
        self.refresh()

    def on_resize(self) -> None:
        """Redraw the content in the new size."""
        self.redraw()
        self.post_message(self.Resized())

    def watch_has_focus(self, has_focus: bool) -> None:
        """Redraw the content, because only a focused widget shows its cursor."""
        super().watch_has_focus(has_focus)
        self.redraw()

    def on_click(self, event: Click) -> None:
        """Pass a click to `click_cell` and `click_row`, unless the text has its own action."""
        if "@click" in event.style.meta:
            return
        offset = event.get_content_offset(self)
        if offset is not None:
            self.click_cell(offset.x, offset.y)
            self.click_row(offset.y, event.chain)

    def click_cell(self, x: int, y: int) -> None:
        """Handle a click on a cell; does nothing by default."""

    def click_row(self, row: int, clicks: int) -> None:
        """Handle a click on a row; does nothing by default. `clicks` is 2 for a double click."""
