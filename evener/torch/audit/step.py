"""Compare the gradient that the training run computes for a few rows with the correct one.

The correct gradient is computed on one device or in equal parts. The training run's gradient is
computed in unequal parts, one for each device's share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import msgspec

from ...training.audit import (
    LOSS,
    LOSS_SAFETY,
    REPEATS,
    GradientDifference,
    Sketch,
    compare,
    find_cause,
    find_noises,
    floor,
)
from .computations import AuditChange, Computations
from .compute import GradientSketcher
from .randomness import SEED
from .row_numbers import find_random_count

REENTRANT = "use_reentrant=True"  # identifies PyTorch's error for reentrant checkpoints
# why a gradient can't be compared, as a part of a message
UNREPEATABLE = "the same rows give a different one each time that they are computed"
DRAWN = (
    "it depends on random numbers of Python or NumPy that are drawn for each row and differ in a"
    " part; torch's would work"
)
NEAR = 1e-5  # relative difference of two losses that are equal except for rounding


class Audited(msgspec.Struct, frozen=True):
    """Result of an audit: how two gradients of the same rows differ, and the likeliest cause."""

    difference: GradientDifference | None  # between the two gradients
    cause: str  # the difference's likeliest cause, or ""
    rows: int  # a digest of the rows
    sizes: tuple[int, ...]  # number of rows in each part
    fault: str  # why the audit is inconclusive, as a part of a message, or ""
    # False if the reference gradient has infinities or NaN; then the audit is inconclusive
    finite: bool
    sketch: Sketch  # random projections of the reference gradient
    changed: tuple[str, ...]  # names of buffers that a pass changes
    # differences that rounding causes, by tensor; None if they weren't measured
    noises: Mapping[str, float] | None = None
    # True if the only difference came from random numbers that depend on padding
    explained: bool = False


def audit(
    sketcher: GradientSketcher, computations: Computations, add_noise: bool = False
) -> Audited:
    """Compare the gradients of two computations, and find the likeliest cause of a difference.

    The losses are compared instead if torch.autograd.grad can't compute the gradients, for example
    because of reentrant checkpoints, or if no tensor gets a gradient. With `add_noise`, noise is
    added to weights whose values are all the same.
    """
    found = _audit_equal_rows(sketcher, computations, add_noise)
    # the audit has drawn the same numbers for every row, so that all rows count equally
    agrees = found.difference is None and found.finite and not (found.fault or found.explained)
    if computations.shares is None or not agrees or not sketcher.draws:
        return found
    difference = find_random_count(sketcher, computations.shares, add_noise)
    if difference is None:
        return found
    return msgspec.structs.replace(found, difference=difference, cause="draws")


def _audit_equal_rows(
    sketcher: GradientSketcher, computations: Computations, add_noise: bool
) -> Audited:
    """Compare two gradients while every row draws the same random numbers.

    Compare the losses instead if the gradients can't be computed or no tensor gets one.
    """
    try:
        found = _try_quick_passes(sketcher, computations, add_noise) or _audit(
            sketcher, computations, add_noise
        )
        if found.sketch.sums or sketcher.losses_only:
            return found  # otherwise no weight had a gradient
    except RuntimeError as error:
        if REENTRANT not in str(error):
            raise
    sketcher.losses_only = True
    return _audit(sketcher, computations, add_noise)


def _try_quick_passes(
    sketcher: GradientSketcher, computations: Computations, add_noise: bool
) -> Audited | None:
    """Run an audit with faster passes, without intercepting random operations.

    The result is None if such passes aren't possible or don't show that the gradients agree.
    """
    if not sketcher.may_be_quick:
        return None
    with sketcher.open(add_noise):
        reference = sketcher.sum_quickly(computations.reference)
        trained = None if reference is None else sketcher.sum_quickly(computations.trained)
        if reference is None or trained is None:
            return None
        sketches = sketcher.read(reference), sketcher.read(trained)
    if compare(*sketches) is not None:
        return None
    return _report_agreement(sketcher, computations, sketches[0])


def _audit(sketcher: GradientSketcher, computations: Computations, add_noise: bool) -> Audited:
    with sketcher.open(add_noise):
        return _Comparison(sketcher, computations).judge()


class _Comparison:
    """Compares two gradients of the same rows, and looks for the cause of a difference."""

    # both gradients are computed on creation, and more gradients to explain a difference

    def __init__(self, sketcher: GradientSketcher, computations: Computations) -> None:
        self._sketcher = sketcher
        self._computations = computations
        self._reference = sketcher.sketch(computations.reference)
        drawn = sketcher.drawn
        self._trained = sketcher.sketch(computations.trained)
        self._draws_by_row = sketcher.drawn != drawn
        # of the reference, made if a difference may not be rounding
        self._repeats: list[Sketch] = []
        self._noises: Mapping[str, float] | None = None

    def judge(self) -> Audited:
        """Compare the gradients, allowing for rounding, and return the result."""
        sketcher, computation = self._sketcher, self._computations.reference
        if compare(self._reference, self._trained) is None and not sketcher.measures_rounding:
            return self._result()
        if compare(self._reference, sketcher.sketch(computation)) is not None:
            return self._result(fault=UNREPEATABLE)
        self._repeats = [sketcher.sketch(computation, number + 1) for number in range(REPEATS)]
        if sketcher.measures_rounding:
            self._noises = find_noises(self._reference, self._repeats)
        difference = compare(self._reference, self._trained, self._repeats)
        return self._result() if difference is None else self._explain_difference(difference)

    def _explain_difference(self, difference: GradientDifference) -> Audited:
        """Test possible causes of a difference between the gradients; return the audit's result."""
        changes = self._computations.changes
        answers = {name: partial(self._is_right, each) for name, each in changes.items()}
        # if random numbers may explain the difference, the result has none
        if self._draws_by_row and self._do_draws_matter():
            return self._result(fault=DRAWN)
        padded = self._sketcher.draws > 0 and self._computations.pads
        if padded and self._do_draws_matter() and answers["collation"]():
            return self._result(explained=True)
        cause = find_cause(answers)
        if cause == "rows" and _are_near(*difference.losses):
            cause = "weight"
        return self._result(difference, cause)

    def _do_draws_matter(self) -> bool:
        """Return whether different random numbers would change the gradient."""
        others = self._sketcher.sketch(self._computations.reference, seed=SEED + 1)
        return compare(self._reference, others, self._repeats) is not None

    def _is_right(self, change: AuditChange) -> bool:
        """Return whether the gradients agree in a variant of the computations.

        `change` is the variant, which avoids one possible cause of the difference.
        """
        wanted = self._reference
        if change.reference is not None:
            wanted = self._sketcher.sketch(change.reference)
        return compare(wanted, self._sketcher.sketch(change.trained), self._repeats) is None

    def _result(
        self,
        difference: GradientDifference | None = None,
        cause: str = "",
        fault: str = "",
        explained: bool = False,
    ) -> Audited:
        found = _report_agreement(self._sketcher, self._computations, self._reference)
        return msgspec.structs.replace(
            found,
            difference=difference,
            cause=cause,
            fault=fault,
            noises=self._noises,
            explained=explained,
        )


