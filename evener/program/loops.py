"""Divide the rows of a user's plain PyTorch loop in proportion to the shares instead of equally.

Such a loop has a DataLoader whose sampler divides rows evenly, and a DistributedDataParallel model.
Each rank draws the batches of all ranks from copies of its batch sampler. So each rank knows the
global batches, and all ranks divide them in the same way without communicating. Shares stay equal
until a whole step has been observed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, default_collate

from ..errors import RequestError
from ..torch.audit import same_data
from ..torch.audit.objects import unfold
from ..torch.audit.rows import FewRows, copy_dataset, fetch_rows
from ..torch.audit.state import kept_state
from ..torch.private import count_yielded, is_loader_iterator
from ..torch.rows.loader import Epoch
from ..torch.rows.sampler import RowOrder, UnevenBatchSampler
from ..torch.rows.structure import each_tensor, tensors_in
from .exchanges import exchange_shapes, pad_rows
from .program import PROGRAM

DISPATCHED = "one rank reads the rows of all (dispatch_batches of accelerate)"
# PyTorch's names, and accelerate's
_SHARDS = (("rank", "num_replicas"), ("process_index", "num_processes"))


def begin_loop(wrapped: Any, loader: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `DataLoader.__iter__` that returns a `Loop` if the loader's batches train a model."""
    PROGRAM.note_loader(loader)
    opened = getattr(loader.batch_sampler, "opens", False)  # set by an outer loop
    return (
        wrapped(*arguments, **keywords)
        if opened or not PROGRAM.trains(loader)
        else Loop(loader, wrapped)
    )


