"""What a rank says as it ends by an error."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

from evener.torch.ranks.peers import explain_failure


def last_words(error: BaseException) -> str:
    """The error, and below it the last line that a program prints that ends by it."""
    said = io.StringIO()
    with redirect_stderr(said):
        print(f"{type(error).__name__}: {error}", file=said)
        explain_failure(error)
    return f"{type(error).__name__}: {error}\n{said.getvalue().strip().splitlines()[-1]}"
