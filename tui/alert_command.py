"""Starts the user's command for an alert without waiting for it to finish."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading

from .view.alerts import Alert

LIMIT_SECONDS = 60.0


def start_command(command: str, alert: Alert) -> str:
    """Start the user's command for an alert; return "", or an error message.

    The command's environment describes the alert. EVENER_ALERT is its kind, EVENER_ABOUT the label
    of the device or training, and EVENER_TEXT the message. The command has no terminal, and is
    killed after `LIMIT_SECONDS`.
    """
    described = {
        "EVENER_ALERT": alert.kind,
        "EVENER_ABOUT": alert.label,
        "EVENER_TEXT": alert.text,
    }
    try:
        process = subprocess.Popen(
            shlex.split(command),
            env=os.environ | described,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"The command for alerts can't be started: {error}."
    threading.Thread(target=_reap, args=(process,), name="evener-alert", daemon=True).start()
    return ""


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
