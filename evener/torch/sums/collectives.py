"""Collective operations, and a counter of the collectives that the user's script starts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist

from ...errors import RequestError
from ...shares.whole_rows import bounds, gradient_weight
from ..private import broadcast_each, count_collectives

Result = TypeVar("Result")

_own = 0  # number of collectives that evener has started


def count_foreign() -> int:
    """Return how many collectives this process has started, not counting evener's own."""
    return sum(count_exchanges().values()) - _own


def note_own() -> None:
    """Record that evener itself has started one more collective."""
    global _own
    _own += 1


@contextmanager
def own_collectives() -> Iterator[None]:
    """Context manager in which collectives are counted as evener's own, not as the user's."""
    global _own
    before = count_foreign()
    try:
        yield
    finally:
        _own += count_foreign() - before


_sizes: dict[Hashable, int] = {}  # numbers of collectives that calls of `run_own` count as


def run_own(call_site: Hashable, function: Callable[[], Result]) -> Result:
    """Call `function` and return its result; the collectives that it starts count as evener's own.

    Because counting is slow, they are counted only in the first call with this `call_site`. Later
    calls have to start the same number of collectives.
    """
    global _own
    before = 0 if call_site in _sizes else sum(count_exchanges().values())
    result = function()
    if call_site not in _sizes:
        _sizes[call_site] = sum(count_exchanges().values()) - before
    _own += _sizes[call_site]
    return result


class CollectiveError(RequestError):
    """Raised if a loss function communicates with other ranks.

    A single rank then can't repeat it for an audit.
    """


USES_COLLECTIVES = (
    "its ranks exchange values while its loss is computed, and with unequal shares they would come"
    " from different numbers of rows"
)
COLLECTIVES_REMEDY = (
    "Exchange what is only logged after the step, or train it with its own launcher."
)


def refuse_collectives(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compute` so that it raises CollectiveError if it communicates with other ranks."""
    # the other ranks may not call `compute`, so they wouldn't take part

    def checked(*arguments: Any) -> Any:
        before = count_foreign()
        result = compute(*arguments)
        if count_foreign() != before:
            raise CollectiveError(
                "The loss communicates with other ranks, by torch.distributed or in a layer.",
                "Gather values after the step.",
            )
        return result

    return checked


def count_exchanges() -> dict[str, int]:
    """Return how many collectives were started, by process group and device type.

    The dict is empty without a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return count_collectives()


def gather_rows(
    rows: torch.Tensor, sizes: Sequence[int], rank: int, by_loss: bool, timer: Any
) -> torch.Tensor:
    """Concatenate the rows of all ranks, so that gradients flow back to the rank of each row.

    Every rank has to call this. Arguments:

    - `sizes`: row count of each rank; a rank with 0 rows may pass any row.
    - `by_loss`: whether losses are scaled instead of gradients.
    - `timer`: the StepTimer, which counts the time of the collective as waiting.

    Raises RequestError if the number of rows is wrong, or if ranks differ in dtype or shape.
    """
    if len(rows) not in {sizes[rank], max(1, sizes[rank])}:
        raise RequestError(
            f"gather was given {len(rows)} rows on rank {rank}, which has {sizes[rank]} of "
            f"the batch.",
            (
                "Give one row for each row of this rank's batch; gather two views of it one after "
                "the other."
            ),
        )
    with timer.collective():
        _check_same(rows)
        return cast(torch.Tensor, _Gather.apply(rows, tuple(sizes), rank, by_loss, timer))


def add_up(value: Any, device: torch.device, world: int, timer: Any) -> torch.Tensor:
    """Return the sum of a value over all ranks.

    The sum is int64 for an integer tensor with dimensions, and float64 otherwise. `timer` is the
    StepTimer, which counts the time of the collective as waiting. Every rank has to call this.
    """
    total = torch.as_tensor(value).detach()
    whole = total.ndim and not total.is_floating_point()
    total = total.to(device, torch.int64 if whole else torch.float64, copy=True)
    if world > 1:
        with timer.collective():
            dist.all_reduce(total)
    return total


def average(value: Any, sizes: Sequence[int], device: Any, timer: Any) -> Any:
    """Return the mean of a value over ranks, weighted by their row counts.

    `sizes` has the row count of each rank. `timer` is the StepTimer, which counts the time of the
    collective as waiting. Every rank has to call this.
    """
    own = torch.as_tensor(value).detach().to(device, torch.float64).reshape(1)
    every = [torch.empty_like(own) for _ in sizes]
    with timer.collective():
        dist.all_gather(every, own)
    values = torch.cat(every).tolist()
    if len(set(values)) == 1:
        return value
    mean = sum(size * each for size, each in zip(sizes, values, strict=True) if size) / sum(sizes)
    return value.detach().new_tensor(mean) if isinstance(value, torch.Tensor) else mean


def is_equal_everywhere(value: int, device: torch.device | None, group: Any = None) -> bool:
    """Return whether all ranks of a group have the same value.

    Every rank has to call this. A `group` of None is the default group.
    """
    pair = torch.tensor([value, -value], device=device)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return bool(pair[0] == -pair[1])


def spread(tensors: Sequence[torch.Tensor], group: Any = None, source: int = 0) -> None:
    """Copy tensors from rank `source` to all ranks of a group, in place.

    Every rank has to call this. A `group` of None is the default group.
    """
    for device in {tensor.device for tensor in tensors}:
        own = [tensor.detach() for tensor in tensors if tensor.device == device]
        broadcast_each(own, group, 250 << 20, source)


def _check_same(rows: torch.Tensor) -> None:
    kind = f"{rows.dtype} {tuple(rows.shape[1:])}"
    if not is_equal_everywhere(crc32(kind.encode()), rows.device):
        raise RequestError(
            f"The ranks' rows can't be gathered: they differ in type or shape (here {kind}).",
            "Pad or pool them to one shape first.",
        )


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: tuple[int, ...], rank: int, by_loss: bool, timer: Any
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank, ctx.shape, ctx.timer = sizes, rank, rows.shape, timer
        ctx.weight = 1.0 if by_loss else gradient_weight(sizes, rank)
        sent = rows.new_zeros((max(sizes), *rows.shape[1:]))
        sent[: sizes[rank]] = rows[: sizes[rank]]
        parts = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(parts, sent)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Sum the gradient over all ranks, and return the part for this rank's rows."""
        # divided by this rank's weight, by which the model's gradients are multiplied afterwards
        total = gradient * ctx.weight if ctx.weight else torch.zeros_like(gradient)
        with ctx.timer.collective():
            dist.all_reduce(total)
        start, stop = bounds(ctx.sizes)[ctx.rank]
        own = gradient.new_zeros(ctx.shape)
        if start < stop:
            own[: stop - start] = total[start:stop] / ctx.weight
        return own, None, None, None, None
