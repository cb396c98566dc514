"""The meaning of a Trainer's loss, found before the first step by gradients of a few rows.

Many models of transformers take `num_items_in_batch` and compute a mean of their own all the same,
so that what they accept says nothing about their loss. A loss means what makes the gradient of
parts that of all rows at once, as an audit compares them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import RequestError
from ..torch.audit.compute import Bench
from ..torch.audit.rows import FewRows
from ..torch.audit.step import audit, compare_losses
from ..torch.messages import gather_messages
from ..torch.sums.collectives import MeetingError
from ..training.audit import (
    CAUSES,
    REPEATS,
    GradientDifference,
    Sketch,
    are_losses_near,
    compare,
    describe,
)
from .audits import REMEDIES, TrainerWays
from .gathering import Gathering
from .loss import IGNORED, ITEMS, ROWS, TrainerLoss, assume_loss, count_labels

SHIFT = 1e4  # of gathered figures, by which a loss changes that depends on them
GROSS = 0.25  # of a gradient, a difference that isn't looked at more closely
MASKED = 2  # rows of which most labels are ignored, to tell labels from rows
LEFT = 4  # the part of their labels that is left: one of so many
TELLING = 0.25  # as much less than rows do labels have to weigh in a part, to tell them apart
PARTIAL = (
    "Leave out what is added for each batch, such as an auxiliary loss of experts"
    " (model.config.output_router_logits=False). " + REMEDIES["rows"]
)


def find_loss(
    trainer: Any,
    ways: TrainerWays,
    make: Callable[[], FewRows | None],
    gathering: Gathering,
    ignores: bool,
    in_parts: bool = False,
) -> TrainerLoss:
    """The meaning of the trainer's loss; RequestError on every rank where it is no mean over what
    it has. Where nothing can be seen it is what transformers takes it to be.

    `make` takes a few rows of its data. `ignores`: labels of the data are ignored, so that others
    may be, to tell means over rows from means over labels. On a CPU it is tried in any case; on a
    GPU a loss that doesn't know such labels would end the process. `in_parts`: one process asks
    that needs smaller passes; errors are raised.
    """
    passes = trainer._shares.passes
    calls = gathering.calls
    meets = gathering if in_parts or max(passes) > 1 else None

    def find() -> TrainerLoss | None:
        few = make()
        if few is None:
            return None
        if ignores or trainer.args.device.type == "cpu":
            masked = _mask_some(few)
            try:
                return LossFinder(trainer, ways, masked, meets).find()
            except (ArithmeticError, IndexError, RuntimeError):
                if masked is few:
                    raise  # else the loss may not know ignored labels
        return LossFinder(trainer, ways, few, meets).find()

    found = find() if in_parts else _find_together(find)
    if gathering.calls > calls and len(set(passes)) > 1:
        name = type(trainer).__bases__[-1].__name__
        raise RequestError(
            f"{name} gathers figures while it computes a loss, and ranks have different numbers of"
            " passes.",
            "Gather them in a callback, or make a plan without passes (evener balance --micro"
            " off).",
        )
    return assume_loss(trainer, trainer._shares.world) if found is None else found


class LossFinder:
    """Finds what a trainer's loss of a few rows is a mean over.

    `meets` gathers its figures, where passes would gather them of fewer rows.
    """

    def __init__(
        self, trainer: Any, ways: TrainerWays, few: FewRows, meets: Gathering | None
    ) -> None:
        self._ways = ways
        self._few = few
        self._meets = meets
        self._world = trainer._shares.world
        self._passes = trainer._shares.passes
        self._bench: Bench = ways.bench()
        self._repeats: list[Sketch] = []  # of the reference, once they are needed
        self._nearest = ROWS  # what makes the least difference

    def find(self) -> TrainerLoss | None:
        """What the loss is a mean over; None where these rows don't say, or ranks meet in it.

        RequestError where ranks would meet in it in different numbers of passes.
        """
        try:
            return self._find()
        except MeetingError:
            if len(set(self._passes)) > 1:
                raise RequestError(
                    "The loss meets other ranks, by torch.distributed or in a layer, and ranks have"
                    " different numbers of passes.",
                    "Make a plan without passes (evener balance --micro off).",
                ) from None
            return None

    def _find(self) -> TrainerLoss | None:
        with self._bench.open(moves=True):
            reference = self._bench.sketch(self._ways.at_once(self._few))
            if not any(map(reference.size, reference.sums)):
                return None
            multiplied = self._find_multiplied(reference)
            names = (
                [ITEMS] if self._is_scaled(reference) else [ROWS, *count_labels(self._few.whole)]
            )
            fitting = self._find_fitting(names, multiplied, reference)
        if fitting:
            return TrainerLoss(fitting[0], multiplied, len(fitting) == 1)
        self._refuse(TrainerLoss(self._nearest, multiplied))
        return None

    def _find_multiplied(self, reference: Sketch) -> int:
        """The factor by which the trainer multiplies its loss where several processes train."""
        if self._world == 1 and self._meets is None:
            return 1
        calls = 0 if self._meets is None else self._meets.calls
        own = self._bench.sketch(self._ways.at_once(self._few, world=self._world))
        if self._meets is not None and self._meets.calls > calls:
            with self._meets.alone(SHIFT):
                shifted = self._bench.sketch(self._ways.at_once(self._few, world=self._world))
            if not self._agree(own, shifted):
                raise RequestError(
                    "The loss depends on figures that it gathers over the ranks, and passes gather"
                    " them of fewer rows.",
                    "Make a plan without passes (evener balance --micro off).",
                )
        largest = max(reference.sums, key=reference.size)
        half_way = (1 + self._world) / 2
        return self._world if own.size(largest) > half_way * reference.size(largest) else 1

    def _is_scaled(self, reference: Sketch) -> bool:
        """True if the loss is a sum divided by the number of items that it is given."""
        if self._ways.count_items([self._few.whole]) is None:
            return False
        halved = self._bench.sketch(self._ways.at_once(self._few, times=2))
        if self._agree(reference, _double(halved)):
            return True
        if self._agree(reference, halved):
            return False
        raise RequestError(
            f"The loss of {self._few.rows} rows is {reference.loss:.6g}, and {halved.loss:.6g}"
            " where num_items_in_batch is twice as large: only a part of it is divided by that"
            " number.",
            PARTIAL,
        )

    def _find_fitting(self, names: list[str], multiplied: int, reference: Sketch) -> list[str]:
        """Those of the names by whose weights the parts' gradients are that of all rows."""
        few = self._few
        fitting = []
        far = {}
        for name in names:
            loss = TrainerLoss(name, multiplied)
            trained = self._bench.sketch(self._ways.by_shares(few.parts, few.sizes, loss))
            if self._agree(reference, trained):
                fitting.append(name)
            found = compare(reference, trained)
            far[name] = 0.0 if found is None else found.relative
        self._nearest = min(names, key=far.__getitem__)
        return fitting

    def _agree(self, reference: Sketch, other: Sketch) -> bool:
        """True if two computations of the reference's rows differ by no more than rounding, in
        their gradients and in their losses: a small term, as that which spreads tokens over
        experts, may show in the loss alone at first.
        """
        found = compare(reference, other)
        if found is not None and found.relative > GROSS:
            return False
        if found is None and are_losses_near(reference, other):
            return True
        if not self._repeats:
            way = self._ways.at_once(self._few)
            self._repeats = [self._bench.sketch(way, number + 1) for number in range(REPEATS)]
        return compare(reference, other, self._repeats) is None and are_losses_near(
            reference, other, self._repeats
        )

    def _refuse(self, loss: TrainerLoss) -> None:
        """RequestError, unless an audit finds no difference, or a reason for it."""
        found = self._audit(loss)
        if found is None:
            return
        remedies = {name: each.remedy for name, each in CAUSES.items()} | REMEDIES
        difference, cause = found
        raise RequestError(describe(difference, cause, self._few.sizes), remedies[cause])

    def _audit(self, loss: TrainerLoss) -> tuple[GradientDifference, str] | None:
        """The difference, in gradients or else in losses, and its cause."""
        ways = self._ways.make(self._few, loss)
        found = audit(self._ways.bench(), ways, moves=True)
        if found.difference is not None:
            return found.difference, found.cause
        if found.fault or found.explained:
            return None
        return compare_losses(self._ways.bench(), ways)


