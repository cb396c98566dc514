"""Parts of a batch: the rows of one pass, with their weight in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import RequestError
from ...shares.whole_rows import bounds, gradient_weight
from ...training.passes import Pass, divide_rows, weigh_passes
from ..rows.structure import AssignedBatch, cut_rows

AddUp = Callable[[torch.Tensor], torch.Tensor]


class Part:
    """Rows of a batch that are computed in one forward and backward pass.

    Used as a context manager, a part catches an out-of-memory error. Its rows are then yielded
    again in smaller parts.

    Arguments:

    - `batch`: the rows, in the structure of the batch.
    - `rows`: the number of rows; 0 if there is only a filler row, which doesn't count.
    - `weight`: weight of the part's mean loss in this rank's mean loss.
    - `scale`: function that is applied to each loss before its backward pass.
    """

    def __init__(self, batch: Any, rows: int, weight: Any, scale: Callable[[Any], Any]) -> None:
        self.batch = batch
        self.rows = rows
        self.weight = weight
        self.turn = Pass(0, 0, rows, rows, True, True)  # position among the batch's passes
        self.computed = False  # True once backward was called
        self.count: OfPart | None = None  # counts what the loss is a mean over, if not rows
        self.counted: torch.Tensor | None = None  # result of `count` for these rows
        self.passes: Any = None  # the Passes that yielded this part
        # called with each loss after its backward pass
        self.after: Callable[[Any], None] | None = None
        self.error = ""  # the out-of-memory error that ended the block
        self._scale = scale

    @property
    def is_piece(self) -> bool:
        """Whether the part has fewer rows than planned, because memory ran out."""
        return self.rows < self.turn.planned

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or self.passes is None:
            return False
        self.error = self.passes.catch(error)
        return bool(self.error)

    def backward(self, loss: Any) -> Any:
        """Run the backward pass of this part's mean loss; return the loss times the part's weight.

        It may be called several times, each time with another loss. With a GradScaler, pass
        `scaler.scale(loss)`. The result is detached. The sum of the results of all parts is the
        rank's mean loss.
        """
        self.computed = True
        if self.passes is not None:
            self.passes.open()
        plain = not isinstance(self.weight, torch.Tensor)
        weight = self.weight if plain else self.weight.to(loss.dtype)
        self._scale(loss * weight).backward()
        if self.passes is not None:
            self.passes.close()
        if self.after is not None:
            self.after(loss)
        if plain:
            return loss.detach() * weight
        return torch.where(weight > 0, loss.detach() * weight, 0.0)  # a mean over nothing is NaN

    def check_computed(self) -> None:
        """Raise a RequestError if `backward` wasn't called."""
        if torch.is_grad_enabled() and not self.computed:
            raise RequestError(
                "A pass ended without part.backward(loss), so its rows would be missing from "
                "the gradient.",
                "Call part.backward(loss) in place of loss.backward(), in every pass.",
            )

    def at(self, turn: Pass) -> Part:
        """Return a Part with only the rows that the pass `turn` computes.

        `turn` is a pass in the queue. If it computes all rows of this part, the part itself is
        returned.
        """
        # in proportion to rows or, if the loss is a mean over what `count` counts, to that count
        if turn.rows == self.rows:
            self.turn = turn
            return self
        rows = cut_rows(self.batch, turn.start, turn.stop, self.rows)
        piece = Part(rows, turn.rows, self.weight * turn.part, self._scale)
        piece.turn, piece.count = turn, self.count
        if self.count is not None and self.counted is not None:
            piece.counted = _count(self.count, piece)
            share = piece.counted / self.counted.clamp(min=1e-300)
            piece.weight = self.weight * share.to(self.weight.device)
        return piece


OfPart = Callable[[Part], Any]  # returns the mean loss over a part, or the count in it


def make_parts(
    batch: Any, rows: int, micro: int, scale: Callable[[Any], Any], passes: int = 0
) -> list[Part]:
    """Divide a batch of `rows` rows into parts of at most `micro` rows.

    Arguments:

    - `scale`: function that is applied to each loss before its backward pass.
    - `passes`: number of parts; 0 for as few as possible.

    An AssignedBatch is already divided, so its own parts are returned. Raises RequestError if the
    batch can't be divided.
    """
    if isinstance(batch, AssignedBatch):
        pieces, sizes = list(batch.passes), tuple(batch.rows)
    else:
        sizes = divide_rows(rows, micro, passes)
        pieces = [batch] if len(sizes) == 1 else _cut_passes(batch, rows, sizes)
    return [
        Part(piece, own, weight, scale)
        for piece, own, weight in zip(pieces, sizes, weigh_passes(sizes, rows), strict=True)
    ]


def _cut_passes(batch: Any, rows: int, sizes: Sequence[int]) -> list[Any]:
    """Divide a batch of `rows` rows into passes with these row counts."""
    # a pass with 0 rows gets the batch's first row as a filler
    places = [each if each[0] < each[1] else (0, 1) for each in bounds(sizes)]
    return [cut_rows(batch, start, stop, max(1, rows)) for start, stop in places]


def weigh_by_count(
    parts: Sequence[Part], count: OfPart, sizes: Sequence[int], rank: int, add_up: AddUp
) -> None:
    """Weight parts by the denominators of their mean losses, such as token counts.

    Arguments:

    - `count`: returns the denominator for a part.
    - `sizes`: row count of each rank.
    - `add_up`: sums a tensor over the ranks.

    Every rank has to call this.
    """
    own = torch.stack([_count(count, part) * min(1, part.rows) for part in parts])
    total = add_up(own.sum())
    weights = own.to(total.device) / (total * (gradient_weight(sizes, rank) or 1.0))
    for part, weight, counted in zip(parts, weights, own, strict=True):
        part.weight, part.count, part.counted = weight, count, counted


def _count(count: OfPart, part: Part) -> torch.Tensor:
    counted: torch.Tensor = torch.as_tensor(count(part)).detach().to(torch.float64)
    return counted
