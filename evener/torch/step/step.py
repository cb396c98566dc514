"""One optimizer step of a rank, from the loader's batch to the sum of gradients over the ranks.

Read this file first.

A step trains one global batch of N rows, of which rank i computes n_i. Its gradient is the gradient
of the mean loss over all N rows:

    sum over the ranks of  (n_i / N) * (the gradient of the mean over rank i's rows)

A rank's rows pass through these stages, in this order:

    loader       yields them, and reports each rank's number of rows       `LoaderSteps.begin`
      |
    passes       one or several, as memory allows, with their weights      `take_parts`
      |
      +--> pass    forward and backward of some rows; their gradients add  `Passes.take`
      |    |       up on this rank
      |    fails   out of memory: undone, and again in smaller passes      recovery.py
      |
    last pass
      | weight     its backward pass begins: gradients get n_i / N         weights.py
      | exchange   a bucket of gradients is sent once it is complete       sums/exchange.py
      |
    gradients    are the global batch's on every rank; the loop's optimizer steps
      |
    loader       when the loop requests a batch, shares may change         `LoaderSteps.done`

A loop that uses `split.step(batch, loss)` or `split.parts(batch)` runs all these stages, and passes
the batch that it computes. The adapters for transformers' Trainer and Lightning make the parts and
weight the losses themselves, and pass the parts to `Passes.take`. A loop that calls
`loss.backward()` itself has a single pass, which can't be computed again; recognition.py finds out
which batch it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...errors import RequestError
from ...training.passes import PassQueue
from ...training.retreat import Retreat
from ..rows.loader import Epoch, StepListener
from ..rows.structure import each_tensor
from ..sums.collectives import is_equal_everywhere
from ..sums.exchange import Exchange
from .batches import TakenBatch
from .part import OfPart, Part, make_parts, weigh_by_count
from .recovery import Recovery, RunningPass
from .unowned import UNOWNED


@dataclass
class LoaderSteps(StepListener):
    """Times, weights and audits each step of the training run.

    A loader notifies this object of its steps. `trains` is False for validation loaders.
    """

    training: Any
    trains: bool

    def compare(self, digest: int) -> None:
        """Raise RequestError if the ranks' row orders or row lengths differ.

        Every rank has to call this. `digest` is this rank's checksum of both.
        """
        # otherwise rows would be computed twice, or ranks would wait for each other forever
        if dist.is_initialized() and not is_equal_everywhere(digest, self.training.device):
            raise RequestError(
                "The ranks drew different orders of rows from order=, or were given different "
                "lengths=.",
                (
                    "Draw from PyTorch's random numbers, or give a function of the epoch that "
                    "seeds its own."
                ),
            )

    def start(self) -> None:
        """Start timing when a training loop begins."""
        if self.trains:
            self.training.timer.start_loop()

    def begin(self, origin: Epoch, sizes: tuple[int, ...], batch: Any) -> None:
        """Record a batch before the loader yields it, and start timing its step.

        `origin` is the loop over the loader, and `sizes` has the row count of each rank.
        """
        training, weights = self.training, self.training.weights
        weights.take(origin, sizes, batch)
        if not self.trains:
            training.timer.note_validation()
            return
        weights.note_lengths(batch)
        weights.is_loops = True
        training.audits.watch_loop(batch)
        training.timer.begin(sizes)
        if training.audits.is_due:
            training.timer.disturb()

    def done(self, sizes: tuple[int, ...], tokens: tuple[int, int]) -> None:
        """Report a finished training step.

        `sizes` has the row count of each rank. `tokens` says how many tokens this rank's rows have,
        without and with padding.
        """
        if self.trains:
            self.training.report(sizes[self.training.rank], tokens)
            self.training.end()

    def end(self, origin: Epoch) -> None:
        """Pause timing when a loop over the loader ends."""
        if self.trains:
            self.training.audits.close()
            self.training.timer.pause()
        self.training.weights.end(origin)


def train_batch(training: Any, batch: Any, compute: OfPart, count: OfPart | None) -> Any:
    """Compute a batch's loss and gradients pass by pass, and return the rank's mean loss.

    `compute` returns the mean loss of a part. `count` returns the denominator of this mean, such as
    a token count; None means the row count.
    """
    recovery: Recovery = training.passes.recovery
    recovery.check = partial(training.audits.audit_part, compute)
    training.audits.expect_function()
    total: Any = 0.0
    for part in take_parts(training, batch, count):
        with part:
            total = total + part.backward(compute(part))
    recovery.check = None
    return total


def take_parts(
    training: Any, batch: Any, count: OfPart | None = None, models: Sequence[Any] | None = None
) -> Generator[Part]:
    """Yield the parts of a batch.

    If a part runs out of memory, its rows are yielded again in smaller parts. `count` returns the
    denominator of a part's mean loss; None means its row count. `models` are the models that are
    trained; None means all wrapped models.
    """
    weights = training.weights
    taken = weights.begin_parts(batch)
    try:
        parts = _divide(training, batch, taken)
        if count is not None:
            weigh_by_count(parts, count, taken.sizes, training.rank, training.add_up)
        exchanging = weights.list_models(models, taken)
        yield from training.passes.take(parts, exchanging, weights.list_exchanges())
    finally:
        weights.in_parts = None


def _divide(training: Any, batch: Any, taken: TakenBatch) -> list[Part]:
    """Divide this rank's rows of a batch into parts, one for each gradient-accumulation pass."""
    weights = training.weights
    rows = taken.sizes[training.rank]
    most = max(1, rows) if taken.origin.by_length else training.ranks.micros[training.rank]
    scale = weights.scale if weights.by_loss else _same
    return make_parts(batch, rows, most, scale, weights.count_equal_passes(taken))


