"""Finds out what a Trainer's loss is a mean over, before the first training step.

A model's signature doesn't show this: many models accept `num_items_in_batch` but compute a mean of
their own. Therefore a few rows are computed together and in parts, and the gradients are compared
as in an audit.

For example, the gradients of the parts may add up to the gradient of all rows if they are weighted
by labels. Then the loss is a mean over labels.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import DeviceError, RequestError
from ..torch.audit.compute import GradientSketcher
from ..torch.audit.rows import FewRows
from ..torch.audit.step import REENTRANT, audit, compare_losses
from ..torch.messages import broadcast_message, gather_messages
from ..torch.step.recovery import is_out_of_memory
from ..torch.step.wrapped import is_sharded
from ..torch.sums.collectives import COLLECTIVES_REMEDY, USES_COLLECTIVES, CollectiveError
from ..torch.training_audits import NOT_AUDITED, describe_error
from ..training.audit import (
    CAUSES,
    FLOORS,
    LOSS,
    LOSS_SAFETY,
    REPEATS,
    SAFETY,
    GradientDifference,
    Sketch,
    are_losses_near,
    compare,
    describe,
)
from .audits import REMEDIES, TrainerComputations
from .gathering import Gathering
from .loss import IGNORED, ITEMS, ROWS, TrainerLoss, assume_loss, count_labels

SHIFT = 1e4  # added to gathered values, so that a loss that depends on them changes
# relative difference of two losses that is always rounding, if no gradients can be compared
NEAR_LOSS = LOSS_SAFETY * FLOORS["float32"]
GROSS = 0.25  # relative difference of gradients that is certain without repeats
MASKED = 2  # number of rows whose labels are masked, to distinguish labels from rows
LEFT = 4  # one of this many labels is kept in a masked row
TELLING = 0.25  # relative difference of weights by labels and by rows that distinguishes them
PARTIAL = (
    "Leave out what is added for each batch, such as an auxiliary loss of experts"
    " (model.config.output_router_logits=False). " + REMEDIES["rows"]
)

NO_MEMORY = "Memory ran out while a few rows' loss was checked, before the first step in shards."
MORE_MEMORY = (
    "Give this device a smaller part of the model or fewer rows in the plan. With check=False"
    " nothing is checked: do that if you know that the loss is a mean over rows or labels."
)


def find_loss(
    trainer: Any,
    computations: TrainerComputations,
    fetch_rows: Callable[[], FewRows | None],
    gathering: Gathering,
    accepts_ignored: bool,
    in_parts: bool = False,
) -> TrainerLoss:
    """Compute a few rows in different ways, and return what the Trainer's loss is a mean over.

    - `fetch_rows`: returns the rows, or None if they can't be fetched.
    - `accepts_ignored`: whether the loss is known to support ignored labels.
    - `in_parts`: whether a single process checks if it can split a batch.

    If the rows don't show what the loss is a mean over, the result follows the Trainer's settings.
    Raises RequestError if the loss doesn't fit any mean, or can't be computed in passes. Every rank
    has to call this.
    """
    passes = trainer._shares.passes
    calls = gathering.calls
    gathering_in_passes = gathering if in_parts or max(passes) > 1 else None

    def find() -> TrainerLoss | None:
        few_rows = fetch_rows()
        if few_rows is None:
            return None
        # Masking some labels helps to distinguish a mean over labels from a mean over rows. A loss
        # that doesn't support ignored labels raises an error on a CPU, but would kill the process
        # on a GPU.
        if accepts_ignored or trainer.args.device.type == "cpu":
            masked = _mask_some_labels(few_rows)
            try:
                return LossFinder(trainer, computations, masked, gathering_in_passes).find()
            except (ArithmeticError, IndexError, RuntimeError):
                if masked is few_rows:
                    raise  # otherwise the loss may not support ignored labels
        return LossFinder(trainer, computations, few_rows, gathering_in_passes).find()

    if in_parts:
        found = find()
    else:
        found = _find_on_first_rank(find, trainer.keeps_launcher, trainer._shares.is_sharded)
    if gathering.calls > calls and len(set(passes)) > 1:
        name = type(trainer).__bases__[-1].__name__
        raise RequestError(
            f"{name} gathers values while it computes a loss, and ranks have different numbers of"
            " passes.",
            "Gather them in a callback, or make a plan without passes (evener balance --micro"
            " off).",
        )
    return assume_loss(trainer, trainer._shares.world) if found is None else found


class LossFinder:
    """Finds what a loss is a mean over, such as rows or labels.

    It computes the gradient of a few rows at once and in parts, and compares them. If batches are
    split into passes, `gathering_in_passes` is the object that gathers values from ranks and
    passes; otherwise, it is None.
    """

    def __init__(
        self,
        trainer: Any,
        computations: TrainerComputations,
        few_rows: FewRows,
        gathering_in_passes: Gathering | None,
    ) -> None:
        self._in_step = trainer._shares.is_sharded or is_sharded(trainer.model)
        self._computations = computations
        self._few_rows = few_rows
        self._gathering = gathering_in_passes
        self._world = trainer._shares.world
        self._passes = trainer._shares.passes
        self._keeps_launcher = trainer.keeps_launcher
        self._sketcher: GradientSketcher = computations.make_sketcher()
        self._repeats: list[Sketch] = []  # repeats of the reference, computed when needed
        self._nearest = ROWS  # the name with the smallest difference
        self._difference: GradientDifference | None = None  # between the last compared losses

    def find(self) -> TrainerLoss | None:
        """Return what the loss is a mean over, or None if its gradients can't be compared.

        Raises RequestError if training with unequal shares would change the loss.
        """
        try:
            return self._find_by_losses_if_needed()
        except CollectiveError:
            if self._keeps_launcher:
                raise RequestError(USES_COLLECTIVES, COLLECTIVES_REMEDY) from None
            if len(set(self._passes)) > 1:
                raise RequestError(
                    "The loss communicates with other ranks, by torch.distributed or in a layer, "
                    "and ranks have different numbers of passes.",
                    "Make a plan without passes (evener balance --micro off).",
                ) from None
            return None

    def _find_by_losses_if_needed(self) -> TrainerLoss | None:
        """Find what the loss is a mean over, by gradients or, if that isn't possible, by losses."""
        try:
            return self._find()
        except RuntimeError as error:
            if REENTRANT not in str(error):
                raise
        # reentrant activation checkpointing doesn't support `torch.autograd.grad`
        self._sketcher.losses_only, self._repeats = True, []
        return self._find()

    def _find(self) -> TrainerLoss | None:
        with self._sketcher.open(add_noise=True):
            reference = self._sketcher.sketch_fast(self._computations.at_once(self._few_rows))
            sizes = list(map(reference.size, reference.sums))
            if self._agree_on(not any(sizes) or not math.isfinite(sum(sizes))):
                return None
            multiplied = self._find_factor(reference)
            names = (
                [ITEMS]
                if self._is_scaled(reference)
                else [ROWS, *count_labels(self._few_rows.whole)]
            )
            fitting = self._find_fitting(names, multiplied, reference)
        if fitting:
            return TrainerLoss(fitting[0], multiplied, len(fitting) == 1)
        self._refuse(TrainerLoss(self._nearest, multiplied))
        return None

    def _find_factor(self, reference: Sketch) -> int:
        """Return the factor that the Trainer multiplies its loss by if it sees several processes.

        It is 1 or the number of processes. `reference` has the gradients of a single process.
        """
        if self._world == 1 and self._gathering is None:
            return 1
        calls = 0 if self._gathering is None else self._gathering.calls
        own = self._sketcher.sketch_fast(
            self._computations.at_once(self._few_rows, world=self._world)
        )
        if self._gathering is not None and self._gathering.calls > calls:
            with self._gathering.local(SHIFT):
                shifted = self._sketcher.sketch_fast(
                    self._computations.at_once(self._few_rows, world=self._world)
                )
            if not self._agree_within_rounding(own, shifted):
                raise RequestError(
                    "The loss depends on values that it gathers over the ranks, and passes gather"
                    " them of fewer rows.",
                    "Make a plan without passes (evener balance --micro off).",
                )
        largest = max(reference.sums, key=reference.size)
        half_way = (1 + self._world) / 2
        return self._world if own.size(largest) > half_way * reference.size(largest) else 1

    def _is_scaled(self, reference: Sketch) -> bool:
        """Return whether the loss is divided by `num_items_in_batch`.

        If it is, doubling that number halves the gradient. Raises RequestError if only a part of
        the loss is divided.
        """
        if self._computations.count_items([self._few_rows.whole]) is None:
            return False
        halved = self._sketcher.sketch_fast(
            self._computations.at_once(self._few_rows, item_factor=2)
        )
        if self._agree_within_rounding(reference, _double(halved)):
            return True
        if self._agree_within_rounding(reference, halved):
            return False
        raise RequestError(
            f"The loss of {self._few_rows.rows} rows is {reference.loss:.6g}, and {halved.loss:.6g}"
            " where num_items_in_batch is twice as large: only a part of it is divided by that"
            " number.",
            PARTIAL,
        )

    def _find_fitting(self, names: list[str], multiplied: int, reference: Sketch) -> list[str]:
        """Return those of the means in `names`, such as "rows" and "labels", that fit the loss.

        A mean fits if the parts' gradients, weighted accordingly, add up to `reference`, the
        gradient of all rows. `multiplied` is the factor that the Trainer multiplies its loss by. If
        only losses can be compared, the mean that fits best comes first.
        """
        few_rows = self._few_rows
        fitting = []
        distances = {}
        for name in names:
            loss = TrainerLoss(name, multiplied)
            trained = self._sketcher.sketch_fast(
                self._computations.by_shares(few_rows.parts, few_rows.sizes, loss)
            )
            if self._agree_within_rounding(reference, trained):
                fitting.append(name)
            if self._sketcher.losses_only:
                distances[name] = _relate_losses(reference, trained)
            else:
                difference = compare(reference, trained)
                distances[name] = 0.0 if difference is None else difference.relative
        self._nearest = min(names, key=distances.__getitem__)
        if self._sketcher.losses_only:  # rounding may make means over rows and labels fit
            fitting.sort(key=distances.__getitem__)
        return fitting

    def _agree_on(self, own: bool) -> bool:
        """Return `own` or, for a sharded model, the first rank's value, so that all ranks agree.

        Every rank of a sharded model has to call this.
        """
        return bool(broadcast_message(own)) if self._in_step else own

    def _agree_within_rounding(self, reference: Sketch, other: Sketch) -> bool:
        """Return whether the gradients or losses of two computations are equal up to rounding."""
        if self._sketcher.losses_only:
            return self._have_near_losses(reference, other)
        found = compare(reference, other)
        if self._agree_on(found is not None and found.relative > GROSS):
            return False
        # a small term of the loss, such as one for balancing experts, may hardly change the
        # gradient
        if self._agree_on(found is None and are_losses_near(reference, other)):
            return True
        self._measure_rounding()
        self._difference = compare(reference, other, self._repeats)
        return self._agree_on(
            self._difference is None and are_losses_near(reference, other, self._repeats)
        )

    def _have_near_losses(self, reference: Sketch, other: Sketch) -> bool:
        """Return whether the losses of two computations are equal up to rounding."""
        relative = _relate_losses(reference, other)
        self._difference = _describe_loss_difference(reference, other, NEAR_LOSS)
        if self._agree_on(relative > GROSS):
            return False
        if self._agree_on(relative <= NEAR_LOSS):
            return True
        # the dtype's precision doesn't show its effect: a sum of many rounded terms is more precise
        self._measure_rounding()
        noise = max(_relate_losses(reference, repeat) for repeat in self._repeats)
        allowed = max(NEAR_LOSS, SAFETY * noise)
        self._difference = _describe_loss_difference(reference, other, allowed)
        return self._agree_on(relative <= allowed)

    def _measure_rounding(self) -> None:
        """Repeat the reference computation with rounding errors, to see how its gradients change.

        Only the first call does this; the results are kept for later comparisons.
        """
        if not self._repeats:
            computation = self._computations.at_once(self._few_rows)
            self._repeats = [
                self._sketcher.sketch(computation, number + 1) for number in range(REPEATS)
            ]

    def _refuse(self, loss: TrainerLoss) -> None:
        """Raise RequestError if an audit confirms that unequal shares change the gradient.

        Differences that are only due to random numbers are accepted.
        """
        found = self._audit_shares(loss)
        if found is None:
            return
        remedies = {name: each.remedy for name, each in CAUSES.items()} | REMEDIES
        difference, cause = found
        raise RequestError(describe(difference, cause, self._few_rows.sizes), remedies[cause])

    def _audit_shares(self, loss: TrainerLoss) -> tuple[GradientDifference, str] | None:
        """Compare the gradient of all rows at once with the combined gradient of unequal shares.

        Returns the difference and its cause, or None if they agree. If the gradients agree, the
        losses are compared too.
        """
        computations = self._computations.make(self._few_rows, loss)
        if self._in_step:  # an audit computes more passes on a rank that finds a difference
            found_loss = compare_losses(self._computations.make_sketcher(), computations)
            if found_loss is None and self._difference is not None:
                return self._difference, "rows"
            return found_loss
        found = audit(self._computations.make_sketcher(), computations, add_noise=True)
        if found.difference is not None:
            return found.difference, found.cause
        if found.fault or found.explained:
            return None
        return compare_losses(self._computations.make_sketcher(), computations)


