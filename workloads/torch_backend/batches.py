"""Training data for PyTorch workloads, loaded in the same way as in training.

A data set is read in epochs, each in a new order. If there is only `sample_batch`, it creates a
fixed set of rows, which are reused in every epoch. They are more than fit in a processor's cache,
unless creating rows is slow. If rows have lengths, their tokens and padding are counted.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from typing import Any

import torch
from torch.utils.data import Dataset

from evener.errors import RequestError
from evener.shares.curves import Cost, RankCost, Work
from evener.shares.whole_rows import bounds
from evener.torch.rows.fetch import select
from evener.torch.rows.loader import Loader, StepListener, check_options, count_rows
from evener.torch.rows.sampler import LengthSampler, UnevenBatchSampler
from evener.torch.rows.structure import AssignedBatch, each_item, each_tensor
from evener.training.row_assignment import RowAssigner

# options that a DataLoader accepts only with workers
OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
SAMPLED = 256  # the number of lengths that represent the lengths of all rows
ENDLESS_STEPS = 1 << 40


class EndlessSampler(UnevenBatchSampler):
    """Sampler that never ends, for synthetic rows and for data sets smaller than a global batch.

    `sizes` are the rows of each rank in a global batch.
    """

    def __init__(self, rows: int, sizes: Sequence[int], rank: int) -> None:
        super().__init__(ENDLESS_STEPS * sum(sizes), sizes, rank)
        self._rows = rows

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the indices of this rank's rows in each batch.

        All rows are shuffled once, and this order is repeated.
        """
        once = torch.randperm(self._rows, generator=torch.Generator().manual_seed(self.seed))
        order = once.repeat(2 + self.global_batch // self._rows)
        start, stop = bounds(self.shares)[self.rank]
        firsts = (step * self.global_batch % self._rows for step in range(len(self)))
        return (order[first + start : first + stop] for first in firsts)


class Lengths:
    """The lengths of all rows in tokens; rows can be looked up by their length.

    Raises `RequestError` unless there is a valid length for each row.
    """

    def __init__(self, tokens: Sequence[int], rows: int) -> None:
        RowAssigner((RankCost(Cost(0.0, 1.0, 0.0)),), (1.0,)).check(tokens, rows)
        self.tokens = torch.as_tensor(tokens)
        self._rising = torch.argsort(self.tokens, stable=True)

    @property
    def longest_row(self) -> int:
        """The index of the longest row."""
        return int(self._rising[-1])

    def sample(self) -> tuple[int, ...]:
        """Return up to 256 lengths that represent all of them, in increasing order.

        The longest one is included.
        """
        rising, rows = self.tokens[self._rising].tolist(), len(self.tokens)
        places = (
            [rows * n // SAMPLED for n in range(SAMPLED - 1)] if rows > SAMPLED else range(rows - 1)
        )
        return (*(rising[setup] for setup in places), rising[-1])

    def nearest(self, length: int, rows: int) -> torch.Tensor:
        """Return the indices of `rows` rows with at most `length` tokens, longest first.

        Indices are repeated if there are too few such rows. If there is none, the shortest row is
        used.
        """
        stop = max(1, bisect_right(self.tokens[self._rising].tolist(), length))
        below = self._rising[:stop].flip(0)
        return below.repeat(-(-rows // stop))[:rows]

    def count(self, rows: torch.Tensor) -> Work:
        """Count the tokens of rows that are computed in one pass, with and without padding."""
        own = self.tokens[rows]
        longest = int(own.max())
        padded = len(rows) * longest
        return Work(float(own.sum()), 1.0, padded, padded * longest)


class RepeatingSampler(UnevenBatchSampler):
    """Sampler that draws the same rows for this rank in every batch."""

    def __init__(self, rows: torch.Tensor, sizes: Sequence[int], rank: int) -> None:
        super().__init__(ENDLESS_STEPS * sum(sizes), sizes, rank)
        self._rows = rows

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the same row indices for each batch."""
        return repeat(self._rows, len(self))


def count_work(sampler: UnevenBatchSampler, lengths: Lengths) -> UnevenBatchSampler:
    """Make a sampler count the tokens of each batch that it draws, and return it.

    The counts are appended to its new attribute `works`.
    """
    works, draw = deque[Work](), sampler.batches

    def batches() -> Iterator[torch.Tensor]:
        for rows in draw():
            works.append(lengths.count(rows))
            yield rows

    vars(sampler).update(batches=batches, works=works)
    return sampler


def read_lengths(row_lengths: Any, rows: int) -> Lengths | None:
    """Convert the user's row lengths to `Lengths`.

    Returns None if there are none, or if all rows have the same length. Raises `RequestError`
    unless there is a whole number for each row.
    """
    if row_lengths is None:
        return None
    try:
        tokens = [int(each) for each in row_lengths]
    except (TypeError, ValueError):
        raise RequestError(
            f"The lengths of the training data are of type {type(row_lengths).__name__}.",
            "Give a whole number for each row.",
        ) from None
    lengths = Lengths(tokens, rows)
    return None if min(tokens) == max(tokens) else lengths


SampleBatch = Callable[[int], Any]  # n -> (inputs, targets), tensors of n rows each, on the host
SAMPLE_ROWS = 8  # number of rows from which the size of a row is estimated
POOL_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # by type of the training device
POOL_ROWS = 1 << 16  # maximum rows of a pool
SLOW_ROW_SECONDS = 2e-4  # seconds per row; if creating a row takes longer, a pool has fewer rows:
SLOW_POOL_ROWS = 1024


class Data:
    """A data set with the options of its `DataLoader`.

    The option `lengths` has the rows' lengths in tokens. Without it, the data set's attribute
    `lengths` is used, if there is one. Raises `RequestError` for unsupported options.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any] | None = None) -> None:
        self.dataset = dataset
        self.options = dict(options or {})
        self.prefetch = self.options.pop("prefetch", None)
        given = self.options.pop("lengths", getattr(dataset, "lengths", None))
        check_options(self.options)
        self.rows = count_rows(dataset)
        self.lengths = read_lengths(None if callable(given) else given, self.rows)

    def use_workers(self, count: int) -> None:
        """Set the number of the data loader's worker processes.

        With 0, rows are loaded in this process.
        """
        options = self.options
        if not count:
            for name in OF_WORKERS:
                options.pop(name, None)
        options["num_workers"] = count
        if count:
            options["persistent_workers"] = True

    def sampler(self, sizes: Sequence[int], rank: int) -> UnevenBatchSampler:
        """Return a sampler of this rank's rows.

        `sizes` has the number of rows of each rank in a batch. If the data set is smaller than a
        global batch, its rows are repeated. Otherwise, rows that don't fill another global batch at
        the end of an epoch are left out.
        """
        if isinstance(self.dataset, Pool) or sum(sizes) > self.rows:
            sampler: UnevenBatchSampler = EndlessSampler(self.rows, sizes, rank)
        else:
            sampler = UnevenBatchSampler(self.rows, sizes, rank, drop_last=True)
        return sampler if self.lengths is None else count_work(sampler, self.lengths)

    def assigned_sampler(
        self, sizes: Sequence[int], rank: int, assigner: RowAssigner, epoch: int
    ) -> UnevenBatchSampler:
        """Return a sampler that assigns rows to ranks by their length.

        The ranks then finish a batch at about the same time. `sizes` has the mean number of rows of
        each rank.
        """
        assert self.lengths is not None
        whole, tokens = sum(sizes) <= self.rows, self.lengths.tokens
        rows = LengthSampler(
            self.rows, sizes, rank, lengths=tokens, assigner=assigner, drop_last=whole
        )
        rows.set_epoch(epoch)
        return count_work(rows, self.lengths)

    def one_length_sampler(
        self, sizes: Sequence[int], rank: int, length: int
    ) -> UnevenBatchSampler:
        """Return a sampler that repeats the same rows, which have about `length` tokens each.

        `sizes` are the rows of each rank in a batch.
        """
        assert self.lengths is not None
        return count_work(
            RepeatingSampler(self.lengths.nearest(length, sizes[rank]), sizes, rank), self.lengths
        )


class Pool(Dataset):  # type: ignore[misc]  # torch is not followed
    """Data set of synthetic rows, which the user's `sample_batch` creates in a single call.

    The number of rows is limited by memory. If creating rows is slow, there are at most 1024.
    Raises `RequestError` if the function doesn't return a valid batch.
    """

    def __init__(self, sample_batch: SampleBatch, device: str) -> None:
        sample = _checked(sample_batch, SAMPLE_ROWS)
        started = time.perf_counter()
        _checked(sample_batch, SAMPLE_ROWS)
        slow = time.perf_counter() - started > SAMPLE_ROWS * SLOW_ROW_SECONDS
        sizes: list[int] = []
        each_tensor(lambda tensor: sizes.append(tensor.numel() * tensor.element_size()), sample)
        fitting = POOL_BYTES[device] * SAMPLE_ROWS // max(1, sum(sizes))
        self._rows = max(SAMPLE_ROWS, min(SLOW_POOL_ROWS if slow else POOL_ROWS, fitting))
        self._batch = _checked(sample_batch, self._rows)
        self._pinned = device == "cuda"

    def __len__(self) -> int:
        return self._rows

    def __getitems__(self, rows: torch.Tensor) -> Any:
        return each_tensor(lambda tensor: select(tensor, rows, self._pinned), self._batch)


class Batches:
    """Loads the batches of a probe's steps, and sends them to the device.

    With `on_device`, one batch is loaded and reused in all steps.
    """

    def __init__(
        self, data: Data, device: torch.device, on_device: bool, listener: StepListener
    ) -> None:
        self.data = data
        self._device = self._sent_to = device
        self._on_device = on_device
        self._listener = listener
        self._loader: Loader | None = None
        self._steps: Iterator[Any] = iter(())
        self.rows = 0
        self.on_host = False
        self._kept: Any = None

    def drop(self) -> None:
        """Close the data loader, and release its batches."""
        if isinstance(self._steps, Generator):
            self._steps.close()
        self._kept = None
        self._loader, self._steps, self.rows = None, iter(()), 0

    def make(self, sampler: UnevenBatchSampler, on_host: bool = False) -> None:
        """From now on, load the batches that `sampler` draws.

        With `on_host`, they stay in host memory. The first batch is checked when it is taken;
        `RequestError` is raised if it is malformed.
        """
        prefetch = 0 if self._on_device else self.data.prefetch
        options = self.data.options
        loader = Loader(
            self.data.dataset,
            sampler,
            self._listener,
            options,
            self._device,
            prefetch,
            on_host=on_host,
        )
        self.rows, self.on_host = sampler.shares[sampler.rank], on_host
        self._sampler = sampler
        self._sent_to = torch.device("cpu") if on_host and not self._on_device else self._device
        if self._on_device:
            self._steps = self._repeat_first(loader)
        else:
            self._loader, self._steps = loader, self._walk(loader)

    def take(self) -> Any:
        """Return the next batch, or the same one again after `keep(True)`.

        It is on the device unless `make` was called with `on_host`.
        """
        return next(self._steps) if self._kept is None else self._kept

    def keep(self, keep: bool) -> bool:
        """Make `take` return the same batch every time if `keep` is set, else new batches again.

        Returns whether this is possible. It isn't if tokens are counted, because they are counted
        when a batch is drawn.
        """
        if hasattr(self._sampler, "works"):
            return False
        self._kept = next(self._steps) if keep else None
        return True

    def works(self, batch: Any) -> list[Work]:
        """Return the tokens counted in each pass of a batch; empty if rows have no lengths."""
        drawn = getattr(self._sampler, "works", ())
        return (
            [drawn.popleft() for _ in (batch.rows if isinstance(batch, AssignedBatch) else (0,))]
            if drawn
            else []
        )

    def wait(self) -> None:
        """Wait until the data loader has filled its queue."""
        # In the timed steps that follow, it then loads exactly one batch for each batch that a step
        # uses.
        if self._loader is not None:
            self._loader.wait_until_full()

    def _repeat_first(self, loader: Loader) -> Iterator[Any]:
        """Load one batch, and yield it forever."""
        steps = iter(loader)
        batch = self._checked(next(steps))
        while True:
            yield batch

    def _walk(self, loader: Loader) -> Iterator[Any]:
        batches = chain.from_iterable(loader for _ in count())
        yield self._checked(next(batches))
        for batch in batches:
            yield batch if isinstance(batch, AssignedBatch) else as_pair(send(batch, self._sent_to))

    def _checked(self, batch: Any) -> Any:
        if isinstance(batch, AssignedBatch):
            for each, rows in zip(batch.passes, batch.rows, strict=True):
                check_rows(as_pair(each), max(1, rows))
            return batch
        pair = as_pair(send(batch, self._sent_to))
        if not self._sampler.is_by_length:
            check_rows(pair, self.rows)
        return pair


def _checked(sample_batch: SampleBatch, rows: int) -> tuple[Any, Any]:
    pair = as_pair(to_tensors(sample_batch(rows)))
    check_rows(pair, rows)
    return pair


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return a batch as (inputs, targets); targets are None if the batch has only inputs.

    Raises `RequestError` if it is neither a pair nor a tensor or mapping.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, torch.Tensor | Mapping):
        return batch, None
    raise RequestError(
        f"A batch is a {type(batch).__name__}, no pair.",
        "Return (inputs, targets), or the inputs alone for a module that returns its loss.",
    )


def check_rows(batch: Any, rows: int) -> None:
    """Raise `RequestError` unless each tensor of the batch has `rows` rows."""
    tensors: list[Any] = []
    each_tensor(tensors.append, batch)
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if counts != {rows}:
        raise RequestError(
            f"A batch of {rows} has tensors of {sorted(counts)} rows.",
            f"Each tensor needs {rows} rows.",
        )


def send(batch: Any, device: torch.device) -> Any:
    """Copy a batch's tensors to a device.

    Copies from pinned memory are asynchronous.
    """
    return each_tensor(lambda tensor: tensor.to(device, non_blocking=True), batch)


def to_tensors(data: Any) -> Any:
    """Convert the arrays of a nested structure to tensors."""
    return torch.as_tensor(data) if hasattr(data, "__array__") else each_item(to_tensors, data)
