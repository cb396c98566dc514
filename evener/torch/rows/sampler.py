"""Choose the rows of a data set that each rank computes.

Every rank draws the same global order, which has each row once per epoch, and takes its slice of
each global batch. The slices differ in size. No communication is needed. A rank without a row in a
short last batch gets a filler row with weight 0, so that it runs the same collectives as the
others.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice, repeat
from typing import Any
from zlib import crc32

import torch

from ...errors import RequestError
from ...shares.whole_rows import apportion, check_rank_shares
from ...training.row_assignment import RowAssigner, RowAssignment
from .structure import AssignedBatch

Order = Iterable[int] | Callable[[int], Sequence[int]]


class RowOrder:
    """Order of the rows in each epoch, taken from a user's sampler, list or function of the epoch.

    All ranks draw the same order, because PyTorch's random generator is seeded first. Raises
    RequestError if the result isn't a list of valid row numbers.
    """

    # The random seed depends on `seed` and the epoch. RequestError is also raised if two epochs
    # have different numbers of rows.

    def __init__(self, order: Order, rows: int, seed: int) -> None:
        self._order, self._rows, self._seed = order, rows, seed
        self._epoch = 0
        self._drawn = self._draw(0)
        self._digest: int | None = None

    def __len__(self) -> int:
        return len(self._drawn)

    def draw(self, epoch: int) -> torch.Tensor:
        """Return the row indices of an epoch as an int64 tensor of shape (rows,)."""
        if epoch != self._epoch:
            drawn = self._draw(epoch)
            if len(drawn) != len(self._drawn):
                raise RequestError(
                    f"The order has {len(drawn)} rows in epoch {epoch} and {len(self._drawn)} "
                    f"in epoch {self._epoch}.",
                    "Give one with as many rows in every epoch.",
                )
            self._epoch, self._drawn, self._digest = epoch, drawn, None
        return self._drawn

    def digest(self, epoch: int) -> int:
        """Return a CRC-32 checksum of an epoch's order, which ranks compare."""
        drawn = self.draw(epoch)
        if self._digest is None:
            self._digest = crc32(drawn.numpy().tobytes())
        return self._digest

    def _draw(self, epoch: int) -> torch.Tensor:
        order: Any = self._order
        seed = mix_seed(self._seed, epoch)
        with torch.random.fork_rng(devices=[]):  # preserves the state of the program's generator
            torch.default_generator.manual_seed(seed)
            if isinstance(getattr(order, "generator", None), torch.Generator):
                order.generator.manual_seed(seed)
            if callable(order):
                rows = order(epoch)
            else:
                if hasattr(order, "set_epoch"):
                    order.set_epoch(epoch)
                rows = list(order)
        drawn = _whole_numbers(rows)
        if drawn is None or not len(drawn) or drawn.min() < 0 or drawn.max() >= self._rows:
            raise RequestError(
                f"order={type(order).__name__} doesn't give row numbers from 0 to "
                f"{self._rows - 1}.",
                (
                    "Give a sampler, a list of row numbers, or a function of the epoch that "
                    "returns one; no batch sampler."
                ),
            )
        return drawn


def _whole_numbers(values: Any) -> torch.Tensor | None:
    """Convert `values` to a one-dimensional int64 tensor on the CPU.

    The result is None if `values` isn't a flat sequence of integers.
    """
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        return None
    return found.to("cpu", torch.int64, copy=True)


def mix_seed(seed: int, epoch: int) -> int:
    """Derive an epoch's random seed from the seed of the training run."""
    return (seed * 1_000_003 + epoch) % (1 << 63)


# maximum number of simultaneous loops over a sampler in which changes of shares take effect
LOOPS = 4
_STATE_KEYS = ("epoch", "position", "length", "shuffle", "seed")


