"""Signal exactly the process that was confirmed, or read its environment; its pid and start time identify it."""

from __future__ import annotations

import os
import signal

import psutil

from evener.errors import RequestError

from .types import ProcessSample

SIGNALS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL}
START_TIME_TOLERANCE_SECONDS = 0.05  # psutil works it out from clock ticks


def send_signal(row: ProcessSample, name: str) -> None:
    """Send SIG`name`; RequestError if the process ended, its pid is another's now, or it is out of reach.

    A descriptor holds the process while its start time and owner are checked, so the pid can't be reused meanwhile.
    """
    _check_here(row)
    try:
        with open(os.pidfd_open(row.pid), "rb") as held:
            _check_same(row)
            signal.pidfd_send_signal(held.fileno(), SIGNALS[name])
    except (PermissionError, psutil.AccessDenied):
        raise RequestError(f"You may not signal process {row.pid}.", "Nothing was sent.") from None
    except (OSError, psutil.NoSuchProcess):
        raise RequestError(f"Process {row.pid} has ended.", "Nothing was sent.") from None


def read_environment(row: ProcessSample) -> dict[str, str]:
    """The variables that a process started with; RequestError if it ended, or belongs to another user."""
    _check_here(row)
    try:
        _check_same(row)
        return dict(psutil.Process(row.pid).environ())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        raise RequestError(f"Process {row.pid} has ended.", "Choose one that runs.") from None
    except (psutil.AccessDenied, OSError):
        raise RequestError(f"You may not read the environment of process {row.pid}.", "Ask its user.") from None


def _check_here(row: ProcessSample) -> None:
    if row.host:
        raise RequestError(f"Process {row.pid} runs on {row.host}, out of reach from here.", "Run evener there.")


def _check_same(row: ProcessSample) -> None:
    process = psutil.Process(row.pid)
    if abs(process.create_time() - row.start_time) > START_TIME_TOLERANCE_SECONDS:
        raise RequestError(f"Pid {row.pid} is another process now.", "Nothing was done.")
    if os.geteuid() != 0 and process.uids().real != os.geteuid():
        raise RequestError(f"Process {row.pid} belongs to another user.", "Ask them, or an administrator.")
