"""The meaning of a Trainer's loss, rows or labels that it is a mean over, measured before the first
step.

Many models of transformers take `num_items_in_batch` and compute a mean of their own all the same,
so that what they accept says nothing about their loss. `passes.py` weighs passes by its meaning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import msgspec
import torch

from ..errors import RequestError
from ..torch.loss.check import REMEDY, CheckBatch, LossCheck, find_together
from ..torch.loss.measure import LossMeasure
from ..torch.ranks.ranks import RankShares
from .gathering import Gathering, processes

IGNORED = -100
ITEMS, ROWS = "num_items_in_batch", "rows"
SHIFT = 1e4  # of gathered figures, by which a loss changes that depends on them
PARTIAL_REMEDY = (
    "Leave out what is added for each batch, such as an auxiliary loss of experts"
    " (model.config.output_router_logits=False)."
)


class TrainerLoss(msgspec.Struct, frozen=True):
    """A loss is a mean over `mean_over`: num_items_in_batch, rows, labels or shifted labels.

    `multiplied` is what the trainer multiplies it by when several processes train; `certain`: the
    rows that were checked tell rows from labels.
    """

    mean_over: str
    multiplied: int = 1
    certain: bool = True

    @property
    def excess(self) -> int:
        """The factor by which the trainer's own loss is too large: the number of processes where
        it multiplies a mean as if that were a part of a sum; else 1.
        """
        return 1 if self.mean_over == ITEMS else self.multiplied

    def count(self, batch: Any) -> float:
        """The number of a pass's labels that the loss is a mean over; 0 if it is a mean over
        something else.
        """
        return count_labels(batch).get(self.mean_over, 0.0)

    def part_of(self, whole: Any, rows: int, piece: Any, own: int) -> float:
        """The weight of the loss of a piece with `own` rows in that of a pass with `rows`."""
        if (
            own == rows or self.mean_over == ITEMS
        ):  # a sum over items has been divided by those of all passes
            return 1.0
        return (
            own / rows if self.mean_over == ROWS else self.count(piece) / (self.count(whole) or 1.0)
        )


def find_loss(
    trainer: Any,
    make: Callable[[], CheckBatch | None],
    shares: RankShares,
    gathering: Gathering,
    ignores: bool,
    strict: bool = False,
) -> TrainerLoss:
    """The trainer's loss, by rows of its data; RequestError on every rank where it is no mean over
    what it has.

    `ignores`: labels of the data are ignored, so that others may be, to tell means over rows from
    means over labels. On a CPU it is tried in any case; on a GPU a loss that doesn't know such
    labels would end the process. `strict`: errors of the check itself are raised.
    """
    masks, calls = ignores or trainer.args.device.type == "cpu", gathering.calls
    in_passes = gathering if strict or max(shares.passes) > 1 else None

    def find() -> TrainerLoss | None:
        batch = make()
        if batch is None:
            return None
        if masks:
            with suppress(
                ArithmeticError, IndexError, RuntimeError
            ):  # of a loss that knows no ignored labels
                return _TrainerCheck(trainer, _mask_some(batch), shares.world, in_passes).find()
        return _TrainerCheck(trainer, batch, shares.world, in_passes).find()

    with gathering.alone(), silent(trainer):
        found = find_together(find, TrainerLoss, strict)
    if gathering.calls > calls and len(set(shares.passes)) > 1:
        name = type(trainer).__bases__[-1].__name__
        raise RequestError(
            f"{name} gathers figures while it computes a loss, and ranks have different "
            f"numbers of passes.",
            (
                "Gather them in a callback, or make a plan without passes (evener balance --micro "
                "off)."
            ),
        )
    return assume_loss(trainer, shares.world) if found is None else found


def silent(trainer: Any) -> Any:
    """A context in which a trainer logs nothing."""
    return mock.patch.object(trainer, "log")


def assume_loss(trainer: Any, world: int) -> TrainerLoss:
    """The loss as transformers itself takes it to be, unchecked."""
    scaled = is_scaled(trainer)
    return TrainerLoss(ITEMS if scaled else ROWS, world if scaled else 1)


def is_scaled(trainer: Any, items: Any = 0) -> bool:
    """True if the trainer takes its loss as a part of an optimizer step's, and doesn't divide it by
    the passes.
    """
    own = getattr(trainer, "loss_is_scaled_for_ga", None)
    takes = (
        trainer.model_accepts_loss_kwargs and items is not None
    ) or trainer.compute_loss_func is not None
    return bool(takes) if own is None else bool(own)


def count_labels(batch: Any) -> dict[str, float]:
    """The number of a batch's labels that aren't ignored: of all, and of those left if the model
    shifts them by one.
    """
    labels, shifted = _labels(batch)
    if labels is None:
        return {}
    counts = {"labels": float((labels != IGNORED).sum())}
    if labels.ndim > 1 and not shifted:
        counts["shifted labels"] = float((labels[..., 1:] != IGNORED).sum())
    return counts


def has_ignored(batch: Any) -> bool:
    """True if some labels of the batch are ignored, which shows that the loss allows that."""
    labels, _ = _labels(batch)
    return labels is not None and bool((labels == IGNORED).any())


def has_uneven_labels(batch: Any) -> bool:
    """True if rows of the batch have different numbers of labels that aren't ignored."""
    labels, _ = _labels(batch)
    if labels is None:
        return False
    counts = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    return len(set(counts.tolist())) > 1


