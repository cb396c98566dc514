"""The outputs of a command: standard streams, which may be lost while it runs, and files.

A stream is lost if its pipe, terminal or descriptor is closed. If standard error is lost, the
command continues. If standard output is lost, the command ends: writing raises `ReaderGoneError` if
nobody reads the output, and `OutputError` if it is a file that can't be written. Output files are
checked before anything is measured.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from evener.errors import EvenerError, PlanError, RequestError, as_request_error
from evener.plan.file import load_plan
from evener.printable import plain

from ..text.formatting import json_text
from ..view.cells import to_ascii


class ReaderGoneError(Exception):
    """Raised if nobody reads standard output any more.

    It isn't an OSError, because argument parsers handle OSErrors themselves.
    """


class OutputError(RequestError):
    """Raised if standard output is a file that can't be written, such as on a full disk.

    The error is always reported on standard error, even with `--json`.
    """


class _GuardedFile(io.FileIO):
    """A file that ignores later writes once one fails."""

    def __init__(self, descriptor: int, raises: bool) -> None:
        # if `raises`, the first failed write raises ReaderGoneError or OutputError
        super().__init__(descriptor, "w", closefd=False)
        self._raises = raises
        self._is_terminal = os.isatty(descriptor)  # unknown after a hang-up

    def write(self, data: object) -> int:
        """Write and return the size, even if the bytes were lost."""
        size = memoryview(data).nbytes  # type: ignore[arg-type]  # a buffer, as everywhere in io
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError as error:
            raises = self._raises
            self._raises = False
            if raises:
                raise self._loss(error) from None
            return size

    def _loss(self, error: OSError) -> Exception:
        if self._is_terminal or error.errno == errno.EPIPE:
            return ReaderGoneError()
        reason = error.strerror or str(error)
        return OutputError(
            f"Standard output can't be written: {reason}.",
            "Free some space, or redirect it elsewhere.",
        )


def terminal_columns() -> int | None:
    """Return the width of the terminal on standard output; None if it isn't a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def draws_screens() -> bool:
    """True if the full-screen app can run, in a browser or on this terminal.

    A terminal can't if TERM is unset or "dumb". In a browser, TEXTUAL_DRIVER is set.
    """
    if "TEXTUAL_DRIVER" in os.environ:
        return True
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def guard_streams() -> None:
    """Replace the standard streams by streams that survive being closed.

    A standard stream that is already closed is opened on /dev/null. Otherwise the next file to be
    opened, such as a journal, would get the stream's descriptor and its output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout = _guarded(1, sys.stdout)
    sys.stderr = _guarded(2, sys.stderr)


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the stream can't encode with similar ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    # `codecs` also expects the index at which to continue
    return to_ascii(error.object[error.start : error.end].replace("±", "+-")), error.end


def _guarded(descriptor: int, before: TextIO | None) -> io.TextIOWrapper:
    raw = _GuardedFile(descriptor, raises=descriptor == 1)
    encoding = before.encoding if before is not None else "utf-8"
    codecs.register_error("evener.similar", _similar)
    usual = ("strict", "surrogateescape")  # the second one in the C locale
    errors = (
        "evener.similar"
        if descriptor == 2 or before is None or before.errors in usual
        else before.errors
    )
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors, line_buffering=descriptor == 2 or raw.isatty()
    )


def report_fault(fault: EvenerError, as_json: bool) -> int:
    """Print an error to standard error, and return its exit code.

    If `as_json`, print it as JSON to standard output instead.
    """
    if as_json:
        error = {"kind": fault.kind, "message": fault.message, "remedy": fault.remedy}
        print(json_text({"error": error}), flush=True)
    else:
        print(f"evener: {plain(str(fault), 2000)}", file=sys.stderr, flush=True)
    return fault.exit_code


def check_plan_file(path: Path, option: str) -> None:
    """Raise RequestError unless a plan can be written to `path`.

    `option` is the option that named the path, for the message.
    """
    if path.suffix not in (".toml", ".json"):
        remedy = f"Name it {path.stem or 'plan'}.toml or {path.stem or 'plan'}.json."
        raise RequestError(
            f"{option} {path} ends neither in .toml nor in .json; plans are TOML or JSON.", remedy
        )
    with as_request_error(
        f"{option} {path} can't be written", "Name a file in a folder that you may write to."
    ):
        if path.is_dir():
            raise RequestError(f"{option} {path} is a folder.", "Name a file in it.")
        tempfile.TemporaryFile(dir=path.parent).close()


def check_replaceable(path: Path, remedy: str = "Name another file.") -> None:
    """Raise RequestError with this `remedy` if the file exists and isn't a plan.

    A plan may be replaced, because the run that found it still has it.
    """
    if path.is_file():
        try:
            load_plan(path)
        except PlanError:
            raise RequestError(f"{path} exists already and isn't a plan.", remedy) from None


def check_export(path: Path | None) -> None:
    """Raise RequestError if `path`, the value of `--export`, is given but can't be written."""
    if path is not None:
        check_plan_file(path, "--export")
        check_replaceable(path)


def check_new(path: Path, force: bool) -> None:
    """Raise RequestError if the file exists already, unless `force` is True."""
    if not force and path.exists():
        raise RequestError(
            f"{path} exists already.", "Add --force to replace it, or name another file."
        )
