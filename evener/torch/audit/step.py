"""The audit of one step: compute the gradient of a few rows in two ways, and find why they differ.

One way is the reference, as one device computes the rows; the other is how the training run
computes them.
"""

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
REENTRANT = "use_reentrant=True"  # identifies PyTorch's error for reentrant checkpoints
# why a gradient can't be compared, as a part of a message
UNREPEATABLE = "the same rows give another one each time that they are computed"
DRAWN = (
    "it goes by random numbers of Python or NumPy that are drawn for each row, and are other ones"
    " in a part; torch's would do"
)
NEAR = 1e-5  # relative difference of two losses that are equal except for rounding


class AuditChange(msgspec.Struct, frozen=True, eq=False):
    """A variant of an audit's computations, with one possible cause of differences removed.

    `trained` is how the training run computes, without that cause. `reference` is the reference
    computation without that cause, or None if the reference needs no change.
    """

    trained: Way
    reference: Way | None = None


class Ways(msgspec.Struct, frozen=True, eq=False):
    """The ways to compute a few rows.

    `reference` is the correct way, and `trained` is the way in which the training run computes.
    `changes` has an AuditChange for each possible cause of a difference: if the changed way agrees
    with the reference, that is the cause.
    """

    reference: Way
    trained: Way
    changes: Mapping[str, AuditChange] = {}
    sizes: tuple[int, ...] = ()  # the number of rows in each part
    digest: int = 0  # of all numbers in the rows
    pads: bool = False  # parts that are collated separately are padded to other lengths


class Audited(msgspec.Struct, frozen=True):
    """The result of an audit: a difference and its cause, or None and "" without a difference.

    `fault` is the reason why the audit is inconclusive, as a part of a message. The audit is also
    inconclusive if the reference isn't `finite`. `rows` is a digest of the rows, and `sizes` has
    the number of rows in each part. `sketch` is the sketch of the reference, and `changed` has the
    names of buffers that a pass changes. `noises` has the differences that rounding causes, by
    tensor, if the bench measures them. `explained` is True if there was a difference, but only from
    random numbers that depend on the length to which rows are padded.
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
    """Compute a few rows in the reference way and the training run's way; compare the gradients.

    `moves` is passed to `Bench.open`. If gradients can't be computed, only the losses are compared.
    Reentrant checkpoints, for example, don't support torch.autograd.grad.
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
    """Return the result of an audit with quick passes, or None if they can't be used or differ."""
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
    """Compares the gradients of two ways to compute rows, inside the context of `Bench.open`."""

    def __init__(self, bench: Bench, ways: Ways) -> None:
        self._bench = bench
        self._ways = ways
        self._reference = bench.sketch(ways.reference)
        drawn = bench.drawn
        self._trained = bench.sketch(ways.trained)
        self._draws_by_row = bench.drawn != drawn
        self._repeats: list[
            Sketch
        ] = []  # of the reference, made if a difference may not be rounding
        self._noises: Mapping[str, float] | None = None

    def judge(self) -> Audited:
        """Return the difference and its cause, or a result without a difference."""
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
        """Return the difference and its cause, unless random numbers explain the difference."""
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
        """True if another random seed changes the reference gradient."""
        others = self._bench.sketch(self._ways.reference, seed=SEED + 1)
        return compare(self._reference, others, self._repeats) is not None

    def _is_right(self, change: AuditChange) -> bool:
        """True if the changed way agrees with the reference."""
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
    """Return the result of an audit that has found no difference."""
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
    """Compare the losses of the reference way and the trained way, instead of their gradients.

    Return the difference and its likeliest cause, or None if there is no difference. Each piece is
    computed only once, so rounding isn't measured.
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
