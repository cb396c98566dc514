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
REENTRANT = "use_reentrant=True"  # in PyTorch's words for such a checkpoint
# why a gradient can't be compared, as a part of a sentence
UNREPEATABLE = "the same rows give another one each time that they are computed"
DRAWN = (
    "it goes by random numbers of Python or NumPy that are drawn for each row, and are other ones"
    " in a part; torch's would do"
)
NEAR = 1e-5  # of two losses that are the same but for rounding


class AuditChange(msgspec.Struct, frozen=True, eq=False):
    """The way that trains with one thing changed, and the reference with the same thing changed, if
    that is another.
    """

    trained: Way
    reference: Way | None = None


class Ways(msgspec.Struct, frozen=True, eq=False):
    """The ways to compute a few rows: as they should be, as they are trained, and, by the cause of
    a difference, as they are trained with one thing changed.
    """

    reference: Way
    trained: Way
    changes: Mapping[str, AuditChange] = {}
    sizes: tuple[int, ...] = ()  # the rows of the parts
    digest: int = 0  # of all that is in the rows
    pads: bool = False  # parts that are collated by themselves have other lengths


class Audited(msgspec.Struct, frozen=True):
    """The result of an audit: a difference with its cause, or none.

    `fault` is why nothing can be said, as a part of a sentence; nothing can be said either where
    the reference isn't `finite`. `sketch` is that of the reference, `noises` what rounding makes of
    it where the bench measures that, and `changed` the buffers that a pass changes. A difference is
    `explained` by random numbers that go by the length to which rows are padded.
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
    """Compute a few rows both ways; `moves` as in `Bench.open`.

    Where gradients can't be taken, as reentrant checkpoints don't let autograd.grad, the losses are
    compared alone.
    """
    try:
        found = _audit(bench, ways, moves)
        if found.sketch.sums or bench.losses_only:
            return found  # else no weight's gradient was to be had
    except RuntimeError as error:
        if REENTRANT not in str(error):
            raise
    bench.losses_only = True
    return _audit(bench, ways, moves)


def _audit(bench: Bench, ways: Ways, moves: bool) -> Audited:
    with bench.open(moves):
        reference = bench.sketch(ways.reference)
        drawn = bench.drawn
        trained = bench.sketch(ways.trained)
        draws_by_row = bench.drawn != drawn
        found = partial(_result, bench, ways, reference)
        first = compare(reference, trained)
        if first is None and not bench.measures:
            return found(None)
        again = bench.sketch(ways.reference)
        if compare(reference, again) is not None:
            return found(None, fault=UNREPEATABLE)
        repeats = [bench.sketch(ways.reference, number + 1) for number in range(REPEATS)]
        if bench.measures:
            found = partial(found, noises=find_noises(reference, repeats))
        difference = compare(reference, trained, repeats)
        if difference is None:
            return found(None)
        answers = {
            name: partial(_is_right, bench, reference, change, repeats)
            for name, change in ways.changes.items()
        }
        if draws_by_row or (bench.draws and ways.pads):
            others = bench.sketch(ways.reference, seed=SEED + 1)
            matter = compare(reference, others, repeats) is not None
            if matter and draws_by_row:
                return found(None, fault=DRAWN)
            if matter and answers["collation"]():
                return found(None, explained=True)
        cause = find_cause(answers)
        if cause == "rows" and _are_near(*difference.losses):
            cause = "weight"
        return found(difference, cause)


def compare_losses(bench: Bench, ways: Ways) -> tuple[GradientDifference, str] | None:
    """The difference between the losses of both ways, and its likeliest cause, by one pass of each
    piece whatever they give; None where there is none.
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


def _result(
    bench: Bench,
    ways: Ways,
    reference: Sketch,
    difference: GradientDifference | None,
    cause: str = "",
    fault: str = "",
    noises: Mapping[str, float] | None = None,
    explained: bool = False,
) -> Audited:
    changed = tuple(sorted(bench.changed))
    finite = all(math.isfinite(reference.size(name)) for name in reference.sums)
    return Audited(
        difference=difference,
        cause=cause,
        rows=ways.digest,
        sizes=ways.sizes,
        fault=fault,
        finite=finite,
        sketch=reference,
        changed=changed,
        noises=noises,
        explained=explained,
    )


def _is_right(
    bench: Bench, reference: Sketch, change: AuditChange, repeats: Sequence[Sketch]
) -> bool:
    wanted = reference if change.reference is None else bench.sketch(change.reference)
    return compare(wanted, bench.sketch(change.trained), repeats) is None


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))
