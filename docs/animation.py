"""Frames of the app as one animated SVG: each row of the screen once for every text that it shows,
switched by CSS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

ROW_PX, BASELINE_PX, TITLE_PX = 24.4, 20.0, 31.0
BACKGROUND = "#0d1219"  # of the app's dark theme
_STYLE = re.compile(r"\.[\w-]+-(r\d+) \{ (.*?) \}")
_RECT = re.compile(r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
_TEXT = re.compile(
    r'<text class="[\w-]+-(r\d+)" x="([\d.]+)" y="([\d.]+)" '
    r'textLength="([\d.]+)"[^>]*>([^<]*)</text>'
)


class Palette:
    """One short class for each style of all frames; Rich numbers them anew in each picture."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, style: str) -> str:
        """The class of a style."""
        return self._names.setdefault(style, f"s{len(self._names)}")

    def css(self) -> str:
        """The rules."""
        return "\n".join(f".{name}{{{style}}}" for style, name in self._names.items())


def read_rows(svg: str, palette: Palette) -> dict[int, str]:
    """The drawing of each row of a screenshot that Rich made, without its window."""
    styles = {name: palette.name(style.strip()) for name, style in _STYLE.findall(svg)}
    start = svg.index('clip-path="url(#', svg.index("</defs>"))
    rows: dict[int, str] = {}
    for fill, left, top, width in _join(_RECT.findall(svg, start)):
        if fill != BACKGROUND:
            row = round(top / ROW_PX)
            rect = (
                f'<rect fill="{fill}" x="{left:g}" y="{top:g}" width="{width:g}" '
                f'height="{ROW_PX + 0.25}"/>'
            )
            rows[row] = rows.get(row, "") + rect
    for style, left, baseline, length, text in _TEXT.findall(svg, start):
        if text.strip():
            row = round((float(baseline) - BASELINE_PX) / ROW_PX)
            drawn = (
                f'<text class="{styles[style]}" x="{left}" y="{baseline}" '
                f'textLength="{length}">{text}</text>'
            )
            rows[row] = rows.get(row, "") + drawn
    return rows


def _join(rects: Sequence[Sequence[str]]) -> Iterator[tuple[str, float, float, float]]:
    """(fill, left, top, width) of the rectangles, those of one colour beside each other as one."""
    before: tuple[str, float, float, float] | None = None
    for fill, *numbers in rects:
        left, top, width = map(float, numbers)
        if (
            before
            and (before[0], before[2]) == (fill, top)
            and abs(before[1] + before[3] - left) < 0.1
        ):
            before = (fill, before[1], top, before[3] + width)
            continue
        if before:
            yield before
        before = (fill, left, top, width)
    if before:
        yield before


def animate(svgs: Sequence[str], seconds: Sequence[float], font: str) -> str:
    """The frames, each for its seconds, over and over; a reader without animations sees the last
    one.
    """
    palette = Palette()
    frames = [read_rows(svg, palette) for svg in svgs]
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svgs[0])
    assert box is not None
    total = sum(seconds)
    begins = [100 * sum(seconds[:place]) / total for place in range(len(seconds) + 1)]
    rules: dict[tuple[bool, ...], str] = {}
    groups = []
    for row in range(max(map(max, frames)) + 1):
        texts = [frame.get(row, "") for frame in frames]
        for text in filter(None, dict.fromkeys(texts)):
            shown = tuple(each == text for each in texts)
            kind = "" if all(shown) else f' class="{rules.setdefault(shown, f"f{len(rules)}")}"'
            groups.append(f"<g{kind}>{text}</g>")
    css = [palette.css(), *(_rule(name, shown, begins, total) for shown, name in rules.items())]
    width, height = float(box[1]), float(box[2]) - TITLE_PX
    return _WINDOW.format(
        width=width,
        height=height,
        inner_width=width - 2,
        inner_height=height - 2,
        background=BACKGROUND,
        font=font.replace('"', "'"),
        css="\n".join(css),
        rows="\n".join(groups),
    )


def _rule(name: str, shown: Sequence[bool], begins: Sequence[float], total: float) -> str:
    """Show a row's text in some frames; outside an animation, only if it is in the last one."""
    steps = []
    for place, now in enumerate(shown):
        if place == 0 or now != shown[place - 1]:
            steps.append(f"{begins[place]:.3f}%{{visibility:{'visible' if now else 'hidden'}}}")
    rest = "visible" if shown[-1] else "hidden"
    shows = f".{name}{{visibility:{rest};animation:{name} {total:g}s step-end infinite}}"
    return f"{shows}@keyframes {name}{{{''.join(steps)}}}"


_WINDOW = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">
<title>evener finds a split of two cards, then trains with it while one of them gets hot</title>
<style>
text{{{font};font-size:20px;white-space:pre}}
@media (prefers-reduced-motion:reduce){{g{{animation:none!important}}}}
{css}
</style>
<rect fill="{background}" stroke="#76839a" x="1" y="1" width="{inner_width:g}" height="{inner_height:g}" rx="8"/>
<g transform="translate(9, 10)">
{rows}
</g>
</svg>
"""  # noqa: E501
