"""Exchanges between ranks: flat buckets of gradients, the rows of a batch, sums; and their number in this process.

A rank that takes a pass in pieces would meet the others more often than they meet it: collectives that are not of
evener itself are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from typing import Any, NoReturn, Protocol
from zlib import crc32

import torch
import torch.distributed as dist

from ..errors import RequestError
from ..shares.whole_rows import bounds, gradient_weight

_own = 0  # collectives that evener has begun


def count_foreign() -> int:
    """The collectives that others than evener have begun in this process, among several ranks."""
    return _count() - _own


def note_own() -> None:
    """Count one that evener begins."""
    global _own
    _own += 1


@contextmanager
def own_collectives() -> Iterator[None]:
    """A context whose collectives are evener's own."""
    global _own
    before = _count()
    try:
        yield
    finally:
        _own += _count() - before


def refuse_meeting(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for this rank alone: RequestError at the end of a call that has met other ranks."""

    def checked(*arguments: Any) -> Any:
        before = count_foreign()
        result = compute(*arguments)
        if count_foreign() != before:
            raise RequestError(
                "The loss meets other ranks, by torch.distributed or in a layer.", "Gather figures after the step."
            )
        return result

    return checked


def _count() -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    total = 0
    for backend in backends:
        with suppress(RuntimeError):  # of one that doesn't count
            total += backend._get_sequence_number_for_group()
    return total


FIRST_BYTES = 1 << 20  # the first bucket is small, so that it goes early


class Bucket:
    """The gradients of some parameters, one after the other, and a flag for each that says whether there is one.

    `places` are the parameters' numbers in their model; `left` counts those whose gradient the pass hasn't given yet.
    """

    def __init__(self, places: Sequence[int], parameters: Sequence[Any]) -> None:
        self.places, self._parameters = tuple(places), tuple(parameters)
        first = parameters[0]
        sizes = [each.numel() for each in parameters]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self._views = _cut(self.flat, parameters)
        self._numbers = {place: number for number, place in enumerate(places)}
        self.on_cpu = first.device.type == "cpu"
        self.gradients, self._flags = self.flat[: sum(sizes)], self.flat[sum(sizes) :]
        self._patterns: dict[tuple[int, ...], torch.Tensor] = {}
        self._hold: torch.Tensor | None = None  # gradients of earlier batches, weighted already
        self._held_views: list[torch.Tensor] = []
        self._absent: list[int] = []  # without a gradient when it was gathered
        self.left = len(sizes)
        self.work: Any = None

    def take(self, place: int) -> None:
        """Make the gradient of a parameter a view as soon as it is there, while a CPU still has it in its cache."""
        number = self._numbers[place]
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        if gradient is None or gradient is view or gradient.requires_grad or gradient.is_sparse:
            return  # the last two kinds are refused as they are gathered
        view.copy_(gradient)
        parameter.grad = view
        self._forget(number)

    def gather(self) -> None:
        """Make gradients views of the bucket, also where zero_grad had set them to None."""
        gradients = [each.grad for each in self._parameters]
        self._absent = [place for place, each in enumerate(gradients) if each is None]
        pairs = zip(gradients, self._views, strict=True)
        places = [place for place, (each, view) in enumerate(pairs) if each is not view and each is not None]
        if not places:
            return
        fresh = [gradients[place] for place in places]
        if torch.is_grad_enabled() and any(each.requires_grad for each in fresh):  # in a pass with create_graph
            _refuse_graph()
        views = [self._views[place] for place in places]
        for place, view in zip(places, views, strict=True):
            self._parameters[place].grad = view
        if self._hold is not None:
            for place in places:
                self._forget(place)
        _copy(views, fresh)

    def fold(self, weight: float) -> None:
        """Apply this weight to the gradients so far, as those that come now have another one."""
        self.gather()
        self.weigh(weight)
        self._hold = self.flat.clone()
        self._held_views = _cut(self._hold, self._parameters)
        self.flat.zero_()

    def weigh(self, weight: float) -> None:
        """Multiply what was gathered by the weight of this rank; a weight of 0 keeps infinities out."""
        with torch.no_grad():
            if not self._absent:
                self._flags.fill_(1)
            else:
                for place in self._absent:
                    self._views[place].zero_()
                    self._forget(place)
                self._flags.copy_(self._pattern())
            if weight == 0.0:
                self.flat.zero_()
            elif weight != 1.0:
                self.flat.mul_(weight)
            if self._hold is not None:
                self.flat.add_(self._hold)
                self._hold, self._held_views = None, []

    def receive(self) -> None:
        """Wait for the sum. A parameter that only other ranks used has a gradient too; one that none used has none."""
        self.work.wait()
        self.work = None
        if self._absent:
            used = self._flags.tolist()
            for place in self._absent:
                if used[place] != 0:  # also of complex numbers
                    self._parameters[place].grad = self._views[place]

    def _forget(self, place: int) -> None:
        """Forget what was kept of a gradient that the loop has dropped."""
        if self._hold is not None:
            self._held_views[place].zero_()

    def _pattern(self) -> torch.Tensor:
        absent = tuple(self._absent)
        if absent not in self._patterns:
            flags = torch.ones(len(self.places), dtype=self.flat.dtype)
            flags[list(absent)] = 0
            self._patterns[absent] = flags.to(self.flat.device)
        return self._patterns[absent]


def make_buckets(parameters: Sequence[Any], order: Iterable[int], most_bytes: int) -> list[Bucket]:
    """Buckets of one type and device each, in the order in which they are full."""
    made: list[Bucket] = []
    open_: dict[Any, list[int]] = {}
    for place in order:
        kind = parameters[place].dtype, parameters[place].device
        places = open_.setdefault(kind, [])
        places.append(place)
        size = sum(parameters[each].numel() * parameters[each].element_size() for each in places)
        if size >= (most_bytes if made else min(FIRST_BYTES, most_bytes)):
            made.append(Bucket(places, [parameters[each] for each in places]))
            del open_[kind]
    return made + [Bucket(places, [parameters[each] for each in places]) for places in open_.values()]


def _cut(flat: torch.Tensor, parameters: Sequence[Any]) -> list[torch.Tensor]:
    views, start = [], 0
    for each in parameters:
        part = flat[start : start + each.numel()]
        start += each.numel()
        dense = any(each.is_contiguous(memory_format=kind) for kind in _FORMATS.get(each.ndim, ()))
        views.append(part.as_strided(each.shape, each.stride()) if dense else part.view(each.shape))
    return views


_FORMATS = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def _refuse_graph() -> NoReturn:
    raise RequestError(
        "A gradient was computed with create_graph=True, and its sum over ranks can't be differentiated again.",
        "Use torch.autograd.grad(..., create_graph=True) for the inner gradient, and a plain backward() last.",
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _copy(views: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
    if any(map(_IS_SPARSE, fresh)):
        raise RequestError(
            "A gradient is sparse, as of Embedding(sparse=True), and a plan weighs dense ones.",
            "Leave sparse=True out.",
        )
    torch._foreach_copy_(views, fresh)


_IS_SPARSE = attrgetter("is_sparse")


class Meeting(Protocol):
    """A timer that leaves exchanges out of a rank's own work."""

    def meeting(self) -> AbstractContextManager[None]:
        """A context in which ranks wait for each other."""


def gather_rows(rows: torch.Tensor, sizes: Sequence[int], rank: int, by_loss: bool, timer: Meeting) -> torch.Tensor:
    """(n_i, ...) of every rank as (N, ...), in the batch's order; `sizes` are the n_i, and a rank with 0 gives any row.

    The gradient of each rank's own rows is that of the ranks' losses weighted by their rows, so it is exact if every
    rank has the whole batch's loss, and if each has the mean over its own rows; `by_loss`: the losses are weighted
    already, else the model's gradients will be. The `timer` leaves the exchange out. RequestError for other shapes.
    """
    if len(rows) not in {sizes[rank], max(1, sizes[rank])}:
        raise RequestError(
            f"gather was given {len(rows)} rows on rank {rank}, which has {sizes[rank]} of the batch.",
            "Give one row for each row of this rank's batch; gather two views of it one after the other.",
        )
    with timer.meeting():
        _check_same(rows)
        gathered: torch.Tensor = _Gather.apply(rows, tuple(sizes), rank, by_loss, timer)
    return gathered


def add_up(value: Any, device: torch.device, world: int, timer: Meeting) -> torch.Tensor:
    """The sum of a figure over the ranks: in float64, or in int64 for whole numbers in a tensor with dimensions."""
    figure = torch.as_tensor(value).detach()
    whole = figure.ndim and not figure.is_floating_point()
    figure = figure.to(device, torch.int64 if whole else torch.float64, copy=True)
    if world > 1:
        with timer.meeting():
            dist.all_reduce(figure)
    return figure


def average(value: Any, sizes: Sequence[int], device: Any, timer: Meeting) -> Any:
    """A figure of each rank's rows as that of all; one that is equal everywhere stays, to its last digit."""
    figure = torch.as_tensor(value).detach().to(device, torch.float64).reshape(1)
    every = [torch.empty_like(figure) for _ in sizes]
    with timer.meeting():
        dist.all_gather(every, figure)
    figures = torch.cat(every).tolist()
    if len(set(figures)) == 1:
        return value
    mean = sum(size * each for size, each in zip(sizes, figures, strict=True) if size) / sum(sizes)
    return value.detach().new_tensor(mean) if isinstance(value, torch.Tensor) else mean


def is_equal_everywhere(value: int, device: torch.device) -> bool:
    """True if all ranks have the same number."""
    pair = torch.tensor([value, -value], device=device)
    dist.all_reduce(pair, dist.ReduceOp.MAX)
    return bool(pair[0] == -pair[1])


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
        ctx: Any, rows: torch.Tensor, sizes: tuple[int, ...], rank: int, by_loss: bool, timer: Meeting
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
        """Weighted before the sum over ranks; the model's gradients are weighted after this, so its own part isn't."""
        total = gradient * ctx.weight if ctx.weight else torch.zeros_like(gradient)
        with ctx.timer.meeting():
            dist.all_reduce(total)
        start, stop = bounds(ctx.sizes)[ctx.rank]
        own = gradient.new_zeros(ctx.shape)
        if start < stop:
            own[: stop - start] = total[start:stop] / ctx.weight
        return own, None, None, None, None
