"""The characters that the screens draw with: Unicode, or plain ASCII."""

from __future__ import annotations

import msgspec


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """A set of characters, Unicode by default; each takes one cell."""

    full: str = "━"  # the filled part of a bar
    half: str = "╸"  # half a cell of it; "" if there is none
    track: str = "─"  # the empty part
    spark: str = "▁▂▃▄▅▆▇█"  # heights from the lowest to the highest
    levels: str = " ▁▂▃▄▅▆▇█"  # how far a cell of a graph is filled, from not at all
    shade: str = "░"  # a cell of a graph under its edge
    curve: str = "hd"  # what plotext draws a line with
    predicted: str = "·"  # a line beyond what was measured
    plain: bool = False  # nothing beyond ASCII
    fills: str = "█▓▒░▞▚▤▥"  # one filling for each device in a shares bar
    ellipsis: str = "…"
    none: str = "–"  # the device doesn't report it
    pending: str = "…"  # not read yet: a rate needs two readings
    denied: str = "⊘"  # this user may not read it
    lost: str = "×"
    stale: str = "~"  # before a value that is too old to be called current
    cursor: str = "▸"
    folded: str = "▶"  # a group whose rows are hidden
    tagged: str = "◆"
    ascending: str = "▲"
    descending: str = "▼"
    down: str = "↓"  # received
    up: str = "↑"  # sent
    degree: str = "°"
    plus_minus: str = "±"
    dot: str = "·"  # between facts
    running: str = "●"
    waiting: str = "○"
    done: str = "✓"
    failed: str = "✗"
    wall: str = "▌"  # ran out of memory
    alarm: str = "!"

    def show(self, text: str) -> str:
        """`text` in the characters of this set."""
        return to_ascii(text) if self.plain else text


UNICODE = Marks()
ASCII = Marks(
    full="=",
    half="",
    track=".",
    spark="_.-:=+*#",
    levels=" .-#",
    shade=":",
    curve=".",
    predicted="~",
    plain=True,
    fills="#@$&/;:s",
    ellipsis="~",
    none="-",
    pending="?",
    denied="x",
    lost="X",
    stale="~",
    cursor=">",
    folded="+",
    tagged="*",
    ascending="^",
    descending="v",
    down="<",
    up=">",
    degree=" ",
    plus_minus="+-",
    dot="|",
    running="*",
    waiting="o",
    done="+",
    failed="x",
    wall="|",
    alarm="!",
)

_SIMILAR = str.maketrans(
    "…–—·×±°→≤≥─│┤├┬┴┌┐└┘┼\u202f\u00a0",
    "~--|x~ ><>-|+++++++++  ",
)


def to_ascii(text: str) -> str:
    """`text` with every other character replaced by a similar ASCII one, cell for cell."""
    if text.isascii():
        return text
    text = text.replace("± ", "+-").replace("±\u00a0", "+-")  # two cells in both
    return text.translate(_SIMILAR).encode("ascii", "replace").decode("ascii")
