"""A plain PyTorch loop: a DataLoader whose sampler shares rows out evenly, and a DistributedDataParallel model.

A rank's batch sampler is asked for every rank's batches, so all know the global batches, and rows of one are dealt
out by shares without a word between the ranks. Nothing is changed before a first step was seen whole.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, default_collate

from ..torch_loss.measure import kept_state
from ..torch_rows.loader import Epoch
from ..torch_rows.sampler import UnevenBatchSampler
from ..torch_rows.structure import tensors_in
from ..torch_split.batch import Steps
from .program import PROGRAM

_SHARDS = (("rank", "num_replicas"), ("process_index", "num_processes"))  # PyTorch's names, and accelerate's

_LIBRARIES = {"torch", "accelerate", "transformers", "evener"}  # whose figures are known


def make_model(wrapped: Any, model: Any, arguments: Any, keywords: Any) -> None:
    """Know each DistributedDataParallel."""
    wrapped(*arguments, **keywords)
    PROGRAM.models[model] = None


def clip(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Note that gradients are clipped."""
    PROGRAM.note_clipping()
    return wrapped(*arguments, **keywords)


def exchange(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Note that the program exchanges figures itself."""
    if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:  # behind what called this
        PROGRAM.note_exchange()
    return wrapped(*arguments, **keywords)


def update(optimizer: Any, *_: Any) -> None:
    """Note that an optimizer has stepped."""
    PROGRAM.note_update(optimizer)


def begin_loop(wrapped: Any, loader: Any, arguments: Any, keywords: Any) -> Any:
    """Take part in each loop over a DataLoader in which the program trains."""
    opened = isinstance(loader.batch_sampler, SharedBatches) and loader.batch_sampler.opens  # by a loop around this one
    return wrapped(*arguments, **keywords) if opened or not PROGRAM.trains() else Loop(loader, wrapped)


class Loop:
    """A loop over a DataLoader, or over `outer`, which fetches its batches one ahead of their turn."""

    def __init__(self, loader: Any, begin: Any, outer: Any = None) -> None:
        self._loader = loader
        self.dealer = SharedBatches.of(loader)
        self.dealer.opens = True
        self._batches = begin()
        workers = loader.num_workers
        self.ahead = (workers * (loader.prefetch_factor or 2) if workers else 0) + (outer is not None)
        self.sampler: UnevenBatchSampler | None = None
        self.steps: Steps | None = None  # once the program trains by shares
        self.origin = Epoch()
        self.batch: Any = None
        self.compared = False  # the order of its rows
        self._step = getattr(outer, "skip_batches", 0) - 1
        self._begins = True

    def __iter__(self) -> Loop:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        PROGRAM.finish(self)
        try:
            self.batch = next(self._batches)
        except StopIteration:
            if self.steps is not None:
                self.steps.end(self.origin)
            PROGRAM.end(self)
            raise
        self._step += 1
        if self._begins:
            self._begins = False
            self.sampler = self.dealer.sampler
            if PROGRAM.training is not None and self.sampler is not None:
                self.follow(PROGRAM.follow(self))
        PROGRAM.begin(self)
        return self.batch

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each rank in the current batch, as far as they weigh the ranks."""
        if self.steps is None or self.sampler is None:
            return (1,) * PROGRAM.world
        return self.sampler.sizes_at(self._step * self.sampler.global_batch)

    def follow(self, steps: Steps) -> None:
        """Let `steps` hear of the batches from the next one on."""
        assert self.sampler is not None
        self.steps, self.sampler.changes = steps, True
        self.origin = Epoch(True, self.sampler.rows_of_odd_tail())
        self._note_begun()

    def varies(self) -> bool:
        """True if the data set gives another row for the same number, by the same random numbers."""
        with suppress(Exception):  # of the user's own code, which is asked in a way that it may not know
            twin = _copy_data(self._loader.dataset)
            row = next(iter(self.sampler.sample_rows(1, 1))) if self.sampler is not None else 0
            rows = []
            for _ in range(2):
                with kept_state():
                    rows.append(tree_leaves(twin[row]))
            return any(map(_differ, *rows))
        return False

    def repad(self, cut: int) -> list[Any]:
        """The current batch as two parts that the loader's own collate_fn makes; empty if it pads none of them less."""
        collate = self._loader.collate_fn
        if self.sampler is None or collate in (None, default_collate):
            return []
        with suppress(Exception), kept_state():
            twin = _copy_data(self._loader.dataset)
            rows = [twin[row] for row in self.sampler.rows_at(self._step)]
            made = (tensors_in(collate(some)) for some in (rows, rows[:cut], rows[cut:]))
            whole, *parts = ([each for each in some if each.ndim] for some in made)
            given = [each.cpu() for each in tensors_in(self.batch) if each.ndim]
            shapes = ([each.shape[1:] for each in some] for some in parts)
            if any(each != [one.shape[1:] for one in whole] for each in shapes) and not any(map(_differ, whole, given)):
                return parts
        return []

    def begin(self) -> None:
        """The loop gets a batch."""
        if self.steps is not None and self.sampler is not None:
            self.steps.begin(self.origin, self.sizes, self.batch)
            self._note_begun()

    def done(self) -> None:
        """The loop is done with its batch."""
        if self.steps is not None and not self._begins:
            self.steps.done(self.sizes, (0, 0))

    def _note_begun(self) -> None:
        assert self.sampler is not None
        self.sampler.schedule.begun = (self._step + 1) * self.sampler.global_batch


class SharedBatches:
    """A loader's batch sampler, in whose place it stands: by shares in a loop that trains, else as it was.

    `sampler` is that of the newest such loop; without one, `fault` says why its rows can't be dealt.
    """

    def __init__(self, given: Any, fault: str) -> None:
        self.given, self.opens = given, False
        self.sampler: UnevenBatchSampler | None = None
        self.fault, self.digest = fault, 0

    @classmethod
    def of(cls, loader: Any) -> SharedBatches:
        """The loader's dealer; one that deals nothing stands beside the loader's own sampler."""
        given = loader.batch_sampler
        if isinstance(given, SharedBatches):
            return given
        if given is None or isinstance(loader.dataset, IterableDataset):
            return cls(given, "its data are a stream, or it makes no batches, so rows have no numbers")
        vars(loader)["batch_sampler"] = dealer = cls(given, "")  # which DataLoader doesn't let others set
        return dealer

    def __len__(self) -> int:
        return len(self.given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.given, name)

    def __iter__(self) -> Iterator[Any]:
        opens, self.opens, self.sampler = self.opens, False, None
        if not opens:
            yield from self.given
            return
        every = self._draw()
        own = list(self.given)
        if isinstance(every, list) and PROGRAM.shares and sum(PROGRAM.shares) != len(own[0]) * PROGRAM.world:
            every = "its batches are of another size"
        if not isinstance(every, str) and own != every[PROGRAM.rank]:
            every = "its sampler draws other rows each time that it is asked"
        if isinstance(every, str):
            self.fault = every
            yield from own
            return
        steps = [[row for batches in every for row in batches[step]] for step in range(len(own))]
        order = OwnOrder(torch.tensor([row for step in steps for row in step]))
        self.fault, self.digest = "", order.digest(0)
        shares = PROGRAM.shares or (len(own[0]),) * PROGRAM.world
        self.sampler = UnevenBatchSampler(len(order), shares, PROGRAM.rank, order=order)  # type: ignore[arg-type]
        yield from self.sampler

    def _draw(self) -> list[list[Any]] | str:
        """The batches of each rank, drawn by copies of the sampler; or why not."""
        every = []
        for rank in range(PROGRAM.world):
            try:
                with kept_state():
                    twin = _copy_for(self.given, rank)
                    if twin is None:
                        return "its rows aren't shared out by a DistributedSampler"
                    every.append([list(batch) for batch in islice(twin, len(twin) + 1)])
            except Exception as error:
                return f"its sampler can't be asked for another rank's rows ({type(error).__name__}: {error})"
            if len(every[-1]) > len(twin):
                return "its sampler gives more batches than it says"
        return _find_fault(every) or every


def _copy_data(dataset: Any) -> Any:
    """A copy of a data set, and of those in it, so that what they note down or draw isn't the program's own."""
    twin = copy.copy(dataset)
    for name, value in list(getattr(twin, "__dict__", {}).items()):
        if name == "dataset":
            setattr(twin, name, _copy_data(value))
        elif name == "datasets" and isinstance(value, list | tuple):
            setattr(twin, name, [_copy_data(each) for each in value])
        elif isinstance(value, torch.Generator):
            setattr(twin, name, value.clone_state())
        elif isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            setattr(twin, name, copy.deepcopy(value))
    return twin


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, float | int | bytes | str):
        return bool(one != other and one == one)
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.shape != other.shape or not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _find_fault(every: list[list[Any]]) -> str:
    """Why the ranks' batches aren't shares of whole global batches; empty if they are."""
    if not every[0] or len({len(batches) for batches in every}) > 1:
        return "its ranks have other numbers of batches, or none"
    sizes = [{len(batches[step]) for batches in every} for step in range(len(every[0]))]
    if any(len(each) > 1 for each in sizes) or len(set.union(*sizes[:-1], sizes[0])) > 1:
        return "its ranks have batches of other sizes"
    if not all(isinstance(row, int) for batches in every for batch in batches[:1] for row in batch):
        return "its rows have no numbers"
    return ""