def _report_agreement(
    sketcher: GradientSketcher, computations: Computations, reference: Sketch
) -> Audited:
    """Return the result of an audit in which the gradients agree.

    `reference` is the sketch of the correct gradient.
    """
    return Audited(
        difference=None,
        cause="",
        rows=computations.digest,
        sizes=computations.sizes,
        fault="",
        finite=all(math.isfinite(reference.size(name)) for name in reference.sums),
        sketch=reference,
        changed=tuple(sorted(sketcher.changed)),
    )


def compare_losses(
    sketcher: GradientSketcher, computations: Computations
) -> tuple[GradientDifference, str] | None:
    """Run two computations once each, and compare only their losses.

    The result is None if the losses agree. Otherwise it is the difference and its likeliest cause:
    "sum" if the loss is a sum over rows, or "rows" if, for any other reason, it isn't a mean over
    rows.
    """
    # everything is computed once, so a fixed multiple of the dtype's precision is allowed for
    # rounding
    with sketcher.open():
        reference = [sketcher.sketch([each]) for each in computations.reference]
        trained = [sketcher.sketch([each]) for each in computations.trained]
    right = sum(each.loss for each in reference)
    own = sum(each.loss for each in trained)
    kinds = {kind for each in reference for kind in each.kinds.values()} or {"float32"}
    allowed = LOSS_SAFETY * max(map(floor, kinds))
    scale = max(abs(right), abs(own)) or 1.0
    if abs(own - right) <= allowed * scale:
        return None
    changed = computations.changes["sum"].trained
    whole = [
        each.loss * float(other.weight) / float(piece.weight)
        for each, piece, other in zip(trained, computations.trained, changed, strict=True)
    ]
    cause = "sum" if abs(sum(whole) - right) <= allowed * scale else "rows"
    relative = abs(own - right) / scale
    return GradientDifference(LOSS, relative, allowed, right, own, (right, own)), cause


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))
