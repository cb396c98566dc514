"""Make text safe to print in a terminal, and print messages."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

CONTROLS = ("Cc", "Cf", "Zl", "Zp")  # Unicode's control, format and separator characters


def printable(text: str) -> str:
    """Return the text with spaces in place of control characters.

    Characters that UTF-8 can't encode become "?".
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
    """Return the text without control characters, cut off with "…" after `limit` characters."""
    clean = printable(text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def print_notice(*lines: str) -> None:
    """Print lines to standard error, each with the prefix "evener: "."""
    for line in lines:
        print(f"evener: {plain(line, 1000)}", file=sys.stderr, flush=True)


def align(rows: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """Return a line of text for each row of a table, with aligned columns.

    Columns from the index `numbers_from` on are right-aligned. Raises IndexError if there are no
    rows.
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
