"""Loaders for one rank of an uneven split; they can resume in mid-epoch.

`Loader` reports each rank's rows per step to a listener, which weights gradients accordingly.
`StepLoader` is for the loops of trainers, which report their steps themselves.
"""

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
    """One iteration over a loader.

    - `training`: False for validation.
    - `tail`: tells in which batches the ranks' weights differ from a full batch's (see
      `UnevenBatchSampler.rows_of_odd_tail`).
    - `by_length`: True if rows are assigned by length.
    - `loader()`: returns the loader, or None if it no longer exists.
    """

    # If rows are assigned by length, a batch must not be cut into passes.

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
        """True if a training loop may still use this epoch's newest batch."""
        return self.open or self.unfinished or self.batches[-1].is_alive()

    def leaves_one(self) -> bool:
        """True if the epoch has ended, but a loop may still compute its last batch."""
        # a loop may fetch the next epoch's first batch before it computes the last batch of this
        # one
        last = self.batches[-1]
        return self.unfinished and not last.used and bool(last.is_alive())


class StepListener:
    """Callbacks that a loader calls in each step; in this base class they do nothing."""

    def compare(self, digest: int) -> None:
        """Called when an epoch begins, if the user gave the rows' order or lengths.

        `digest` identifies these on this rank. It must be equal on all ranks.
        """

    def start(self) -> None:
        """Called when a loop begins, before its worker processes start."""

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """Called when the loop gets a batch.

        `sizes` are the ranks' numbers of rows in it, and `origin` is its iteration.
        """

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """Called when the loop is done with a batch.

        `sizes` are the ranks' numbers of rows. `tokens` are the tokens in this rank's rows, without
        and with padding.
        """

    def end(self, origin: Epoch) -> None:
        """Called when an iteration has ended, or its loop was left early."""


class Loader:
    """Yields this rank's rows of each global batch, with a DataLoader's attributes.

    Every iteration is a new epoch in a new order, unless `set_epoch` or `load_state_dict` has
    chosen an epoch or position.

    - `listener`: called for each step.
    - `options`: options of DataLoader.
    - `prefetch`: number of batches to prefetch and send to `device`; None for `check_prefetch`'s
      default.
    - `training`: False for validation.
    - `on_host`: keep prefetched batches in host memory.
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
        """Return the number of steps in a full epoch."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> RowSampler:
        """A sampler of the loader's row indices, one by one."""
        return RowSampler(self)

    @property
    def next_epoch(self) -> int:
        """The epoch number of the next loop.

        - After `set_epoch`: the chosen epoch.
        - After `load_state_dict`: the loaded epoch, if it has steps left.
        - Otherwise: the following epoch.
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
                "update_bn takes statistics of this rank's rows: give it a DataLoader of all.",
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
        """Return the state for a copy in another process, which doesn't report its steps.

        Such a process is a DataLoader's worker, for example.
        """
        return {**vars(self), "_listener": StepListener(), "_ahead": None}

    def wait_until_full(self) -> None:
        """Wait until `prefetch` batches are prefetched, or none are left.

        Return at once if nothing is prefetched: `prefetch` is 0, or no loop is running.
        """
        if self._ahead is not None:
            self._ahead.wait_until_full()

    def prefetched_rows(self) -> list[int]:
        """Return all ranks' row indices in the loop's newest batch.

        Before the first batch, return those of the first batch.
        """
        return self.batch_sampler.rows_of_all(max(0, self._steps - 1))

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop iterate over this epoch, from its first row.

        If a state from the middle of this epoch was just loaded, the loop starts there instead.
        """
        if not (self._loaded and epoch == self.batch_sampler.epoch):
            self.batch_sampler.set_epoch(epoch)
        self._steps = 0
        self._fresh = self._chosen = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the current batch, to save in a checkpoint.

        It is the same on every rank and JSON-serializable.
        """
        return self.batch_sampler.state_dict(self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next loop continue at the position in `state`.

        The state may come from a run with another plan.
        """
        self.batch_sampler.load_state_dict(state)
        self._steps = 0
        self._fresh = self._loaded = True
        self._chosen = False


class RowSampler(SequentialSampler):  # type: ignore[misc]  # torch isn't followed
    """Yields a loader's row indices one by one, like the `sampler` of a DataLoader."""

    # a SequentialSampler, so that Lightning doesn't replace it

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Return the number of this rank's rows in an epoch, with filler rows.

        A batch in which the rank has no row of its own has one filler row.
        """
        sampler = self._loader.batch_sampler
        firsts = range(0, len(sampler) * sampler.global_batch, sampler.global_batch)
        return sum(max(1, sampler.sizes_at(first)[sampler.rank]) for first in firsts)

    def __iter__(self) -> Iterator[int]:
        return (row for batch in self._loader.batch_sampler for row in batch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        self._loader.set_epoch(epoch)


def count_rows(dataset: Any) -> int:
    """Return the number of rows of a data set.

    Raises RequestError if the rows have no indices, or if it is a loader.
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
    """Return the number of batches to prefetch.

    None stands for the default: 2 for a GPU, 0 for a CPU. Raises RequestError if `prefetch` isn't
    an integer of 0 or more.
    """
    # A valid number is an integer of 0 or more. On a CPU, prefetching would take cores away from
    # the computation.
    if prefetch is None:
        return DEPTH if device.type == "cuda" else 0
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise RequestError(
            f"prefetch={prefetch!r} isn't a number of batches.", "Give 0 or more, or leave it out."
        )
    return prefetch


