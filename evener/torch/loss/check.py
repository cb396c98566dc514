"""The check of a training's loss before its first step: what it is a mean over."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ...errors import RequestError
from ...training.loss_check import LossFigures, LossMeaning, describe, judge
from ..audit.randomness import SEED, seed_all
from ..audit.state import kept_state
from ..messages import gather_messages
from ..rows.sampler import UnevenBatchSampler
from ..rows.structure import cut_rows, tensors_in
from .measure import Compute, LossMeasure

NOTHING = 1e-2  # of the rounding: a smaller loss is 0 but for that, and says nothing
ROWS, CANDIDATES = 8, 32  # rows that are computed, and those that they are chosen from
REMEDY = "Change the loss to such a mean, or train on one device."

Found = TypeVar("Found")
Count = Callable[
    [Any], Mapping[str, float]
]  # of a batch: what its loss may be a mean over, but for rows


class CheckBatch(msgspec.Struct, frozen=True):
    """A few rows as one batch and as two unequal parts, which are collated as they would be on two
    devices.
    """

    whole: Any
    parts: tuple[Any, ...]
    rows: tuple[int, ...]
    cut: tuple[Any, ...] | None = None  # the parts as cut from the whole, padded as it is


def make_check_batch(
    dataset: Any, sampler: UnevenBatchSampler, collate: Callable[[list[Any]], Any]
) -> CheckBatch | None:
    """Rows that differ in length and class, as far as the data's do; None for fewer than two
    rows.
    """

    def collated(items: Sequence[Any], seed: int = SEED) -> Any:
        seed_all(seed)
        return collate(list(items))

    with kept_state():
        chosen = _choose_rows(dataset, sampler.sample_rows(ROWS, CANDIDATES - ROWS), collated)
        if len(chosen) < 2:
            return None
        first = max(1, len(chosen) * 3 // 8)
        whole, rows = collated(chosen), (first, len(chosen) - first)
        cut = _cut(whole, first, len(chosen))
        if cut is not None and not all(
            map(torch.equal, tensors_in(whole), tensors_in(collated(chosen, SEED + 1)))
        ):
            return CheckBatch(
                whole, cut, rows
            )  # a collator that masks at random makes other parts than it cuts
        return CheckBatch(whole, (collated(chosen[:first]), collated(chosen[first:])), rows, cut)


def _choose_rows(
    dataset: Any, order: Sequence[int], collated: Callable[[Sequence[Any]], Any]
) -> list[Any]:
    """The first rows of the order, or rows from all of it if those are alike; sorted by classes and
    lengths.
    """
    items = [dataset[row] for row in order[:ROWS]]
    signs = _list_signs(items, collated)
    if any(len(set(values)) < 2 for values in zip(*signs, strict=False)):
        items += [dataset[row] for row in order[ROWS:]]
        signs = _list_signs(items, collated)
    ranked = (
        sorted(range(len(items)), key=lambda place: (signs[place], place))
        if signs
        else range(len(items))
    )
    count = min(ROWS, len(items))
    return [items[ranked[place * len(items) // count]] for place in range(count)]


def _cut(whole: Any, first: int, rows: int) -> tuple[Any, Any] | None:
    """The parts of a collated batch; None for one that has no row for each sample."""
    try:
        return cut_rows(whole, 0, first, rows), cut_rows(whole, first, rows, rows)
    except RequestError:
        return None


def _list_signs(
    items: Sequence[Any], collated: Callable[[Sequence[Any]], Any]
) -> list[tuple[int, ...]]:
    """The classes and lengths of each row; empty if rows can't be collated one by one."""
    try:
        return [tuple(map(_sign, tensors_in(collated([item])))) for item in items]
    except Exception:  # a collator of pairs, say
        return []


def _sign(tensor: torch.Tensor) -> int:
    if tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
        return int(tensor)
    return int((tensor != -100).sum())