def _relate_losses(one: Sketch, other: Sketch) -> float:
    """Return the difference of two losses, relative to the larger one; inf if one isn't finite."""
    size = max(abs(one.loss), abs(other.loss))
    if not math.isfinite(size):
        return math.inf
    return abs(one.loss - other.loss) / size if size else 0.0


def _describe_loss_difference(one: Sketch, other: Sketch, allowed: float) -> GradientDifference:
    """Return a GradientDifference that describes how two losses differ.

    `allowed` is the relative difference that rounding may cause.
    """
    return GradientDifference(
        name=LOSS,
        relative=_relate_losses(one, other),
        allowed=allowed,
        reference=abs(one.loss),
        trained=abs(other.loss),
        losses=(one.loss, other.loss),
    )


def _double(sketch: Sketch) -> Sketch:
    """Return a copy of a gradient sketch whose gradients and loss are doubled."""
    sums = {name: tuple(2.0 * each for each in line) for name, line in sketch.sums.items()}
    return Sketch(sums, sketch.kinds, 2.0 * sketch.loss)


# ------------------------------------------------------------------ on all ranks


class _Finding(msgspec.Struct):
    """One rank's result: what its loss is a mean over, or the message and remedy of an error."""

    found: TrainerLoss | None = None
    message: str = ""
    remedy: str = ""


