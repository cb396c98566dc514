"""Figures, times and sentences as people read them. Knows no screen."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable

from evener.balancer.number_format import efficiency

NO_BREAK = "\u00a0"
_WITHIN_FIGURE = re.compile(r"(?<=\d) (?=\d{3}(?!\d)|%)|(?<=±) (?=\d)")


def note_words(note: str, tags: Iterable[str]) -> str:
    """A run's tags and note on one line."""
    return " ".join((*(f"#{tag}" for tag in tags), note)).strip()


def unbroken(text: str) -> str:
    """`text` with no-break spaces within its figures (2 165, 0.7 %, ± 0.7 %), to be broken into lines."""
    return _WITHIN_FIGURE.sub(NO_BREAK, text)


def folded(text: str, width: int | None, indent: str = "") -> list[str]:
    """A sentence in lines of at most `width` characters, broken between words; whole without a width."""
    if width is None:
        return [text]
    lines = textwrap.wrap(
        unbroken(text), max(20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def plain(text: str, limit: int = 500) -> str:
    """Foreign text with every control and format character replaced, so that it can't control a terminal."""
    clean = text
    if not text.isprintable():
        clean = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") else char for char in text)
        clean = "".join("?" if unicodedata.category(char) == "Cs" else char for char in clean)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def energy_cells(samples_per_second: float, active_watts: float, idle_watts: float) -> tuple[str, str, str]:
    """Samples per joule of all devices, the watts of those that compute and of idle ones; - where they are unknown."""
    watts = active_watts + idle_watts
    if not watts:
        return "-", "-", "-"
    return efficiency(samples_per_second / watts), f"{active_watts:.0f}", f"{idle_watts:.0f}"
