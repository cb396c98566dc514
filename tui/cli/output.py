"""Standard streams that survive a closed pipe, error messages, and checks of output files.

If standard error can't be written, a command continues without it. If standard output can't be
written, ReaderGoneError or OutputError is raised and ends the command.
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
    """The reader of standard output, such as `head`, has closed it, or its terminal was closed."""


class OutputError(RequestError):
    """Standard output can't be written, for instance because the disk is full."""


class _GuardedFile(io.FileIO):
    """A standard stream that ignores failed writes.

    If `raises` is set, the first failed write raises an error, and only later ones are ignored.
    """

    def __init__(self, descriptor: int, raises: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises = raises
        self._is_terminal = os.isatty(descriptor)  # unknown after a hang-up

    def write(self, data: object) -> int:
        """Write `data` and return its size in bytes, even if the write fails.

        The first failure raises ReaderGoneError or OutputError if `raises` was set.
        """
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
    """Return the width of the terminal, or None if standard output isn't a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def draws_screens() -> bool:
    """Return whether the app can be shown, on a terminal or by Textual's driver for browsers."""
    if "TEXTUAL_DRIVER" in os.environ:
        return True
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def guard_streams() -> None:
    """Replace the standard streams, so that a closed or full one can't crash the process.

    Missing streams are opened on /dev/null. Characters that the encoding lacks are replaced with
    similar ASCII ones.
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
    """Codec error handler that encodes characters as similar ASCII ones."""
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
    """Print an error, and return its exit code.

    The error goes to standard output as JSON, or to standard error as text.
    """
    if as_json:
        error = {"kind": fault.kind, "message": fault.message, "remedy": fault.remedy}
        print(json_text({"error": error}), flush=True)
    else:
        print(f"evener: {plain(str(fault), 2000)}", file=sys.stderr, flush=True)
    return fault.exit_code


def check_plan_file(path: Path, option: str) -> None:
    """Raise RequestError unless a plan can be written to `path`, a .toml or .json file."""
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
    """Raise RequestError if `path` is an existing file that isn't a plan.

    `remedy` is what the error suggests to the user.
    """
    if path.is_file():
        try:
            load_plan(path)
        except PlanError:
            raise RequestError(f"{path} exists already and isn't a plan.", remedy) from None


def check_export(path: Path | None) -> None:
    """Raise RequestError if the plan can't be written to `path`, before a long search begins.

    Does nothing if `path` is None.
    """
    if path is not None:
        check_plan_file(path, "--export")
        check_replaceable(path)


def check_new(path: Path, force: bool) -> None:
    """Raise RequestError if `path` exists and `force` isn't set."""
    if not force and path.exists():
        raise RequestError(
            f"{path} exists already.", "Add --force to replace it, or name another file."
        )
