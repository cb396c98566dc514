"""Samples of a training's noise scale, taken as ranks sum their gradients anyway.

In one of EVERY steps each rank takes the squared norm of its own gradient, and beside it that of
their sum, before anything is clipped. The device isn't waited for: a sample is read once it is
there. Weights aren't touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import RequestError
from ...training.noise_scale import EVERY, NoiseScale, NoiseWindow, describe, separate
from .buckets import Bucket, HostCopy
from .collectives import note_own

# rows of each rank; the sum of their squared norms, and the squared norm of the sum
_Sample = tuple[tuple[int, ...], HostCopy]
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # to sum squares in


class RankNoise:
    """Takes the noise scale of one model's gradient, in rows, by comparing the ranks' own; equal on
    all ranks.

    `begin` is called for each batch with the rows of each rank, none if they aren't known, after
    this many updates of the weights. `note` is called with the batch that a backward pass is of,
    where that is known: a loop may get a batch before it has trained the last one.
    """

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        self.window = window or NoiseWindow()
        self.every = every
        self.steps = 0  # sums of gradients
        self.accumulated = 1  # batches of these rows that `begin` stands for
        self._batch = 0  # rows of the last one that was looked at
        self._pending: deque[_Sample] = deque()
        # rows of each rank in the batches since the last sum, and the batches themselves
        self._begun: list[tuple[int, ...]] = []
        self._noted: list[Any] = []
        # updates of the weights by the last batch, and at the last sum
        self._updates = 0
        self._summed_at = -1
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
        self._own = []
        self._sum = None
        self._begun = []
        self._noted = []
        self._summed_at = self._updates
        self.steps += 1

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


def _norm(gradients: torch.Tensor) -> torch.Tensor:
    """The norm, summed up in float32 at least, on the device: one kernel, as steps may wait for the
    host.
    """
    return torch.linalg.vector_norm(gradients, dtype=_WIDER.get(gradients.dtype))


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
