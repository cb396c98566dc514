"""The signs that the screens draw with: Unicode, or plain ASCII where a terminal has no more."""

from __future__ import annotations

from typing import Literal

import msgspec

BoxName = Literal["round", "ascii"]


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """One set of signs; every one of them takes one cell."""

    box: BoxName  # the CSS border of a panel
    full: str  # the filled part of a bar
    half: str  # half a cell of it; "" if there is none
    track: str  # the empty part
    spark: str  # heights from the lowest to the highest
    levels: str  # how far a cell of a graph is filled, from not at all
    shade: str  # a cell of a graph under its edge
    curve: str  # what plotext draws a line with
    plain: bool  # nothing beyond ASCII
    fills: str  # one filling for each device in a shares bar
    ellipsis: str
    none: str  # the device can't tell
    denied: str  # it could, but not to this user
    lost: str
    stale: str  # before a value that is too old to be called current
    cursor: str
    tagged: str
    ascending: str
    descending: str
    down: str  # received
    up: str  # sent
    degree: str
    plus_minus: str
    dot: str  # between facts
    running: str
    waiting: str
    done: str
    failed: str
    wall: str  # ran out of memory
    alarm: str


UNICODE = Marks(
    box="round",
    full="━",
    half="╸",
    track="─",
    spark="▁▂▃▄▅▆▇█",
    levels=" ▁▂▃▄▅▆▇█",
    shade="░",
    curve="hd",
    plain=False,
    fills="█▓▒░▞▚▤▥",
    ellipsis="…",
    none="–",
    denied="⊘",
    lost="×",
    stale="~",
    cursor="▸",
    tagged="◆",
    ascending="▲",
    descending="▼",
    down="↓",
    up="↑",
    degree="°",
    plus_minus="±",
    dot="·",
    running="●",
    waiting="○",
    done="✓",
    failed="✗",
    wall="▌",
    alarm="!",
)

ASCII = Marks(
    box="ascii",
    full="=",
    half="",
    track=".",
    spark="_.-:=+*#",
    levels=" .-#",
    shade=":",
    curve=".",
    plain=True,
    fills="#=+-%o*~",
    ellipsis="~",
    none="-",
    denied="x",
    lost="X",
    stale="~",
    cursor=">",
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

_PLAIN = str.maketrans(
    {
        "…": "~",
        "–": "-",
        "—": "-",
        "·": "|",
        "×": "x",
        "±": "+",
        "°": " ",
        "→": ">",
        "≤": "<",
        "≥": ">",
        "─": "-",
        "│": "|",
        "┤": "+",
        "├": "+",
        "┬": "+",
        "┴": "+",
        "┌": "+",
        "┐": "+",
        "└": "+",
        "┘": "+",
        "┼": "+",
        "\u202f": " ",
        "\u00a0": " ",
    }
)


def to_ascii(text: str) -> str:
    """`text` with every sign beyond ASCII replaced by one that is near it, cell for cell."""
    if text.isascii():
        return text
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
