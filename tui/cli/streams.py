"""Standard streams that a command can lose: a pipe without a reader, a terminal that was closed, no stream at all.

What is said about the work (standard error) never ends it; when nobody reads the answer (standard output), the command
ends by `ReaderGoneError`, once, wherever it was; when its file can't take the answer, by `OutputError`.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import shutil
import sys
from typing import TextIO

from evener.errors import RequestError
from evener.tui.view.marks import to_ascii


class ReaderGoneError(Exception):
    """Nobody reads standard output any more. No OSError, as argument parsers take those for their own affair."""


class OutputError(RequestError):
    """Standard output is a file that can't be written, as on a full disk; to be said on standard error."""


class _Outlasting(io.FileIO):
    """A descriptor that is written to for as long as somebody takes it."""

    def __init__(self, descriptor: int, raises: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises = raises
        self._is_terminal = os.isatty(descriptor)  # one that hung up no longer tells

    def write(self, data: object) -> int:
        """The bytes taken; what nobody takes counts as written."""
        size = memoryview(data).nbytes  # type: ignore[arg-type]  # a buffer, as everywhere in io
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError as error:
            raises, self._raises = self._raises, False
            if raises:
                raise self._loss(error) from None
            return size

    def _loss(self, error: OSError) -> Exception:
        if self._is_terminal or error.errno == errno.EPIPE:
            return ReaderGoneError()
        reason = error.strerror or str(error)
        return OutputError(f"Standard output can't be written: {reason}.", "Make room, or send it elsewhere.")


def terminal_columns() -> int | None:
    """The width of the terminal that standard output is; None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def draws_screens() -> bool:
    """Whether the full-screen app can be shown: on a terminal, both ways, that understands where to draw."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def guard_streams() -> None:
    """Put such streams in the place of this process' own; one that is closed leads nowhere from now on.

    A closed descriptor would be given to the next file that is opened, such as a journal, and written into.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout = _outlasting(1, sys.stdout)
    sys.stderr = _outlasting(2, sys.stderr)


def _near(error: UnicodeError) -> tuple[str, int]:
    """A sign that the stream's encoding has, near the one that it lacks: a terminal may know ASCII alone."""
    assert isinstance(error, UnicodeEncodeError)
    return to_ascii(error.object[error.start : error.end].replace("±", "+-")), error.end


def _outlasting(descriptor: int, before: TextIO | None) -> io.TextIOWrapper:
    raw = _Outlasting(descriptor, raises=descriptor == 1)
    encoding = before.encoding if before is not None else "utf-8"
    codecs.register_error("evener.near", _near)
    errors = "evener.near" if descriptor == 2 or before is None or before.errors == "strict" else before.errors
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=descriptor == 2 or raw.isatty())
