"""A rank's batch in the passes that its rows were dealt in, which only `split.parts` takes apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import RequestError


class DealtBatch:
    """The passes of a rank, each collated by itself, with the rows of each that count.

    Every other use of it is refused in a sentence, as it is in a loop that computes a batch at once.
    """

    def __init__(self, passes: Sequence[Any], rows: Sequence[int]) -> None:
        self.passes = passes
        self.rows = rows

    def map(self, function: Callable[[Any], Any]) -> DealtBatch:
        """The batch with `function` applied to the data of each pass."""
        return DealtBatch(list(map(function, self.passes)), self.rows)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RequestError(
            "The rows of this batch are dealt by their lengths, in several passes on a rank, but this loop computes a"
            " batch at once.",
            "Write for part in split.parts(batch): and part.backward(loss).",
        )

    __iter__ = __getitem__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
