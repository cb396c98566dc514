"""A DataLoader for one rank of an uneven split: it says what each step's rows weigh and can go on
in mid-epoch.
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
LOADER_OPTIONS = {  # of DataLoader that are free, and what it takes for those that aren't given
    name: parameter.default
    for name, parameter in signature(DataLoader).parameters.items()
    if name not in {*_DECIDED, "dataset", "shuffle", "drop_last"}
} | {"collate_fn": default_collate}


class Epoch:
    """A loop over a loader; `tail` is None if all its batches weigh the same, else what the last
    one has instead.

    `dealt`: its rows were dealt by length, so a batch is not to be cut into passes. `loader()` is
    the split's, or None.
    """

    __slots__ = ("batches", "dealt", "loader", "open", "tail", "training", "unfinished")

    def __init__(self, training: bool = True, tail: object = None, dealt: bool = False) -> None:
        self.training = training
        self.tail = tail
        self.dealt = dealt
        self.loader: Callable[[], Loader | None] = lambda: None
        self.open = True
        self.unfinished = False  # it ended before its newest batch was computed
        self.batches: list[Any] = []  # the newest, and older ones that may still be in use

    def may_be_computed(self) -> bool:
        """True if a loop may still use the epoch's newest batch."""
        return self.open or self.unfinished or self.batches[-1].is_alive()

    def leaves_one(self) -> bool:
        """True if a loop may have taken the next epoch's first batch before it computes this
        epoch's last one.
        """
        last = self.batches[-1]
        return self.unfinished and not last.used and bool(last.is_alive())


class StepListener:
    """Hears of a loader's steps; this one does nothing about them."""

    def compare(self, digest: int) -> None:
        """An epoch begins with an order or lengths of the user's own, which have this digest
        here.
        """

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """The loop gets this batch, of which the ranks have these rows."""

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """The loop is done with a batch of these rows, and of this rank's tokens without and with
        padding.
        """

    def end(self, origin: Epoch) -> None:
        """An epoch is over, or left."""


class Loader:
    """Batches of this rank's rows, in step with the other ranks; other libraries find a
    DataLoader's attributes.

    Every loop is a new epoch in a new order, unless `set_epoch` or `load_state_dict` says which; it
    begins with its first batch. With a `prefetch` of 1 or more, as many batches are fetched ahead
    and sent to `device`; with 0, each is fetched when it is asked for and stays on the host.
    `listener` hears of the steps, as `training` or validation.
    """

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
        self.drawn_ahead = self.prefetch + self.num_workers * (
            self.prefetch_factor or 2
        )  # most, before their turn
        on_gpu = self.device.type == "cuda"
        pinned = bool(self.prefetch or self.pin_memory) and on_gpu
        self._sent_to = torch.device("cpu") if on_host else self.device  # by what fetches ahead
        self._fetch = Fetch(dataset, sampler, options, pinned)
        self._listener = listener
        self._training = training
        self._steps = 0  # of this loop, begun
        self._fresh = True  # the next loop is the epoch that the sampler says
        self._chosen = False  # by set_epoch, so the next loop is that one, whatever is left of it
        self._loaded = False  # a state, and no loop since
        self._ahead: Prefetcher | None = None  # of the loop that runs

    def __repr__(self) -> str:
        sampler = self.batch_sampler
        return (
            f"Loader({sampler.length} rows, shares={sampler.shares}, rank={sampler.rank}, "
            f"device={self.device})"
        )

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> RowSampler:
        """A sampler of the loader's rows, one by one."""
        return RowSampler(self)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next loop: the one that a loaded state is in the middle of, or the one
        after the last.
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
        origin = Epoch(self._training, sampler.rows_of_odd_tail(), sampler.is_dealt)
        origin.loader = weakref.ref(self)
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
        """The state of a copy for another process, as DataLoader's; the copy's steps aren't
        reported.
        """
        return {**vars(self), "_listener": StepListener(), "_ahead": None}

    def wait_until_full(self) -> None:
        """Return when all that is fetched ahead is there; at once where nothing is."""
        if self._ahead is not None:
            self._ahead.wait_until_full()

    def rows_at_hand(self) -> list[int]:
        """The row numbers of all ranks in the batch that was given last."""
        return self.batch_sampler.rows_of_all(max(0, self._steps - 1))

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop this epoch, from its first row; of an epoch whose state was just
        loaded, what is left.
        """
        if not (self._loaded and epoch == self.batch_sampler.epoch):
            self.batch_sampler.set_epoch(epoch)
        self._steps = 0
        self._fresh = self._chosen = True

    def state_dict(self) -> dict[str, Any]:
        """The position of the training after the current batch; the same on every rank, fit for
        JSON.
        """
        return self.batch_sampler.state_dict(self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next loop go on where `state` was taken, also under another plan."""
        self.batch_sampler.load_state_dict(state)
        self._steps = 0
        self._fresh = self._loaded = True
        self._chosen = False


