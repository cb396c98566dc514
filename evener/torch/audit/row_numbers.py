"""Find losses that are divided by a random count, by letting rows draw different random numbers.

Usually an audit draws the same numbers for every row. It then misses a loss that is divided by a
random count, such as the number of tokens that the model masks, because every row has the same
count. Here, rows draw different random numbers, and a row draws the same ones in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...training.audit import LOSS, LOSS_SAFETY, REPEATS, SAFETY, GradientDifference, floor
from .computations import Computations, WholeShares
from .compute import GradientSketcher, Piece
from .randomness import SEED, EvenRandomness, draw_equal_rows
from .rows import FewRows

APART = 7919  # between the seeds of two rows


class RowRandomness(EvenRandomness):
    """Context manager in which random operations draw different numbers for each row.

    A row gets the same numbers, whichever batch it is in. Arguments:

    - `first`: index of the pass's first row.
    - `rows`: row count of the pass.
    - `by_row`: indices of the pass's random operations whose results have one entry per row. The
      other operations give every row the same numbers.
    - `disturbance`: seed of random errors to add to results, as large as rounding errors; 0 adds
      none.
    """

    def __init__(
        self, first: int, rows: int, by_row: frozenset[int] = frozenset(), disturbance: int = 0
    ) -> None:
        super().__init__(disturbance)
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
            made.append(_draw_row(function, own, dict(keywords), seed))
        if function._schema.is_mutable:  # rows of the argument were filled
            return arguments[0], True
        if isinstance(made[0], tuple):  # such as GPUs' dropout with its mask
            return tuple(map(torch.cat, zip(*made, strict=True))), True
        return torch.cat(made), True


def _draw_row(function: Any, arguments: list[Any], keywords: dict[str, Any], seed: int) -> Any:
    """Run a random operation on the arguments of one row, with this seed."""
    # usually an audit takes the likelier value of torch.bernoulli, and a count of them isn't random
    if function.overloadpacket is torch.ops.aten.bernoulli:
        chances = arguments[0] if len(arguments) < 2 else arguments[1]
        drawn = draw_equal_rows(torch.ops.aten.rand_like.default, arguments[:1], {}, seed)[0]
        return (drawn < chances).to(arguments[0].dtype)
    return draw_equal_rows(function, arguments, keywords, seed)[0]


def _find_size(function: Any) -> int | None:
    """Return the index of an operation's `size` parameter, or None if it has none."""
    names = [argument.name for argument in function._schema.arguments]
    return names.index("size") if "size" in names else None


def _count_entries(argument: Any, size_index: int | None) -> int:
    """Return the length of the first axis of what a random operation draws; 0 for a scalar.

    `size_index` is the index of the operation's `size` parameter, or None if it has none.
    `argument` is the value of that parameter, or else the operation's first argument.
    """
    if size_index is not None:
        return int(argument[0]) if argument else 0
    return len(argument) if isinstance(argument, torch.Tensor) and argument.ndim else 0


def _cut(argument: Any, is_size: bool, row: int, rows: int) -> Any:
    """Return a random operation's argument for a single row: the one with index `row`.

    `rows` is the row count of the pass. Arguments that don't have one entry per row are returned
    unchanged. `is_size` is whether the argument is the size of the result.
    """
    if is_size:
        return [1, *argument[1:]]
    if isinstance(argument, torch.Tensor) and argument.ndim and len(argument) == rows:
        return argument[row : row + 1]
    return argument


class _Pass(NamedTuple):
    """A pass, with the index of its first row and its row count."""

    piece: Piece
    first: int
    rows: int


def find_loss_by_rows(
    sketcher: GradientSketcher, computations: Computations, few: FewRows
) -> tuple[float, float] | None:
    """Compute the loss in equal and in unequal parts, while each row draws its own random numbers.

    Return both losses if they differ, else None. The result is also None if no random operation
    returns one entry per row. `sketcher` has to compute only losses.
    """
    with sketcher.open():
        found = _compare_losses(
            sketcher,
            _list_passes(computations.reference, few.even_sizes),
            _list_passes(computations.trained, few.sizes),
        )
    return None if found is None else found.losses


