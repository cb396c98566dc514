"""The text behind `@`: a share of a device's compute, a part of its memory, or both, and back to text again.

limit   = part [ "+" part ]         one of each kind, in either order
part    = percent | size
percent = NUMBER "%"                above 0, at most 100
size    = NUMBER UNIT               UNIT: B KiB MiB GiB TiB (powers of 1024) or KB MB GB TB (powers of 1000), any case
"""

from __future__ import annotations

import re
from decimal import Decimal

from evener.errors import RequestError

from .types import Limit

UNITS = {"b": 1} | {f"{sign}ib": 1 << 10 * i for i, sign in enumerate("kmgt", 1)}
UNITS |= {f"{sign}b": 1000**i for i, sign in enumerate("kmgt", 1)}
LARGEST_BYTES = 1 << 60
REMEDY = "Write a limit as 60%, 8GiB or 60%+8GiB."
_PART = re.compile(r"(\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})\s*(%|[a-zA-Z]{1,3})", re.ASCII)


def parse_limit(text: str) -> Limit:
    """The limit that the text behind `@` asks for; RequestError names the part that can't be read."""
    found: dict[str, Decimal] = {}
    for part in text.split("+"):
        number, unit = _number_and_unit(part.strip(), text)
        kind = "percentage" if unit == "%" else "size"
        if kind in found:
            raise RequestError(f"The limit {text!r} gives two {kind}s.", REMEDY)
        found[kind] = number * UNITS.get(unit, 1)
    percent, size = found.get("percentage"), found.get("size")
    if percent is not None and not 0 < percent <= 100:
        raise RequestError(f"The limit {text!r} is not a share of a device.", "Give more than 0 and at most 100 %.")
    if size is not None and not 1 <= size <= LARGEST_BYTES:
        raise RequestError(f"The limit {text!r} is not a size that a device can have.", REMEDY)
    return Limit(None if percent is None else float(percent), None if size is None else round(size))


def write_limit(limit: Limit) -> str:
    """The text that `parse_limit` reads back as the same limit; empty without one."""
    parts = []
    if limit.percent is not None:
        parts.append(f"{Decimal(repr(limit.percent)).normalize():f}%")  # the shortest decimal, without an exponent
    if limit.memory_bytes is not None:
        sizes = {unit: UNITS[unit.lower()] for unit in ("TiB", "GiB", "MiB", "KiB", "B")}
        unit = next(unit for unit in sizes if limit.memory_bytes % sizes[unit] == 0)
        parts.append(f"{limit.memory_bytes // sizes[unit]}{unit}")
    return "+".join(parts)


def _number_and_unit(part: str, text: str) -> tuple[Decimal, str]:
    found = _PART.fullmatch(part)
    if not found:
        raise RequestError(f"The limit {text!r} holds {part!r}, which is neither a percentage nor a size.", REMEDY)
    unit = found[2].lower()
    if unit != "%" and unit not in UNITS:
        message = f"The limit {text!r} has the unknown unit {found[2]!r}."
        raise RequestError(message, "Units are B, KiB, MiB, GiB, MB, GB.")
    return Decimal(found[1]), unit
