"""A training run that the app has started on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evener.errors import RequestError, as_request_error
from evener.system.files import make_private

TAIL_BYTES = 64 << 10  # bytes at the end of the log that are read for its last lines


class LocalTraining:
    """A training run that the app has started in a separate process, which outlives the app.

    The process runs `evener` with `arguments`, and its output is appended to the file `log`. Raises
    RequestError if that file can't be written.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.command = shlex.join(["evener", *arguments])
        self.log = log
        with as_request_error(f"The log {log} can't be written", f"Look at {log.parent}."):
            make_private(log.parent)
            stream = open(log, "ab")  # noqa: SIM115 - the child keeps it
        with stream:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "evener", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
            )

    @property
    def pid(self) -> int:
        """The id of the launcher's process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process is running.

        If a signal ended the process, this is the negative number of the signal.
        """
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self.exit_code is None

    def stop(self) -> None:
        """Send SIGINT, as Ctrl-C does, so that the script can save a checkpoint."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)

    def state_text(self) -> str:
        """Return the process id or, once the process has ended, how it ended."""
        code = self.exit_code
        if code is None:
            return f"process {self.pid}"
        return "has ended" if code == 0 else f"ended with exit code {code}"

    def read_tail(self, lines: int) -> list[str]:
        """Return up to `lines` lines from the end of the log, or none if it can't be read.

        If a progress bar has rewritten its line, only its last state is returned.
        """
        try:
            with open(self.log, "rb") as stream:
                length = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, length - TAIL_BYTES))
                text = stream.read().decode("utf-8", "replace")
        except OSError:
            return []
        rows = [row.rstrip("\r").rpartition("\r")[2] for row in text.split("\n")]
        if rows and not rows[-1]:
            rows.pop()
        return rows[-lines:] if lines > 0 else []

    def closing_lines(self) -> tuple[str, ...]:
        """Return lines with the process's state, its log and, while it runs, how to stop it."""
        if not self.is_running:
            return (f"{self.command}: {self.state_text()}; its log: {self.log}",)
        return (
            f"{self.command} goes on as process {self.pid}; its log: {self.log}",
            f"to end it: kill -INT {self.pid}",
        )


def read_command(text: str) -> list[str]:
    """Split a command line into the arguments after `evener`.

    Raises RequestError unless the line is `evener launch PLAN SCRIPT...` with matching quotes.
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"The line can't be read: {error}.", "Close its quotes.") from None
    if parts[:2] != ["evener", "launch"] or len(parts) < 4:
        raise RequestError(
            "The line doesn't start a training with a plan.",
            "Write evener launch PLAN SCRIPT, then the script's own arguments.",
        )
    return parts[1:]
