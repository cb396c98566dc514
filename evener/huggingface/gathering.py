"""Replaces `Accelerator.gather` for ranks with different numbers of rows and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ..system.replaced import replaced
from ..torch.private import plain_tensors
from ..torch.ranks.own_work import StepTimer
from ..torch.rows.structure import each_tensor


@contextmanager
def pretend_processes(accelerator: Any, count: int) -> Iterator[None]:
    """Context manager that makes accelerate and PyTorch report `count` processes."""
    states = [accelerator.state.__dict__, vars(PartialState())]
    before, asked = [state["num_processes"] for state in states], dist.get_world_size
    try:
        for state in states:
            state["num_processes"] = count
        dist.get_world_size = lambda *_: count
        yield
    finally:
        dist.get_world_size = asked
        for state, were in zip(states, before, strict=True):
            state["num_processes"] = were


class PassValues(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """Scalars gathered from all ranks and passes, whose `mean` is weighted by the passes' rows."""

    # `sums` has the value of each pass. If memory ran out and a pass was computed in pieces, `sums`
    # has the sum of the pieces' values.

    rows: torch.Tensor
    sums: torch.Tensor  # for each value, the sum over the pieces of its pass

    def sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the sum over ranks and passes."""
        return self.sums.sum(*args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the mean weighted by rows or, if any arguments are given, the plain mean."""
        plain = self.as_subclass(torch.Tensor)
        if args or kwargs or not self.rows.sum():
            return plain.mean(*args, **kwargs)
        return (plain.double() * self.rows).sum().div(self.rows.sum()).to(plain.dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Treat these values as a plain tensor, except in the methods `sum` and `mean`.

        The results of PyTorch functions are plain tensors too.
        """
        with plain_tensors():
            return function(*args, **(kwargs or {}))


class _Piece(NamedTuple):
    """The rows that are being computed: a pass or, after memory ran out, a piece of one."""

    rows: int
    full_batch: int
    is_last: bool


class Gathering:
    """Replaces `accelerator.gather` in training, where ranks have different numbers of rows.

    If a batch has several passes, `gather` returns the values of the batch's passes so far: tensors
    are concatenated along their rows, and scalars become `PassValues`.
    """

    # A rank without rows computes a filler row.

    def __init__(self, accelerator: Any, timer: StepTimer) -> None:
        self._accelerator, self._gather, self._timer = accelerator, accelerator.gather, timer
        self._world, self._local, self._shift = accelerator.num_processes, False, 0.0
        self.calls = 0  # number of calls to `gather` inside `local`
        self._piece: _Piece | None = None  # what is being computed; None: all rows count
        self._call = 0  # number of gather calls in this piece
        self._earlier: list[list[Any]] = []  # values that each call gathered, by pass of the batch
        # arguments of each call in earlier pieces of the pass, with their rows
        self._pieces: list[list[tuple[torch.Tensor, int]]] = []
        # values that each call gathered in the pass, because other ranks gather only once
        self._gathered_calls: list[Any] = []
        accelerator.gather = self.gather

    def begin_batch(self) -> None:
        """Forget the values that were gathered in the previous batch."""
        self._earlier = []
        self.end_pass()

    def end_pass(self) -> None:
        """Forget the values of a pass that is now complete, which were kept for retries."""
        self._pieces, self._gathered_calls = [], []

    @contextmanager
    def local(self, shift: float = 0.0) -> Iterator[None]:
        """Context manager in which `gather` returns only this rank's values, plus `shift`.

        The shift shows whether a loss depends on gathered values.
        """
        before, self._local, self._shift = (self._local, self._shift), True, shift
        try:
            yield
        finally:
            self._local, self._shift = before

    @contextmanager
    def computing(
        self, rows: int, full_batch: int = 0, is_last_piece: bool = True
    ) -> Iterator[None]:
        """Context manager around the computation of a pass of `rows` rows, or of a piece of it.

        In an evaluation, `full_batch` is the batch size: tensors of this length are cut to `rows`.
        Only the last piece of a pass exchanges values with other ranks.
        """
        outer, self._piece = self._piece, _Piece(rows, full_batch, is_last_piece)
        self._call = 0
        try:
            yield
        finally:
            self._piece = outer

    def save(self) -> Callable[[], None]:
        """Return a function that restores the values gathered so far, for a retry of a pass.

        Values that other ranks have sent in this pass are kept, because they won't be sent again.
        """
        earlier, pieces = (
            [list(each) for each in every] for every in (self._earlier, self._pieces)
        )

        def put_back() -> None:
            self._earlier, self._pieces = earlier, pieces

        return put_back

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values`, of shape (n,), over all ranks.

        Every rank has to call this.
        """
        sums: torch.Tensor = self._gather(values[None]).sum(0)
        return sums

    def gather(self, data: Any) -> Any:
        """Gather tensors in `data` from all ranks, as `accelerator.gather` does.

        Every rank has to call this. In the context `local`, only this rank's tensors are returned.
        """
        if self._local:
            self.calls += 1
            return each_tensor(
                lambda own: (own + self._shift if self._shift else own).reshape(own.shape or 1),
                data,
            )
        with self._timer.collective(), pretend_processes(self._accelerator, self._world):
            return each_tensor(self._gather_tensor, data)

    def _gather_tensor(self, tensor: torch.Tensor) -> Any:
        piece = self._piece
        if piece is None:
            return self._gather_rows([tensor]) if tensor.ndim else self._gather(tensor)
        call, self._call = self._call, self._call + 1
        gathered = self._gather_call(call, tensor, piece)
        if not piece.is_last:
            return gathered
        return self._join_earlier_passes(call, gathered, is_scalar=tensor.ndim == 0)

    def _gather_call(self, call: int, tensor: torch.Tensor, piece: _Piece) -> Any:
        """Gather a value from all ranks; on a retry, return the value that was gathered before.

        `call` is the number of earlier `gather` calls in the pass.
        """
        if call < len(self._gathered_calls):
            # the pass is repeated, and the other ranks' values were already gathered
            return self._gathered_calls[call]
        missing = call + 1 - len(self._pieces)
        self._pieces += [[] for _ in range(missing)]
        self._pieces[call].append((tensor.detach(), piece.rows))
        return self._gather_pieces(self._pieces[call], piece.is_last)

    def _join_earlier_passes(self, call: int, gathered: Any, is_scalar: bool) -> Any:
        """Concatenate a gathered value with the values from the batch's earlier passes.

        `call` is the number of earlier `gather` calls in the pass. If the shapes don't match, only
        the value of this pass is returned.
        """
        if call == len(self._earlier):
            self._earlier.append([])
        every = self._earlier[call]
        every.append(gathered)
        shapes = {each.shape[1:] for each in every}
        # values whose shapes differ between passes can't be concatenated
        if len(every) == 1 or len(shapes) > 1:
            return gathered
        joined = torch.cat(every)
        if not is_scalar:
            return joined
        # scalars have the rows of each pass as weights (see PassValues)
        sums = torch.cat([each.sums for each in every])
        rows = torch.cat([each.rows for each in every])
        return _weighted(joined, sums, rows)

    def _gather_pieces(self, pieces: list[tuple[torch.Tensor, int]], is_last: bool) -> Any:
        """Gather a value from all ranks, once the last piece of the pass is computed.

        Before that, only this rank's value is returned. `pieces` has the value and the row count of
        each piece so far.
        """
        gather = self._gather if is_last else lambda own: own
        values = [value for value, _ in pieces]
        if values[0].ndim:
            gathered = self._gather_rows(values) if is_last else values[-1]
        else:
            gathered = _gather_scalar(values, [rows for _, rows in pieces], gather)
        if is_last:
            self._gathered_calls.append(gathered)
        return gathered

    def _gather_rows(self, tensors: list[torch.Tensor]) -> Any:
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        piece = self._piece
        # in an evaluation, transformers gathers a batch's loss as one copy for each row
        if piece is not None and (not piece.rows or len(tensor) == piece.full_batch):
            tensor = tensor[: piece.rows]
        counts = self._gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        if len(set(counts)) == 1:
            return self._gather(tensor)
        most = max(counts)
        every = self._gather(pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, most - len(tensor))))
        return torch.cat([every[i * most : i * most + count] for i, count in enumerate(counts)])


