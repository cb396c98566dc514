"""Fetch batches from a data set, and prefetch them in a thread for a GPU.

Some data sets return a whole batch for a tensor of row indices. From others, rows are fetched one
by one, as in DataLoader. Python takes about 10 µs for each row, so a fast GPU that trains a small
network has to wait for its batches.

Besides the current batch, at most `depth` batches wait on the device. The training loop runs at
most `depth` steps ahead of the GPU. So the memory for batches is bounded, and is the same in a
probe as in a training run.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from typing import Any, ClassVar, get_type_hints

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from .sampler import UnevenBatchSampler
from .structure import each_tensor

Whole = Callable[[torch.Tensor, bool], Any]  # (row indices, into pinned memory) -> the batch


def whole_fetch(dataset: Any) -> Whole | None:
    """Return a function that fetches a whole batch of `dataset` in one call, or None.

    This is possible for a TensorDataset, for a data set whose `__getitems__` is annotated to take a
    torch.Tensor of row indices, and for a Subset of either.
    """
    # `__getitems__` must return the batch in the form that the loop gets
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda rows, pinned: [select(tensor, rows, pinned) for tensor in tensors]
    if type(dataset) is Subset:
        inner = whole_fetch(dataset.dataset)
        numbers = torch.as_tensor(dataset.indices)
        # negative numbers count from the end
        numbers = torch.where(numbers < 0, numbers + len(dataset.dataset), numbers)
        return None if inner is None else lambda rows, pinned: inner(numbers[rows], pinned)
    if _takes_tensor(dataset):
        return lambda rows, _: dataset.__getitems__(rows)
    return None


def select(source: torch.Tensor, rows: torch.Tensor, pinned: bool = False) -> torch.Tensor:
    """Return the given rows of `source`, in pinned memory if `pinned`.

    Tensors that are on a GPU or require a gradient are never pinned.
    """
    if source.device.type != "cpu":
        return source.index_select(0, rows.to(source.device))
    if not pinned or source.requires_grad:
        return source.index_select(0, rows)
    out = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype, pin_memory=True)
    return torch.index_select(source, 0, rows, out=out)


class Fetch:
    """Iterable that fetches and collates the batches whose row indices `sampler` yields.

    Arguments:

    - `dataset`: a map-style data set.
    - `sampler`: yields the row indices of each batch.
    - `options`: keyword arguments of DataLoader.
    - `pinned`: whether to put batches that are fetched in one call into pinned memory.
    """

    # whole batches are fetched if the data set supports it; otherwise, or if `options` require it,
    # DataLoader fetches the batches

    def __init__(
        self, dataset: Any, sampler: UnevenBatchSampler, options: Mapping[str, Any], pinned: bool
    ) -> None:
        self._sampler = sampler
        self._pinned = pinned
        self._collate = options.get("collate_fn")
        # None if the collate function has to get single rows
        whole = None if self._collate and not _takes_tensor(dataset) else whole_fetch(dataset)
        self._whole = None if options.get("num_workers") else whole
        if self._whole is None:
            if whole is not None:  # fetch whole batches in worker processes
                dataset, options = (
                    _ListDataset(dataset),
                    {**options, "collate_fn": self._collate or _identity},
                )
            self._loader = DataLoader(dataset, batch_sampler=sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        whole, pinned, collate = self._whole, self._pinned, self._collate
        if whole is None:
            return iter(self._loader)
        fetched = (whole(rows, pinned) for rows in self._sampler.batches())
        return fetched if collate is None else map(collate, fetched)


class _ListDataset(Dataset):  # type: ignore[misc]  # torch is not followed
    """Wraps a data set so that a worker of DataLoader fetches each batch from it in one call."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, rows: list[int]) -> Any:
        whole = whole_fetch(self._dataset)
        assert whole is not None
        return whole(torch.tensor(rows), False)


def _identity(batch: Any) -> Any:
    return batch


def _takes_tensor(dataset: Any) -> bool:
    method = getattr(type(dataset), "__getitems__", None)
    if method is None:
        return False
    try:
        hints = get_type_hints(method)
    except (NameError, TypeError, AttributeError):
        return False
    return any(kind is torch.Tensor for name, kind in hints.items() if name != "return")


DEPTH = 2  # number of batches that wait on the device


