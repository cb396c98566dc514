"""Compare what the ranks observe in a step, to find reasons why shares have to stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, isnan
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..torch.audit import same_data
from ..torch.audit.same_data import RankData
from ..torch.private import joins_unevenly, needs_own_sums
from . import sharded

NO_GROUP = (
    "it trains without a process group, so each process trains on all rows; wrap the model in"
    " DistributedDataParallel and shuffle with a DistributedSampler, as under torchrun"
)
FOR_ONE = "it trains without a process group, so it runs once, on its first device alone"
ONE_PROCESS = "its process group has one process"
CLIPPED = (
    "each rank clips its own gradients before they are summed, so what is learned "
    "depends on the shares"
)
EXCHANGED = (
    "the program exchanges values between its ranks itself; an average of ranks' mean losses "
    "now differs slightly, and"
    " so does whatever depends on it"
)
FLAGGED = (
    "the program exchanges a flag by {}, as where a rank decides to stop; if that depends on the "
    "rank's own rows, it may now decide differently"
)
EVEN_START = "it ended within its first steps, which have equal shares"
OTHER_ROWS = (
    "its data set returns a different row when asked for the same one again, so its rows "
    "differ from those under its"
    " own launcher"
)
PADDED = (
    "rows are padded to the longest one beside them, and with unequal shares other rows are "
    "beside them; whether its loss depends"
    " on that can't be seen"
)
ALONE = "not every rank takes its rows from its own loader"
LOCAL = "its ranks take steps with gradients that they haven't exchanged"
OUTSIDE = (
    "its optimizer trains what isn't in a DistributedDataParallel, with each rank's own gradients"
)
NO_MODEL = "its model isn't in DistributedDataParallel, FSDP or DeepSpeed"
TENSOR_PARALLEL = (
    "its parameters are DTensors that aren't from fully_shard, as in tensor parallelism, which has "
    "several ranks compute one row"
)
NO_LOADER = "its rows don't come from a DataLoader"
NO_OPTIMIZER = "its optimizer isn't PyTorch's, so its steps can't be followed"
OWN_ITERATION = "its loader, {}, makes its batches by an iteration of its own"
BEGUN_EARLY = "its loop over a DataLoader began before its model was wrapped"
NO_SAMPLER = "its rows aren't shared out by a DistributedSampler"
SINGLE = (
    "each rank takes one item of its data set at a time, a row or a whole batch, and one can't be "
    "divided"
)
WRAPPED_LATER = "it has wrapped another model in the middle of an epoch"
INTERRUPTED = (
    "In the middle of an epoch with unequal shares, the program has begun to train another model in"
    " a loop of its own, and then went on with the epoch.",
    "Train the other model before or after the epoch, or start the program with its own launcher.",
)
SEVERAL = "its steps take rows of several loaders"
# relative tolerance, because different kinds of GPUs round computed values differently
NEAR = 1e-4
DIVIDED = (
    "its loss is a sum over rows, and its gradients are then changed by a number that may be a "
    "count of each rank's own rows"
)
NO_NOISE = "--noise measures a mean over rows, and its loss is a sum"
DIFFERENCES = {  # differences between the views of the ranks, the most serious first
    "order": "its ranks draw different orders of rows, or batches of different sizes",
    "rates": "its ranks step at different rates",
    "numbers": (
        "its ranks compute their losses, or change weights and gradients, with different numbers"
    ),
    "row": (
        "the data sets of its ranks have different rows under the same numbers, as where each "
        "rank draws its rows, or a random_split of them, without a common seed"
    ),
    "are_sums": "the loss of some of its ranks is a sum over rows, and that of others a mean",
}


class RankView(msgspec.Struct, frozen=True):
    """One rank's observations in a training step, sent to all ranks for comparison.

    Shares may differ if all ranks have the same observations and no `fault` is set.
    """

    fault: str = ""
    order: tuple[int, ...] = ()  # digest of the order of rows, and the number of batches
    rates: int = 0  # digest of the optimizers' settings; by shares, of their learning rates
    numbers: tuple[float, ...] | None = None  # numbers in the loss, if a guard has checked it
    uses: tuple[float, ...] = ()  # numbers applied to weights and gradients after the backward pass
    warning: str = ""  # warning about what may differ under shares
    data: RankData | None = None  # a summary of the data set; None if unknown
    are_sums: bool = False  # True if the loss is a sum over rows instead of a mean
    exchanges: bool = False  # True if the program's own code exchanges values between ranks


def find_difference(records: list[RankView]) -> str:
    """Return the first difference between the ranks' records, as a key of `DIFFERENCES`, or ""."""
    for name in ("order", "rates", "are_sums"):
        if len({getattr(each, name) for each in records}) > 1:
            return name
    if same_data.find_difference([each.data for each in records if each.data is not None]):
        return "row"
    return "numbers" if _have_other_numbers(records) else ""