def begin_loader_subclass(wrapped: Any, loader: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `__iter__` in subclasses of `DataLoader`, such as torchdata's.

    It returns a `Loop` if the batches train a model and come from PyTorch's own iterator.
    """
    # with any other iterator, the number of batches fetched ahead is unknown
    if getattr(loader.batch_sampler, "opens", False) or not PROGRAM.trains(loader):
        return wrapped(*arguments, **keywords)
    loop = Loop(loader, partial(wrapped, *arguments, **keywords))
    if loop.has_known_iterator:
        PROGRAM.note_loader(loader)
        return loop
    PROGRAM.note_own_iteration(loader)
    return loop.leave()


def begin_wrapping_loader(wrapped: Any, outer: Any, *_: Any) -> Any:
    """Hook of loaders that wrap a `DataLoader`, such as accelerate's and timm's.

    It returns a `Loop` if the loader's batches train a model.
    """
    inner = getattr(outer, "base_dataloader", None) or outer.loader
    return Loop(inner, wrapped, outer) if PROGRAM.trains(inner) else wrapped()


class Loop:
    """Iterator over a loader's batches, each of which begins a training step.

    `outer` is another library's loader that wraps `loader`, and fetches each batch before it
    returns the previous one.
    """

    def __init__(self, loader: Any, begin: Any, outer: Any = None) -> None:
        PROGRAM.open_loop()
        self._loader = loader
        self.shared_batches = SharedBatches.find_or_install(loader)
        self.shared_batches.opens = True
        self._batches = begin()
        workers = loader.num_workers
        self.ahead = (workers * (loader.prefetch_factor or 2) if workers else 0) + (
            outer is not None
        )
        self.sampler: UnevenBatchSampler | None = None
        self.origin: Epoch | None = None  # set once the loop trains by shares
        self.batch: Any = None
        # rows of each rank in the batch, which are the ranks' weights
        self.sizes: tuple[int, ...] = ()
        self.compared = False  # True once the ranks have compared the order of the rows
        self.is_over = False
        # True if another training run began before the program stepped with an uneven batch
        self.was_interrupted = False
        # an iterator that resumes an epoch has yielded batches before
        self._step = getattr(outer, "skip_batches", 0) + count_yielded(self._batches) - 1

    def __iter__(self) -> Loop:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        PROGRAM.finish(self)
        begins = self.batch is None
        try:
            self.batch = next(self._batches)
        except StopIteration:
            PROGRAM.end(self)
            raise
        self._step += 1
        if begins:
            self.sampler = self.shared_batches.sampler
            if PROGRAM.training is not None and self.sampler is not None:
                self.follow(PROGRAM.training)
        self.sizes = (1,) * dist.get_world_size()
        if self.sampler is not None and self.origin is not None:
            self.sizes = self.sampler.take(self._step)
        PROGRAM.begin(self)
        return self.batch

    @property
    def has_known_iterator(self) -> bool:
        """Whether PyTorch's own iterator loads the batches.

        Only then is the number of prefetched batches known.
        """
        return is_loader_iterator(self._batches)

    def leave(self) -> Any:
        """Restore the loader's own batch sampler, and return its plain iterator."""
        self.shared_batches.opens = False
        if self._loader.batch_sampler is self.shared_batches:
            vars(self._loader)["batch_sampler"] = self.shared_batches.script_sampler
        return self._batches

    @property
    def batch_maker(self) -> str:
        """Class name of the script's custom batch sampler.

        It is "" if the batch sampler is from PyTorch or accelerate.
        """
        return name_own_sampler(self.shared_batches.script_sampler)

    def follow(self, training: Any) -> None:
        """Divide this loop's batches by the shares of `training` from now on."""
        assert self.sampler is not None
        training.follow(self.sampler, self.ahead)
        self.sampler.changes = True
        self.origin = Epoch(True, self.sampler.rows_of_odd_tail())
        self.sampler.take(self._step)

    def varies(self) -> bool:
        """Return whether the data set returns different samples for the same index.

        One sample is read twice, with the same random state. The result is False if reading fails.
        """
        with suppress(Exception):  # the user's code may not support this call
            copied_data = copy_dataset(self._loader.dataset)
            number = next(iter(self.sampler.sample_rows(1, 1))) if self.sampler is not None else 0
            rows = []
            for _ in range(2):
                with kept_state():
                    rows.append(tree_leaves(copied_data[number]))
            return any(map(_differ, *rows))
        return False

    def summarize_data(self) -> same_data.RankData | None:
        """Return a summary of the data set, for a comparison between ranks.

        The result is None if the rows can't be divided.
        """
        if self.sampler is None:
            return None
        return same_data.summarize(self._loader.dataset, self._loader.collate_fn, self.sampler)

    def count_rows(self) -> int:
        """Return this rank's row count in the current batch; 0 if the rows can't be divided."""
        return 0 if self.sampler is None else len(self.sampler.rows_at(self._step))

    def fetch_few_rows(self) -> FewRows | None:
        """Fetch a few rows of the current batch again; collate them with the script's own function.

        The result is None if rows can't be divided, if the loader uses PyTorch's own collate
        function, or if the script's function doesn't reproduce the batch.
        """
        collate = self._loader.collate_fn
        if self.sampler is None or collate in (None, default_collate):
            return None
        numbers = self.sampler.rows_at(self._step)
        expected = [tensor.cpu() for tensor in tensors_in(unfold(self.batch)) if tensor.ndim]
        with suppress(Exception), kept_state():
            copied_data = copy_dataset(self._loader.dataset)
            rows = unfold(collate([copied_data[number] for number in numbers]))
            made = [tensor for tensor in tensors_in(rows) if tensor.ndim]
            if len(made) == len(expected) and not any(map(_differ, made, expected)):
                return fetch_rows(self._loader.dataset, collate, numbers)
        return None


_STATE_METHODS = ("state_dict", "load_state_dict", "update_state_dict")
RESUMED = "it resumes an epoch in its middle, by a saved state of its sampler"
_OTHER_ROWS = "its sampler draws different rows each time that it is asked"


class SharedBatches:
    """Batch sampler that gives each rank its share of the global batch instead of an equal part.

    It replaces the loader's own batch sampler, `script_sampler`. Batches are divided by shares only
    for a training loop, which sets `opens` to True first; other loops get the original batches. If
    the rows can't be divided, `fault` says why.
    """

    def __init__(self, script_sampler: Any, fault: str) -> None:
        self.script_sampler, self.opens = script_sampler, False
        self.has_trained = False  # True once an optimizer has stepped in a loop over the loader
        self.sampler: UnevenBatchSampler | None = None
        # digest: of the order of rows and the number of batches
        self.fault, self.digest = fault, (0, 0)

    @classmethod
    def find_or_install(cls, loader: Any) -> SharedBatches:
        """Return the loader's `SharedBatches`, which is installed in the loader on first use.

        If the loader has no batch sampler or its data set is a stream, nothing is installed, and
        the result's `fault` says so.
        """
        original = loader.batch_sampler
        if isinstance(original, SharedBatches):
            return original
        if original is None or isinstance(loader.dataset, IterableDataset):
            return cls(
                original, "its data are a stream, or it makes no batches, so rows have no numbers"
            )
        # set through vars(), because DataLoader refuses the assignment
        vars(loader)["batch_sampler"] = made = cls(original, "")
        return made

    def __len__(self) -> int:
        return len(self.script_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.script_sampler, name)

    def __reduce_ex__(self, _: Any) -> Any:
        """Pickle as the script's own sampler, so that the pickle can be loaded without evener."""
        # Later protocols than 1 don't allow an object to be replaced by one of another class.
        return self.script_sampler.__reduce_ex__(1)

    def __iter__(self) -> EpochBatches:
        """Return an iterator over the batches of one epoch."""
        return EpochBatches(self)

    def draw(self, drawn: Iterator[Any], resumes: bool) -> Iterator[Any]:
        """Yield this rank's share of each global batch.

        If rows can't be divided, yield the rank's own batches instead. `drawn` iterates over the
        batches of the script's own sampler. `resumes` is True if that sampler starts in the middle
        of an epoch. Raises RequestError if a later batch from the script's sampler isn't the one
        that was predicted at the start of the epoch.
        """
        # The script's sampler is advanced with each batch: a loop may leave an epoch early, and the
        # rows of the next epoch may depend on how far the sampler got.
        opens, self.opens, self.sampler = self.opens, False, None
        divided = self._divide_epoch() if opens and not resumes else None
        if divided is None:
            self.fault = RESUMED if resumes else self.fault
            yield from drawn
            return
        sampler, expected = divided
        begun = list(islice(drawn, 1))
        own = chain(begun, drawn)
        if [list(batch) for batch in begun] != expected[:1]:
            self.fault = _OTHER_ROWS
            yield from own
            return
        self.sampler = sampler
        yield from _draw_own_batches_too(sampler, own, expected)

    def _divide_epoch(self) -> tuple[UnevenBatchSampler, list[list[Any]]] | None:
        """Draw all ranks' rows of the next epoch, and divide them by shares.

        Returns a sampler that divides the rows, and the batches that this rank's own sampler should
        draw. If rows can't be divided, returns None, and `fault` says why.
        """
        self.fault = ""
        rank, world = dist.get_rank(), dist.get_world_size()
        try:
            every = draw_ranks(self.script_sampler)
            again = _draw_rank(self.script_sampler, rank)
        except RequestError as error:
            self.fault = error.message
            return None
        each = len(every[0][0])
        shares = PROGRAM.shares or (each,) * world
        if sum(shares) != each * world:
            self.fault = "its batches have a different size"
        elif again != every[rank]:
            self.fault = _OTHER_ROWS
        if self.fault:
            return None
        rows = join_ranks(every)
        order = RowOrder(lambda _: rows, 1 + max(rows), 0)
        self.digest = order.digest(0), len(again)
        return UnevenBatchSampler(len(order), shares, rank, order=order), again


class EpochBatches:
    """Iterator over an epoch's batches; it can save and load the state of the script's sampler."""

    # torchdata's loaders save the state of the program's own sampler through it

    def __init__(self, shared: SharedBatches) -> None:
        self._shared = shared
        self._drawn: Any = None
        self._batches: Iterator[Any] | None = None
        self._resumes = False

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._shared.draw(self._begin(), self._resumes)
        return next(self._batches)

    def _begin(self) -> Any:
        if self._drawn is None:
            self._drawn = iter(self._shared.script_sampler)
        return self._drawn

    def __getattr__(self, name: str) -> Any:
        """Return a method of the script's sampler that saves or loads its state.

        An example is `state_dict`. Raises AttributeError for other names.
        """
        if name not in _STATE_METHODS:
            raise AttributeError(name)
        method = getattr(self._begin(), name)
        return partial(self._load, method) if name == "load_state_dict" else method

    def _load(self, load: Any, state: Any) -> None:
        self._resumes = True
        load(state)


def _draw_own_batches_too(
    batches: Iterable[Any], drawn: Iterator[Any], expected: Sequence[list[Any]]
) -> Iterator[Any]:
    """Yield `batches`, and for each of them draw one batch from the script's own sampler.

    So the script's sampler advances as in the unchanged script. Raises RequestError if the drawn
    batches differ from `expected`.
    """
    # If they differed, rows would be left out or trained twice.
    for batch, own in zip(batches, expected, strict=True):
        if list(next(drawn, ())) != own:
            raise _uneven("its sampler draws different rows than when the epoch began")
        yield batch
    if next(drawn, None) is not None:
        raise _uneven("its sampler draws more batches than it did when the epoch began")


def name_own_sampler(sampler: Any) -> str:
    """Return the class name of a batch sampler that isn't from PyTorch or accelerate, or "".

    Samplers nested in `sampler` are searched, too.
    """
    for each in _chain(sampler):
        home = type(each).__module__.partition(".")[0]
        if home not in ("torch", "accelerate", "evener"):
            return type(each).__name__ if hasattr(each, "batch_size") else ""
    return ""


def draw_ranks(sampler: Any) -> list[list[Any]]:
    """Return for each rank the batches of row indices that its sampler draws in this epoch.

    Raises RequestError if the sampler can't be copied for other ranks, or if the ranks' batches
    don't form global batches.
    """
    if _find_rank_attribute(sampler) is None:
        raise _uneven("its rows aren't shared out by a DistributedSampler")
    every = [_draw_rank(sampler, rank) for rank in range(dist.get_world_size())]
    counts = {len(batches) for batches in every}
    if max(counts) > len(sampler):
        raise _uneven("its sampler gives more batches than it says")
    if counts == {0} or len(counts) > 1:
        raise _uneven("its ranks have different numbers of batches, or none")
    _check_sizes(every)
    if not all(isinstance(row, int) and row >= 0 for row in join_ranks(every)):
        raise _uneven("its rows have no numbers")
    return every


def _draw_rank(sampler: Any, rank: int) -> list[Any]:
    """Return the batches of row indices that rank `rank` draws, from a copy of the sampler.

    Raises RequestError if the sampler can't be copied for the rank.
    """
    # at most one batch more than the sampler's length
    try:
        with kept_state():
            copied_sampler = _copy_for(sampler, rank)
            return [list(batch) for batch in islice(copied_sampler, len(copied_sampler) + 1)]
    except Exception as error:
        raise _uneven(f"its sampler can't be asked for another rank's rows ({error!r})") from error


def _check_sizes(batches_by_rank: list[list[Any]]) -> None:
    """Raise RequestError unless batches have the same size on all ranks and in all steps.

    The last step may have a different batch size if it is the same on all ranks.
    """
    sizes = [{len(batch) for batch in step} for step in zip(*batches_by_rank, strict=True)]
    whole = set.union(*sizes[:-1], sizes[0])
    if len(whole) > 1 or len(sizes[-1]) > 1:
        raise _uneven("its ranks have batches of different sizes")


def _uneven(why: str) -> RequestError:
    return RequestError(why, "Start it with its own launcher.")


def join_ranks(batches_by_rank: Any) -> list[Any]:
    """Return all ranks' row indices in training order: by step, and within a step by rank."""
    return [row for step in zip(*batches_by_rank, strict=True) for batch in step for row in batch]


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, float | int | bytes | str):
        return bool(one != other and one == one)
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.shape != other.shape or not torch.allclose(
        one, other, rtol=0, atol=0, equal_nan=True
    )


