"""A rank's batch in passes: each part is a forward and a backward pass, and the last one exchanges the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..errors import RequestError
from ..shares.passes import split_passes
from ..shares.whole_rows import bounds, even, gradient_weight
from .dealt_batch import DealtBatch
from .nested_batch import cut_rows, each_tensor


class Part:
    """The rows of one pass, in the batch's own structure; `rows` of them count, 0 where the rank only keeps step.

    `weight` is what its loss counts in this rank's mean. As a context, it takes out-of-memory of the block for a reason
    to come again in smaller parts.
    """

    def __init__(self, batch: Any, rows: int, weight: Any, scale: Callable[[Any], Any]) -> None:
        self.batch = batch
        self.rows = rows
        self.weight = weight
        self.computed = False  # backward was called
        self.count: Callable[[Part], Any] | None = None  # of what the loss is a mean over, where that isn't rows
        self.origin: Part | None = None  # that failed, of which it is a piece
        self.passes: Any = None  # the Passes that yielded this part
        self.error = ""  # that the block ended with
        self._scale = scale

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or self.passes is None:
            return False
        self.error = self.passes.catch(error)
        return bool(self.error)

    def backward(self, loss: Any) -> Any:
        """The backward pass of the mean loss over these rows (or over what `count` counted), weighted among the passes.

        Returns the weighted loss, detached: their sum over the parts is this rank's mean loss, for `split.mean`. With a
        GradScaler, give what `scaler.scale(loss)` returns. Several losses of one pass may be given in turn.
        """
        self.computed = True
        if self.passes is not None:
            self.passes.open()
        plain = not isinstance(self.weight, torch.Tensor)
        weight = self.weight if plain else self.weight.to(loss.dtype)
        self._scale(loss * weight).backward()
        if self.passes is not None:
            self.passes.close()
        if plain:
            return loss.detach() * weight
        return torch.where(weight > 0, loss.detach() * weight, 0.0)  # a mean over nothing is NaN

    def check_computed(self) -> None:
        """RequestError if its rows would be missing from the gradient."""
        if torch.is_grad_enabled() and not self.computed:
            raise RequestError(
                "A pass ended without part.backward(loss), so its rows would be missing from the gradient.",
                "Call part.backward(loss) in place of loss.backward(), in every pass.",
            )

    def cut(self, most: int, least: int = 1) -> list[Part]:
        """Pieces of up to `most` rows, or more where pieces would have fewer than `least`."""
        pieces = []
        for start, stop in bounds(even(self.rows, max(1, min(-(-self.rows // most), self.rows // least)))):
            rows = stop - start
            piece = Part(
                cut_rows(self.batch, start, stop, self.rows), rows, self.weight * rows / self.rows, self._scale
            )
            piece.count, piece.origin = self.count, self.origin
            pieces.append(piece)
        if self.count is not None:
            counted = torch.stack([_count(self.count, piece) for piece in pieces])
            parts = counted / counted.sum().clamp(min=1e-300)
            for piece, part in zip(pieces, parts, strict=True):
                piece.weight = self.weight * part.to(self.weight.device)
        return pieces


def make_parts(batch: Any, rows: int, micro: int, scale: Callable[[Any], Any]) -> list[Part]:
    """The parts of a rank's batch, of which `rows` count, in passes of up to `micro` rows, or as they were dealt.

    RequestError for a batch that can't be cut.
    """
    if isinstance(batch, DealtBatch):
        pairs = zip(batch.passes, batch.rows, strict=True)
        return [Part(each, own, own / rows if rows else 1.0, scale) for each, own in pairs]
    passes = split_passes(rows, micro)
    if len(passes) <= 1:
        return [Part(batch, rows, 1.0, scale)]
    return [
        Part(cut_rows(batch, start, stop, rows), stop - start, (stop - start) / rows, scale)
        for start, stop in bounds(passes)
    ]


def weigh_by_count(
    parts: Sequence[Part],
    count: Callable[[Part], Any],
    sizes: Sequence[int],
    rank: int,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Weigh each part by what `count` counts in it, of all that the ranks count in the batch; every rank calls it.

    `add_up` sums over the ranks.
    """
    own = torch.stack([_count(count, part) for part in parts]) * min(1, sizes[rank])
    total = add_up(own.sum())
    weights = own.to(total.device) / (total * (gradient_weight(sizes, rank) or 1.0))
    for part, weight in zip(parts, weights, strict=True):
        part.weight, part.count = weight, count


def _count(count: Callable[[Part], Any], part: Part) -> torch.Tensor:
    counted: torch.Tensor = torch.as_tensor(count(part)).detach().to(torch.float64)
    return counted


def in_turn(parts: Sequence[Part], models: Sequence[Any], device: torch.device) -> Iterator[Part]:
    """Each part, on the device for its turn; the models exchange gradients in the last one only."""
    for part in parts:
        batch = part.batch
        part.batch = each_tensor(lambda tensor: tensor.to(device, non_blocking=True), batch)
        with ExitStack() as stack:
            for model in models if part is not parts[-1] else ():
                if hasattr(model, "no_sync"):
                    stack.enter_context(model.no_sync())
            yield part
        part.batch = batch
        part.check_computed()
