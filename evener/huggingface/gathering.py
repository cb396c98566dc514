"""The gathering of a Trainer's figures over ranks with different numbers of rows, and over batches in passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from evener.huggingface.processes import processes
from evener.torch_split.nested_batch import each_tensor
from evener.torch_split.own_work import StepTimer


class Gathered(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """A figure of each rank and pass, whose mean is weighted by their `rows`."""

    rows: torch.Tensor

    def mean(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The mean, weighted by rows if it is over all figures."""
        plain = self.as_subclass(torch.Tensor)
        if args or kwargs or not self.rows.sum():
            return plain.mean(*args, **kwargs)
        return (plain.double() * self.rows).sum().div(self.rows.sum()).to(plain.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with a plain tensor, so that results are plain too."""
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Gathering:
    """Gathers over ranks as the accelerator does, even if they have different numbers of rows.

    Rows that only keep step are left out of what is gathered, and the passes of a batch are gathered together: the
    last one has what all of them gave.
    """

    def __init__(self, accelerator: Any, timer: StepTimer) -> None:
        self._accelerator, self._gather, self._timer = accelerator, accelerator.gather, timer
        self._world, self._alone = accelerator.num_processes, False
        self.calls = 0  # by code that gathers alone
        self._rows: int | None = None  # that count in the current batch; None: all
        self._repeats = 0  # rows that a loss is repeated for in evaluation
        self._earlier: list[list[Any]] = []  # what each call gathered in the passes of the batch
        self._call = 0
        accelerator.gather = self.gather

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which a rank gathers nothing but its own."""
        self._alone, before = True, self._alone
        try:
            yield
        finally:
            self._alone = before

    @contextmanager
    def counting(self, rows: int, repeats: int = 0, first: bool = True) -> Iterator[None]:
        """A context in which `rows` rows of the current pass count; `first`: the pass is the first of its batch."""
        before, self._call = (self._rows, self._repeats), 0
        self._rows, self._repeats = rows, repeats
        if first:
            self._earlier = []
        try:
            yield
        finally:
            self._rows, self._repeats = before

    def add_up(self, figures: torch.Tensor) -> list[float]:
        """The sums of (n,) figures over all ranks."""
        sums: list[float] = self._gather(figures[None]).sum(0).tolist()
        return sums

    def gather(self, data: Any) -> Any:
        """The tensors of all ranks, one after the other."""
        if self._alone:
            self.calls += 1
            return each_tensor(lambda tensor: tensor.reshape(1) if tensor.ndim == 0 else tensor, data)
        with self._timer.meeting(), processes(self._accelerator, self._world):
            return each_tensor(self._gather_tensor, data)

    def _gather_tensor(self, tensor: torch.Tensor) -> Any:
        gathered = self._gather_rows(tensor) if tensor.ndim else self._gather_figure(tensor)
        if self._rows is None:
            return gathered
        if self._call == len(self._earlier):
            self._earlier.append([])
        every = self._earlier[self._call]
        self._call += 1
        every.append(gathered)
        if len(every) == 1 or len({each.shape[1:] for each in every}) > 1:
            return gathered
        joined = torch.cat(every)
        return _weighted(joined, torch.cat([each.rows for each in every])) if not tensor.ndim else joined

    def _gather_figure(self, figure: torch.Tensor) -> Any:
        if self._rows is None:
            return self._gather(figure)
        pairs = self._gather(torch.stack([figure.double(), figure.new_tensor(self._rows, dtype=torch.float64)])[None])
        counted = pairs[pairs[:, 1] > 0]
        return _weighted(counted[:, 0].to(figure.dtype), counted[:, 1])

    def _gather_rows(self, tensor: torch.Tensor) -> Any:
        if self._rows is not None and (not self._rows or len(tensor) == self._repeats):
            tensor = tensor[: self._rows]
        counts = self._gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        if len(set(counts)) == 1:
            return self._gather(tensor)
        most = max(counts)
        every = self._gather(pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, most - len(tensor))))
        return torch.cat([every[i * most : i * most + count] for i, count in enumerate(counts)])


def _weighted(figures: torch.Tensor, rows: torch.Tensor) -> Gathered:
    made: Gathered = figures.as_subclass(Gathered)
    made.rows = rows
    return made