def _copy_for(sampler: Any, rank: int) -> Any:
    """Copy the sampler, but not its data set, and set the copy's rank to `rank`."""
    held = [vars(each).get(name) for each in _chain(sampler) for name in ("dataset", "data_source")]
    copied = copy.deepcopy(sampler, {id(each): each for each in held})
    holder, name = _find_rank_attribute(copied)
    setattr(holder, name, rank)
    return copied


def _find_rank_attribute(sampler: Any) -> Any:
    """Find which of the nested samplers stores the rank, and return it with the attribute's name.

    The result is None if no sampler stores it.
    """
    for each in _chain(sampler):
        for own, world in _SHARDS:
            if (getattr(each, own, -1), getattr(each, world, -1)) == (
                dist.get_rank(),
                dist.get_world_size(),
            ):
                return each, own
    return None


def _chain(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, then the samplers nested in it, the outermost first."""
    while sampler is not None and hasattr(sampler, "__dict__"):
        yield sampler
        inner = vars(sampler)
        sampler = next(
            (
                inner[name]
                for name in ("script_sampler", "batch_sampler", "sampler")
                if name in inner
            ),
            None,
        )


def begin_dispatcher(wrapped: Any, outer: Any, *_: Any) -> Any:
    """Hook of accelerate's `DataLoaderDispatcher`, for which shares stay equal.

    With this loader, one rank loads the rows of all ranks.
    """
    if PROGRAM.trains(outer):
        PROGRAM.stay_even(DISPATCHED)
    with PROGRAM.left_unchanged():
        yield from wrapped()


def gather(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `Accelerator.gather` that lets ranks gather tensors with different row counts."""

    def gather(tensor: torch.Tensor) -> Any:
        if not tensor.ndim:
            PROGRAM.note_exchange()  # for example, a mean over this rank's rows
            return wrapped(tensor)
        counts = [shape[0] for shape in exchange_shapes(tensor)]
        if len(set(counts)) == 1:
            PROGRAM.note_exchange()
            return wrapped(tensor)
        most = max(counts)
        rows = wrapped(pad_rows(tensor, most))
        parts = [rows[rank * most : rank * most + count] for rank, count in enumerate(counts)]
        return torch.cat(parts)

    with PROGRAM.exchanges.handling_rows():
        if not PROGRAM.is_uneven:
            return wrapped(*arguments, **keywords)
        return each_tensor(gather, arguments[0] if arguments else keywords["tensor"])
