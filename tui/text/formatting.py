"""Formats numbers, sentences and tables for people, and JSON and TOML for programs."""

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
    """Return `text` with no-break spaces inside its numbers, such as 2 165, 0.7 % and ± 0.7 %."""
    return _WITHIN_FIGURE.sub(NO_BREAK, text)


def folded(text: str, width: int | None, indent: str = "") -> list[str]:
    """Wrap a sentence into lines of at most `width` characters, but never narrower than 20.

    Lines after the first begin with `indent`. If `width` is None, the sentence is a single line.
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
    """Return cells for a layout's samples per joule, active watts and idle watts.

    Devices in use are active, the other ones idle. The samples per joule count both. Each cell is
    "-" if no power is known.
    """
    watts = active_watts + idle_watts
    if not watts:
        return "-", "-", "-"
    return efficiency(samples_per_second / watts), f"{active_watts:.0f}", f"{idle_watts:.0f}"


class Table(NamedTuple):
    """A text table; the first of its rows holds the column headings.

    Columns from index `numbers_from` on hold numbers and are right-aligned. `note` is a sentence
    below the table that explains the headings.
    """

    title: str
    rows: Sequence[Sequence[str]]
    numbers_from: int
    note: str = ""

    def lines(self, width: int | None = None) -> list[str]:
        """Return the title, rows and note as lines, followed by an empty line.

        A table without rows becomes "title: note", or no lines if one of them is empty. Otherwise,
        the note is wrapped to `width` characters, or not wrapped if that is None.
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
    """Return `data` as one line of JSON that is safe to print.

    Bytes of file names that aren't valid UTF-8 become question marks.
    """
    try:
        text = msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(as_unicode(msgspec.to_builtins(data))).decode()
    return harmless_json(text.encode())


def harmless_json(document: bytes) -> str:
    """Return the JSON document with its control characters escaped, so that printing it is safe."""
    return _harmless(document.decode(), lambda sign: json.dumps(sign)[1:-1])


def toml_text(document: bytes) -> str:
    """Escape the control characters of a TOML document, to print it safely.

    All strings of the document must be basic strings (in double quotes), because only they allow
    escapes.
    """
    return _harmless(document.decode(), lambda sign: f"\\U{ord(sign):08x}")


def _harmless(text: str, escape: Callable[[str], str]) -> str:
    """Replace each control character by the result of `escape`."""
    # Control characters are DEL and every non-ASCII control or format character, surrogate, and
    # line or paragraph separator. The encoders have already escaped ASCII control characters in
    # strings.
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(
        escape(sign) if sign > "\x7e" and unicodedata.category(sign) in _UNSAFE else sign
        for sign in text
    )


def cut_path(text: str, most: int) -> str:
    """Return the path `text` shortened to at most `most` characters.

    The first directories are replaced by an ellipsis, because the file's name is at the end.
    """
    if len(text) <= most:
        return text
    kept = text[len(text) - most + 1 :]
    _, slash, rest = kept.partition("/")
    return "…" + (slash + rest if rest else kept)