def _copy_for(sampler: Any, rank: int) -> Any:
    """A copy of a batch sampler that draws for another rank; None where nothing in it says whose rows it draws."""
    memo: dict[int, Any] = {}
    for each in _chain(sampler):
        for name in ("dataset", "data_source"):
            held = vars(each).get(name)
            memo[id(held)] = held
    twin = copy.deepcopy(sampler, memo)
    for each in _chain(twin):
        for own, world in _SHARDS:
            if getattr(each, world, None) == PROGRAM.world and getattr(each, own, None) == PROGRAM.rank:
                setattr(each, own, rank)
                return twin
    return None


def _chain(sampler: Any) -> Iterator[Any]:
    """The samplers that a batch sampler is made of, itself first."""
    while sampler is not None and hasattr(sampler, "__dict__"):
        yield sampler
        inner = vars(sampler)
        sampler = next((inner[name] for name in ("given", "batch_sampler", "sampler") if name in inner), None)


class OwnOrder:
    """The program's own order of one epoch, in which each rank's rows of a global batch follow one another."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def draw(self, _: int) -> torch.Tensor:
        """The rows, (rows,) of int64."""
        return self._order

    def digest(self, _: int) -> int:
        """A digest that tells this order from another."""
        return crc32(self._order.numpy().tobytes())
