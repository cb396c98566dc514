"""Audits of a Trainer: check that unequal shares give the same gradients as the whole batch.

An audit computes the gradient of a few rows twice, with the trainer's own `compute_loss`: in one
pass and divided into shares. The rows of each share are collated separately. Their losses are
weighted as in a training step. Under `evener run`, the gradient of the shares is compared with the
gradient that the script learns from under its own launcher: the mean of the gradients of equal
parts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import RequestError
from ..torch.audit.computations import AuditChange, Computation, Computations, WholeShares
from ..torch.audit.compute import GradientSketcher, Piece
from ..torch.audit.rows import FewRows
from ..torch.audit.step import Audited, audit
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
        "Compute it over the whole batch, with self.accelerator.gather(value) in training_step, or"
        " train on one device."
    ),
}
PROCESSES = 2  # number of processes in an audit; a trainer may multiply its loss by it
FEW = 2  # rows per pass in an audit
_OURS = "evener."


class TrainerAudit:
    """Checks after some steps of a Trainer that unequal shares don't change the gradients."""

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
        few_rows = self._audits.take_rows(self._dataset, self._collate, numbers)
        if few_rows is None:
            return None
        made = self.computations.make(few_rows, loss, self._audits.follows_launcher)
        return audit(self.computations.make_sketcher(), made, add_noise)


class TrainerComputations:
    """Computes a Trainer's loss for a few rows in different ways, for example at once or in parts.

    Methods such as `by_shares` return a Computation: functions that compute losses, with the
    weights of these losses.
    """

    def __init__(self, trainer: Any, gathering: Gathering) -> None:
        self._trainer = trainer
        self._gathering = gathering

    def make_sketcher(self) -> GradientSketcher:
        """Return a GradientSketcher, which summarizes gradients and doesn't change the Trainer."""
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

    def make(
        self, few_rows: FewRows, loss: TrainerLoss, follows_launcher: bool = False
    ) -> Computations:
        """Return two computations of a few rows that have to give the same gradient.

        One divides the rows into shares, as the training does. The other, the reference, computes
        all rows at once. With `follows_launcher`, the reference is the mean over equal parts, as
        under torchrun. The result also has variants of the computation in shares, which help to
        find the cause of a difference.
        """
        max_rows = FEW if max(self._trainer._shares.passes) > 1 else 0
        keeps_excess = follows_launcher and self._trainer.excess > 1
        by_shares = partial(
            self.by_shares, sizes=few_rows.sizes, loss=loss, keeps_excess=keeps_excess
        )
        trained = by_shares(few_rows.parts, max_rows=max_rows)
        changes = {"sum": AuditChange([Piece(each.loss) for each in trained])}
        if max_rows:
            changes["passes"] = AuditChange(by_shares(few_rows.parts))
        if few_rows.cut is not None and few_rows.cut is not few_rows.parts:
            changes["collation"] = AuditChange(by_shares(few_rows.cut, max_rows=max_rows))
        whole, even = self.at_once(few_rows), few_rows.even
        even_cut = even if few_rows.even_cut is None else few_rows.even_cut
        shares = WholeShares(
            self._average_equal_parts(even_cut) if follows_launcher else whole,
            few_rows.even_sizes if follows_launcher else (few_rows.rows,),
            by_shares(few_rows.parts if few_rows.cut is None else few_rows.cut),
            few_rows.sizes,
        )
        return Computations(
            self._average_equal_parts(even) if follows_launcher else whole,
            trained,
            changes,
            few_rows.sizes,
            few_rows.digest,
            few_rows.pads,
            shares,
        )

    def at_once(
        self, few_rows: FewRows, item_factor: int = 1, world: int = 1, weight: float = 1.0
    ) -> Computation:
        """Return the computation of all rows in one batch, with its loss multiplied by `weight`.

        The Trainer gets the batch's number of items (`num_items_in_batch`) multiplied by
        `item_factor`, and sees `world` processes.
        """
        items = self.count_items([few_rows.whole])
        return [
            Piece(
                self._loss(few_rows.whole, None if items is None else item_factor * items, world),
                weight,
            )
        ]

    def by_shares(
        self,
        batches: Sequence[Any],
        sizes: Sequence[int],
        loss: TrainerLoss,
        max_rows: int = 0,
        keeps_excess: bool = False,
    ) -> Computation:
        """Return the computation of a batch part by part, with losses weighted by rows or labels.

        Arguments:

        - `batches`, `sizes`: the parts, and their row counts.
        - `max_rows`: the maximum row count of a pass; with 0, each part is one pass.
        - `keeps_excess`: whether to keep the number of processes as a factor of the loss if
          transformers multiplies by it. Otherwise, the loss is divided by it.
        """
        parts: list[tuple[Any, int]] = []
        for batch, rows in zip(batches, sizes, strict=True):
            parts += _cut_passes(batch, rows, max_rows)
        items = self.count_items([batch for batch, _ in parts])
        weights = _weigh_parts(parts, loss)
        world = min(PROCESSES, self._trainer._shares.world)
        divisor = world if loss.multiplied > 1 and not keeps_excess else 1
        return [
            Piece(self._loss(batch, items, world), weight / divisor)
            for (batch, _), weight in zip(parts, weights, strict=True)
            if weight
        ]

    def _average_equal_parts(self, even: Sequence[Any]) -> Computation:
        """Return the computation that averages the losses of equal parts, as under torchrun."""
        items = self.count_items(even)
        if not self._trainer.args.average_tokens_across_devices:
            own = [self.count_items([each]) for each in even]
        else:
            own = [items] * len(even)
        return [
            Piece(self._loss(batch, count, PROCESSES), 1.0 / len(even))
            for batch, count in zip(even, own, strict=True)
        ]

    def count_items(self, batches: Sequence[Any]) -> Any:
        """Return the Trainer's `num_items_in_batch` for some batches.

        The Trainer divides its loss by this number. The result is None if it doesn't count items.
        """
        trainer = self._trainer
        with pretend_processes(trainer.accelerator, 1):
            return private.count_items(trainer, batches, trainer.args.device)

    def _loss(self, batch: Any, items: Any, world: int) -> Any:
        """Return a function that computes a batch's loss.

        It raises CollectiveError if the loss communicates with other ranks. `items` is passed to
        the loss as `num_items_in_batch`; it is None if the Trainer doesn't count items. The Trainer
        sees `world` processes.
        """
        return refuse_collectives(partial(self._compute, batch, items, world))

    def _compute(self, batch: Any, items: Any, world: int) -> Any:
        trainer = self._trainer
        inputs = private.prepare_inputs(trainer, copy.copy(batch))
        with pretend_processes(trainer.accelerator, world), trainer.compute_loss_context_manager():
            result = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
        return result[0] if isinstance(result, tuple) else result