def _have_other_numbers(records: list[RankView]) -> bool:
    """Return whether ranks use different numbers to scale losses, gradients or weights."""
    # Such a number is, for example, a factor of the loss. The `uses` are compared only if all ranks
    # have equally many: one rank may compute something alone, for example to log it.
    looked = [each for each in records if each.numbers is not None]
    comparable = len({len(each.uses) for each in looked}) == 1
    uses = [each.uses for each in looked if comparable]
    return differ([each.numbers for each in looked]) or differ(uses)


def differ(sequences: Sequence[Any]) -> bool:
    """Return whether any of the sequences of numbers differs from the first, except for rounding.

    NaNs are equal to each other.
    """
    return any(not _are_near(sequence, sequences[0]) for sequence in sequences)


def _are_near(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    return all(
        isclose(a, b, rel_tol=NEAR) or (isnan(a) and isnan(b))
        for a, b in zip(one, other, strict=True)
    )


def read_numbers(optimizer: Any, names: tuple[str, ...] = ()) -> list[float]:
    """Return all scalars in the optimizer's settings.

    If `names` is given, only the settings with these names are read.
    """
    groups = optimizer.param_groups
    chosen = [
        one
        for group in groups
        for name, one in group.items()
        if name in (names or group.keys() - {"params"})
    ]
    single = (each for each in tree_leaves(chosen) if isinstance(each, int | float | torch.Tensor))
    return [float(each) for each in single if torch.numel(torch.as_tensor(each)) == 1]


def find_fault(model: Any) -> str:
    """Return why the model can't train with unequal shares, or "" if it can."""
    if sharded.find_library(model):
        return sharded.find_fault(model)
    if type(model) is not torch.nn.parallel.DistributedDataParallel:
        return f"its model is in a {type(model).__name__}"
    if model.process_group is not dist.group.WORLD:
        return "its model is trained by some of the processes only"
    if needs_own_sums(model):
        return "its DistributedDataParallel has a communication hook or mixed precision of its own"
    if joins_unevenly(model):
        return "its ranks join with different numbers of batches"
    return ""


def find_obstacle(optimizer: Any, models: Any, loader_obstacle: str) -> str:
    """Return why evener can't use unequal shares for the model that an optimizer trains, or "".

    - If the optimizer trains none of `models`, the result is "".
    - If `models` is empty, the result says that no model is wrapped, or that tensor parallelism
      splits it.
    - Otherwise, the loader is the obstacle, and the result is `loader_obstacle`.
    """
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    if not models:
        kinds = {kind.__name__ for weight in weights for kind in type(weight).__mro__}
        return TENSOR_PARALLEL if "DTensor" in kinds else NO_MODEL
    trained = {id(parameter) for model in models for parameter in model.parameters()}
    if not sharded.has_copies(models) and not any(id(weight) in trained for weight in weights):
        return ""  # the optimizer trains another model
    return loader_obstacle
