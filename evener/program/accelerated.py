"""Figures that accelerate gathers of ranks with different numbers of rows, and its loader of one rank for all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ..torch_rows.structure import each_tensor
from .program import PROGRAM

DISPATCHED = "one rank reads the rows of all (dispatch_batches of accelerate)"


def begin_dispatcher(wrapped: Any, _: Any, *__: Any) -> Any:
    """Leave a loop alone that has a loader on one rank only."""
    if PROGRAM.trains():
        PROGRAM.stay(DISPATCHED)
    with PROGRAM.left_alone():
        yield from wrapped()


def gather(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Gather rows of which ranks have different numbers."""
    sizes = PROGRAM.sizes
    if len(set(sizes)) < 2:
        return wrapped(*arguments, **keywords)
    own, most = sizes[dist.get_rank()], max(sizes)

    def gather(tensor: torch.Tensor) -> Any:
        if not tensor.ndim or len(tensor) != max(1, own):
            PROGRAM.note_exchange()  # of a mean over its own rows, say
            return wrapped(tensor)
        rows = wrapped(pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, most - len(tensor))))
        return torch.cat([rows[rank * most : rank * most + size] for rank, size in enumerate(sizes)])

    return each_tensor(gather, arguments[0] if arguments else keywords["tensor"])
