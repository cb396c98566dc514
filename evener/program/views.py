"""A rank's view of a program's steps, and the sentences for what keeps its shares even."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..torch_loss.guard import Guard

NO_GROUP = (
    "it trains without a process group, so each process trains on all rows; wrap the model in"
    " DistributedDataParallel and shuffle by a DistributedSampler, as under torchrun"
)
CLIPPED = "each rank clips its own gradients before they are summed, so what is learned depends on the shares"
EXCHANGED = (
    "the program exchanges figures between its ranks itself; an average of ranks' mean losses now differs slightly, and"
    " so does whatever depends on it"
)
RATES = "its ranks compute their losses with different numbers, or step at different rates"
OTHER_ROWS = (
    "its data set returns a different row when asked for the same one again, so its rows differ from those under its"
    " own launcher"
)
UNEVEN = "a number in its loss goes by a rank's own rows"
PADDED = (
    "rows are padded to the longest one beside them, and by shares other rows are beside them; whether its loss depends"
    " on that can't be seen"
)
ALONE = "not every rank takes its rows from a loader of its own"
LOCAL = "its ranks step by gradients that they haven't exchanged"
NO_LOOP = "its model isn't in DistributedDataParallel, or its rows come from no DataLoader with a DistributedSampler"
SEVERAL = "its steps take rows of several loaders"


class RankView(msgspec.Struct, frozen=True):
    """A rank's view of the program's steps; shares may be uneven where all are alike and without a fault."""

    fault: str = ""
    order: int = 0  # a digest of the order of rows
    rates: int = 0  # of the optimizers' rates
    numbers: int = 0  # of the numbers in its loss, where the guard has looked
    sizes: tuple[int, ...] = ()  # rows of a global batch, and steps of an epoch
    warning: str = ""  # of what may be otherwise by shares


def read_guard(guard: Guard | None) -> int:
    """A digest of the numbers in the loss; 0 where none was computed again."""
    return 0 if guard is None or guard.numbers is None else digest(guard.numbers)


def digest(numbers: list[float], before: int = 0) -> int:
    return crc32(repr(numbers).encode(), before)


def read_rates(optimizer: Any) -> list[float]:
    """The learning rate of each group."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [rate for rate in rates if isinstance(rate, int | float)]


def read_numbers(optimizer: Any) -> list[float]:
    """The numbers by which an optimizer steps: rates, momenta and so on of each group."""
    groups = [[each for name, each in group.items() if name != "params"] for group in optimizer.param_groups]
    numbers = (int, float, torch.Tensor)
    return [
        float(each)
        for each in tree_leaves(groups)
        if isinstance(each, numbers) and torch.numel(torch.as_tensor(each)) == 1
    ]


def find_fault(model: Any) -> str:
    """Why a model in DistributedDataParallel stays as it is; empty if it can be taken over."""
    if type(model) is not torch.nn.parallel.DistributedDataParallel:
        return f"its model is in a {type(model).__name__}"
    if model.process_group is not dist.group.WORLD:
        return "its model is trained by some of the processes only"
    if model._comm_hooks or model.mixed_precision is not None:
        return "its DistributedDataParallel has a communication hook or mixed precision of its own"
    if model._join_config.enable:
        return "its ranks join with different numbers of batches"
    return ""