def _double(sketch: Sketch) -> Sketch:
    """The sketch of a gradient that is twice as large."""
    sums = {name: tuple(2.0 * each for each in line) for name, line in sketch.sums.items()}
    return Sketch(sums, sketch.kinds, 2.0 * sketch.loss)


# ------------------------------------------------------------------ on all ranks


class _Finding(msgspec.Struct):
    """What a rank has found, or why it can't train."""

    found: TrainerLoss | None = None
    message: str = ""
    remedy: str = ""


def _find_together(find: Callable[[], TrainerLoss | None]) -> TrainerLoss | None:
    """The result of `find` on the first rank where it isn't None; every rank calls this.

    RequestError on every rank if it raises one on any. Any other error is the program's own, which
    its first step raises again, or memory ran out: what the loss means isn't known then.
    """
    own = _Finding()
    try:
        own.found = find()
    except RequestError as error:
        own = _Finding(message=error.message, remedy=error.remedy)
    except Exception:
        own = _Finding()
    every = [own]
    if dist.is_available() and dist.is_initialized():
        every = gather_messages(own, _Finding)
    for each in every:
        if each.message:
            raise RequestError(each.message, each.remedy)
    return next((each.found for each in every if each.found is not None), None)


# ------------------------------------------------------------------ labels that are ignored


def _mask_some(few: FewRows) -> FewRows:
    """The rows, with most labels of the first of them ignored where a part's labels weigh about as
    much as its rows do.
    """
    counts = [count_labels(part).get("shifted labels", 0.0) for part in few.parts]
    weight = few.sizes[0] / few.rows
    telling = abs(counts[0] - weight * sum(counts)) > TELLING * weight * sum(counts)
    if not all(counts) or telling:
        return few
    masked = min(MASKED, few.sizes[0], few.even_sizes[0])

    def mask(parts: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if parts is None else (_mask_rows(parts[0], masked), *parts[1:])

    cut = mask(few.cut)
    parts = cut if few.cut is few.parts else mask(few.parts)
    return msgspec.structs.replace(
        few,
        whole=_mask_rows(few.whole, masked),
        parts=parts,
        cut=cut,
        even=mask(few.even),
        even_cut=mask(few.even_cut),
    )


def _mask_rows(batch: Any, count: int) -> Any:
    """The batch with all but a part of its first rows' labels ignored."""
    same = copy.copy(batch)
    labels: torch.Tensor = same["labels"].clone()
    for row in range(count):
        places = (labels[row] != IGNORED).nonzero()
        for place in places[max(1, len(places) // LEFT) :]:
            labels[(row, *place)] = IGNORED
    same["labels"] = labels
    return same
