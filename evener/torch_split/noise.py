"""Samples of a training's noise scale, taken as gradients are summed anyway: over ranks, or over
the passes of a step.

In one of EVERY steps the squared norm of each part of the gradient is taken, and beside it that of
their sum, before anything is clipped. Parts are the ranks' own gradients, or of one process the
passes of a step. The device isn't waited for: a sample is read once it is there. Weights aren't
touched.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RequestError
from ..training.noise_scale import EVERY, NoiseScale, NoiseWindow, describe, separate
from .buckets import Bucket, HostCopy
from .collectives import note_own

_Sample = tuple[
    tuple[int, ...], HostCopy
]  # rows of each part; the sum of squares, and the square of the sum
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # to sum squares in


class NoiseSampler:
    """Takes the noise scale of one model's gradient, in rows; equal on all ranks.

    `begin` is called for each batch with the rows of each rank, none if they aren't known, after
    this many updates of the weights.
    """

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        self.steps = 0  # sums of gradients
        self.accumulated = 1  # batches of these rows that `begin` stands for
        self.window, self.every = window or NoiseWindow(), every
        self._batch = 0  # rows of the last one that was looked at
        self._exchange: Callable[[], Any] = lambda: None
        self._pending: deque[_Sample] = deque()

    def attach(self, exchange: Any) -> None:
        """Look at the gradients of this exchange."""
        exchange.noise, self._exchange = self, weakref.ref(exchange)

    def begin(self, sizes: Sequence[int], updates: int) -> None:
        """Begin a batch."""
        raise NotImplementedError

    def scale(self) -> NoiseScale | None:
        """The noise scale by the samples that the device has computed; None before there are
        enough.
        """
        while self._pending and self._pending[0][1].is_there():
            sizes, figures = self._pending.popleft()
            self.window.add(separate(sizes, *figures.read()))
        return self.window.scale()

    def describe(self) -> str:
        """A sentence of the noise scale beside the last batch; empty before there is one."""
        found = self.scale()
        return "" if found is None else describe(found, self._batch, self.steps)


class RankNoise(NoiseSampler):
    """Compares the ranks' own gradients.

    `note` is called with the batch that a backward pass is of, where that is known: a loop may get
    a batch before it has trained the last one.
    """

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        super().__init__(window, every)
        self._begun: list[
            tuple[int, ...]
        ] = []  # rows of each rank in the batches since the last sum
        self._noted: list[Any] = []  # the batches themselves
        self._updates, self._summed_at = (
            0,
            -1,
        )  # of the weights, by the last batch, and at the last sum
        self._own: list[torch.Tensor] = []  # norms of the buckets that were sent
        self._sum: Any = None  # under way: the work, with what it sums
        self._sample: _Sample | None = None  # of a batch that may not be over

    def begin(self, sizes: Sequence[int], updates: int) -> None:
        """Begin a batch."""
        if self._sample is not None:
            self._pending.append(self._sample)
            self._sample = None
        self._begun.append(tuple(sizes))
        self._updates = updates

    def note(self, batch: Any) -> None:
        """Note the batch that gradients are of; it has `sizes`."""
        if not any(each is batch for each in self._noted):
            self._noted.append(batch)

    def add_own(self, bucket: Bucket) -> None:
        """Take the norm of this rank's weighted gradients as they are sent."""
        if self._is_sampled():
            self._own.append(_norm(bucket.gradients))

    def send(self, group: Any) -> None:
        """Sum sum_i n_i |g_i|^2 over the ranks once all gradients are sent; n_i / N * g_i is what
        rank i has sent.
        """
        if self._is_sampled():
            sizes = self._rows()
            rows = sizes[dist.get_rank(group)]
            own = _add_squares(self._own)
            own = own * (sum(sizes) ** 2 / rows) if rows else torch.zeros_like(own)
            note_own()
            self._sum = dist.all_reduce(own, group=group, async_op=True), own

    def receive(self, buckets: Iterable[Bucket]) -> None:
        """Take the norm of the summed gradients, which `buckets` have."""
        # where this is another sum of the same batch: neither has its whole gradient
        self._sample = None
        if self._sum is not None:
            work, weighted = self._sum
            work.wait()
            whole = _add_squares([_norm(bucket.gradients) for bucket in buckets])
            self._batch = sum(self._rows())
            self._sample = self._rows(), HostCopy(torch.cat([weighted, whole.to(weighted.device)]))
        self._own, self._sum, self._begun, self._noted = [], None, [], []
        self._summed_at = self._updates
        self.steps += 1

    def _is_sampled(self) -> bool:
        """True if the step is looked at: it is its turn, and its batches have the same rows, on two
        ranks or more.
        """
        if (
            self.steps % self.every or self._updates == self._summed_at
        ):  # gradients are added to those of a sum
            return False
        batches = self._batches()
        return len(set(batches)) == 1 and sum(size > 0 for size in batches[0]) > 1

    def _batches(self) -> list[tuple[int, ...]]:
        """Rows of each rank in the batches that the gradients are of."""
        return [batch.sizes for batch in self._noted] or self._begun

    def _rows(self) -> tuple[int, ...]:
        """Rows of each rank that the sum is a mean over."""
        batches = self._batches()
        return tuple(size * len(batches) * self.accumulated for size in batches[0])


_HELD_BYTES = 25 << 20  # of gradients whose norms are taken at once


