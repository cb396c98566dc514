"""Loaders of accelerate and timm, which hand batches on one later than they fetch them, and accelerate's gathering."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from ..torch_rows.structure import each_tensor
from .loops import Loop
from .program import PROGRAM

DISPATCHED = "one rank reads the rows of all (dispatch_batches of accelerate)"


def begin_shard(wrapped: Any, loader: Any, *_: Any) -> Any:
    """Take part in each loop over accelerate's loader in which the program trains."""
    return Loop(loader.base_dataloader, wrapped, loader) if PROGRAM.trains() else wrapped()


def begin_prefetcher(wrapped: Any, loader: Any, *_: Any) -> Any:
    """Take part in each loop over timm's loader in which the program trains."""
    return Loop(loader.loader, wrapped, loader) if PROGRAM.trains() else wrapped()


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
    own, most = sizes[PROGRAM.rank], max(sizes)

    def gather(tensor: torch.Tensor) -> Any:
        if not tensor.ndim or len(tensor) != max(1, own):
            PROGRAM.note_exchange()  # of a mean over its own rows, say
            return wrapped(tensor)
        rows = wrapped(pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, most - len(tensor))))
        return torch.cat([rows[rank * most : rank * most + size] for rank, size in enumerate(sizes)])

    return each_tensor(gather, arguments[0] if arguments else keywords["tensor"])