def _weigh_parts(parts: Sequence[tuple[Any, int]], loss: TrainerLoss) -> list[float]:
    """Return the weight of each part's loss in the mean over all parts.

    `parts` are pairs of a batch and its row count.
    """
    if loss.mean_over == ITEMS:
        return [1.0] * len(parts)
    counts = [float(rows) for _, rows in parts]
    if loss.mean_over != ROWS:
        counts = [loss.count(batch) for batch, _ in parts]
    return [count / (sum(counts) or 1.0) for count in counts]


def _cut_passes(batch: Any, rows: int, max_rows: int) -> list[tuple[Any, int]]:
    """Cut a batch into passes of at most `max_rows` rows, and return each with its row count.

    The result is a single pass if `max_rows` is 0, or if the batch can't be cut.
    """
    if not max_rows or rows <= max_rows:
        return [(batch, rows)]
    firsts = range(0, rows, max_rows)
    try:
        return [
            (cut_rows(batch, first, min(first + max_rows, rows), rows), min(max_rows, rows - first))
            for first in firsts
        ]
    except RequestError:
        return [(batch, rows)]


def _find_own_loss(kind: type) -> Any:
    """Return the `compute_loss` of the user's Trainer class, without evener's wrapper."""
    for each in kind.__mro__:
        if "compute_loss" in vars(each) and not each.__module__.startswith(_OURS):
            return vars(each)["compute_loss"]
    raise AssertionError("a Trainer has one")