def _find_on_first_rank(
    find: Callable[[], TrainerLoss | None], keeps_launcher: bool, is_sharded_model: bool
) -> TrainerLoss | None:
    """Find out on every rank what the loss is a mean over, and return the first rank's result.

    `find` does this on one rank. If it returns None or fails, the next rank's result is used; the
    result is None if no rank has one. A RequestError on any rank is raised on every rank. Other
    errors only lead to a warning; with `keeps_launcher`, they raise RequestError on every rank,
    unless memory ran out. For a sharded model, running out of memory raises DeviceError. Every rank
    has to call this.
    """
    # Another error means that memory ran out, or that the script has an error, which its first step
    # will raise again.
    own = _find_or_return_error(find, keeps_launcher, is_sharded_model)
    every = [own]
    if dist.is_available() and dist.is_initialized():
        every = gather_messages(own, _Finding)
    for each in every:
        if each.message:
            raise RequestError(each.message, each.remedy)
    return next((each.found for each in every if each.found is not None), None)


def _find_or_return_error(
    find: Callable[[], TrainerLoss | None], keeps_launcher: bool, is_sharded_model: bool
) -> _Finding:
    """Return what `find` finds on this rank or, if it fails, an error message for all ranks.

    - If `find` raises RequestError, its message and remedy are returned.
    - If memory runs out, a sharded model leads to a DeviceError. For other models, a warning is
      issued, and the result is empty.
    - Any other error leads to a warning and an empty result. With `keeps_launcher`, its message is
      returned instead.
    """
    try:
        return _Finding(find())
    except RequestError as error:
        return _Finding(message=error.message, remedy=error.remedy)
    except Exception as error:
        ran_out = is_out_of_memory(error)
        if is_sharded_model and ran_out:
            raise DeviceError(NO_MEMORY, MORE_MEMORY) from error
        why = "memory ran out" if ran_out else describe_error(error)
        if keeps_launcher and not ran_out:
            return _Finding(message=why)
        warnings.warn(NOT_AUDITED.format(why), stacklevel=2)
        return _Finding()


