"""What the passes of a Trainer's optimizer step weigh, and what is gathered over ranks with other numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch.nn.functional import pad

from evener.huggingface.loss import ITEMS, ROWS, TrainerLoss, has_ignored
from evener.huggingface.processes import processes
from evener.torch_split.nested_batch import each_tensor
from evener.torch_split.own_work import StepTimer


class Pass(msgspec.Struct, frozen=True):
    """One pass of this rank: the rows of it that count, and what its loss counts in its global batch's."""

    rows: int
    weight: Any


def weigh_passes(
    loss: TrainerLoss,
    passes: list[Any],
    sizes: list[tuple[int, ...]],
    totals: list[int],
    items: Any,
    gathering: Gathering,
    device: torch.device,
) -> tuple[list[float], Any, bool]:
    """The weight of each pass, the items of all ranks, and whether any rank has labels that are ignored.

    `sizes` are this rank's rows in the passes of each global batch, `totals` those of all ranks.
    """
    rows = [own for step in sizes for own in step]
    if loss.mean_over == ROWS:
        weights = [own / total for step, total in zip(sizes, totals, strict=True) for own in step]
    else:
        weights = [float(own > 0) for own in rows]
    by_labels = loss.mean_over not in (ITEMS, ROWS)
    if items is None and not by_labels and loss.certain:
        return weights, items, False
    counts = [loss.count(each) * (own > 0) if by_labels else 0.0 for each, own in zip(passes, rows, strict=True)]
    firsts = [sum(map(len, sizes[:step])) for step in range(len(sizes) + 1)]
    steps = [sum(counts[first:stop]) for first, stop in pairwise(firsts)]
    ignored = not loss.certain and any(map(has_ignored, passes))
    own = torch.tensor([[float(items or 0.0), float(ignored), *steps]], dtype=torch.float64, device=device)
    total, seen, *each = gathering.gather(own).sum(0).tolist()
    if by_labels:
        spread = [sum_ for sum_, step in zip(each, sizes, strict=True) for _ in step]
        weights = [count / (sum_ or 1.0) for count, sum_ in zip(counts, spread, strict=True)]
    return weights, None if items is None else torch.tensor(total, device=device).to(items.dtype), bool(seen)


def weigh_loss(loss: Any, factor: float, model: Any) -> Any:
    """The loss times its factor; 0 for one that doesn't count, even where it is NaN."""
    if factor == 0.0 and not torch.isfinite(loss):
        return sum((each * 0).sum() for each in model.parameters() if each.requires_grad)
    return loss if factor == 1.0 else loss * factor


class Gathering:
    """Gathers over ranks as the accelerator does, also where they have different numbers of rows.

    Rows that only keep step are left out of what is gathered.
    """

    def __init__(self, accelerator: Any, timer: StepTimer) -> None:
        self._accelerator, self._gather, self._timer = accelerator, accelerator.gather, timer
        self._world, self._alone = accelerator.num_processes, False
        self.rows: int | None = None  # that count in the batch in hand; None: all
        self.padded_to = 0  # rows that a loss is repeated for in evaluation
        accelerator.gather = self.gather

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, a rank gathers nothing but its own."""
        self._alone, before = True, self._alone
        try:
            yield
        finally:
            self._alone = before

    @contextmanager
    def counting(self, rows: int | None, padded_to: int = 0) -> Iterator[None]:
        """Within it, a batch is in hand of which so many rows count."""
        before = self.rows, self.padded_to
        self.rows, self.padded_to = rows, padded_to
        try:
            yield
        finally:
            self.rows, self.padded_to = before

    def gather(self, data: Any) -> Any:
        """All ranks' tensors, one behind the other."""
        if self._alone:
            return each_tensor(lambda tensor: tensor.reshape(1) if tensor.ndim == 0 else tensor, data)
        with self._timer.meeting(), processes(self._accelerator, self._world):
            return each_tensor(self._gather_rows, data)

    def _gather_rows(self, tensor: torch.Tensor) -> Any:
        if tensor.ndim == 0:
            return self._gather(tensor)
        if self.rows is not None and (not self.rows or len(tensor) == self.padded_to):
            tensor = tensor[: self.rows]
        counts = self._gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        if len(set(counts)) == 1:
            return self._gather(tensor)
        most = max(counts)
        every = self._gather(pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, most - len(tensor))))
        return torch.cat([every[i * most : i * most + count] for i, count in enumerate(counts)])
