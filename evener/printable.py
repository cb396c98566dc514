"""Text for a terminal: foreign text that can't control it, evener's own lines, and columns."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

CONTROLS = ("Cc", "Cf", "Zl", "Zp")  # Unicode's control, format and separator characters


def printable(text: str) -> str:
    """The text with a space for every control and format character, so that it can't control a
    terminal, and a question mark for what no encoding holds.
    """
    if text.isprintable():
        return text
    return "".join(map(_replace, text))


def _replace(sign: str) -> str:
    category = unicodedata.category(sign)
    if category in CONTROLS:
        return " "
    return "?" if category == "Cs" else sign


def plain(text: str, limit: int = 500) -> str:
    """Foreign text that can't control a terminal, in at most `limit` characters."""
    clean = printable(text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def say(*lines: str) -> None:
    """Print lines of evener's own on standard error, among those of a training too."""
    for line in lines:
        print(f"evener: {plain(line, 1000)}", file=sys.stderr, flush=True)


def align(rows: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """Columns separated by two spaces, right-aligned from `numbers_from` on."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column >= numbers_from else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
