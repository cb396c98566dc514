"""Audits of a Trainer: compare a few rows' gradient in one process with the gradient by shares.

An audit calls the trainer's own `compute_loss`, with each part collated separately and weighted
like its passes. Under `evener run` the reference is what the program's own launcher would compute:
equal parts, each with the trainer's own factors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import RequestError
from ..torch.audit.compute import Bench, Piece
from ..torch.audit.rows import FewRows
from ..torch.audit.step import AuditChange, Audited, Way, Ways, audit
from ..torch.rows.structure import cut_rows
from ..torch.step.wrapped import is_sharded
from ..torch.sums.collectives import refuse_meeting
from ..torch.training_audits import TrainingAudits
from . import private
from .gathering import Gathering, processes
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
PROCESSES = 2  # among which an audit divides its rows; a trainer may multiply its loss by this
FEW = 2  # rows of a pass in an audit
_OURS = "evener."


class TrainerAudit:
    """Audits the steps of one trainer.

    `dataset` and `collate` are the data set and the collator of its training loader.
    """

    def __init__(self, trainer: Any, gathering: Gathering, dataset: Any, collate: Any) -> None:
        self._trainer = trainer
        self._audits: TrainingAudits = trainer._planned.audits
        self.ways = TrainerWays(trainer, gathering)
        self._dataset = dataset
        self._collate = collate
        self._audits.remedies |= REMEDIES
        self._audits.question = " Is it a mean over rows?"

    def after_step(self, numbers: Sequence[int], loss: TrainerLoss) -> None:
        """Audit a step on the rows `numbers` of the data set, if an audit is due.

        Call it once the step's gradients are computed, before the optimizer uses them. Raises
        RequestError if the gradients differ.
        """
        trainer = self._trainer
        own = partial(_find_own_loss(type(trainer)), trainer.compute_loss_func)
        self._audits.after_batch(partial(self._find, numbers, loss), own, [trainer])

    def _find(self, numbers: Sequence[int], loss: TrainerLoss, moves: bool) -> Audited | None:
        few = self._audits.take_rows(self._dataset, self._collate, numbers)
        if few is None:
            return None
        made = self.ways.make(few, loss, self._audits.follows_launcher)
        return audit(self.ways.bench(), made, moves)


class TrainerWays:
    """Makes the ways to compute a trainer's own loss for a few rows.

    A way is a list of weighted loss functions, one for each pass.
    """

    def __init__(self, trainer: Any, gathering: Gathering) -> None:
        self._trainer = trainer
        self._gathering = gathering

    def bench(self) -> Bench:
        """Return a Bench for the trainer's model; its computations don't affect the training."""
        trainer = self._trainer
        apart = {id(trainer.train_dataset), id(trainer.eval_dataset), id(trainer)}
        held = [each for each in vars(trainer).values() if id(each) not in apart]
        own = partial(_find_own_loss(type(trainer)), *held)
        bench: Bench = trainer._planned.audits.make_bench(
            [trainer.model],
            [] if trainer.optimizer is None else [trainer.optimizer],
            holders=[trainer],
            apart=[trainer.train_dataset, trainer.eval_dataset],
            function=own,
            around=[self._gathering.alone, partial(silent, trainer)],
            losses_only=is_sharded(trainer.model),
        )
        return bench

    def make(self, few: FewRows, loss: TrainerLoss, follows_launcher: bool = False) -> Ways:
        """Return two ways to compute the gradient of a few rows: as the reference, and by shares.

        - Reference: one process computes the gradient. With `follows_launcher`, the gradient is
          that of equal parts, as the program's own launcher computes it.
        - By shares: passes are weighted by what the loss is a mean over.
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
        return Ways(reference, trained, changes, few.sizes, few.digest, few.pads)

    def at_once(self, few: FewRows, times: int = 1, world: int = 1, weight: float = 1.0) -> Way:
        """Return the way to compute all rows in one pass, as one of `world` processes would.

        The number of items that is passed to the loss is multiplied by `times`.
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
    ) -> Way:
        """Return the way to compute the parts as under shares.

        Passes have up to `micro` rows; 0 means one pass for each part.

        With `excess`, the loss keeps the factor by which the trainer's own loss is too large.
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

    def _by_launcher(self, few: FewRows) -> Way:
        """Return the way to compute the rows as the program's own launcher does.

        It is a mean over processes with equal parts.
        """
        items = self.count_items(few.even)
        if not self._trainer.args.average_tokens_across_devices:
            own = [self.count_items([each]) for each in few.even]
        else:
            own = [items] * len(few.even)
        return [
            Piece(self._loss(batch, count, PROCESSES), 1.0 / len(few.even))
            for batch, count in zip(few.even, own, strict=True)
        ]

    def count_items(self, batches: Sequence[Any]) -> Any:
        """Return the number of items that a loss of all these batches is a mean over.

        Return None if the trainer doesn't count items.
        """
        trainer = self._trainer
        with processes(trainer.accelerator, 1):
            return private.count_items(trainer, batches, trainer.args.device)

    def _loss(self, batch: Any, items: Any, world: int) -> Any:
        """Return a function that computes the trainer's own loss as in one of `world` processes."""
        return refuse_meeting(partial(self._compute, batch, items, world))

    def _compute(self, batch: Any, items: Any, world: int) -> Any:
        trainer = self._trainer
        inputs = private.prepare_inputs(trainer, copy.copy(batch))
        with processes(trainer.accelerator, world), trainer.compute_loss_context_manager():
            result = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
        return result[0] if isinstance(result, tuple) else result


def _weigh_parts(parts: Sequence[tuple[Any, int]], loss: TrainerLoss) -> list[float]:
    """Return the weight of each part's loss; `parts` are batches with their numbers of rows."""
    if loss.mean_over == ITEMS:
        return [1.0] * len(parts)
    counts = [float(rows) for _, rows in parts]
    if loss.mean_over != ROWS:
        counts = [loss.count(batch) for batch, _ in parts]
    return [count / (sum(counts) or 1.0) for count in counts]


def _cut_passes(batch: Any, rows: int, micro: int) -> list[tuple[Any, int]]:
    """Return the passes of a part with their numbers of rows; one pass if it can't be cut."""
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
    """Return the `compute_loss` function of the Trainer class, without evener's override."""
    for each in kind.__mro__:
        if "compute_loss" in vars(each) and not each.__module__.startswith(_OURS):
            return vars(each)["compute_loss"]
    raise AssertionError("a Trainer has one")