class RowSampler(SequentialSampler):  # type: ignore[misc]  # torch isn't followed
    """A loader's rows one by one, as a DataLoader's `sampler` gives them; sequential, so that
    Lightning keeps it.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Rows of this rank in an epoch, with one in each step where it only keeps step."""
        sampler = self._loader.batch_sampler
        firsts = range(0, len(sampler) * sampler.global_batch, sampler.global_batch)
        return sum(max(1, sampler.sizes_at(first)[sampler.rank]) for first in firsts)

    def __iter__(self) -> Iterator[int]:
        return (row for batch in self._loader.batch_sampler for row in batch)

    def set_epoch(self, epoch: int) -> None:
        """The loader's."""
        self._loader.set_epoch(epoch)


def count_rows(dataset: Any) -> int:
    """The length of a data set; RequestError for one whose rows have no numbers, and for a loader
    of one.
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
    """Batches to fetch ahead; unless said two for a GPU, none on a CPU, which computes.
    RequestError for no count.
    """
    if prefetch is None:
        return DEPTH if device.type == "cuda" else 0
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise RequestError(
            f"prefetch={prefetch!r} isn't a number of batches.", "Give 0 or more, or leave it out."
        )
    return prefetch


def check_options(options: dict[str, Any]) -> None:
    """RequestError for an option of DataLoader that the split decides."""
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
    """The loaders of a training that are in use, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Loader]] = []
        self._waiting: list[dict[str, Any]] = []  # states of loaders that aren't made yet

    def add(self, loader: Loader) -> Loader:
        """Remember a loader; it goes on where the loader of its place was, if a state was loaded
        before it was made.
        """
        self._made.append(weakref.ref(loader))
        if self._waiting:
            loader.load_state_dict(self._waiting.pop(0))
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The states of all, the same on every rank, fit for JSON."""
        return {_LOADERS: [loader.state_dict() for loader in self._list()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make each loader go on where it was, also those that are made later; RequestError for
        another's state.
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
    """This rank's rows of each global batch, as a batch sampler that begins anew at any of them."""

    def __init__(self, sampler: UnevenBatchSampler) -> None:
        self.sampler, self.drop_last = sampler, sampler.drop_last
        self.batch_size = sampler.shares[sampler.rank]
        self.first_step = 0  # of the next iteration: those before it are left out

    def __len__(self) -> int:
        """Global batches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.steps(), self.first_step, None)

    def steps(self) -> Iterator[Any]:
        """The rows of each global batch of the epoch."""
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """The order of rows of this epoch, from its first row on."""
        self.sampler.set_epoch(epoch)

    def count_tokens(self, steps: Iterable[int]) -> tuple[int, int]:
        """The tokens of this rank's rows in those batches, without and with padding; 0 where rows
        have no lengths.
        """
        rows = self.sampler
        counted = [rows.count_tokens(step * rows.global_batch, rows.epoch) for step in steps]
        return sum(tokens for tokens, _ in counted), sum(padded for _, padded in counted)


class StepLoader(DataLoader[Any]):  # type: ignore[misc]  # torch isn't followed
    """The DataLoader that a trainer iterates over: this rank's global batches; `done` is how many
    of this epoch the trainer has computed.

    `ahead`: it has fetched the next batch as it gives one, as accelerate's does, so that what a
    callback changes in a collator is in the same batch with a plan and without. `begins` is called
    as a loop begins, and `asks` as it asks for a batch: the one before is then computed. `options`
    are DataLoader's. `load_state_dict` goes on in mid-epoch, also under other shares, as long as
    the global batch is the same; RequestError if not.
    """

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
        self._start = 0  # global batch with which the next iteration begins
        self._ahead, self._begins, self._asks = ahead, begins, asks

    def __iter__(self) -> Any:
        if self._begins is not None:
            self._begins()
        self.batch_sampler.first_step = self.done = self._start
        self._start = 0
        batches: Any = super().__iter__()
        rows = self.batch_sampler.sampler
        if rows.is_dealt:
            batches = _loop(batches, rows)
        if self._ahead:
            batches = _fetch_ahead(batches)
        return batches if self._asks is None else _AskedBatches(batches, self._asks)

    @property
    def drawn_ahead(self) -> int:
        """The most global batches whose rows are drawn before the trainer asks for them."""
        drawn: int = self.num_workers * (self.prefetch_factor or 2)
        return drawn + self._ahead

    def take(self, step: int) -> tuple[int, ...]:
        """The rows of each rank in the epoch's global batch number `step`, which the trainer has
        now.
        """
        sizes: tuple[int, ...] = self.batch_sampler.sampler.take(step)
        return sizes

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the training after `done` global batches; the same on every rank that has
        as many.
        """
        rows = self.batch_sampler.sampler
        return {**rows.state_dict(self.done), "global_batch": rows.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken."""
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
    """The batches, within what a loop over these rows sets in the process."""
    with rows.loop_context():
        yield from batches


def _fetch_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    fetched: deque[Any] = deque()
    for batch in batches:
        fetched.append(batch)
        if len(fetched) > 1:
            yield fetched.popleft()
    yield from fetched


class _AskedBatches:
    """The batches of a DataLoader's iterator, whose other attributes it has too; `asks` is called
    before each.
    """

    def __init__(self, batches: Any, asks: Callable[[], None]) -> None:
        self._batches, self._asks = batches, asks

    def __iter__(self) -> _AskedBatches:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        self._asks()
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
