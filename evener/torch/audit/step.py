"""The audit of one step: the gradient of a few rows both ways, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from .compute import Bench, Piece
from .randomness import SEED

Way = Sequence[Piece]
REENTRANT = "use_reentrant=True"  # names such a checkpoint in PyTorch's messages
# why a gradient can't be compared, as a part of a message
UNREPEATABLE = "the same rows give another one each time that they are computed"
DRAWN = (
    "it goes by random numbers of Python or NumPy that are drawn for each row, and are other ones"
    " in a part; torch's would do"
)
NEAR = 1e-5  # relative difference of two losses that are equal except for rounding


class AuditChange(msgspec.Struct, frozen=True, eq=False):
    """The way in which the training computes, with one thing changed.

    `reference` is the reference way with the same change, if it has to change too.
    """

    trained: Way
    reference: Way | None = None


class Ways(msgspec.Struct, frozen=True, eq=False):
    """The ways to compute a few rows.

    `reference` is the correct way, and `trained` is the way in which the training computes.
    `changes` has a changed `trained` for each possible cause of a difference: if it agrees with the
    reference, that is the cause.
    """

    reference: Way
    trained: Way
    changes: Mapping[str, AuditChange] = {}
    sizes: tuple[int, ...] = ()  # the rows of the parts
    digest: int = 0  # digest of all numbers in the rows
    pads: bool = False  # parts that are collated separately have other lengths


class Audited(msgspec.Struct, frozen=True):
    """The result of an audit: a difference with its cause, or none.

    `fault` is why the audit shows nothing, as a part of a message; it shows nothing either if the
    reference isn't `finite`. `sketch` is that of the reference, `noises` its differences by
    rounding if the bench measures them, and `changed` the buffers that a pass changes. A
    difference is `explained` if it comes from random numbers that depend on the length to which
    rows are padded.
    """

    difference: GradientDifference | None
    cause: str
    rows: int
    sizes: tuple[int, ...]
    fault: str
    finite: bool
    sketch: Sketch
    changed: tuple[str, ...]
    noises: Mapping[str, float] | None = None
    explained: bool = False


def audit(bench: Bench, ways: Ways, moves: bool = False) -> Audited:
    """Compute a few rows both ways and compare them; `moves` is that of `Bench.open`.

    If gradients can't be taken, only the losses are compared; reentrant checkpoints, for example,
    don't support autograd.grad.
    """
    try:
        found = _agree_quickly(bench, ways, moves) or _audit(bench, ways, moves)
        if found.sketch.sums or bench.losses_only:
            return found  # else no weight had a gradient
    except RuntimeError as error:
        if REENTRANT not in str(error):
            raise
    bench.losses_only = True
    return _audit(bench, ways, moves)


def _agree_quickly(bench: Bench, ways: Ways, moves: bool) -> Audited | None:
    """Return the audit if quick passes can be made and agree, else None."""
    if not bench.is_quick:
        return None
    with bench.open(moves):
        found = [bench.sum_quickly(way) for way in (ways.reference, ways.trained)]
        sketches = [bench.read(sums) for sums in found if sums is not None]
    if len(sketches) < 2 or compare(sketches[0], sketches[1]) is not None:
        return None
    return _report(bench, ways, sketches[0])


def _audit(bench: Bench, ways: Ways, moves: bool) -> Audited:
    with bench.open(moves):
        return _Comparison(bench, ways).judge()


class _Comparison:
    """Both ways' gradients, on an open bench."""

    def __init__(self, bench: Bench, ways: Ways) -> None:
        self._bench = bench
        self._ways = ways
        self._reference = bench.sketch(ways.reference)
        drawn = bench.drawn
        self._trained = bench.sketch(ways.trained)
        self._draws_by_row = bench.drawn != drawn
        self._repeats: list[
            Sketch
        ] = []  # of the reference, once a difference isn't surely rounding
        self._noises: Mapping[str, float] | None = None

    def judge(self) -> Audited:
        """Return the difference with its cause, or why there is none."""
        bench, way = self._bench, self._ways.reference
        if compare(self._reference, self._trained) is None and not bench.measures:
            return self._result()
        if compare(self._reference, bench.sketch(way)) is not None:
            return self._result(fault=UNREPEATABLE)
        self._repeats = [bench.sketch(way, number + 1) for number in range(REPEATS)]
        if bench.measures:
            self._noises = find_noises(self._reference, self._repeats)
        difference = compare(self._reference, self._trained, self._repeats)
        return self._result() if difference is None else self._explain(difference)

    def _explain(self, difference: GradientDifference) -> Audited:
        """Return the difference with its cause, unless random numbers account for it."""
        changes = self._ways.changes
        answers = {name: partial(self._is_right, each) for name, each in changes.items()}
        if self._draws_by_row and self._do_draws_matter():
            return self._result(fault=DRAWN)
        padded = self._bench.draws > 0 and self._ways.pads
        if padded and self._do_draws_matter() and answers["collation"]():
            return self._result(explained=True)
        cause = find_cause(answers)
        if cause == "rows" and _are_near(*difference.losses):
            cause = "weight"
        return self._result(difference, cause)

    def _do_draws_matter(self) -> bool:
        """True if other random numbers lead to another gradient."""
        others = self._bench.sketch(self._ways.reference, seed=SEED + 1)
        return compare(self._reference, others, self._repeats) is not None

    def _is_right(self, change: AuditChange) -> bool:
        """True if this change removes the difference."""
        wanted = self._reference
        if change.reference is not None:
            wanted = self._bench.sketch(change.reference)
        return compare(wanted, self._bench.sketch(change.trained), self._repeats) is None

    def _result(
        self,
        difference: GradientDifference | None = None,
        cause: str = "",
        fault: str = "",
        explained: bool = False,
    ) -> Audited:
        found = _report(self._bench, self._ways, self._reference)
        return msgspec.structs.replace(
            found,
            difference=difference,
            cause=cause,
            fault=fault,
            noises=self._noises,
            explained=explained,
        )


def _report(bench: Bench, ways: Ways, reference: Sketch) -> Audited:
    """Return an audit that has found no difference."""
    return Audited(
        difference=None,
        cause="",
        rows=ways.digest,
        sizes=ways.sizes,
        fault="",
        finite=all(math.isfinite(reference.size(name)) for name in reference.sums),
        sketch=reference,
        changed=tuple(sorted(bench.changed)),
    )


def compare_losses(bench: Bench, ways: Ways) -> tuple[GradientDifference, str] | None:
    """Return the difference between the losses of both ways, and its likeliest cause.

    Return None if there is no difference. Each piece is computed once, without repeats
    that measure rounding.
    """
    with bench.open():
        reference = [bench.sketch([each]) for each in ways.reference]
        trained = [bench.sketch([each]) for each in ways.trained]
    right = sum(each.loss for each in reference)
    own = sum(each.loss for each in trained)
    allowed = LOSS_SAFETY * max(floor(each.kinds.get(LOSS, "float32")) for each in reference)
    scale = max(abs(right), abs(own)) or 1.0
    if abs(own - right) <= allowed * scale:
        return None
    changed = ways.changes["sum"].trained
    whole = [
        each.loss * float(other.weight) / float(piece.weight)
        for each, piece, other in zip(trained, ways.trained, changed, strict=True)
    ]
    cause = "sum" if abs(sum(whole) - right) <= allowed * scale else "rows"
    relative = abs(own - right) / scale
    return GradientDifference(LOSS, relative, allowed, right, own, (right, own)), cause


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))