def find_random_count(
    sketcher: GradientSketcher, shares: WholeShares, add_noise: bool
) -> GradientDifference | None:
    """Compare the losses of an audit again, this time with each row drawing its own random numbers.

    The result is the difference if the losses differ by more than rounding. It is None if they
    agree, if they can't be computed, or if no random operation returns one entry per row. With
    `add_noise`, noise is added to weights whose values are all the same.
    """
    before, sketcher.losses_only = sketcher.losses_only, True
    try:
        with sketcher.open(add_noise):
            return _compare_losses(
                sketcher,
                _list_passes(shares.reference, shares.reference_sizes),
                _list_passes(shares.trained, shares.sizes),
                measures_rounding=True,
            )
    except Exception:  # the usual audit could compute the loss, and found no difference
        return None
    finally:
        sketcher.losses_only = before


def _compare_losses(
    sketcher: GradientSketcher,
    reference: Sequence[_Pass],
    trained: Sequence[_Pass],
    measures_rounding: bool = False,
) -> GradientDifference | None:
    """Compare the losses of two computations, while each row draws its own random numbers.

    The result is None if the losses agree or can't be compared. With `measures_rounding`, the
    effect of rounding errors is measured on these rows, and losses that differ by less than this
    effect also count as equal.
    """
    if not (reference and trained):
        return None
    by_row = _find_draws_by_row(sketcher, [*reference, *trained])
    if not by_row:
        return None
    right, precision = _sum_losses(sketcher, reference, by_row)
    own, own_precision = _sum_losses(sketcher, trained, by_row)
    scale = max(abs(right), abs(own))
    allowed = LOSS_SAFETY * max(precision, own_precision)
    # a loss that isn't finite compares with nothing
    if not abs(own - right) > allowed * scale:
        return None
    if measures_rounding:
        repeats = [
            _sum_losses(sketcher, reference, by_row, number + 1)[0] for number in range(REPEATS)
        ]
        allowed = max(allowed, SAFETY * max(abs(each - right) for each in repeats) / scale)
        if not abs(own - right) > allowed * scale:
            return None
    return GradientDifference(LOSS, abs(own - right) / scale, allowed, right, own, (right, own))


def _find_draws_by_row(sketcher: GradientSketcher, passes: Sequence[_Pass]) -> frozenset[int]:
    """Return the indices of the random operations that return one entry per row in every pass.

    The set is empty if all passes have the same number of rows, because an operation may then have
    that many entries by coincidence.
    """
    if len({each.rows for each in passes}) < 2:
        return frozenset()
    noted = [RowRandomness(each.first, each.rows) for each in passes]
    for mode, each in zip(noted, passes, strict=True):
        sketcher.sketch([each.piece], modes=[mode])
    return frozenset(set.intersection(*(mode.may_be_by_row for mode in noted)))


def _sum_losses(
    sketcher: GradientSketcher,
    passes: Sequence[_Pass],
    by_row: frozenset[int],
    disturbance: int = 0,
) -> tuple[float, float]:
    """Return the sum of the passes' losses, and the precision of the dtypes used to compute them.

    The precision is a relative difference: gradients of these dtypes that differ by less count as
    equal. `by_row` has the indices of the random operations that draw different numbers for each
    row. `disturbance` is the seed of random errors to add to results; 0 adds none.
    """
    found = [
        sketcher.sketch(
            [each.piece], modes=[RowRandomness(each.first, each.rows, by_row, disturbance)]
        )
        for each in passes
    ]
    precision = max(floor(each.kinds.get(LOSS, "float32")) for each in found)
    return sum(each.loss for each in found), precision


def _list_passes(computation: Sequence[Piece], sizes: Sequence[int]) -> list[_Pass]:
    """Return the passes of a computation with their rows.

    `sizes` has the row count of each pass. If its length isn't the number of passes, the result is
    [].
    """
    if len(computation) != len(sizes):
        return []
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    return list(map(_Pass, computation, firsts, sizes))
