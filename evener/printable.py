"""Text for a terminal: sanitize external text, print evener's own lines and align columns."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

CONTROLS = ("Cc", "Cf", "Zl", "Zp")  # Unicode's control, format and separator characters


def printable(text: str) -> str:
    """Return the text with terminal control characters replaced by spaces.

    Lone surrogates, which no encoding can represent, become question marks.
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
    """Return the text sanitized for a terminal and cut to at most `limit` characters.

    A text that was cut ends with an ellipsis.
    """
    clean = printable(text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def print_notice(*lines: str) -> None:
    """Print evener's own lines on standard error, each with the prefix `evener: `."""
    for line in lines:
        print(f"evener: {plain(line, 1000)}", file=sys.stderr, flush=True)


def align(rows: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """Return a table as lines of text, with its columns aligned and two spaces apart.

    `rows` has the cells of each line. Columns from index `numbers_from` on are right-aligned.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column >= numbers_from else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