class LossCheck:
    """Checks a loss on a few rows; `count` says what it may be a mean over beside rows, `remedy`
    what to do if not.
    """

    def __init__(
        self, measure: LossMeasure, batch: CheckBatch, count: Count, remedy: str = REMEDY
    ) -> None:
        self.measure, self.batch, self._count, self._remedy = measure, batch, count, remedy

    def find_meaning(self, function: Compute, wanted: Collection[str] = ()) -> LossMeaning:
        """The meaning of the loss of `function`; RequestError if it is no mean, or none over what
        is `wanted`.
        """

        def fits(figures: LossFigures) -> bool:
            return bool(set(judge(figures).mean_over) & set(wanted or figures.counts))

        figures = self.figures(function)
        if not fits(figures) and self._is_random(function, figures):
            figures = self.figures(function, training=False)
        if not fits(figures):
            self._refuse(function, figures, fits)
        if self.measure.changed:
            warnings.warn(
                f"Each training pass changes the model's buffer {min(self.measure.changed)}: "
                f"with shares every device"
                " changes its own, once for each of its passes.",
                stacklevel=2,
            )
        return judge(figures)

    def figures(
        self, function: Compute, training: bool = True, parts: tuple[Any, ...] | None = None
    ) -> LossFigures:
        """The losses of the rows; ArithmeticError where its rows have none."""
        chosen = self.batch.parts if parts is None else parts
        with self.measure.open(training):
            whole, *losses = [
                self.measure.compute(function, each) for each in (self.batch.whole, *chosen)
            ]
        if (
            not math.isfinite(whole)
            or 0.0 < max(map(abs, (whole, *losses))) < NOTHING * self.measure.rounding
        ):
            raise ArithmeticError(f"the loss of {sum(self.batch.rows)} rows is {whole}")
        counted = [self._count(part) for part in chosen]
        counts = {name: tuple(each[name] for each in counted) for name in counted[0]}
        return LossFigures(
            whole, tuple(losses), {"rows": self.batch.rows, **counts}, self.measure.rounding
        )

    def _is_random(self, function: Compute, figures: LossFigures) -> bool:
        """True if random numbers explain figures that don't fit: not PyTorch's own, or as many as
        padding makes.
        """
        with self.measure.open():
            other = self.measure.compute(function, self.batch.whole, SEED + 1)
        if abs(other - figures.whole) > figures.rounding * abs(figures.whole):
            return True
        cut = self.batch.cut if self.measure.randomness.draws else None
        return cut is not None and bool(judge(self.figures(function, parts=cut)).mean_over)

    def _refuse(
        self, function: Compute, figures: LossFigures, fits: Callable[[LossFigures], bool]
    ) -> NoReturn:
        cut = self.batch.cut
        if cut is not None and fits(self.figures(function, parts=cut)):
            raise RequestError(
                f"The loss of the same {sum(self.batch.rows)} rows changes with their "
                f"padding, and shares pad their"
                " rows to other lengths.",
                "Pad all rows to one length, and give the model their attention mask.",
            )
        raise RequestError(describe(figures), self._remedy)


class _Finding(msgspec.Struct):
    """What a rank has found, or why it can't train."""

    found: Any = None
    message: str = ""
    remedy: str = ""


def find_together(
    find: Callable[[], Found | None], kind: type[Found], strict: bool = False
) -> Found | None:
    """The result of `find`, a `kind`, on the first rank where it isn't None; every rank calls this.

    RequestError on every rank if it raises one on any. Any other error is the user's code's, or out
    of memory: a warning says that the loss wasn't checked, and the training says the rest; with
    `strict` it is raised.
    """
    own = _Finding()
    try:
        own.found = find()
    except RequestError as error:
        own = _Finding(message=error.message, remedy=error.remedy)
    except Exception as error:
        if strict:
            raise
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        warnings.warn(f"The loss wasn't checked before the first step: {reason}.", stacklevel=4)
    every = [own]
    if dist.is_available() and dist.is_initialized():
        every = gather_messages(own, _Finding)
    for each in every:
        if each.message:
            raise RequestError(each.message, each.remedy)
    found = next((each.found for each in every if each.found is not None), None)
    return None if found is None else msgspec.convert(found, kind)
