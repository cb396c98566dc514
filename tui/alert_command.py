"""Start the command that the user has set for alerts."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading

from .view.alerts import Alert

LIMIT_SECONDS = 60.0


def start_command(command: str, alert: Alert) -> str:
    """Start `command` for `alert` in the background. Return an error message, or "" if it started.

    The command runs without a shell, in its own process session, and with its standard streams on
    /dev/null. It can read the alert from the environment variables EVENER_ALERT (kind),
    EVENER_ABOUT (device or training run) and EVENER_TEXT (message). After 60 seconds it is killed.
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