# ------------------------------------------------------------------ labels that are ignored


def _mask_some_labels(few_rows: FewRows) -> FewRows:
    """Mark most labels of some rows as ignored, if all rows have about equally many labels.

    Otherwise, a mean over rows and a mean over labels would be nearly equal, and couldn't be
    distinguished.
    """
    counts = [count_labels(part).get("shifted labels", 0.0) for part in few_rows.parts]
    weight = few_rows.sizes[0] / few_rows.rows
    telling = abs(counts[0] - weight * sum(counts)) > TELLING * weight * sum(counts)
    if not all(counts) or telling:
        return few_rows
    masked = min(MASKED, few_rows.sizes[0], few_rows.even_sizes[0])

    def mask(parts: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if parts is None else (_mask_rows(parts[0], masked), *parts[1:])

    cut = mask(few_rows.cut)
    parts = cut if few_rows.cut is few_rows.parts else mask(few_rows.parts)
    return msgspec.structs.replace(
        few_rows,
        whole=_mask_rows(few_rows.whole, masked),
        parts=parts,
        cut=cut,
        even=mask(few_rows.even),
        even_cut=mask(few_rows.even_cut),
    )


def _mask_rows(batch: Any, count: int) -> Any:
    """Return a copy of the batch whose first `count` rows keep only a quarter of their labels."""
    same = copy.copy(batch)
    labels: torch.Tensor = same["labels"].clone()
    for row in range(count):
        places = (labels[row] != IGNORED).nonzero()
        for place in places[max(1, len(places) // LEFT) :]:
            labels[(row, *place)] = IGNORED
    same["labels"] = labels
    return same