def _same(value: Any) -> Any:
    return value


@contextmanager
def _without_sums(models: Sequence[Any]) -> Iterator[None]:
    """Context manager in which backward passes don't all-reduce gradients of these models."""
    with ExitStack() as stack:
        stack.enter_context(UNOWNED.no_sync())
        for model in models:
            if hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        yield


class Passes:
    """Runs the gradient-accumulation passes of each batch on one rank.

    If memory runs out in a pass, the rows of the pass are computed again in smaller passes.
    `report_retry` is called before this, when the failed pass has been undone.
    """

    def __init__(
        self, rank: int, device: torch.device, report_retry: Callable[[Retreat], None]
    ) -> None:
        self._device = device
        self.recovery = Recovery(rank, device, report_retry)
        self._exchanges: list[Exchange] = []  # exchanges that sum the current batch's gradients
        # exchanges that have gradients of the batch's earlier passes
        self._given: set[Exchange] = set()
        self._running: RunningPass | None = None

    def take(
        self,
        parts: Sequence[Part],
        models: Sequence[Any],
        exchanges: Sequence[Exchange],
        begins: bool = True,
        move: bool = True,
    ) -> Iterator[Part]:
        """Yield the parts to compute.

        If a part runs out of memory, its rows are yielded again in smaller parts. Arguments:

        - `models`: models whose gradients are all-reduced in the last part only.
        - `exchanges`: objects that all-reduce their gradients. If there are none, another
          library does, and no pass can be computed again.
        - `begins`: whether the parts begin a new batch.
        - `move`: whether to move tensors to the device.
        """
        recovery = self.recovery
        self._exchanges = list(exchanges)
        self._given = set()
        if begins:
            recovery.begin_batch()
        queue = PassQueue([each.rows for each in parts], recovery.limit)
        turn = queue.take(self._least_rows)
        while turn is not None:
            part = parts[turn.number].at(turn)
            yield from self._compute(part, models, move)
            assert self._running is not None
            if part.error:
                self._retry(self._running, queue)
            else:
                self._complete(self._running, queue)
            turn = queue.take(self._least_rows)
        self._exchanges, self._running = [], None

    def _compute(self, part: Part, models: Sequence[Any], move: bool) -> Iterator[Part]:
        """Yield a part to the user's loop, and catch an out-of-memory error there.

        With `move`, its tensors are moved to the device first. The gradients of `models` are
        all-reduced only in the batch's last part.
        """
        # if memory runs out while tensors are moved, the part isn't yielded
        batch = part.batch
        running = self._running = self.recovery.open(part, self._exchanges)
        part.passes = self
        try:
            with part:  # moving its rows may run out of memory
                # A copy of the structure, which the program may change.
                part.batch = each_tensor(self._send if move else _same, batch)
            if part.error:
                return
            if part.turn.last:
                yield part
            else:
                with _without_sums(models):
                    yield part
            self.recovery.look_for_collectives(running)
        finally:
            part.batch, part.passes = batch, None

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    # -- the backward pass of a part; Part.backward or the trainer's adapter calls these methods

    def open(self) -> None:
        """Begin a part's backward pass: prepare the objects that will all-reduce its gradients.

        Raises RequestError if the gradients of the batch's earlier passes were cleared.
        """
        running = self._running
        if running is not None:
            running.opened = True
            if running.part.is_piece:
                self.recovery.look_for_collectives(running)
        dependent = running is not None and running.state.may_differ()
        for exchange in self._exchanges:
            if exchange in self._given and not exchange.has_gradients():
                raise RequestError(
                    "The gradients of the batch's earlier passes are gone.",
                    "Call zero_grad() before or after all parts of a batch, not in between.",
                )
            exchange.open(dependent)

    def close(self) -> None:
        """After a part's backward pass, notify the objects that all-reduce gradients."""
        if self._running is not None:
            self._running.ended = True
        for exchange in self._exchanges:
            exchange.close()

    def note_backward(self) -> None:
        """Record a backward pass that the user's loop has run without `Part.backward`."""
        if self._running is not None and not self._running.opened:
            self._running.ended = True

    def catch(self, error: BaseException) -> str:
        """Return the message of an out-of-memory error if the pass can be retried, else ""."""
        running = self._running
        return "" if running is None else self.recovery.catch(error, running, self._exchanges)

    # -- after a pass

    def _complete(self, running: RunningPass, queue: PassQueue) -> None:
        """Finish a pass whose rows the user's loop has computed.

        Raises RequestError if the loop didn't call `Part.backward`.
        """
        # models with gradients are recorded, to detect a zero_grad() between passes
        running.part.check_computed()
        if not running.part.turn.last:
            self._given.update(exchange for exchange in self._exchanges if exchange.has_gradients())
        if queue.complete():
            self.recovery.forget(running, self._exchanges)

    def _retry(self, running: RunningPass, queue: PassQueue) -> None:
        """Undo a pass that ran out of memory, and put its rows back into the queue."""
        # Unless an earlier failed pass is still being retried, gradients that were sent are
        # complete for the rows of this pass only.
        queue.retry(all(exchange.held.final is None for exchange in self._exchanges))
        self.recovery.undo(running, self._exchanges, self._least_rows())
        running.part.computed, running.part.error = False, ""

    def _least_rows(self) -> int:
        """Return the smallest number of rows that a pass can have."""
        # a BatchNorm in training mode can't normalize a single row
        for exchange in self._exchanges:
            if any(normalizer.training for normalizer in exchange.normalizers):
                return 2
        return 1
