"""Figures as every sentence and table writes them."""

from __future__ import annotations

from collections.abc import Sequence


def rate(samples_per_second: float) -> str:
    """Samples/s with four significant digits at least, thousands set apart: 12.35, 684.2, 2 123, 158 012."""
    for digits, limit in ((2, 99.995), (1, 999.95)):
        if samples_per_second < limit:
            return f"{samples_per_second:.{digits}f}"
    return f"{samples_per_second:,.0f}".replace(",", " ")


def percent(share: float, digits: int = 0) -> str:
    """A relative figure: 0.173 is "17 %"."""
    return f"{share * 100:.{digits}f} %"


def join_words(words: Sequence[str]) -> str:
    """One, two and three."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
