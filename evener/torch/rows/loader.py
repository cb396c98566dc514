"""Data loaders that give each rank its own rows of every global batch."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature, unwrap
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from ...errors import RequestError
from .fetch import DEPTH, Fetch, Prefetcher
from .sampler import UnevenBatchSampler

_DECIDED = {
    "batch_size": "Leave it out; another global batch is Split(plan, global_batch=N).",
    "sampler": "Give it as order=: all ranks then take their rows of its order.",
    "batch_sampler": (
        "Give order=, a sampler of rows or a function of the epoch that returns their order."
    ),
}
LOADER_OPTIONS = {  # DataLoader's options that the plan doesn't set, with their defaults
    name: parameter.default
    for name, parameter in signature(DataLoader).parameters.items()
    if name not in {*_DECIDED, "dataset", "shuffle", "drop_last"}
} | {"collate_fn": default_collate}


class Epoch:
    """State of one loop over a loader; all batches of the loop refer to it.

    Arguments:

    - `training`: False in an evaluation loop.
    - `tail`: row count of a last batch that is divided in other proportions than full batches,
      or None (see `UnevenBatchSampler.rows_of_odd_tail`).
    - `by_length`: whether rows are assigned by length.
    """

    # if rows are assigned by length, a batch must not be cut into passes

    __slots__ = ("batches", "by_length", "loader", "open", "tail", "training", "unfinished")

    def __init__(self, training: bool = True, tail: object = None, by_length: bool = False) -> None:
        self.training = training
        self.tail = tail
        self.by_length = by_length
        self.loader: Callable[[], Loader | None] = lambda: None
        self.open = True
        self.unfinished = False  # True if it ended before its newest batch was computed
        self.batches: list[Any] = []  # batches that may still be in use; the newest is last

    def may_be_computed(self) -> bool:
        """Return whether a batch of this loop may still be passed to the model."""
        return self.open or self.unfinished or self.batches[-1].is_alive()

    def has_pending_batch(self) -> bool:
        """Return whether the loop has ended, but its last batch may still have to be computed.

        The result is False if that batch has already been freed.
        """
        # a loop may fetch the next epoch's first batch before it computes the last batch of this
        # one
        last = self.batches[-1]
        return self.unfinished and not last.used and bool(last.is_alive())


class StepListener:
    """Interface of objects that a loader notifies of its steps.

    By default, the methods do nothing.
    """

    def compare(self, digest: int) -> None:
        """Called with a checksum of the row order, which ranks compare.

        This happens at the start of an epoch if the user has given the order or the lengths of
        rows.
        """

    def start(self) -> None:
        """Called when a loop over the loader begins."""

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """Called before a batch is yielded, with the row count of each rank.

        `origin` is the loop that the batch belongs to.
        """

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """Called after a step, with the row count of each rank.

        `tokens` says how many tokens this rank's rows have, without and with padding.
        """

    def end(self, origin: Epoch) -> None:
        """Called when a loop over the loader ends, even if it ends early."""


class Loader:
    """Data loader that yields this rank's rows of each global batch, on its device.

    It replaces torch's DataLoader. A new epoch begins with each loop, unless `set_epoch` or
    `load_state_dict` was called before. Arguments:

    - `dataset`: a map-style data set.
    - `sampler`: selects this rank's rows.
    - `listener`: its methods are called before and after each step.
    - `options`: keyword arguments of DataLoader.
    - `device`: the device to prefetch to; the CPU by default.
    - `prefetch`: number of batches to prefetch; by default 2 on a GPU and 0 on a CPU.
    - `training`: False for an evaluation loop.
    - `on_host`: whether prefetched batches stay in host memory.
    """

    # With a `prefetch` of 0, each batch is fetched when the loop requests it and stays on the host.

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    collate_fn: Callable[[list[Any]], Any]

    def __init__(
        self,
        dataset: Any,
        sampler: UnevenBatchSampler,
        listener: StepListener,
        options: dict[str, Any],
        device: torch.device | None = None,
        prefetch: int | None = None,
        training: bool = True,
        on_host: bool = False,
    ) -> None:
        for name, default in LOADER_OPTIONS.items():
            given = options.get(name)
            setattr(self, name, default if given is None else given)
        self.dataset = dataset
        self.batch_sampler = sampler
        self.batch_size = sampler.shares[sampler.rank]
        self.drop_last = sampler.drop_last
        self.device = device or torch.device("cpu")
        self.prefetch = check_prefetch(prefetch, self.device)
        # maximum number of batches drawn ahead
        self.drawn_ahead = self.prefetch + self.num_workers * (self.prefetch_factor or 2)
        on_gpu = self.device.type == "cuda"
        pinned = bool(self.prefetch or self.pin_memory) and on_gpu
        # the device to which prefetched batches are sent
        self._sent_to = torch.device("cpu") if on_host else self.device
        self._fetch = Fetch(dataset, sampler, options, pinned)
        self._listener = listener
        self._training = training
        self._steps = 0  # number of steps that have begun in this loop
        self._fresh = True  # True if the next loop is the sampler's current epoch
        # True after set_epoch: the next loop is this epoch, even if no rows are left
        self._chosen = False
        self._loaded = False  # True if a state was loaded and no loop has begun since
        self._ahead: Prefetcher | None = None  # prefetcher of the running loop

    def __repr__(self) -> str:
        sampler = self.batch_sampler
        return (
            f"Loader({sampler.length} rows, shares={sampler.shares}, rank={sampler.rank}, "
            f"device={self.device})"
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> RowSampler:
        """Sampler of this rank's rows, for trainers that call `loader.sampler.set_epoch`."""
        return RowSampler(self)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next loop iterates over.

        This is the epoch that was set by `set_epoch` or loaded by `load_state_dict`, if it has
        batches left; otherwise it is the next one.
        """
        sampler = self.batch_sampler
        return sampler.epoch + (not self._fresh or not (sampler.steps_left or self._chosen))

    def __iter__(self) -> Iterator[Any]:
        sampler = self.batch_sampler
        if (epoch := self.next_epoch) != sampler.epoch:
            sampler.set_epoch(epoch)
        self._fresh = self._chosen = self._loaded = False
        self._steps = 0
        first, full = sampler.position, sampler.global_batch
        listener = self._listener
        digest = sampler.digest(epoch)
        if digest is not None:
            listener.compare(digest)
        if (
            sys._getframe(1).f_code is unwrap(torch.optim.swa_utils.update_bn).__code__
            and len(sampler.shares) > 1
        ):
            warnings.warn(
                "update_bn takes statistics of this rank's rows only: give it a DataLoader "
                "of all rows.",
                stacklevel=2,
            )
        origin = Epoch(self._training, sampler.rows_of_odd_tail(), sampler.is_by_length)
        origin.loader = weakref.ref(self)
        listener.start()
        batches = sampler.join_passes(iter(self._fetch))
        schedule = sampler.schedule
        ahead = Prefetcher(batches, self._sent_to, self.prefetch) if self.prefetch else None
        self._ahead = ahead
        try:
            with sampler.loop_context():
                for step, batch in enumerate(ahead or batches):
                    row = first + step * full
                    sizes = sampler.sizes_at(row, epoch, schedule)
                    listener.begin(origin, sizes, batch)
                    self._steps, schedule.begun = step + 1, row + full
                    yield batch
                    listener.done(sizes, sampler.count_tokens(row, epoch))
        finally:
            if ahead is not None:
                ahead.close()
            listener.end(origin)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, which leaves out the listener and the prefetching thread."""
        return {**vars(self), "_listener": StepListener(), "_ahead": None}

    def wait_until_full(self) -> None:
        """Wait until the running loop has prefetched `prefetch` batches, or all that are left.

        Without prefetching or a running loop, this returns immediately.
        """
        if self._ahead is not None:
            self._ahead.wait_until_full()

    def prefetched_rows(self) -> list[int]:
        """Return the row indices of all ranks in the loop's newest global batch.

        Before the loop has a batch, these are the row indices of the first one.
        """
        return self.batch_sampler.rows_of_all(max(0, self._steps - 1))

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop iterate over the given epoch from its first row.

        After `load_state_dict`, setting the same epoch keeps the loaded position.
        """
        if not (self._loaded and epoch == self.batch_sampler.epoch):
            self.batch_sampler.set_epoch(epoch)
        self._steps = 0
        self._fresh = self._chosen = True

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position in it, for a checkpoint.

        The result is the same on every rank, and can be stored as JSON.
        """
        return self.batch_sampler.state_dict(self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in a state that `state_dict` returned.

        Raises RequestError if the data set's length, its order or the seed differs. The state may
        have been saved under another plan.
        """
        self.batch_sampler.load_state_dict(state)
        self._steps = 0
        self._fresh = self._loaded = True
        self._chosen = False


class RowSampler(SequentialSampler):  # type: ignore[misc]  # torch isn't followed
    """Stands in for a loader's SequentialSampler, for trainers that read `loader.sampler`."""

    # a SequentialSampler, so that Lightning doesn't replace it

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Return the number of rows that this rank loads in an epoch, including filler rows."""
        sampler = self._loader.batch_sampler
        firsts = range(0, len(sampler) * sampler.global_batch, sampler.global_batch)
        return sum(max(1, sampler.sizes_at(first)[sampler.rank]) for first in firsts)

    def __iter__(self) -> Iterator[int]:
        return (row for batch in self._loader.batch_sampler for row in batch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        self._loader.set_epoch(epoch)


def count_rows(dataset: Any) -> int:
    """Return the number of rows of a map-style data set.

    Raises RequestError for a loader, for an IterableDataset and for a data set without a length.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader | Loader):
        raise RequestError(
            f"A {kind} has made batches already, and the plan decides which rows are in a rank's.",
            (
                "Give its data set, and its options beside it: split.loader(loader.dataset, "
                "num_workers=...)."
            ),
        )
    if isinstance(dataset, IterableDataset):
        raise RequestError(
            f"A {kind} is a stream: even if it has a length, its rows have no numbers to "
            f"share them out by.",
            "Give a data set with len() and numbered rows, or collect the stream into one.",
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise RequestError(
            f"The length of a {kind} is not known, so its rows can't be shared out exactly.",
            "Give a data set with len() and numbered rows.",
        ) from None


def check_prefetch(prefetch: int | None, device: torch.device) -> int:
    """Return how many batches to prefetch to `device`.

    None means the default: 2 on a GPU, 0 on a CPU. Raises RequestError if `prefetch` is not a valid
    number.
    """
    # on a CPU, prefetching would take cores away from the computation
    if prefetch is None:
        return DEPTH if device.type == "cuda" else 0
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise RequestError(
            f"prefetch={prefetch!r} isn't a number of batches.", "Give 0 or more, or leave it out."
        )
    return prefetch


def check_options(options: dict[str, Any]) -> None:
    """Raise a RequestError for options of DataLoader that conflict with the plan's choice of rows.

    These are `batch_size`, `sampler` and `batch_sampler`.
    """
    for name, remedy in _DECIDED.items():
        if options.get(name) is not None:
            shown = (
                repr(options[name])
                if isinstance(options[name], int)
                else type(options[name]).__name__
            )
            raise RequestError(
                f"{name}={shown} can't be given: the plan decides each rank's rows.", remedy
            )


_LOADERS = "loaders"


class LoaderStates:
    """Saves and restores the positions of all loaders of a script, in order of creation."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Loader]] = []
        self._waiting: list[dict[str, Any]] = []  # states of loaders that aren't created yet

    def add(self, loader: Loader) -> Loader:
        """Register a loader and return it, with its position restored if one was loaded for it."""
        self._made.append(weakref.ref(loader))
        if self._waiting:
            loader.load_state_dict(self._waiting.pop(0))
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all loaders that still exist, for a checkpoint.

        The result is the same on every rank, and can be stored as JSON.
        """
        return {_LOADERS: [loader.state_dict() for loader in self._list()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of the loaders, including loaders that are created later.

        Raises RequestError if `state` wasn't returned by `state_dict`, or doesn't fit a loader.
        """
        if not isinstance(state.get(_LOADERS), list):
            raise RequestError(
                f"The state of the split has no {_LOADERS!r}.",
                "Give what its state_dict() returned.",
            )
        states, loaders = state[_LOADERS], self._list()
        for loader, own in zip(loaders, states, strict=False):
            loader.load_state_dict(own)
        self._waiting = list(states[len(loaders) :])

    def _list(self) -> list[Loader]:
        self._made = [each for each in self._made if each() is not None]
        return [loader for each in self._made if (loader := each()) is not None]


class StepSampler:
    """Batch sampler for torch's DataLoader that can start in the middle of an epoch.

    An iteration starts with batch number `first_step` of the epoch.
    """

    def __init__(self, sampler: UnevenBatchSampler) -> None:
        self.sampler, self.drop_last = sampler, sampler.drop_last
        self.batch_size = sampler.shares[sampler.rank]
        self.first_step = 0  # the next iteration starts at this step

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.steps(), self.first_step, None)

    def steps(self) -> Iterator[Any]:
        """Return an iterator over this rank's row indices, batch by batch."""
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of rows, and start with its first row."""
        self.sampler.set_epoch(epoch)

    def count_tokens(self, steps: Iterable[int]) -> tuple[int, int]:
        """Return how many tokens this rank has in the given steps, without and with padding.

        Both are 0 if the lengths of rows aren't known.
        """
        rows = self.sampler
        counted = [rows.count_tokens(step * rows.global_batch, rows.epoch) for step in steps]
        return sum(tokens for tokens, _ in counted), sum(padded for _, padded in counted)


class StepLoader(DataLoader[Any]):  # type: ignore[misc]  # torch isn't followed
    """DataLoader for trainers that yields this rank's rows, with a position that can be saved.

    Arguments:

    - `dataset`: a map-style data set.
    - `steps`: the batch sampler.
    - `ahead`: whether to fetch a batch before the previous one is yielded, as accelerate's loader
      does.
    - `on_begin`: called when a loop begins.
    - `before_fetch`: called before each batch is fetched.
    - `options`: further keyword arguments of DataLoader.

    The trainer sets `done` to the number of the epoch's batches that it has computed.
    """

    # With `ahead`, a collator that a callback changes takes effect with the same batch as without a
    # plan. Other shares must have the same global batch.

    def __init__(
        self,
        dataset: Any,
        steps: StepSampler,
        *,
        ahead: bool = False,
        on_begin: Callable[[], None] | None = None,
        before_fetch: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=steps, **options)
        self.done = 0
        self._start = 0  # the global batch at which the next iteration begins
        self._ahead, self._on_begin, self._before_fetch = ahead, on_begin, before_fetch

    def __iter__(self) -> Any:
        if self._on_begin is not None:
            self._on_begin()
        self.batch_sampler.first_step = self.done = self._start
        self._start = 0
        batches: Any = super().__iter__()
        rows = self.batch_sampler.sampler
        if rows.is_by_length:
            batches = _loop(batches, rows)
        if self._ahead:
            batches = _fetch_ahead(batches)
        if self._before_fetch is None:
            return batches
        return _CountedRequests(batches, self._before_fetch)

    @property
    def drawn_ahead(self) -> int:
        """Maximum number of batches that are fetched before the training loop uses them."""
        drawn: int = self.num_workers * (self.prefetch_factor or 2)
        return drawn + self._ahead

    def take(self, step: int) -> tuple[int, ...]:
        """Record that global batch `step` has begun, and return the row count of each rank in it.

        If shares change later, only the batches after it are affected.
        """
        sizes: tuple[int, ...] = self.batch_sampler.sampler.take(step)
        return sizes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of rows."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it and the size of the global batch, for a checkpoint.

        The position is that after the epoch's first `done` batches. The result is the same on all
        ranks.
        """
        rows = self.batch_sampler.sampler
        return {**rows.state_dict(self.done), "global_batch": rows.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next loop start at the position in a state that `state_dict` returned.

        Raises RequestError if the global batch, the data set's length, its order or the seed
        differs.
        """
        rows = self.batch_sampler.sampler
        if state.get("global_batch") != rows.global_batch:
            raise RequestError(
                f"The checkpoint was made with a global batch of "
                f"{state.get('global_batch')!r} rows, this training has"
                f" {rows.global_batch}.",
                "Go on with the same, or from a checkpoint of an epoch's end.",
            )
        rows.load_state_dict(state)
        self._start = -(-rows.position // rows.global_batch)
        rows.position = 0


def _loop(batches: Iterator[Any], rows: UnevenBatchSampler) -> Iterator[Any]:
    """Iterate over `batches` inside the context manager of `rows.loop_context`."""
    with rows.loop_context():
        yield from batches


def _fetch_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    fetched: deque[Any] = deque()
    for batch in batches:
        fetched.append(batch)
        if len(fetched) > 1:
            yield fetched.popleft()
    yield from fetched


class _CountedRequests:
    """Iterator that calls a function before it fetches each batch."""

    def __init__(self, batches: Any, before_fetch: Callable[[], None]) -> None:
        self._batches, self._before_fetch = batches, before_fetch

    def __iter__(self) -> _CountedRequests:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        self._before_fetch()
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
