"""Figures and times as people read and write them; knows no screen."""

from __future__ import annotations

import re
import unicodedata

from evener.errors import RequestError

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?) *(ms|s|min|m|h)(?![a-z]) *")


def parse_duration(text: str, name: str) -> float:
    """Seconds in "120s", "2m", "1h30m", "3 min 20 s" or "90" (seconds); RequestError names the option."""
    given = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", given):
        given += "s"
    parts = _PART.findall(given)
    if not parts or _PART.sub("", given):
        raise RequestError(f"{name} {text!r} is not a time.", "Write it like 90s, 2m or 1h.")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def duration(seconds: float) -> str:
    """A time as short as it can be read: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def rate(samples_per_second: float) -> str:
    """Samples/s with four significant digits at least, thousands set apart: 12.35, 684.2, 2 123, 158 012."""
    for digits, limit in ((2, 99.995), (1, 999.95)):
        if samples_per_second < limit:
            return f"{samples_per_second:.{digits}f}"
    return f"{samples_per_second:,.0f}".replace(",", " ")


def size(count: float) -> str:
    """Bytes in binary units with three significant digits: 512 MiB, 7.63 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def percent(share: float, digits: int = 0) -> str:
    """A relative figure: 0.173 is "17 %"."""
    return f"{share * 100:.{digits}f} %"


def plain(text: str, limit: int = 500) -> str:
    """Text from elsewhere with every control and format character replaced, so that it can't steer a terminal."""
    clean = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") else char for char in text)
    clean = "".join("?" if unicodedata.category(char) == "Cs" else char for char in clean)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
