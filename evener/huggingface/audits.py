"""Audits of a Trainer: check that unequal shares give the same gradients as the whole batch.

An audit computes the gradient of a few rows in one pass and by shares, with the trainer's own
`compute_loss`. The rows of each share are collated separately. Their losses are weighted as in a
training step. Under `evener run`, the gradient by shares is compared with the gradient that the
script learns from under its own launcher: the mean of the gradients of equal parts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import RequestError
from ..torch.audit.compute import GradientSketcher, Piece
from ..torch.audit.rows import FewRows
from ..torch.audit.step import AuditChange, Audited, Computation, Computations, audit
from ..torch.rows.structure import cut_rows
from ..torch.shards.make import trains_shards_only
from ..torch.step.wrapped import is_sharded
from ..torch.sums.collectives import refuse_collectives
from ..torch.training_audits import TrainingAudits
from . import private
from .gathering import Gathering, pretend_processes
from .loss import ITEMS, ROWS, TrainerLoss, silent

REMEDIES = {
    "rows": (
        "Change the loss to a mean over rows or over labels (num_items_in_batch), or train on one"
        " device."
    ),
    "state": (
        "Note it of the whole batch, by self.accelerator.gather(value) in training_step, or train"
        " on one device."
    ),
}
PROCESSES = 2  # number of processes in an audit; a trainer may multiply its loss by it
FEW = 2  # rows per pass in an audit
_OURS = "evener."


class TrainerAudit:
    """Checks, after some steps of a Trainer, that shares don't change the gradients."""

    def __init__(self, trainer: Any, gathering: Gathering, dataset: Any, collate: Any) -> None:
        self._trainer = trainer
        self._audits: TrainingAudits = trainer._planned.audits
        self.computations = TrainerComputations(trainer, gathering)
        self._dataset = dataset
        self._collate = collate
        self._audits.remedies |= REMEDIES
        self._audits.question = " Is it a mean over rows?"

    def after_step(self, numbers: Sequence[int], loss: TrainerLoss) -> None:
        """Check the gradients of a few of the step's rows, if an audit is due.

        Call it after the backward pass and before the optimizer's step. `numbers` are the row
        indices of the global batch. Raises RequestError if the gradients differ. Every rank has to
        call this in each step.
        """
        trainer = self._trainer
        own = partial(_find_own_loss(type(trainer)), trainer.compute_loss_func)
        self._audits.after_batch(partial(self._find, numbers, loss), own, [trainer])

    def _find(self, numbers: Sequence[int], loss: TrainerLoss, add_noise: bool) -> Audited | None:
        few = self._audits.take_rows(self._dataset, self._collate, numbers)
        if few is None:
            return None
        made = self.computations.make(few, loss, self._audits.follows_launcher)
        return audit(self.computations.sketcher(), made, add_noise)


