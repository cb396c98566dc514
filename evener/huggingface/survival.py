"""A Trainer's passes when one runs out of memory: its rows are computed again in smaller passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_split.batch import Part
from ..torch_split.exchange import Exchange
from ..torch_split.loss_measure import keep_attributes
from ..torch_split.planned import PlannedTraining
from .gathering import Gathering
from .loss import Pass, TrainerLoss


class Survival:
    """Computes the passes of `trainer`, a failed one in pieces."""

    def __init__(self, trainer: Any, planned: PlannedTraining, gathering: Gathering) -> None:
        self._trainer, self._weights, self._passes = trainer, planned.weights, planned.passes
        self._gathering = gathering
        self._model: Any = None  # of the newest pass
        self._exchanges: list[Exchange] = []  # of its gradients; none where they are summed by others
        self._backward = trainer.accelerator.backward
        trainer.accelerator.backward = self.backward

    def compute(
        self, model: Any, inputs: Any, now: Pass, loss: Callable[[], TrainerLoss], train: Callable[[Any, Pass], Any]
    ) -> torch.Tensor:
        """The sum of what `train` returns for the pass or its pieces; figures that are noted meanwhile count once."""
        if model is not self._model:
            self._model, self._exchanges = model, self._weights.take_on(model)
        if not self._exchanges:
            return train(inputs, now)
        with self._gathering.one_pass():
            return self._compute(model, inputs, now, loss, train)

    def _compute(
        self, model: Any, inputs: Any, now: Pass, loss: Callable[[], TrainerLoss], train: Callable[[Any, Pass], Any]
    ) -> torch.Tensor:
        total, left = torch.zeros((), device=self._trainer.args.device), now.rows
        whole = Part(inputs, now.rows, 1.0, lambda loss: loss)
        for part in self._passes.take([whole], [model], self._exchanges, begins=now.first):
            ends = part.rows == left
            attributes, gathered = self._keep(), self._gathering.keep()
            with part:
                try:
                    weight = now.weight * loss().part_of(inputs, now.rows, part.batch, part.rows)
                    piece = Pass(part.rows, weight, now.first and left == now.rows, now.last and ends, ends)
                    total = total + train(part.batch, piece)
                    part.computed = True
                    left -= part.rows
                finally:
                    if not (part.computed and ends):
                        attributes()
                    if not part.computed:
                        gathered()
        return total

    def note(self, loss: Any) -> None:
        """The loss of a pass: a trainer that calls its backward() itself leaves gradients that can't be undone."""
        if loss.requires_grad:
            loss.register_hook(lambda _: self._passes.note_backward())

    def backward(self, loss: Any, **options: Any) -> None:
        """Gather as the accelerator does, in a pass that may fail."""
        self._passes.open()
        self._backward(loss, **options)
        self._passes.close()

    def _keep(self) -> Callable[[], None]:
        """Note the trainer's state before a pass; returns the function that restores it."""
        trainer = self._trainer
        return keep_attributes(trainer, apart=(trainer.train_dataset, trainer.eval_dataset))
