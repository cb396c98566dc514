"""The data of a PyTorch workload, loaded as in a training run.

A data set is read epoch after epoch and reshuffled each time. A `sample_batch` function is called
once, for a pool of rows that is then reused. The pool is larger than a processor's cache, unless
rows are slow to create. The tokens and padding of rows that differ in length are counted.
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
    """Yields this rank's rows for an endless number of steps.

    Each step uses the next rows of one shuffled order, which is repeated.
    """

    def __init__(self, rows: int, sizes: Sequence[int], rank: int) -> None:
        super().__init__(ENDLESS_STEPS * sum(sizes), sizes, rank)
        self._rows = rows

    def batches(self) -> Iterator[torch.Tensor]:
        """Return an iterator over this rank's rows in each step.

        If a global batch has more rows than the data, some rows occur in it more than once.
        """
        once = torch.randperm(self._rows, generator=torch.Generator().manual_seed(self.seed))
        order = once.repeat(2 + self.global_batch // self._rows)
        start, stop = bounds(self.shares)[self.rank]
        firsts = (step * self.global_batch % self._rows for step in range(len(self)))
        return (order[first + start : first + stop] for first in firsts)


class Lengths:
    """The number of tokens in each row of a data set.

    Raises RequestError if the number of lengths isn't the number of rows, or a length is invalid.
    """

    def __init__(self, tokens: Sequence[int], rows: int) -> None:
        RowAssigner((RankCost(Cost(0.0, 1.0, 0.0)),), (1.0,)).check(tokens, rows)
        self.tokens = torch.as_tensor(tokens)
        self._rising = torch.argsort(self.tokens, stable=True)

    @property
    def longest_row(self) -> int:
        """The index of the longest row; the last index if several rows are equally long."""
        return int(self._rising[-1])

    def sample(self) -> tuple[int, ...]:
        """Return up to `SAMPLED` lengths in increasing order, including the longest.

        They are evenly spaced among all lengths.
        """
        rising, rows = self.tokens[self._rising].tolist(), len(self.tokens)
        places = (
            [rows * n // SAMPLED for n in range(SAMPLED - 1)] if rows > SAMPLED else range(rows - 1)
        )
        return (*(rising[setup] for setup in places), rising[-1])

    def nearest(self, length: int, rows: int) -> torch.Tensor:
        """Return the indices of `rows` rows that have at most `length` tokens, the longest first.

        Indices are repeated if there are too few such rows. The shortest row is used if there is
        none.
        """
        stop = max(1, bisect_right(self.tokens[self._rising].tolist(), length))
        below = self._rising[:stop].flip(0)
        return below.repeat(-(-rows // stop))[:rows]

    def count(self, rows: torch.Tensor) -> Work:
        """Return the tokens of a pass over these rows, with and without padding."""
        own = self.tokens[rows]
        longest = int(own.max())
        padded = len(rows) * longest
        return Work(float(own.sum()), 1.0, padded, padded * longest)


class RepeatingSampler(UnevenBatchSampler):
    """Yields the same rows in every step, for an endless number of steps."""

    def __init__(self, rows: torch.Tensor, sizes: Sequence[int], rank: int) -> None:
        super().__init__(ENDLESS_STEPS * sum(sizes), sizes, rank)
        self._rows = rows

    def batches(self) -> Iterator[torch.Tensor]:
        """Return an iterator that yields the same rows for each step."""
        return repeat(self._rows, len(self))


def count_work(sampler: UnevenBatchSampler, lengths: Lengths) -> UnevenBatchSampler:
    """Make a sampler record each batch's tokens and padding, and return it.

    The records are appended to a new attribute of the sampler, `works`.
    """
    works, draw = deque[Work](), sampler.batches

    def batches() -> Iterator[torch.Tensor]:
        for rows in draw():
            works.append(lengths.count(rows))
            yield rows

    vars(sampler).update(batches=batches, works=works)
    return sampler


def read_lengths(given: Any, rows: int) -> Lengths | None:
    """Return the row lengths that the user's code gives.

    Return None if there are none, or if all rows are equally long. Raises RequestError unless there
    is one whole number for each of the `rows` rows.
    """
    if given is None:
        return None
    try:
        tokens = [int(each) for each in given]
    except (TypeError, ValueError):
        raise RequestError(
            f"The lengths of the training data are of type {type(given).__name__}.",
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
    """A data set with the loader options that the training uses."""

    def __init__(self, dataset: Any, options: Mapping[str, Any] | None = None) -> None:
        self.dataset = dataset
        self.options = dict(options or {})
        self.prefetch = self.options.pop("prefetch", None)
        given = self.options.pop("lengths", getattr(dataset, "lengths", None))
        check_options(self.options)
        self.rows = count_rows(dataset)
        self.lengths = read_lengths(None if callable(given) else given, self.rows)

    def use_workers(self, count: int) -> None:
        """Load rows with `count` worker processes, which persist over epochs.

        If `count` is 0, rows are loaded in the main process.
        """
        options = self.options
        if not count:
            for name in OF_WORKERS:
                options.pop(name, None)
        options["num_workers"] = count
        if count:
            options["persistent_workers"] = True

    def sampler(self, sizes: Sequence[int], rank: int) -> UnevenBatchSampler:
        """Return a sampler of full batches for one rank; `sizes` has each rank's rows.

        Each iteration over the sampler is an epoch of the data set. A pool, or a data set with
        fewer rows than a batch, is repeated endlessly in one shuffled order instead.
        """
        if isinstance(self.dataset, Pool) or sum(sizes) > self.rows:
            sampler: UnevenBatchSampler = EndlessSampler(self.rows, sizes, rank)
        else:
            sampler = UnevenBatchSampler(self.rows, sizes, rank, drop_last=True)
        return sampler if self.lengths is None else count_work(sampler, self.lengths)

    def assigned(
        self, sizes: Sequence[int], rank: int, assigner: RowAssigner, epoch: int
    ) -> UnevenBatchSampler:
        """Return a sampler whose global batches are assigned to the ranks by cost.

        `sizes` are the ranks' mean rows. All global batches have the same number of rows. The
        sampler begins at the start of the epoch `epoch`.
        """
        assert self.lengths is not None
        whole, tokens = sum(sizes) <= self.rows, self.lengths.tokens
        rows = LengthSampler(
            self.rows, sizes, rank, lengths=tokens, assigner=assigner, drop_last=whole
        )
        rows.set_epoch(epoch)
        return count_work(rows, self.lengths)

    def of_one_length(self, sizes: Sequence[int], rank: int, length: int) -> UnevenBatchSampler:
        """Return a sampler that repeats the longest rows with at most `length` tokens.

        `sizes` are the ranks' rows per step, and `rank` is this rank.
        """
        assert self.lengths is not None
        return count_work(
            RepeatingSampler(self.lengths.nearest(length, sizes[rank]), sizes, rank), self.lengths
        )


class Pool(Dataset):  # type: ignore[misc]  # torch is not followed
    """Rows from a single call of `sample_batch`, fetched one batch at a time.

    Raises RequestError if `sample_batch` returns anything but batches of the requested size.
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
    """The batches of this rank's share, epoch after epoch.

    If `on_device`, there is a single batch, which stays in the device's memory. `listener` is
    notified when a batch is used, as in a training run.
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
        """Release all batches, including prefetched batches."""
        if isinstance(self._steps, Generator):
            self._steps.close()
        self._kept = None
        self._loader, self._steps, self.rows = None, iter(()), 0

    def make(self, sampler: UnevenBatchSampler, on_host: bool = False) -> None:
        """Start loading a sampler's rows for this rank.

        With `on_host`, the batches stay in host memory, so that each pass can be sent to the device
        separately. Raises RequestError if the data are unusable.
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
        """Return the next batch, or the batch that `keep` has kept.

        The batch is on the device, unless batches stay in host memory.
        """
        return next(self._steps) if self._kept is None else self._kept

    def keep(self, kept: bool) -> bool:
        """Make `take` return the same batch repeatedly if `kept`, otherwise new batches.

        Return False if rows differ in length, because no batch can be kept then.
        """
        # Tokens are counted when a batch is drawn, and a kept batch isn't drawn again.
        if hasattr(self._sampler, "works"):
            return False
        self._kept = next(self._steps) if kept else None
        return True

    def works(self, batch: Any) -> list[Work]:
        """Return the tokens and padding of each pass of `batch`, which `take` returned last.

        The result is empty if all rows have the same length.
        """
        drawn = getattr(self._sampler, "works", ())
        return (
            [drawn.popleft() for _ in (batch.rows if isinstance(batch, AssignedBatch) else (0,))]
            if drawn
            else []
        )

    def wait(self) -> None:
        """Wait until the loader has prefetched as many batches as it can hold."""
        # In the timed steps that follow, it then loads exactly one batch for each batch that a step
        # uses.
        if self._loader is not None:
            self._loader.wait_until_full()

    def _repeat_first(self, loader: Loader) -> Iterator[Any]:
        """Repeat the loader's first batch, and keep the loader open."""
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
    """Return the (inputs, targets) of a batch.

    Targets are None if the batch is a single tensor or a mapping. Raises RequestError for anything
    else.
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
    """Raise RequestError unless every tensor has this number of rows."""
    tensors: list[Any] = []
    each_tensor(tensors.append, batch)
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if counts != {rows}:
        raise RequestError(
            f"A batch of {rows} has tensors of {sorted(counts)} rows.",
            f"Each tensor needs {rows} rows.",
        )


def send(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to a device; copies from pinned memory are asynchronous."""
    return each_tensor(lambda tensor: tensor.to(device, non_blocking=True), batch)


def to_tensors(data: Any) -> Any:
    """Return the nested data with NumPy arrays converted to tensors."""
    return torch.as_tensor(data) if hasattr(data, "__array__") else each_item(to_tensors, data)