def _labels(batch: Any) -> tuple[Any, bool]:
    """The whole numbers that are a batch's labels, or None, and whether they are shifted
    already.
    """
    shifted = hasattr(batch, "get") and "shift_labels" in batch
    labels = batch.get("shift_labels" if shifted else "labels") if hasattr(batch, "get") else None
    found = isinstance(labels, torch.Tensor) and labels.ndim and not labels.is_floating_point()
    return (labels if found else None), shifted


class _TrainerCheck:
    """Checks a Trainer's loss, as one process computes it and as one of `world`, and what it
    gathers `in_passes`.
    """

    def __init__(
        self, trainer: Any, checked: CheckBatch, world: int, in_passes: Gathering | None
    ) -> None:
        self._trainer, self._checked, self._world, self._in_passes = (
            trainer,
            checked,
            world,
            in_passes,
        )
        self._measure = LossMeasure(trainer.model, [trainer])

    def find(self) -> TrainerLoss:
        batch, measure = self._checked.whole, self._measure
        items = self._count_items(batch)
        with measure.open():
            loss = measure.compute(self._function(lambda _: items), batch)
            halved = (
                loss
                if items is None
                else measure.compute(self._function(lambda _: 2 * items), batch)
            )
            with processes(self._trainer.accelerator, 1):
                alone = measure.compute(self._function(lambda _: items), batch)
            shifted = loss
            if self._in_passes is not None:
                with self._in_passes.alone(SHIFT):
                    shifted = measure.compute(self._function(lambda _: items), batch)
        multiplied = self._world if abs(loss - self._world * alone) < abs(loss - alone) else 1
        near = measure.rounding * abs(loss)
        if abs(loss - shifted) > near:
            raise RequestError(
                "The loss depends on figures that it gathers over the ranks, and passes "
                "gather them of fewer rows.",
                "Make a plan without passes (evener balance --micro off).",
            )
        if abs(loss - 2 * halved) <= near:
            return self._find_sum(multiplied)
        if abs(loss - halved) > near:
            raise RequestError(
                f"The loss of {sum(self._checked.rows)} rows is {loss:.6g}, and {halved:.6g} "
                f"where num_items_in_batch"
                " is twice as large: only a part of it is divided by that number.",
                f"{PARTIAL_REMEDY} {REMEDY}",
            )
        meaning = LossCheck(measure, self._checked, count_labels).find_meaning(
            self._function(lambda _: items)
        )
        return TrainerLoss(meaning.mean_over[0], multiplied, len(meaning.mean_over) == 1)

    def _find_sum(self, multiplied: int) -> TrainerLoss:
        """The meaning of a loss that is divided by the number of items: a mean over each part's own
        items.
        """
        check = LossCheck(
            self._measure, self._checked, lambda batch: {ITEMS: float(self._count_items(batch))}
        )
        check.find_meaning(self._function(self._count_items), {ITEMS})
        return TrainerLoss(ITEMS, multiplied)

    def _count_items(self, batch: Any) -> Any:
        with processes(self._trainer.accelerator, 1):
            return self._trainer._get_num_items_in_batch([batch], self._trainer.args.device)

    def _function(self, count: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The trainer's loss of a batch with as many items as `count` says."""
        trainer = self._trainer

        def compute(batch: Any) -> Any:
            inputs = trainer._prepare_inputs(batch)
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count(batch))

        return compute


def _mask_some(checked: CheckBatch) -> CheckBatch:
    """The batch with half of its first row's labels ignored, where each row has as many as any
    other.
    """
    counts = [count_labels(part) for part in checked.parts]
    shares = {
        counted.get("labels", 0.0) / rows
        for counted, rows in zip(counts, checked.rows, strict=True)
    }
    if not counts[0].get("shifted labels") or len(shares) > 1:
        return checked
    cut = None if checked.cut is None else (_mask_row(checked.cut[0]), *checked.cut[1:])
    return CheckBatch(
        _mask_row(checked.whole),
        (_mask_row(checked.parts[0]), *checked.parts[1:]),
        checked.rows,
        cut,
    )


def _mask_row(batch: Any) -> Any:
    same = copy.copy(batch)
    labels = same["labels"].clone()
    places = (labels[0] != IGNORED).nonzero()
    for place in places[len(places) // 2 :]:
        labels[(0, *place)] = IGNORED
    same["labels"] = labels
    return same
