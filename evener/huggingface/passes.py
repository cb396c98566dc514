"""Runs a Trainer's gradient-accumulation passes, and weights their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..torch.audit.state import keep_attributes
from ..torch.planned import PlannedTraining
from ..torch.step.part import Part
from ..torch.sums.exchange import Exchange
from ..training.passes import weigh_passes as weigh_rows
from .gathering import Gathering
from .loss import ITEMS, ROWS, TrainerLoss, has_ignored


class PassWeights(NamedTuple):
    """Weights of all passes in an optimizer step, with the number of items in the step."""

    weights: list[float]  # weight of each pass in the mean over its global batch
    items: Any  # num_items_in_batch of all ranks, or None
    ignores: bool  # True if some rank has ignored labels; False if that doesn't matter


def weigh_passes(
    loss: TrainerLoss,
    passes: list[Any],
    sizes: list[tuple[int, ...]],
    totals: list[int],
    items: Any,
    gathering: Gathering,
    device: torch.device,
) -> PassWeights:
    """Return each pass's weight in the loss of its global batch, and the step's number of items.

    For each global batch, `sizes` has the row counts of this rank's passes, and `totals` has the
    batch's row count. `items` is this rank's `num_items_in_batch`, or None. Ranks exchange their
    counts through a collective, so every rank has to call this.
    """
    by_labels = loss.mean_over not in (ITEMS, ROWS)
    weights = _weigh_by_rows(sizes, totals)
    if loss.mean_over != ROWS:
        weights = [float(weight > 0) for weight in weights]
    if not by_labels and loss.certain:  # the host need not wait for the device
        if items is not None:
            own_items = torch.as_tensor(items).to(device, non_blocking=True)
            items = gathering.add_up(own_items.reshape(1))[0]
        return PassWeights(weights, items, False)
    counts = _count_labels(loss, passes, sizes) if by_labels else [[0.0] for _ in sizes]
    ignores = not loss.certain and any(map(has_ignored, passes))
    own = [float(items or 0.0), float(ignores), *map(sum, counts)]
    summed = gathering.add_up(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
    all_items, ignores_anywhere, *of_batches = summed
    if by_labels:
        weights = _weigh_by_labels(counts, of_batches)
    if items is not None:
        items = torch.tensor(all_items, device=device).to(torch.as_tensor(items).dtype)
    return PassWeights(weights, items, bool(ignores_anywhere))


def _weigh_by_rows(sizes: list[tuple[int, ...]], totals: list[int]) -> list[float]:
    """Return each pass's rows as a fraction of the rows of its global batch."""
    pairs = zip(sizes, totals, strict=True)
    return [weight for step, total in pairs for weight in weigh_rows(step, total)]


def _weigh_by_labels(counts: list[list[float]], totals: list[float]) -> list[float]:
    """Return each pass's labels as a fraction of the labels of its global batch."""
    pairs = zip(counts, totals, strict=True)
    return [count / (total or 1.0) for step, total in pairs for count in step]


def _count_labels(
    loss: TrainerLoss, passes: list[Any], sizes: list[tuple[int, ...]]
) -> list[list[float]]:
    """Count the labels in each pass, as a list for each global batch.

    Only labels that the pass's loss is a mean over are counted.
    """
    counts = []
    first = 0
    for step in sizes:
        pairs = zip(passes[first : first + len(step)], step, strict=True)
        # a pass with only a filler row has none
        counts.append([loss.count(batch) if rows else 0.0 for batch, rows in pairs])
        first += len(step)
    return counts


def weigh_loss(loss: Any, factor: float, model: Any) -> Any:
    """Return the loss multiplied by `factor`; with a factor of 0, NaN and inf become 0.

    Even then, all parameters get a gradient, which is 0.
    """
    if factor == 0.0 and not torch.isfinite(loss):
        return sum(
            (parameter * 0).sum() for parameter in model.parameters() if parameter.requires_grad
        )
    return loss if factor == 1.0 else loss * factor


def count_tokens(trainer: Any, inputs: Any) -> int:
    """Count a batch's input tokens; padding is left out if the Trainer's settings say so.

    The result is 0 if the inputs have no tokens.
    """
    name = getattr(trainer.model, "main_input_name", "input_ids")
    if name not in inputs:
        return 0
    if trainer.args.include_num_input_tokens_seen == "non_padding" and "attention_mask" in inputs:
        return int(inputs["attention_mask"].sum())
    return int(inputs[name].numel())


class TrainerPasses:
    """Runs a batch's gradient-accumulation passes, and divides a pass that runs out of memory."""

    def __init__(self, trainer: Any, planned: PlannedTraining, gathering: Gathering) -> None:
        self._trainer, self._weights, self._passes = trainer, planned.weights, planned.passes
        self._gathering = gathering
        self._model: Any = None  # model of the newest pass
        # exchanges of the model's gradients; empty if a library sums them
        self._exchanges: list[Exchange] = []
        self._backward = trainer.accelerator.backward
        trainer.accelerator.backward = self.backward

    def compute(
        self,
        model: Any,
        parts: list[Part],
        loss: Callable[[], TrainerLoss],
        train: Callable[[Part, bool], Any],
    ) -> torch.Tensor:
        """Run forward and backward for all passes of a batch, and return the sum of their losses.

        `parts` are the passes. `train` computes one of them; its second argument is True for the
        last one. `loss` returns what the loss is a mean over.
        """
        if model is not self._model:
            self._model, self._exchanges = model, self._weights.make_exchanges(model)
            self._weights.look_for_tensors()
        total = torch.zeros((), device=self._trainer.args.device)
        planned = [part.weight for part in parts]
        self._gathering.begin_batch()
        for part in self._passes.take(parts, [self], self._exchanges):
            turn = part.turn
            attributes, gathered = self._save_attributes(), self._gathering.save()
            with part:
                try:
                    whole = parts[turn.number]
                    share = loss().weigh_piece(whole.batch, whole.rows, part.batch, part.rows)
                    part.weight = planned[turn.number] * share
                    with self._gathering.computing(part.rows, is_last_piece=turn.ends):
                        total = total + train(part, turn.last)
                    part.computed = True
                finally:
                    if not (part.computed and turn.ends):
                        attributes()
                    if not part.computed:
                        gathered()
            if part.computed and turn.ends:
                self._gathering.end_pass()
        return total

    def no_sync(self) -> Any:
        """Context manager in which gradients accumulate without being exchanged between ranks."""
        return self._trainer.accelerator.no_sync(self._model)

    def watch_backward(self, loss: Any) -> None:
        """Record when the loss's backward pass begins; after that, the pass can't be retried."""
        # its gradients can't be undone
        if loss.requires_grad:
            loss.register_hook(lambda _: self._passes.note_backward())

    def backward(self, loss: Any, **options: Any) -> None:
        """Replacement for `accelerator.backward` that records when a pass's gradients are ready."""
        self._passes.open()
        self._backward(loss, **options)
        self._passes.close()

    def _save_attributes(self) -> Callable[[], None]:
        """Return a function that restores the Trainer's attributes, to call before a retry."""
        trainer = self._trainer
        return keep_attributes(trainer, excluded=(trainer.train_dataset, trainer.eval_dataset))