class TrainerComputations:
    """Computes a Trainer's loss for a few rows in different ways, at once or in parts."""

    def __init__(self, trainer: Any, gathering: Gathering) -> None:
        self._trainer = trainer
        self._gathering = gathering

    def sketcher(self) -> GradientSketcher:
        """Return an object that summarizes gradients and leaves the Trainer unchanged."""
        trainer = self._trainer
        apart = {id(trainer.train_dataset), id(trainer.eval_dataset), id(trainer)}
        held = [each for each in vars(trainer).values() if id(each) not in apart]
        own = partial(_find_own_loss(type(trainer)), *held)
        sketcher: GradientSketcher = trainer._planned.audits.make_sketcher(
            [trainer.model],
            [] if trainer.optimizer is None else [trainer.optimizer],
            holders=[trainer],
            excluded=[trainer.train_dataset, trainer.eval_dataset],
            function=own,
            contexts=[self._gathering.local, partial(silent, trainer)],
            losses_only=is_sharded(trainer.model) or trains_shards_only(trainer.model),
            # autocast casts activations to the dtype in which linear layers are gathered
            keeps_autocast=trainer._shares.is_sharded,
        )
        return sketcher

    def make(self, few: FewRows, loss: TrainerLoss, follows_launcher: bool = False) -> Computations:
        """Return two computations of a few rows that have to give the same gradient.

        One divides the rows by shares, as the training does. The other, the reference, computes all
        rows at once. With `follows_launcher`, the reference is the mean over equal parts, as under
        torchrun. Variants help to find the cause of a difference.
        """
        micro = FEW if max(self._trainer._shares.passes) > 1 else 0
        excess = follows_launcher and self._trainer.excess > 1
        by_shares = partial(self.by_shares, sizes=few.sizes, loss=loss, excess=excess)
        trained = by_shares(few.parts, micro=micro)
        changes = {"sum": AuditChange([Piece(each.loss) for each in trained])}
        if micro:
            changes["passes"] = AuditChange(by_shares(few.parts))
        if few.cut is not None and few.cut is not few.parts:
            changes["collation"] = AuditChange(by_shares(few.cut, micro=micro))
        reference = self._by_launcher(few) if follows_launcher else self.at_once(few)
        return Computations(reference, trained, changes, few.sizes, few.digest, few.pads)

    def at_once(
        self, few: FewRows, times: int = 1, world: int = 1, weight: float = 1.0
    ) -> Computation:
        """Return the computation of all rows in one batch, with its loss multiplied by `weight`.

        The Trainer gets the batch's number of items (`num_items_in_batch`) multiplied by `times`,
        and sees `world` processes.
        """
        items = self.count_items([few.whole])
        return [
            Piece(self._loss(few.whole, None if items is None else times * items, world), weight)
        ]

    def by_shares(
        self,
        batches: Sequence[Any],
        sizes: Sequence[int],
        loss: TrainerLoss,
        micro: int = 0,
        excess: bool = False,
    ) -> Computation:
        """Return the computation of a batch in parts, with losses weighted by rows or labels.

        `sizes` are the parts' row counts. `micro` is the row count of the largest pass; 0 doesn't
        divide the parts into passes. If transformers multiplies the loss by the number of
        processes, that is undone unless `excess` is set.
        """
        parts: list[tuple[Any, int]] = []
        for batch, rows in zip(batches, sizes, strict=True):
            parts += _cut_passes(batch, rows, micro)
        items = self.count_items([batch for batch, _ in parts])
        weights = _weigh_parts(parts, loss)
        world = min(PROCESSES, self._trainer._shares.world)
        divisor = world if loss.multiplied > 1 and not excess else 1
        return [
            Piece(self._loss(batch, items, world), weight / divisor)
            for (batch, _), weight in zip(parts, weights, strict=True)
            if weight
        ]

    def _by_launcher(self, few: FewRows) -> Computation:
        """Return the computation of equal parts whose losses are averaged, as DDP does."""
        items = self.count_items(few.even)
        if not self._trainer.args.average_tokens_across_devices:
            own = [self.count_items([each]) for each in few.even]
        else:
            own = [items] * len(few.even)
        return [
            # the mean of the losses of equal parts, one for each process
            Piece(self._loss(batch, count, PROCESSES), 1.0 / len(few.even))
            for batch, count in zip(few.even, own, strict=True)
        ]

    def count_items(self, batches: Sequence[Any]) -> Any:
        """Return the Trainer's `num_items_in_batch` for some batches; None if it doesn't count."""
        # The trainer divides its loss by this number.
        trainer = self._trainer
        with pretend_processes(trainer.accelerator, 1):
            return private.count_items(trainer, batches, trainer.args.device)

    def _loss(self, batch: Any, items: Any, world: int) -> Any:
        """Return a function that computes a batch's loss, in which a collective raises an error."""
        # The trainer sees `world` processes during the computation.
        # `items` is the number that is passed to the loss; None if the trainer counts none
        return refuse_collectives(partial(self._compute, batch, items, world))

    def _compute(self, batch: Any, items: Any, world: int) -> Any:
        trainer = self._trainer
        inputs = private.prepare_inputs(trainer, copy.copy(batch))
        with pretend_processes(trainer.accelerator, world), trainer.compute_loss_context_manager():
            result = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
        return result[0] if isinstance(result, tuple) else result


def _weigh_parts(parts: Sequence[tuple[Any, int]], loss: TrainerLoss) -> list[float]:
    """Return the weight of each part's loss in the mean over all parts."""
    # a part is a batch with its number of rows
    if loss.mean_over == ITEMS:
        return [1.0] * len(parts)
    counts = [float(rows) for _, rows in parts]
    if loss.mean_over != ROWS:
        counts = [loss.count(batch) for batch, _ in parts]
    return [count / (sum(counts) or 1.0) for count in counts]


def _cut_passes(batch: Any, rows: int, micro: int) -> list[tuple[Any, int]]:
    """Cut a batch into passes of at most `micro` rows; a batch that can't be cut stays whole."""
    # Each pass has its number of rows. If `micro` is 0, there is only one pass.
    if not micro or rows <= micro:
        return [(batch, rows)]
    firsts = range(0, rows, micro)
    try:
        return [
            (cut_rows(batch, first, min(first + micro, rows), rows), min(micro, rows - first))
            for first in firsts
        ]
    except RequestError:
        return [(batch, rows)]


def _find_own_loss(kind: type) -> Any:
    """Return the `compute_loss` of the user's class or its base class, without evener's wrapper."""
    for each in kind.__mro__:
        if "compute_loss" in vars(each) and not each.__module__.startswith(_OURS):
            return vars(each)["compute_loss"]
    raise AssertionError("a Trainer has one")
