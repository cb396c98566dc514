"""Measure the gradient noise scale by comparing the gradients of all ranks with their sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import RequestError
from ...training.noise_scale import EVERY, NoiseScale, NoiseWindow, describe, separate_noise
from .buckets import Bucket, HostCopy
from .collectives import note_own

# each rank's number of rows; a copy of the sum of the ranks' weighted squared norms and of the
# squared norm of the summed gradient
_Sample = tuple[tuple[int, ...], HostCopy]
# dtypes in which squares are summed
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class RankNoise:
    """Measures the gradient noise scale once per `every` training steps.

    It compares the norms of each rank's gradients with the norm of their sum. The noise scale is a
    number of rows.
    """

    # A loop may fetch a batch before it has trained the previous one. So besides `begin` for each
    # batch, `note` is called in each backward pass, with its batch if known.

    def __init__(self, window: NoiseWindow | None = None, every: int = EVERY) -> None:
        self.window = window or NoiseWindow()
        self.every = every
        self.steps = 0  # number of gradient sums
        self.accumulated = 1  # number of batches with the same rows per `begin`
        self._batch = 0  # rows of the last sampled batch
        self._pending: deque[_Sample] = deque()
        # rows of each rank in the batches since the last sum, and the batches themselves
        self._begun: list[tuple[int, ...]] = []
        self._noted: list[Any] = []
        # number of weight updates before the last batch, and at the last sum
        self._updates = 0
        self._summed_at = -1
        self._own: list[torch.Tensor] = []  # norms of the buckets that were sent
        self._sum: Any = None  # the running sum: its work handle and its tensor
        self._sample: _Sample | None = None  # sample of a batch that may not be over

    def begin(self, sizes: Sequence[int], updates: int) -> None:
        """Begin a batch; `sizes` has the row count of each rank, or is () if that is unknown.

        `updates` is the number of optimizer steps so far.
        """
        if self._sample is not None:
            self._pending.append(self._sample)
            self._sample = None
        self._begun.append(tuple(sizes))
        self._updates = updates

    def note(self, batch: Any) -> None:
        """Record a batch whose loss contributes to the running backward pass."""
        if not any(each is batch for each in self._noted):
            self._noted.append(batch)

    def add_own(self, bucket: Bucket) -> None:
        """Record the norm of this rank's weighted gradients in a bucket, before its all-reduce."""
        if self._is_sampled():
            self._own.append(_norm(bucket.gradients))

    def send(self, group: Any) -> None:
        """Start to sum n_i |g_i|² over all ranks i, in an all-reduce.

        n_i is the row count of rank i, and g_i the mean gradient of its rows. `group` is the
        process group that sums gradients.
        """
        if self._is_sampled():
            sizes = self._rows()
            rows = sizes[dist.get_rank(group)]
            own = _add_squares(self._own)
            own = own * (sum(sizes) ** 2 / rows) if rows else torch.zeros_like(own)
            note_own()
            self._sum = dist.all_reduce(own, group=group, async_op=True), own

    def finish_sum(self, buckets: Iterable[Bucket]) -> None:
        """Take a sample of the noise scale from the summed gradients, if this step is measured."""
        # if this is another sum of the same batch, neither sum has the whole gradient
        self._sample = self._complete_sample(buckets) if self._sum is not None else None
        self._forget_batches()
        self._summed_at = self._updates
        self.steps += 1

    def _complete_sample(self, buckets: Iterable[Bucket]) -> _Sample:
        """Return the ranks' row counts, and squared gradient norms before and after the sum."""
        work, squares_of_ranks = self._sum
        work.wait()
        square_of_sum = _add_squares([_norm(bucket.gradients) for bucket in buckets])
        rows = self._rows()
        self._batch = sum(rows)
        both = torch.cat([squares_of_ranks, square_of_sum.to(squares_of_ranks.device)])
        return rows, HostCopy(both)

    def _forget_batches(self) -> None:
        self._own, self._sum = [], None
        self._begun, self._noted = [], []

    def scale(self) -> NoiseScale | None:
        """Return the noise scale measured so far, or None."""
        while self._pending and self._pending[0][1].is_complete():
            sizes, sample = self._pending.popleft()
            self.window.add(separate_noise(sizes, *sample.read()))
        return self.window.scale()

    def describe(self) -> str:
        """Describe the noise scale in a sentence, or return "" if it isn't known."""
        found = self.scale()
        return "" if found is None else describe(found, self._batch, self.steps)

    def _is_sampled(self) -> bool:
        """Return whether the noise scale is measured in this step."""
        # A step isn't measured if its gradients are added to those of an earlier sum (no update in
        # between), if its batches have different row counts on a rank, or if fewer than two ranks
        # have rows.
        if self.steps % self.every or self._updates == self._summed_at:
            return False
        batches = self._batches()
        return len(set(batches)) == 1 and sum(size > 0 for size in batches[0]) > 1

    def _batches(self) -> list[tuple[int, ...]]:
        """Return the row counts of all ranks for each batch in this step."""
        return [batch.sizes for batch in self._noted] or self._begun

    def _rows(self) -> tuple[int, ...]:
        """Return the number of rows of each rank in this step, over all its batches."""
        batches = self._batches()
        return tuple(size * len(batches) * self.accumulated for size in batches[0])


def _norm(gradients: torch.Tensor) -> torch.Tensor:
    """Return the norm of gradients; for half precision, it is computed in float32."""
    # in one kernel, because launching several might delay the step
    return torch.linalg.vector_norm(gradients, dtype=_WIDER.get(gradients.dtype))


def _add_squares(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of some norms, in float64."""
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(norms[0].device, torch.float64) for norm in norms]
    return torch.stack(list(norms)).double().square().sum(0, keepdim=True)


def refuse_noise(library: str) -> RequestError:
    """Return the error to raise if the noise scale is requested but can't be measured.

    The reason is that another library, named `library`, sums the gradients.
    """
    # the noise scale compares the ranks' gradients; only the library sees them before their sum
    return RequestError(
        f"{library} sums the gradients itself, so a rank's own can't be compared for the "
        f"noise scale.",
        "Leave noise out, or use split.wrap or DistributedDataParallel.",
    )
