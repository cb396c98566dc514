"""Loaders of accelerate and timm, which hand batches on one later than they fetch them, and accelerate's gathering."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from wrapt import wrap_function_wrapper

from ..torch_rows.structure import each_tensor
from .loops import Loop
from .program import PROGRAM

_LOADERS = {
    "accelerate.data_loader": ("DataLoaderShard", "base_dataloader"),
    "timm.data.loader": ("PrefetchLoader", "loader"),
}


def hook_loaders(module: Any) -> None:
    """Take part in each loop over such a loader in which the program trains."""
    name, inner = _LOADERS[module.__name__]
    wrap_function_wrapper(module, f"{name}.__iter__", partial(_begin_loop, inner))


def hook_accelerator(module: Any) -> None:
    """Gather rows of which ranks have different numbers."""
    wrap_function_wrapper(module, "Accelerator.gather", _gather)


def _begin_loop(inner: str, wrapped: Any, loader: Any, arguments: Any, keywords: Any) -> Any:
    return Loop(getattr(loader, inner), wrapped, loader) if PROGRAM.trains() else wrapped(*arguments, **keywords)


def _gather(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    sizes = PROGRAM.sizes
    if len(set(sizes)) < 2:
        return wrapped(*arguments, **keywords)
    own, most = sizes[PROGRAM.rank], max(sizes)

    def gather(tensor: torch.Tensor) -> Any:
        if not tensor.ndim or len(tensor) != max(1, own):
            return wrapped(tensor)
        rows = wrapped(pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, most - len(tensor))))
        return torch.cat([rows[rank * most : rank * most + size] for rank, size in enumerate(sizes)])

    return each_tensor(gather, arguments[0] if arguments else keywords["tensor"])