def _gather_scalar(
    values: list[torch.Tensor], rows: list[int], gather: Callable[[torch.Tensor], Any]
) -> Any:
    """Gather a scalar from each rank, together with the rank's row count.

    `values` and `rows` have an entry for each piece of this rank's pass.
    """
    own = torch.stack(values).double()
    count = own.new_tensor(rows)
    mean = (own * count).sum() / count.sum() if len(rows) > 1 else own[0]
    every = gather(torch.stack([mean, own.sum(), count.sum()])[None])
    # ranks without rows are left out
    counted = every[every[:, 2] > 0]
    means, sums = (counted[:, place].to(values[0].dtype) for place in (0, 1))
    return _weighted(means, sums, counted[:, 2])


def _weighted(values: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor) -> PassValues:
    made: PassValues = values.as_subclass(PassValues)
    made.rows, made.sums = rows, sums
    return made


def share_evaluation(trainer: Any, make_loader: Callable[[], Any], gathering: Gathering) -> Any:
    """Return an evaluation loader that gives each rank whole batches.

    If the data set's order isn't fixed, the result is accelerate's own loader.
    """
    loader = make_undivided(trainer, make_loader)
    fixed = not isinstance(loader.dataset, IterableDataset) and isinstance(
        loader.sampler, SequentialSampler
    )
    return (
        SharedLoader(loader, trainer.accelerator, gathering)
        if fixed
        else trainer.accelerator.prepare(loader)
    )


def make_undivided(trainer: Any, make_loader: Callable[[], Any]) -> Any:
    """Return the loader that `make_loader` creates, but keep accelerate from dividing its rows."""
    with replaced(trainer.accelerator, "prepare", lambda loader: loader):
        return make_loader()


class SharedLoader(DataLoader[Any]):  # type: ignore[misc]  # torch is not followed
    """Evaluation loader that gives whole batches to the ranks in turn.

    If the last batches aren't enough for all ranks, the remaining ranks compute the last batch
    again, and its rows aren't counted.
    """

    def __init__(self, loader: Any, accelerator: Any, gathering: Gathering) -> None:
        world, rank = accelerator.num_processes, accelerator.process_index
        self._every = list(loader.batch_sampler)
        self._places = range(rank, -(-len(self._every) // world) * world, world)
        self._gathering, self._full = gathering, loader.batch_size
        last = len(self._every) - 1
        super().__init__(
            loader.dataset,
            batch_sampler=[self._every[min(place, last)] for place in self._places],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
        )

    def __iter__(self) -> Iterator[Any]:
        for place, batch in zip(self._places, super().__iter__(), strict=True):
            rows = len(self._every[place]) if place < len(self._every) else 0
            self._gathering.begin_batch()
            with self._gathering.computing(rows, self._full):
                yield batch
