"""What a rank says as it ends by an error."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr


def last_words(error: BaseException) -> str:
    """The error, and below it the last line that Python's hook for errors that end a program
    prints.
    """
    said = io.StringIO()
    with redirect_stderr(said):
        sys.excepthook(type(error), error, None)
    return f"{type(error).__name__}: {error}\n{said.getvalue().strip().splitlines()[-1]}"