class _Pass:
    """A pass of a step: its rows, the places of parameters that have a gradient, and its gradient's
    squared norm.
    """

    def __init__(self, rows: int, cut: bool) -> None:
        self.rows, self.cut = rows, cut  # cut: a part of a batch, else a whole one
        self.places: set[int] = set()
        self.squares: list[torch.Tensor] = []  # their sum
        self._held: list[torch.Tensor] = []
        self._bytes = 0

    def take(self, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient."""
        self._held.append(gradient)
        self._bytes += gradient.numel() * gradient.element_size()
        if self._bytes >= _HELD_BYTES:
            self.settle()

    def settle(self) -> None:
        """Take the norms of gradients that are held."""
        if self._held:
            self.squares.append(_add_squares(_norms(self._held)))
            self._held, self._bytes = [], 0


class PassNoise(NoiseSampler):
    """Compares the passes of a step in one process: parts of a batch, or batches whose gradients
    are accumulated.

    A gradient is looked at as it comes, before it is added to that of the passes before.
    """

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        super().__init__(window, every)
        self._updates = -1  # before the step that goes on
        self._next = 0  # the step that is looked at next
        self._handles: list[Any] = []  # of the hooks, in a step that is looked at
        self._passes: list[_Pass] = []  # of the step
        self._whole: torch.Tensor | None = None  # squared norm of the sum of their gradients
        # passes whose gradients can't be separated; two were compared
        self._mixed = self._compared = False

    def begin(self, sizes: Sequence[int], updates: int) -> None:
        """Begin a batch; RequestError where the first step that is looked at has one pass."""
        if updates != self._updates:
            self._end_step()
            self._updates, exchange = updates, self._exchange()
            if exchange is not None and self.steps >= self._next:
                pairs = enumerate(exchange.parameters)
                self._handles = [
                    p.register_hook(partial(self._note, i)) for i, p in pairs if p.requires_grad
                ]
        self.expect(sum(sizes), cut=False)

    def expect(self, rows: int, cut: bool = True) -> None:
        """Expect the backward pass of a batch, or a part `cut` from one, of these rows."""
        if self._passes and not self._passes[-1].places:
            self._passes.pop()  # a batch that is cut, or without a gradient so far
        self._passes.append(_Pass(rows, cut))

    def take_sum(self) -> None:
        """Take the norm of the sum of all gradients so far."""
        gradients = [each.grad for each in self._exchange().parameters if each.grad is not None]
        if self._handles and gradients:
            self._whole = _add_squares(_norms(gradients))

    def leave_out(self) -> None:
        """Leave out this step, as a pass has failed and is computed again."""
        for each in self._handles:
            each.remove()
        self._handles = []

    def _note(self, place: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient in a backward pass; those of the first pass are found in the
        sum.
        """
        first, last = self._passes[0], self._passes[-1]
        if not last.places and last is not first:
            if self._whole is None:
                self.take_sum()
            first.squares = first.squares or [each for each in (self._whole,) if each is not None]
            self._whole = None
        self._mixed |= place in last.places
        last.places.add(place)
        if last is not first:
            last.take(gradient)
            if not last.cut and len(last.places) == len(first.places):
                torch.autograd.Variable._execution_engine.queue_callback(self.take_sum)

    def _end_step(self) -> None:
        passes = [each for each in self._passes if each.places]
        if self._handles:
            self._next = self.steps + self.every
            self._compare(passes)
        self.leave_out()
        self._passes, self._whole, self._mixed = self._passes[len(passes) :], None, False
        self.steps += self._updates >= 0

    def _compare(self, passes: Sequence[_Pass]) -> None:
        sizes = tuple(each.rows for each in passes)
        if len(passes) < 2 and not self._compared:
            raise RequestError(
                "The noise scale is seen between ranks, or between the passes of a step, and "
                "one process takes each"
                " step in one pass.",
                (
                    "Accumulate a step over two parts of its batch, train on two ranks, or leave "
                    "noise out."
                ),
            )
        known = all(each.cut for each in passes) or (
            len(set(sizes)) == 1 and sizes[0]
        )  # batches may come early
        if len(passes) < 2 or self._whole is None or self._mixed or not known:
            return
        weighted = torch.zeros_like(self._whole)
        for each in passes:
            each.settle()
            for square in each.squares:
                weighted += square.to(weighted.device) * (sum(sizes) ** 2 / each.rows)
        self._pending.append((sizes, HostCopy(torch.cat([weighted, self._whole]))))
        self._batch, self._compared = sum(sizes), True


def _norm(gradients: torch.Tensor) -> torch.Tensor:
    """The norm, summed up in float32 at least, on the device: one kernel, as steps may wait for the
    host.
    """
    values = gradients.coalesce().values() if gradients.is_sparse else gradients
    return torch.linalg.vector_norm(values, dtype=_WIDER.get(values.dtype))


def _norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each, in few kernels where they are of one kind."""
    kinds = {(each.device, each.dtype, each.layout) for each in gradients}
    if len(kinds) > 1 or gradients[0].is_sparse:
        return [_norm(each) for each in gradients]
    with torch.no_grad():
        return list(torch._foreach_norm(list(gradients), 2, dtype=_WIDER.get(gradients[0].dtype)))


def _add_squares(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the norms' squares in float64, of one element, on the first one's device."""
    if len({(each.device, each.dtype) for each in norms}) > 1:
        norms = [each.to(norms[0].device, torch.float64) for each in norms]
    return torch.stack(list(norms)).double().square().sum(0, keepdim=True)


def refuse_noise(library: str) -> RequestError:
    """The error where another library sums the gradients, so that a rank's own aren't seen."""
    return RequestError(
        f"{library} sums the gradients itself, so a rank's own can't be compared for the "
        f"noise scale.",
        "Leave noise out, or use split.wrap or DistributedDataParallel.",
    )
