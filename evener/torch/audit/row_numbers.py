"""Compare losses with different random numbers in each row, to find a random divisor of the loss.

Usually an audit draws the same numbers for every row. It then misses a loss that is divided by a
random count, such as the number of tokens that the model masks, because every row has the same
count. Here rows have different random numbers, and each row keeps its own in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...training.audit import LOSS, LOSS_SAFETY, floor
from .compute import GradientSketcher, Piece
from .randomness import SEED, EvenRandomness, draw_equal_rows
from .rows import FewRows
from .step import Computations

APART = 7919  # between the seeds of two rows


class RowRandomness(EvenRandomness):
    """Context manager in which random operations draw different numbers for each row.

    A row gets the same numbers, whichever batch it is in. Arguments:

    - `first`: index of the pass's first row.
    - `rows`: row count of the pass.
    - `by_row`: indices of those random operations in the pass that have an entry for each row. The
      other operations give every row the same numbers.
    """

    def __init__(self, first: int, rows: int, by_row: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._first, self._rows, self._by_row = first, rows, by_row
        self.may_be_by_row: set[int] = set()  # draws that have as many entries as there are rows

    def _draw(self, function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        sized = _find_size(function)
        given = arguments[0] if sized is None else arguments[sized]
        if _count_entries(given, sized) == self._rows:
            self.may_be_by_row.add(self.draws)
        if self.draws not in self._by_row:
            return super()._draw(function, arguments, keywords)
        made = []
        for row in range(self._rows):
            own = [
                _cut(argument, place == sized, row, self._rows)
                for place, argument in enumerate(arguments)
            ]
            seed = SEED + self.draws + APART * (1 + self._first + row)
            made.append(draw_equal_rows(function, own, dict(keywords), seed)[0])
        if function._schema.is_mutable:  # rows of the argument were filled
            return arguments[0], True
        if isinstance(made[0], tuple):  # such as GPUs' dropout with its mask
            return tuple(map(torch.cat, zip(*made, strict=True))), True
        return torch.cat(made), True


def _find_size(function: Any) -> int | None:
    """Return the index of an operation's `size` parameter, or None if it has none."""
    names = [argument.name for argument in function._schema.arguments]
    return names.index("size") if "size" in names else None


def _count_entries(given: Any, sized: int | None) -> int:
    """Return the length of the first axis of what a random operation draws; 0 for a scalar.

    `sized` is the index of the operation's `size` parameter, or None if it has none. `given` is the
    value of that parameter, or else the operation's first argument.
    """
    if sized is not None:
        return int(given[0]) if given else 0
    return len(given) if isinstance(given, torch.Tensor) and given.ndim else 0


def _cut(argument: Any, is_size: bool, row: int, rows: int) -> Any:
    """Return one row of a random operation's argument; other arguments are returned unchanged."""
    if is_size:
        return [1, *argument[1:]]
    if isinstance(argument, torch.Tensor) and argument.ndim and len(argument) == rows:
        return argument[row : row + 1]
    return argument


def find_loss_by_rows(
    sketcher: GradientSketcher, computations: Computations, few: FewRows
) -> tuple[float, float] | None:
    """Compute the loss in equal and in unequal parts, with different random numbers for each row.

    Return both losses if they differ, else None. The result is also None if no random operation has
    an entry for each row. `sketcher` has to compute only losses.
    """
    passes = [
        (piece, first, rows)
        for computation, sizes in (
            (computations.reference, few.even_sizes),
            (computations.trained, few.sizes),
        )
        for piece, first, rows in _add_positions(computation, sizes)
    ]
    count = len(computations.reference)
    with sketcher.open():
        noted = [RowRandomness(first, rows) for _, first, rows in passes]
        for mode, (piece, _, _) in zip(noted, passes, strict=True):
            sketcher.sketch([piece], modes=[mode])
        by_row = frozenset(set.intersection(*(mode.may_be_by_row for mode in noted)))
        if not by_row or len({rows for _, _, rows in passes}) < 2:
            return None
        found = [
            sketcher.sketch([piece], modes=[RowRandomness(first, rows, by_row)])
            for piece, first, rows in passes
        ]
    right = sum(each.loss for each in found[:count])
    own = sum(each.loss for each in found[count:])
    allowed = LOSS_SAFETY * max(floor(each.kinds.get(LOSS, "float32")) for each in found)
    # a loss that isn't finite compares with nothing
    is_other = abs(own - right) > allowed * max(abs(right), abs(own))
    return (right, own) if is_other else None


def _add_positions(
    computation: Sequence[Piece], sizes: Sequence[int]
) -> list[tuple[Piece, int, int]]:
    """Return each pass of a computation with the index of its first row and its row count.

    `sizes` has the row count of each pass.
    """
    if len(computation) != len(sizes):
        return []
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    return list(zip(computation, firsts, sizes, strict=True))
