"""Suggest the code that makes a single-GPU script train on several GPUs.

The code uses the script's own variable names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from .exchanges import is_installed

_LOADER_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "drop_last")


def advise(optimizer: Any, loader: Any) -> str:
    """Return a message with four lines of PyTorch that make a script train on all GPUs.

    The script's optimizer steps now, and the script loops over `loader`. The lines keep the
    global batch and can be inserted right before the loop; on a GPU the first line has to come
    before the model is moved there.
    """
    weights = {id(each) for group in optimizer.param_groups for each in group["params"]}
    model = _find_name(lambda each: _count_trained(each, weights)) or "model"
    name = _find_name(lambda each: loader is not None and each is loader) or "loader"
    gpu = torch.accelerator.current_accelerator(check_available=True)
    devices = {each.device.type for group in optimizer.param_groups for each in group["params"]}
    on_gpu = gpu is not None and gpu.type in devices
    device = "; torch.cuda.set_device(torch.distributed.get_node_local_rank())" if on_gpu else ""
    lines = [
        f"torch.distributed.init_process_group(){device}",
        f"{model} = torch.nn.parallel.DistributedDataParallel({model})",
        *_share_rows(name, loader),
    ]
    first = ", the first one at its top" if on_gpu else ""
    return f"To train on all of them, add before its loop{first}:" + "".join(
        f"\n    {each}" for each in lines
    )


def advise_lightning() -> str:
    """Return a message with two lines of Lightning that make a script train on all devices.

    The script's Trainer trains on one device although several ranks are available. The lines keep
    the global batch: each rank has a loader of its own.
    """
    devices = int(os.environ["WORLD_SIZE"])
    lines = (
        f'trainer = L.Trainer(devices={devices}, strategy="ddp", ...)  # the rest as it was',
        f"loader = DataLoader(..., batch_size=batch_size // {devices})",
    )
    return "To train on all of them, write:" + "".join(f"\n    {each}" for each in lines)


def _share_rows(name: str, loader: Any) -> list[str]:
    """Return the lines that give each rank its rows of a loader's batches."""
    data = "torch.utils.data"
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return [
            f"sampler = {data}.DistributedSampler(dataset)",
            f"{name} = {data}.DataLoader(dataset, batch_size, sampler=sampler)",
        ]
    options = [
        f"{each}={name}.{each}" for each in _LOADER_OPTIONS if getattr(loader, each) is not None
    ]
    shuffles = isinstance(loader.sampler, RandomSampler)
    rows = f"{name}.batch_size // torch.distributed.get_world_size()"
    words = ", ".join([f"{name}.dataset", rows, "sampler=sampler", *options])
    return [
        f"sampler = {data}.DistributedSampler({name}.dataset, shuffle={shuffles})",
        f"{name} = {data}.DataLoader({words})",
    ]


def _count_trained(value: Any, weights: set[int]) -> int:
    """Return how many parameters of a model an optimizer trains; 0 for any other value."""
    if not isinstance(value, torch.nn.Module):
        return 0
    return sum(id(each) in weights for each in value.parameters())


def _find_name(rate: Callable[[Any], int]) -> str:
    """Return the program's variable name for the value that `rate` scores highest.

    The result is empty if no value scores above 0.
    """
    best, rates = "", 0
    for frame in _own_frames():
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            found = rate(value)
            if found > rates:
                best, rates = name, found
    return best


def _own_frames() -> Iterator[FrameType]:
    """Yield the stack frames of the program's own code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not is_installed(frame.f_code.co_filename) and not name.startswith("evener."):
            yield frame
        frame = frame.f_back
