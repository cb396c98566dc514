"""Wrapping, tables and JSON for all commands."""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from evener.balancer.number_format import efficiency
from evener.plan.file import as_unicode
from evener.printable import align

NO_BREAK = "\u00a0"
_WITHIN_FIGURE = re.compile(r"(?<=\d) (?=\d{3}(?!\d)|%)|(?<=±) (?=\d)")


def unbroken(text: str) -> str:
    """Replace the spaces in numbers such as "1 024 %" with no-break spaces."""
    return _WITHIN_FIGURE.sub(NO_BREAK, text)


def folded(text: str, width: int | None, indent: str = "") -> list[str]:
    """Wrap text at `width` columns without breaking words or numbers. None doesn't wrap it.

    Lines after the first begin with `indent`. The width is at least 20.
    """
    if width is None:
        return [text]
    lines = textwrap.wrap(
        unbroken(text),
        max(20, width),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def energy_cells(
    samples_per_second: float, active_watts: float, idle_watts: float
) -> tuple[str, str, str]:
    """Return table cells for samples/J, the watts of busy devices, and the watts of idle ones.

    All three are "-" if the power is unknown (0 watts).
    """
    watts = active_watts + idle_watts
    if not watts:
        return "-", "-", "-"
    return efficiency(samples_per_second / watts), f"{active_watts:.0f}", f"{idle_watts:.0f}"


class Table(NamedTuple):
    """A text table with aligned columns. The first row is the heading.

    - `numbers_from`: the first column with numbers; it and all later ones are aligned to the right.
    - `note`: a text below the table.
    """

    title: str
    rows: Sequence[Sequence[str]]
    numbers_from: int
    note: str = ""

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines of the table, followed by an empty one.

        The note is wrapped at `width` columns. A table that has no rows below the heading becomes a
        single line with its title and note, or nothing if either is "".
        """
        if len(self.rows) < 2:
            return [f"{self.title}: {self.note}", ""] if self.title and self.note else []
        notes = folded(self.note, width) if self.note else ()
        return [
            *((f"{self.title}:",) if self.title else ()),
            *align(self.rows, self.numbers_from),
            *notes,
            "",
        ]


_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def json_text(data: object) -> str:
    """Encode `data` as JSON that is safe to print on a terminal.

    Bytes that are not valid Unicode are replaced.
    """
    try:
        text = msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(as_unicode(msgspec.to_builtins(data))).decode()
    return harmless_json(text.encode())


def harmless_json(document: bytes) -> str:
    """Return encoded JSON as text, with control characters escaped."""
    return _harmless(document.decode(), lambda sign: json.dumps(sign)[1:-1])


def toml_text(document: bytes) -> str:
    """Return encoded TOML as text, with control characters escaped."""
    return _harmless(document.decode(), lambda sign: f"\\U{ord(sign):08x}")


def _harmless(text: str, escape: Callable[[str], str]) -> str:
    """Escape the control characters that a terminal could act on.

    `escape` returns the replacement for a character.
    """
    # Control characters are DEL and every non-ASCII control or format character, surrogate, and
    # line or paragraph separator. The encoders have already escaped ASCII control characters in
    # strings.
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(
        escape(sign) if sign > "\x7e" and unicodedata.category(sign) in _UNSAFE else sign
        for sign in text
    )


def cut_path(text: str, max_length: int) -> str:
    """Shorten a path to `max_length` characters, with "…" in place of its first folders."""
    if len(text) <= max_length:
        return text
    kept = text[len(text) - max_length + 1 :]
    _, slash, rest = kept.partition("/")
    return "…" + (slash + rest if rest else kept)
