"""What a loss in PyTorch is a mean over: tried on a few rows before the first step, by every trainer's adapter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from evener.errors import RequestError
from evener.loss_check import LossFigures, LossMeaning, describe, judge
from evener.torch_split.batch_tracker import tensors_in
from evener.torch_split.even_randomness import SEED
from evener.torch_split.loss_measure import Compute, LossMeasure
from evener.torch_split.nested_batch import cut_rows
from evener.torch_split.sampler import UnevenBatchSampler

ROWS = 8  # that are tried, and those that are looked at for rows that differ
CANDIDATES = 32
REMEDY = "Change the loss to such a mean, or train on one device; check=False trains without the check."

Count = Callable[[Any], Mapping[str, float]]  # of a batch: what its loss may be a mean over, but for rows


class Trial(msgspec.Struct, frozen=True):
    """A few rows as one batch and as two unequal parts, which are collated as they would be on two devices."""

    whole: Any
    parts: tuple[Any, ...]
    rows: tuple[int, ...]
    cut: tuple[Any, ...] | None = None  # the parts as cut from the whole, padded as it is


def make_trial(dataset: Any, sampler: UnevenBatchSampler, collate: Callable[[list[Any]], Any]) -> Trial | None:
    """A trial of rows that differ in length and class, as far as the data's do; None for fewer than two rows."""
    order = sampler.sample_rows(ROWS, CANDIDATES - ROWS)
    items = [dataset[row] for row in order[:ROWS]]
    signs = _list_signs(items, collate)
    if len(order) > ROWS and any(len(set(values)) < 2 for values in zip(*signs, strict=False)):
        items += [dataset[row] for row in order[ROWS:]]
        signs = _list_signs(items, collate)
    ranked = sorted(range(len(items)), key=lambda place: (signs[place], place)) if signs else range(len(items))
    chosen = [items[ranked[place * len(items) // min(ROWS, len(items))]] for place in range(min(ROWS, len(items)))]
    if len(chosen) < 2:
        return None
    first = max(1, len(chosen) * 3 // 8)
    rows = (first, len(chosen) - first)
    whole, again = _collate(collate, chosen, SEED), _collate(collate, chosen, SEED + 1)
    try:
        cut = cut_rows(whole, 0, first, len(chosen)), cut_rows(whole, first, len(chosen), len(chosen))
    except RequestError:
        return Trial(whole, (_collate(collate, chosen[:first], SEED), _collate(collate, chosen[first:], SEED)), rows)
    if not _same(whole, again):  # a collator that masks at random makes other parts than it cuts
        return Trial(whole, cut, rows)
    return Trial(whole, (_collate(collate, chosen[:first], SEED), _collate(collate, chosen[first:], SEED)), rows, cut)


def _list_signs(items: Sequence[Any], collate: Callable[[list[Any]], Any]) -> list[tuple[int, ...]]:
    """Of each row its classes and lengths; none where rows can't be collated one by one."""
    try:
        return [tuple(map(_sign, tensors_in(_collate(collate, [item], SEED)))) for item in items]
    except Exception:  # a collator of pairs, say
        return []


def _sign(tensor: torch.Tensor) -> int:
    if tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
        return int(tensor)
    return int((tensor != -100).sum())


def _collate(collate: Callable[[list[Any]], Any], items: Sequence[Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return collate(list(items))


def _same(one: Any, other: Any) -> bool:
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=False))
    return all(mine.shape == its.shape and bool((mine == its).all()) for mine, its in pairs)


class LossTrial:
    """Tries a loss on the rows of a trial; `count` says what it may be a mean over beside rows."""

    def __init__(self, measure: LossMeasure, trial: Trial, count: Count) -> None:
        self.measure, self.trial, self._count = measure, trial, count

    def find_meaning(self, function: Compute, wanted: Collection[str] = ()) -> LossMeaning:
        """What the loss of `function` is a mean over; RequestError where it is none, or none over what is `wanted`."""

        def fits(figures: LossFigures) -> bool:
            return bool(set(judge(figures).mean_over) & set(wanted or figures.counts))

        figures, shaken = self.figures(function), False
        if fits(figures) and not judge(figures).telling:
            figures, shaken = self.figures(function, shaken=True), True
        if not fits(figures) and self._is_random(function, figures, shaken):
            figures = self.figures(function, training=False, shaken=shaken)
        if not fits(figures):
            raise RequestError(self._describe(function, figures, shaken), REMEDY)
        return judge(figures)

    def figures(
        self, function: Compute, training: bool = True, shaken: bool = False, parts: tuple[Any, ...] | None = None
    ) -> LossFigures:
        """The losses of the trial; ArithmeticError where its rows have none."""
        chosen = self.trial.parts if parts is None else parts
        with self.measure.open(training, shaken):
            whole, *losses = [self.measure.compute(function, batch) for batch in (self.trial.whole, *chosen)]
        if not math.isfinite(whole):
            raise ArithmeticError(f"the loss of {sum(self.trial.rows)} rows is {whole}")
        counted = [self._count(part) for part in chosen]
        counts = {name: tuple(each[name] for each in counted) for name in counted[0]}
        return LossFigures(whole, tuple(losses), {"rows": self.trial.rows, **counts}, self.measure.rounding)

    def _is_random(self, function: Compute, figures: LossFigures, shaken: bool) -> bool:
        """Whether random numbers explain figures that don't fit: not PyTorch's own, or as many as padding makes."""
        with self.measure.open(shaken=shaken):
            other = self.measure.compute(function, self.trial.whole, SEED + 1)
        if abs(other - figures.whole) > figures.rounding * abs(figures.whole):
            return True
        cut = self.trial.cut if self.measure.draws else None
        return cut is not None and bool(judge(self.figures(function, shaken=shaken, parts=cut)).mean_over)

    def _describe(self, function: Compute, figures: LossFigures, shaken: bool) -> str:
        cut = self.trial.cut
        if cut is not None and judge(self.figures(function, shaken=shaken, parts=cut)).mean_over:
            return (
                f"The loss of the same {sum(self.trial.rows)} rows changes with their padding, and shares pad their"
                " rows to other lengths."
            )
        return describe(figures)


def agree(find: Callable[[], Any]) -> Any:
    """What `find` returns on the first rank; every rank calls it.

    RequestError on every rank if it raises one on any.
    """
    found: tuple[Any, str, str] = (None, "", "")
    try:
        found = (find(), "", "")
    except RequestError as error:
        found = (None, error.message, error.remedy)
    every: list[Any] = [found]
    if dist.is_available() and dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
    for _, message, remedy in every:
        if message:
            raise RequestError(message, remedy)
    return next((each for each, _, _ in every if each is not None), None)


def warn_unchecked(reason: object) -> None:
    """Say that a loss wasn't checked, and why."""
    warnings.warn(f"The loss wasn't checked before the first step: {reason}.", stacklevel=3)
