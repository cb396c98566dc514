"""Text from elsewhere without the characters that control a terminal."""

from __future__ import annotations

import unicodedata

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
