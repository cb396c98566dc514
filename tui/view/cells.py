"""Lines of coloured text, measured in terminal cells.

A wide character, such as a Chinese one, takes two cells, and a combining character none.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from evener.printable import plain

from ..text.formatting import NO_BREAK, unbroken


class Mark:
    """The special characters of bars, graphs and tables."""

    FULL, HALF, TRACK = "━╸─"  # of a bar: a filled cell, half a filled cell, an empty cell
    LEVELS = " ▁▂▃▄▅▆▇█"  # a cell of a graph, from empty to filled
    SHADE = "░"  # a cell of a graph below its edge
    BLOCK = "█"  # a cell of a thick bar
    NONE = "–"  # the device doesn't report the value
    PENDING = "…"  # no value yet: a rate needs two readings
    DENIED = "⊘"  # this user has no permission to read the value
    LOST = "×"
    STALE = "~"  # in front of a stale value
    CURSOR = "▸"
    FOLDED = "▶"  # a group whose rows are hidden
    TAGGED = "◆"
    ASCENDING, DESCENDING = "▲▼"
    DOT = "·"  # separates facts
    RUNNING, WAITING, DONE, FAILED = "●○✓✗"
    WALL = "▌"  # ran out of memory
    ALARM = "!"
    SIMULATED = "◌"  # the devices' speeds are written down, not measured


_SIGNS = str.maketrans(
    "━╸▁▂▃▄▅▆▇█▓▒░▞▚▤▥⊘▸▶◆▲▼↓↑●○◌✓✗▌…–—·×±°→≤≥─│┤├┬┴┌┐└┘┼╱┆←\u202f\u00a0",
    "==_.-:=+*#@$:/;&s/>+*^vv^*o%+x|~--|x~ ><>-|+++++++++/:<  ",
)


def _similar_braille(bits: int) -> str:
    """Return an ASCII character that resembles a braille character's dots."""
    # A braille character that is filled from the bottom becomes one of similar height. Any other
    # becomes one at the mean height of its dots.
    rows = [row for row, mask in enumerate((0x09, 0x12, 0x24, 0xC0)) if bits & mask]
    if not rows:
        return " "
    if rows == list(range(rows[0], 4)) and len(rows) > 1:
        return "#+:"[rows[0]]
    return "'--."[round(sum(rows) / len(rows))]


_SIMILAR: dict[int, int | str] = {
    **_SIGNS,
    **{0x2800 + bits: _similar_braille(bits) for bits in range(256)},
}


def to_ascii(text: str) -> str:
    """Replace characters outside ASCII with similar ASCII ones of the same width."""
    for sign in ("± ", "±\u00a0", " ±"):  # two cells before and after
        text = text.replace(sign, "+-")
    text = text.translate(_SIMILAR)
    return text if text.isascii() else "".join(map(_ascii_character, text))


def _ascii_character(character: str) -> str:
    """Return a replacement for a character: its base letter if that is ASCII, as for "é".

    ASCII characters stay as they are. All others become a "?" for each cell that they take.
    """
    if character.isascii():
        return character
    letter = unicodedata.normalize("NFKD", character)[0]
    return letter if letter.isascii() else "?" * _character_cells(character)


DeviceTone = Literal[
    "device0", "device1", "device2", "device3", "device4", "device5", "device6", "device7"
]
Shade = Literal[  # a tone mixed with the background, for the lower lines of a graph
    "accent.mid",
    "accent.low",
    "memory.mid",
    "memory.low",
    "power.mid",
    "power.low",
    "speed.mid",
    "speed.low",
    "heat.mid",
    "heat.low",
]
Tone = Literal[
    "text",  # ordinary text
    "dim",  # less important: units, captions, what is missing
    "title",  # column heads and captions
    "strong",  # the most important
    "accent",  # busy: utilisation
    "memory",
    "power",
    "speed",  # samples/s
    "headline",  # the most important number of a screen
    "heat",  # temperatures
    "good",
    "warn",
    "bad",
    "track",  # the empty part of a bar
    "key",  # a key to press
    "tab",  # the screen that is open
    DeviceTone,
    Shade,
]
TONES: tuple[Tone, ...] = get_args(Tone)
DEVICE_TONES: tuple[Tone, ...] = get_args(DeviceTone)


class Span(NamedTuple):
    """A piece of text in one tone. If it can be clicked, `action` is the Textual action to run."""

    text: str
    tone: Tone = "text"
    action: str = ""


class Line(NamedTuple):
    """A line made of spans. It is highlighted if the cursor is on it."""

    spans: tuple[Span, ...] = ()
    cursor: bool = False

    @property
    def text(self) -> str:
        """The text without tones."""
        return "".join(span.text for span in self.spans)


BLANK = Line()


def line(*spans: Span | str, cursor: bool = False) -> Line:
    """Build a line from spans and plain strings."""
    return Line(tuple(Span(span) if isinstance(span, str) else span for span in spans), cursor)


def device_tone(position: int) -> Tone:
    """Return the tone of the device at this position. After eight devices, the tones repeat."""
    return DEVICE_TONES[position % len(DEVICE_TONES)]


def cells(text: str) -> int:
    """Return how many terminal cells the text takes."""
    return len(text) if text.isascii() else _count_cells(text)


