"""The last output of a rank that ends with an error."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

from evener.torch.ranks.peers import explain_failure


def last_words(error: BaseException) -> str:
    """Return the error, and below it the last line of the program's output."""
    said = io.StringIO()
    with redirect_stderr(said):
        print(f"{type(error).__name__}: {error}", file=said)
        explain_failure(error)
    return f"{type(error).__name__}: {error}\n{said.getvalue().strip().splitlines()[-1]}"
