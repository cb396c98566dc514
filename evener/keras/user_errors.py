"""Finds the user's line and the relevant message in an error of Keras or TensorFlow."""

from __future__ import annotations

import re
import traceback
from pathlib import Path


def find_users_line(error: BaseException) -> str:
    """Return the last line of the user's code in a traceback, such as " (train.py, line 12)".

    The result is "" if there is none.
    """
    own = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(own):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


# Lines of an error that tell where it was raised instead of what it is.
PLACES = re.compile(
    r"^(Exception encounter|Graph execution error|Detected at node|<stack|File )|root error"
)


def first_line(error: Exception) -> str:
    """Return the line of an error's message that says what is wrong.

    Lines that only say where the error was raised are skipped. If there are no other lines, the
    result is the name of the error's class.
    """
    plain = re.sub(r"\x1b\[\d+m| ?\[Op:.*|\{\{.*?\}\} ?", "", str(error))
    lines = [re.sub(r"^\(\d+\) [A-Z_]+:", "", line.strip()).strip() for line in plain.splitlines()]
    own_lines = [line for line in lines if line and not PLACES.search(line)]
    return own_lines[0] if own_lines else type(error).__name__