def check_options(options: dict[str, Any]) -> None:
    """Raise RequestError for a DataLoader option that the split sets itself."""
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
    """The training loaders in use, in order of creation, and their checkpoint states."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Loader]] = []
        self._waiting: list[dict[str, Any]] = []  # states of loaders that aren't created yet

    def add(self, loader: Loader) -> Loader:
        """Register a new loader, and return it.

        If a checkpoint was loaded before, the loader resumes from the first state that no loader
        has used yet.
        """
        self._made.append(weakref.ref(loader))
        if self._waiting:
            loader.load_state_dict(self._waiting.pop(0))
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all loaders, equal on every rank and JSON-serializable."""
        return {_LOADERS: [loader.state_dict() for loader in self._list()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume each loader from its state, also loaders that are created later.

        Raises RequestError if `state` doesn't come from `state_dict`.
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
    """A batch sampler of this rank's row indices in each global batch.

    An iteration starts at the batch `first_step` of the epoch.
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
        """Iterate over this rank's row indices in each global batch of the epoch."""
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of rows, and start at its first row."""
        self.sampler.set_epoch(epoch)

    def count_tokens(self, steps: Iterable[int]) -> tuple[int, int]:
        """Return the tokens in this rank's rows of these global batches, without and with padding.

        Both are 0 if the rows' lengths aren't known.
        """
        rows = self.sampler
        counted = [rows.count_tokens(step * rows.global_batch, rows.epoch) for step in steps]
        return sum(tokens for tokens, _ in counted), sum(padded for _, padded in counted)


class StepLoader(DataLoader[Any]):  # type: ignore[misc]  # torch isn't followed
    """A DataLoader over this rank's part of each global batch, for a trainer.

    The trainer sets `done` to the number of this epoch's batches that it has computed.
    `load_state_dict` resumes in the middle of an epoch, also with other shares.

    - `steps`: the batch sampler.
    - `ahead`: fetch each batch one step early, as accelerate's loader does.
    - `begins`: called when a loop begins.
    - `asks`: called when the loop requests a batch, because it has computed the previous one.
    - `options`: passed to DataLoader.
    """

    # The other shares must have the same global batch. With `ahead`, a collator that a callback
    # changes takes effect with the same batch as without a plan.

    def __init__(
        self,
        dataset: Any,
        steps: StepSampler,
        *,
        ahead: bool = False,
        begins: Callable[[], None] | None = None,
        asks: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=steps, **options)
        self.done = 0
        self._start = 0  # the global batch at which the next iteration begins
        self._ahead, self._begins, self._asks = ahead, begins, asks

    def __iter__(self) -> Any:
        if self._begins is not None:
            self._begins()
        self.batch_sampler.first_step = self.done = self._start
        self._start = 0
        batches: Any = super().__iter__()
        rows = self.batch_sampler.sampler
        if rows.is_by_length:
            batches = _loop(batches, rows)
        if self._ahead:
            batches = _fetch_ahead(batches)
        return batches if self._asks is None else _CountedRequests(batches, self._asks)

    @property
    def drawn_ahead(self) -> int:
        """The maximum number of batches that are drawn before the trainer requests them."""
        drawn: int = self.num_workers * (self.prefetch_factor or 2)
        return drawn + self._ahead

    def take(self, step: int) -> tuple[int, ...]:
        """Return each rank's rows in a global batch that the trainer begins, `step`.

        Later changes of shares take effect after this batch.
        """
        sizes: tuple[int, ...] = self.batch_sampler.sampler.take(step)
        return sizes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after `done` global batches, to save in a checkpoint.

        It is the same on all ranks with the same `done`.
        """
        rows = self.batch_sampler.sampler
        return {**rows.state_dict(self.done), "global_batch": rows.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue at the position in `state`.

        Raises RequestError if the state has another global batch.
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
    """Yield the batches inside the sampler's `loop_context`."""
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
    """A DataLoader's iterator that calls `asks` before each batch."""

    def __init__(self, batches: Any, asks: Callable[[], None]) -> None:
        self._batches, self._asks = batches, asks

    def __iter__(self) -> _CountedRequests:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        self._asks()
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