class ShareSchedule:
    """The shares during one loop over the data, which may change between batches."""

    def __init__(self, shares: tuple[int, ...], position: int) -> None:
        self.begun = position  # the row after the loop's newest batch
        self._changes = [(position, shares)]

    def at(self, first: int) -> tuple[int, ...]:
        """Return the shares of the global batch whose first row is `first`."""
        return next(
            (own for start, own in reversed(self._changes) if first >= start), self._changes[0][1]
        )

    def change(self, rows: int, shares: tuple[int, ...]) -> None:
        """Change the shares for later batches.

        These are the batches that begin at least `rows` rows after the end of the newest batch.
        """
        self._changes.append((self.begun + rows, shares))


class UnevenBatchSampler:
    """Batch sampler that yields one rank's rows of each global batch, in unequal shares.

    All ranks together get each row of an epoch once. A rank without rows in a short last batch gets
    one filler row.

    Arguments:

    - `length`: number of rows in the data set, ignored if `order` is given.
    - `shares`: rows of a global batch per rank.
    - `rank`: this rank.
    - `shuffle`: whether to permute the rows in each epoch.
    - `seed`: seed of the permutations, the same on all ranks.
    - `drop_last`: whether to leave out a last batch that isn't full.
    - `order`: order of the rows in each epoch, in place of permutations.
    - `join_tail`: whether to add a last batch with fewer rows than ranks to the previous batch.
    - `without_rows`: whether shares may be 0.

    Raises RequestError for invalid shares, or a data set with too few rows.
    """

    is_by_length = False  # True if rows are assigned by length, in passes

    def __init__(
        self,
        length: int,
        shares: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        order: RowOrder | None = None,
        join_tail: bool = False,
        without_rows: bool = False,
    ) -> None:
        length = length if order is None else len(order)
        check_rank_shares(shares, rank, without_rows)
        if length < 1:
            raise RequestError(f"The data set has {length} rows.", "Give one with 1 row or more.")
        if drop_last and length < sum(shares):
            raise RequestError(
                f"With drop_last, {length} rows don't fill a batch of {sum(shares)}.",
                "Give a smaller global batch, or drop_last=False.",
            )
        self.length = length
        # shares of loops that begin later; `change_shares` changes them
        self.shares = tuple(shares)
        self.rank = rank
        self.shuffle, self.seed, self.order = shuffle, seed, order
        self.drop_last, self.join_tail = drop_last, join_tail
        self.epoch = 0
        self.position = 0  # number of rows of this epoch that are already computed
        self.changes = False  # True if shares may change
        self._schedules = deque([ShareSchedule(self.shares, 0)], maxlen=LOOPS)

    @property
    def global_batch(self) -> int:
        """Number of rows in a full batch over all ranks."""
        return sum(self.shares)

    def change_shares(self, shares: tuple[int, ...], ahead: int) -> None:
        """Change the shares for later loops, and for running loops after `ahead` more batches."""
        # the rows of these batches may already have been drawn
        self.shares = shares
        for schedule in self._schedules:
            schedule.change(ahead * self.global_batch, shares)

    def warn_of_short_batches(self, planned: int) -> None:
        """Warn if the data set is too small, or if some rank has no row in the last batch.

        The data set is too small if it has fewer rows than `planned`, the global batch of the plan.
        If `planned` is 0, this isn't checked.
        """
        if self.length < planned:
            warnings.warn(
                f"The data set has {self.length} rows, fewer than the plan's global batch of "
                f"{planned}: each step is"
                " smaller than those that the plan was measured with.",
                stacklevel=3,
            )
        last = self.sizes(len(self) - 1)
        if any(share and not own for share, own in zip(self.shares, last, strict=True)):
            warnings.warn(
                f"An epoch's last batch has {sum(last)} rows for {len(last)} ranks. The other "
                f"ranks get a row that"
                " gradients don't count; in a metric, cut it off by split.rows, or use "
                "split.gather or drop_last=True.",
                stacklevel=3,
            )

    @property
    def schedule(self) -> ShareSchedule:
        """The shares of the newest loop."""
        return self._schedules[-1]

    def sample_rows(self, first: int, more: int) -> list[int]:
        """Return the indices of the next `first` rows, and of `more` rows spread over the epoch."""
        # in the epoch's order and without duplicates
        order, most = self._draw(self.epoch), min(more, self.length)
        spread = [self.length * place // most for place in range(most)]
        rows = order[self.position : self.position + first].tolist() + order[spread].tolist()
        return list(dict.fromkeys(rows))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch and go back to its first row."""
        self.epoch = epoch
        self.position = 0

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return self._steps(self.length)

    @property
    def steps_left(self) -> int:
        """Number of global batches from the current position to the end of the epoch."""
        return self._steps(self.length - self.position)

    def _steps(self, rows: int) -> int:
        whole, rest = divmod(rows, self.global_batch)
        return whole if self.drop_last or not rest or (whole and self._joins(rest)) else whole + 1

    def _joins(self, rest: int) -> bool:
        return self.join_tail and not self.drop_last and 0 < rest < len(self.shares)

    def sizes(self, step: int) -> tuple[int, ...]:
        """Return the row count of each rank in a step.

        Steps are counted from the current position, which is step 0. A rank that has only a filler
        row has 0.
        """
        return self.sizes_at(self.position + step * self.global_batch)

    def take(self, step: int) -> tuple[int, ...]:
        """Record that a step has begun, and return the row count of each rank in it.

        The step is counted from the current position. Later changes of shares don't affect it.
        """
        self.schedule.begun = self.position + (step + 1) * self.global_batch
        return self.sizes(step)

    def sizes_at(
        self, first: int, epoch: int | None = None, schedule: ShareSchedule | None = None
    ) -> tuple[int, ...]:
        """Return the row count of each rank in the global batch whose first row is `first`.

        A batch that isn't full is divided in proportion to the shares. If `schedule` is None, the
        shares are those of the newest loop. `epoch` matters only in LengthSampler.
        """
        rows, full = self.length - first, self.global_batch
        shares = (schedule or self.schedule).at(first)
        if rows >= full and not (rows < 2 * full and self._joins(rows - full)):
            return shares
        return apportion(rows, shares)

    def rows_at(self, step: int) -> list[int]:
        """Return this rank's row indices in a step.

        Steps are counted from the current position, which is step 0.
        """
        first = self.position + step * self.global_batch
        return [int(row) for row in self._slice(self._draw(self.epoch), first, self.schedule)]

    def rows_of_all(self, step: int) -> list[int]:
        """Return the row indices of all ranks in a step.

        Steps are counted from the current position, which is step 0.
        """
        first = self.position + step * self.global_batch
        return [int(row) for row in self._draw(self.epoch)[first : first + self.global_batch]]

    def rows_of_odd_tail(self) -> object:
        """Return the last batch's row count if it is divided in other ratios than full batches.

        The result is None if the ratios are the same. If every step may have other ratios, the
        result is an object that isn't equal to any other.
        """
        if self.changes or self.is_by_length:
            # equals no other object, because each step may weight ranks differently
            return object()
        last = self.sizes(max(0, self.steps_left - 1))
        total, rows = self.global_batch, sum(last)
        return (
            None
            if all(n * total == share * rows for n, share in zip(last, self.shares, strict=True))
            else rows
        )

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self.batches())

    def batches(self) -> Iterator[torch.Tensor]:
        """Return an iterator over this rank's row indices in the remaining batches of the epoch.

        Each item is an int64 tensor of shape (rows,).
        """
        schedule = ShareSchedule(self.shares, self.position)
        self._schedules.append(schedule)
        order, steps = self._draw(self.epoch), range(self.steps_left)
        return (
            self._slice(order, self.position + step * self.global_batch, schedule) for step in steps
        )

    def _slice(self, order: torch.Tensor, first: int, schedule: ShareSchedule) -> torch.Tensor:
        sizes = self.sizes_at(first, schedule=schedule)
        start, rows = first + sum(sizes[: self.rank]), sizes[self.rank]
        return order[start : start + rows] if rows else order[first : first + 1]

    def _draw(self, epoch: int) -> torch.Tensor:
        if self.order is not None:
            return self.order.draw(epoch)
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        return torch.randperm(self.length, generator=generator)

    def join_passes(self, fetched: Iterator[Any]) -> Iterator[Any]:
        """Return the fetched batches unchanged; a LengthSampler joins the passes of each step."""
        return fetched

    def loop_context(self) -> AbstractContextManager[None]:
        """Return a context manager for running a training loop; in this class, it does nothing."""
        return nullcontext()

    def count_tokens(self, first: int, epoch: int) -> tuple[int, int]:
        """Return how many tokens this rank has in a batch, without and with padding.

        Both are 0 in this class, because the lengths of rows aren't known.
        """
        return (0, 0)

    def digest(self, epoch: int) -> int | None:
        """Return a checksum of an epoch's order, or None if evener itself shuffles the rows."""
        return None if self.order is None else self.order.digest(epoch)

    def state_dict(self, steps: int = 0) -> dict[str, Any]:
        """Return the state after `steps` more steps, for a checkpoint."""
        position = min(self.length, self.position + steps * self.global_batch)
        values = (self.epoch, position, self.length, self._describe_order(self.epoch), self.seed)
        return dict(zip(_STATE_KEYS, values, strict=True))

    def _describe_order(self, epoch: int) -> bool | str:
        return self.shuffle if self.order is None else f"order {self.order.digest(epoch):08x}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the epoch and the position from a state that `state_dict` returned.

        Raises RequestError if keys are missing, or if the data set's length, its order or the seed
        differs. The shares and the number of ranks may differ.
        """
        if missing := [key for key in _STATE_KEYS if key not in state]:
            raise RequestError(
                f"The state of the loader has no {missing[0]!r}.",
                "Give what its state_dict() returned.",
            )
        order = self._describe_order(int(state["epoch"]))
        own = {"length": self.length, "shuffle": order, "seed": self.seed}
        for key, value in own.items():
            if state[key] != value:
                raise RequestError(
                    f"The state was taken with {key} {state[key]!r}, but this loader has "
                    f"{value!r}.",
                    (
                        "Rows would be missed or seen twice: make the loader as it was, or start "
                        "the epoch anew."
                    ),
                )
        self.epoch, self.position = (
            int(state["epoch"]),
            min(max(0, int(state["position"])), self.length),
        )


class _CudnnAttention:
    """Keeps cuDNN's attention kernels disabled while at least one running loop needs that."""

    # PyTorch can turn it off only for the whole process, so the running loops are counted

    def __init__(self) -> None:
        self._loops = 0  # number of running loops that need it off
        self._before = True

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context manager that disables cuDNN's attention.

        If several are active, the last one to exit restores the setting.
        """
        # the last context to end restores the setting from before the first
        if not self._loops:
            self._before = torch.backends.cuda.cudnn_sdp_enabled()
        self._loops += 1
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            self._loops -= 1
            if not self._loops:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_cudnn_attention = _CudnnAttention()


# maximum number of batches whose assignment is cached: prefetched ones and the current one
_KEPT = 128


class LengthSampler(UnevenBatchSampler):
    """Batch sampler that assigns each global batch's rows to ranks and passes by their length.

    Arguments, besides those of UnevenBatchSampler:

    - `lengths`: number of tokens of each row.
    - `assigner`: assigns the rows of a batch to ranks and passes.

    Raises RequestError if `lengths` isn't a list of whole numbers, or if the assigner refuses it.
    """

    # Global batches and their order are the same as without lengths, so a state can be loaded under
    # other shares. During a loop over the batches, cuDNN's attention is off in this process. cuDNN
    # would build an execution plan for each new shape, in about 100 ms on an H200. Nearly every
    # pass has a new shape.

    is_by_length = True

    def __init__(
        self,
        rows: int,
        shares: Sequence[int],
        rank: int,
        *,
        lengths: Any,
        assigner: RowAssigner,
        **options: Any,
    ) -> None:
        super().__init__(rows, shares, rank, **options)
        found = _whole_numbers(lengths)
        if found is None:
            raise RequestError(
                f"lengths={type(lengths).__name__} isn't a list of whole numbers.",
                "Give the tokens of each row, in order.",
            )
        self._lengths, self._assigner, tokens = found, assigner, found.tolist()
        assigner.check(tokens, rows)
        longest = sorted(tokens)[-self.global_batch :]
        # otherwise a loop without parts would fail late, at the first batch with several passes
        self._in_passes = (assigner.saves_padding and min(tokens) < max(tokens)) or assigner.assign(
            longest
        ).in_passes
        self._orders: dict[int, torch.Tensor] = {}  # orders of rows by epoch
        # assignments by epoch and first row
        self._assignments: dict[tuple[int, int], RowAssignment] = {}

    def assignment_at(self, first: int, epoch: int) -> RowAssignment:
        """Return how the rows of a global batch are assigned to ranks and passes.

        The batch begins at row `first` of the epoch's order.
        """
        found = self._assignments.get((epoch, first))
        if found is None:
            rows = self._draw(epoch)[first : first + sum(super().sizes_at(first))]
            found = self._assignments[epoch, first] = self._assigner.assign(
                self._lengths[rows].tolist()
            )
            for old in list(self._assignments)[:-_KEPT]:
                self._assignments.pop(old, None)
        return found

    def sizes_at(
        self, first: int, epoch: int | None = None, schedule: Any = None
    ) -> tuple[int, ...]:
        """Return the row count of each rank in the global batch that begins at row `first`.

        `epoch` is by default the current one. `schedule` is ignored, because lengths determine the
        row counts.
        """
        return self.assignment_at(first, self.epoch if epoch is None else epoch).sizes

    def pass_sizes(self, first: int, epoch: int) -> tuple[int, ...]:
        """Return the row count of each pass of this rank, or `(0,)` if it has no rows.

        The batch begins at row `first` of the epoch's order.
        """
        return tuple(map(len, self.assignment_at(first, epoch).passes[self.rank])) or (0,)

    def count_tokens(self, first: int, epoch: int) -> tuple[int, int]:
        """Return how many tokens this rank has in a batch, without and with padding.

        The batch begins at row `first` of the epoch's order.
        """
        assign = self.assignment_at(first, epoch)
        return assign.tokens[self.rank], assign.padded[self.rank]

    def batches(self) -> Iterator[torch.Tensor]:
        """Return an iterator over this rank's row indices, with one tensor for each pass."""
        return chain.from_iterable(self.steps())

    def steps(self) -> Iterator[list[torch.Tensor]]:
        """Return an iterator over the remaining steps.

        Each item is a list with the row indices of each pass.
        """
        return map(self._passes, self._firsts(), repeat(self.epoch))

    def _firsts(self) -> range:
        """Return the positions of the first rows of all remaining global batches."""
        return range(self.position, self.length, self.global_batch)[: self.steps_left]

    def _passes(self, first: int, epoch: int) -> list[torch.Tensor]:
        rows = self._draw(epoch)[first : first + self.global_batch]
        passes = self.assignment_at(first, epoch).passes[self.rank]
        if not passes:  # the shortest row is the filler row
            return [rows[self._lengths[rows].argmin()].reshape(1)]
        return [rows[torch.tensor(places)] for places in passes]

    def loop_context(self) -> AbstractContextManager[None]:
        """Context manager that disables cuDNN's attention while the training loop runs."""
        return _cudnn_attention.disabled()

    def join_passes(self, fetched: Iterator[Any]) -> Iterator[Any]:
        """Join the fetched passes of each step into an AssignedBatch."""
        # if every batch has a single pass on every rank, the passes are the batches
        rows = map(self.pass_sizes, self._firsts(), repeat(self.epoch))
        return (
            (AssignedBatch(list(islice(fetched, len(own))), own) for own in rows)
            if self._in_passes
            else fetched
        )

    def digest(self, epoch: int) -> int:
        """Return a checksum of the lengths and of the epoch's order."""
        return crc32(self._lengths.numpy().tobytes(), super().digest(epoch) or 0)

    def _draw(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            self._orders = {epoch: super()._draw(epoch), **dict(list(self._orders.items())[:1])}
        return self._orders[epoch]