class Prefetcher:
    """Iterator that fetches batches in a background thread and copies them to `device`.

    At most `depth` batches wait on the device. An error that the source raises in the thread is
    raised in the training loop.
    """

    # on a CPU, batches aren't sent; the thread exits when the iterator is exhausted or closed

    def __init__(self, source: Iterator[Any], device: torch.device, depth: int = DEPTH) -> None:
        self._source = source
        self._copies = _CopyStream(device) if device.type == "cuda" else None
        self._depth = depth
        self._ready: deque[tuple[Any, Any]] = deque()  # (batch, event of its arrival)
        # for each batch that was taken, an event after the GPU's work on the previous batch
        self._released: deque[Any] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="evener-prefetch", daemon=True)
        _open.add(self)
        _close_at_exit()
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # before waiting, because the loop enqueues nothing while it waits
        released = self._copies.mark() if self._copies else None
        with self._change:
            self._change.wait_for(lambda: self._ready or self._ended)
            if not self._ready:
                error, self._error = self._error, None
                raise error or StopIteration
            batch, arrived = self._ready.popleft()
            self._released.append(released)
            self._change.notify_all()
        return self._copies.use_on_current_stream(batch, arrived) if self._copies else batch

    def wait_until_full(self) -> None:
        """Wait until `depth` batches are ready or the source is exhausted."""
        # A probe calls this before and after timed steps. As many batches are then fetched during
        # these steps as they use, so that the time for fetching is included.
        with self._change:
            self._change.wait_for(lambda: len(self._ready) >= self._depth or self._ended)

    def close(self) -> None:
        """Stop prefetching, drop the batches that are ready, and wait for the thread to end."""
        with self._change:
            self._ended = True
            self._ready.clear()
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._copies.context() if self._copies else nullcontext():
                self._send_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _send_all(self) -> None:
        """Fetch batches and copy them to the device until the source is exhausted or closed."""
        for number in count():
            with self._change:
                self._change.wait_for(lambda: len(self._ready) < self._depth or self._ended)
                if self._ended:
                    return
            try:
                batch = next(self._source)
            except StopIteration:
                return
            if number >= self._depth and self._copies:
                self._released.popleft().synchronize()  # it can't be empty, because there is space
            ready = self._copies.send(batch) if self._copies else (batch, None)
            del batch
            with self._change:
                if not self._ended:
                    self._ready.append(ready)
                self._change.notify_all()
            del ready  # so that only the loop holds it


class _CopyStream:
    """CUDA stream that copies batches to the GPU while the training loop computes."""

    # events synchronize it with the stream of the training loop

    # one stream per GPU, because the allocator keeps memory by stream
    _streams: ClassVar[dict[int, Any]] = {}

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._stream = self._streams.setdefault(self._device.index, torch.cuda.Stream(self._device))
        # so that data on the device are complete
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def context(self) -> AbstractContextManager[None]:
        """Return a context manager in which this stream is the current one."""
        context: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return context

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start to copy a batch to the GPU; return it with a CUDA event that marks its arrival.

        If the GPU is out of memory, the result is the batch in pinned host memory, and None.
        """
        pinned = each_tensor(_pin, batch)
        try:
            sent = self._send(pinned)
        except torch.OutOfMemoryError:
            # the device has too little memory, so the batch stays on the host for now
            return pinned, None
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        return sent, arrived

    def mark(self) -> Any:
        """Record a CUDA event after all work that the training loop has queued so far."""
        event = torch.cuda.Event(blocking=True)  # a spinning wait would take a core from the loop
        event.record(torch.cuda.current_stream(self._device))
        return event

    def use_on_current_stream(self, batch: Any, arrived: Any) -> Any:
        """Return a sent batch once it is safe to use on the current stream.

        `arrived` is the event that `send` returned, or None if the batch is still in host memory.
        """
        # The current stream waits until the batch has arrived. If the device had too little memory
        # when the batch was prefetched, it is sent now, because the activations of the last step
        # have been freed.
        if arrived is None:
            return self._send(batch)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        each_tensor(lambda tensor: tensor.record_stream(stream), batch)
        return batch

    def _send(self, batch: Any) -> Any:
        return each_tensor(lambda tensor: tensor.to(self._device, non_blocking=True), batch)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor


_open: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _close_all() -> None:
    for prefetcher in list(_open):
        prefetcher.close()


@cache
def _close_at_exit() -> None:
    atexit.register(_close_all)
