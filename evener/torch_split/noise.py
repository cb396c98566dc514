"""Samples of a training's noise scale, taken as its gradients are summed over the ranks anyway.

In one of EVERY steps each rank adds the squared norm of its own gradient to a sum over the ranks, and that of the
summed gradient is taken beside it, before anything is clipped. The device isn't waited for: a sample is read once it
is there. Weights aren't touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RequestError
from ..learning.noise_scale import NoiseScale, NoiseWindow, describe, separate
from .collectives import Bucket, note_own

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # to sum squares in
EVERY = 8  # steps, of which one is looked at: two norms in each step would cost about 1 % of it


class NoiseSampler:
    """Takes the noise scale of one model's gradient, in rows; equal on all ranks.

    `begin` is called for each batch with the rows of each rank, and `note` with the batch that a backward pass is of,
    where that is known: a loop may get a batch before it has trained the last one.
    """

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        self.steps = 0  # sums of gradients
        self.accumulated = 1  # batches of these rows that `begin` stands for
        self.window, self.every = window or NoiseWindow(), every
        self._batch = 0  # rows of the last one that was looked at
        self._begun: list[tuple[int, ...]] = []  # rows of each rank in the batches since the last sum
        self._noted: list[Any] = []  # the batches themselves
        self._summed, self._updates = False, 0  # a sum that no optimizer has applied yet
        self._goes_on = False  # gradients are added to such a sum
        self._own: list[torch.Tensor] = []  # norms of the buckets that were sent
        self._sum: Any = None  # under way: the work, with what it sums
        self._sample: _Pending | None = None  # of a batch that may not be over
        self._pending: deque[_Pending] = deque()

    def begin(self, sizes: Sequence[int], updates: int) -> None:
        """Begin a batch in which each rank has these rows, none if they aren't known, after this many updates."""
        if self._sample is not None:
            self._pending.append(self._sample)
            self._sample = None
        self._begun.append(tuple(sizes))
        self._goes_on = self._summed and updates == self._updates
        self._summed, self._updates = self._goes_on, updates

    def note(self, batch: Any) -> None:
        """Note the batch that gradients are of; it has `sizes`."""
        if not any(each is batch for each in self._noted):
            self._noted.append(batch)

    def add_own(self, bucket: Bucket) -> None:
        """Take the norm of this rank's weighted gradients as they are sent."""
        if self._is_sampled():
            self._own.append(_norm(bucket.gradients))

    def send(self, group: Any) -> None:
        """Sum sum_i n_i |g_i|^2 over the ranks once all gradients are sent; n_i / N * g_i is what rank i has sent."""
        if not self._is_sampled():
            return
        sizes = self._rows()
        rows = sizes[dist.get_rank(group)]
        own = _add_squares(self._own)
        own = own * (sum(sizes) ** 2 / rows) if rows else torch.zeros_like(own)
        note_own()
        self._sum = dist.all_reduce(own, group=group, async_op=True), own

    def receive(self, buckets: Iterable[Bucket]) -> None:
        """Take the norm of the summed gradients, which `buckets` have."""
        if self._sum is not None:
            work, weighted = self._sum
            work.wait()
            whole = _add_squares([_norm(bucket.gradients) for bucket in buckets])
            self._batch = sum(self._rows())
            self._sample = _Pending(self._rows(), torch.cat([weighted, whole.to(weighted.device)]))
        else:
            self._sample = None  # another sum of the same batch: neither has its whole gradient
        self._own, self._sum, self._begun, self._noted = [], None, [], []
        self._summed = True
        self.steps += 1

    def scale(self) -> NoiseScale | None:
        """The noise scale by the samples that the device has computed; None before there are enough."""
        while self._pending and self._pending[0].is_there():
            self.window.add(self._pending.popleft().read())
        return self.window.scale()

    def describe(self) -> str:
        """A sentence of the noise scale beside the last batch; empty before there is one."""
        found = self.scale()
        return "" if found is None else describe(found, self._batch, self.steps)

    def _is_sampled(self) -> bool:
        """True if the step is looked at: it is its turn, and its batches have the same rows, on two ranks or more."""
        batches = self._batches()
        if self.steps % self.every or self._goes_on or len(set(batches)) != 1:
            return False
        return sum(size > 0 for size in batches[0]) > 1

    def _batches(self) -> list[tuple[int, ...]]:
        """Rows of each rank in the batches that the gradients are of."""
        return [batch.sizes for batch in self._noted] or self._begun

    def _rows(self) -> tuple[int, ...]:
        """Rows of each rank that the sum is a mean over."""
        batches = self._batches()
        return tuple(size * len(batches) * self.accumulated for size in batches[0])


class _Pending:
    """A sample that the device may not have computed yet."""

    def __init__(self, sizes: tuple[int, ...], figures: torch.Tensor) -> None:
        self._sizes, self._event = sizes, None
        self._figures = figures.to("cpu", non_blocking=True)  # into pinned memory
        if figures.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def is_there(self) -> bool:
        """True if the figures can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Any:
        """Noise and signal."""
        return separate(self._sizes, *self._figures.tolist())


def _norm(gradients: torch.Tensor) -> torch.Tensor:
    """The norm, summed up in float32 at least, on the device: one kernel, as steps may wait for the host."""
    return torch.linalg.vector_norm(gradients, dtype=_WIDER.get(gradients.dtype))


def _add_squares(norms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the norms' squares, of one element, on the first one's device."""
    device = norms[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    if len({(each.device, each.dtype) for each in norms}) > 1:
        norms = [each.to(device, wide) for each in norms]
    return torch.stack(norms).to(wide).square().sum(0, keepdim=True)


def make_noise(wanted: bool, world: int) -> NoiseSampler | None:
    """A sampler if the noise scale is wanted; RequestError where one rank trains, which has nothing to compare with."""
    if wanted and world == 1:
        raise RequestError(
            "The noise scale is seen between ranks, and one process trains.", "Leave noise out, or train on two ranks."
        )
    return NoiseSampler() if wanted else None


def refuse_noise(library: str) -> RequestError:
    """The error where another library sums the gradients, so that a rank's own aren't seen."""
    return RequestError(
        f"{library} sums the gradients itself, so a rank's own can't be compared for the noise scale.",
        "Leave noise out, or use split.wrap or DistributedDataParallel.",
    )