@lru_cache(maxsize=1024)
def _count_cells(text: str) -> int:
    return sum(_character_cells(sign) for sign in text)


def _character_cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int, ellipsis: str = "…") -> str:
    """Shorten text to `width` cells, with an ellipsis at the end if anything was cut."""
    if cells(text) <= width:
        return text
    room = width - cells(ellipsis)
    if room < 1:
        return "".join(sign for sign in text if _character_cells(sign) == 1)[: max(0, width)]
    taken, kept = 0, []
    for sign in text:
        taken += _character_cells(sign)
        if taken > room:
            break
        kept.append(sign)
    return "".join(kept) + ellipsis


def fit(
    text: str, width: int, align: Literal["left", "right"] = "left", ellipsis: str = "…"
) -> str:
    """Shorten or pad text to exactly `width` cells."""
    shown = cut(text, width, ellipsis)
    blank = " " * (width - cells(shown))
    return shown + blank if align == "left" else blank + shown


def span_cells(spans: Iterable[Span]) -> int:
    """Return how many cells the spans take."""
    taken = 0
    for text, _, _ in spans:  # not by `cells`: calls would take most of the time
        taken += len(text) if text.isascii() else _count_cells(text)
    return taken


def join_spans(spans: Iterable[Span]) -> list[tuple[str, Tone, str]]:
    """Merge neighbouring spans that have the same tone, because fewer spans are drawn faster.

    Returns them as (text, tone, action). Spans with an action aren't merged.
    """
    # Blanks have no visible tone, so they are merged with the span before them.
    joined: list[tuple[str, Tone, str]] = []
    text = action = ""
    tone = TONES[0]
    for span in spans:
        more, next_tone, next_action = span
        if not (action or next_action) and (next_tone == tone or more.isspace()):
            text += more
        elif more:
            if text:
                joined.append((text, tone, action))
            text, tone, action = span
    return [*joined, (text, tone, action)] if text else joined


def pad(
    spans: tuple[Span, ...], width: int, align: Literal["left", "right"] = "left"
) -> tuple[Span, ...]:
    """Cut or pad spans to exactly `width` cells."""
    missing = width - span_cells(spans)
    if missing == 0:
        return spans
    if missing > 0:
        blank = Span(" " * missing)
        return (*spans, blank) if align == "left" else (blank, *spans)
    kept: list[Span] = []
    room = width
    for span in spans:
        shown = cut(span.text, room, "")
        kept.append(span._replace(text=shown))
        room -= cells(shown)
        if room <= 0:
            break
    return (*kept, Span(" " * room)) if room > 0 else tuple(kept)


def spread(left: tuple[Span, ...], right: tuple[Span, ...], width: int) -> Line:
    """Put spans at both ends of a line. If they don't fit, only the left ones are kept."""
    gap = width - span_cells(left) - span_cells(right)
    if gap >= 1:
        return Line((*left, Span(" " * gap), *right))
    return Line(pad(left, width))


def wrap(text: str, width: int, max_lines: int) -> tuple[str, ...]:
    """Break text into at most `max_lines` lines of `width` cells.

    "…" marks the end if any text is left out. Numbers such as "1 024" are not broken.
    """
    lines = [""]
    for word in filter(None, unbroken(text).split(" ")):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cells(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    shown = [cut(row, width).replace(NO_BREAK, " ") for row in lines[:max_lines]]
    if len(lines) > max_lines and shown:
        shown[-1] = (
            cut(f"{shown[-1]} …", width)
            if cells(shown[-1]) + 2 <= width
            else cut(shown[-1] + "  ", width)
        )
    return tuple(shown)


def text_lines(
    text: str, width: int, max_lines: int, tone: Tone = "text", indent: int = 1
) -> tuple[Line, ...]:
    """Wrap text into at most `max_lines` indented lines, and remove control characters."""
    rows = wrap(plain(text, 2000), max(4, width - indent - 1), max_lines)
    return tuple(line(Span(" " * indent + row, tone)) for row in rows)


def fit_rows(lines: Sequence[Line], height: int, hint: str) -> tuple[Line, ...]:
    """Keep at most `height` lines. If some don't fit, `hint` replaces the last line that would."""
    if len(lines) <= height:
        return tuple(lines)
    kept = tuple(lines[: max(0, height - 1)])
    return (*kept, line(Span(f" {Mark.PENDING} ", "dim"), Span(hint, "dim")))[: max(0, height)]


def whole_lines(text: str, width: int, tone: Tone = "text") -> tuple[Line, ...]:
    """Wrap text without leaving anything out. Line breaks and indentation are kept.

    Control characters are escaped.
    """
    rows: list[str] = []
    for given in text.splitlines():
        taken, start = 0, 0
        shown = plain(given.expandtabs(4), len(given) * 4)
        for place, sign in enumerate(shown):
            taken += _character_cells(sign)
            if taken > max(2, width):
                words = shown.rfind(" ", start, place) + 1
                end = words if shown[start:words].strip() else place
                rows.append(shown[start:end])
                taken, start = cells(shown[end : place + 1]), end
        rows.append(shown[start:])
    return tuple(line(Span(row, tone)) for row in rows)
