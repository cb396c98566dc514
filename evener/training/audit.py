"""The judge of audits: whether the way that trains gives the gradient that it should.

An audit takes a few rows of the batch at hand and computes their gradient twice: as one device
would (the reference), and by the very path that trains: parts of unequal size, each collated by
itself, weighted as in training. For shares to change nothing in what is learned, both have to be
the same but for rounding. This module says when to audit, which difference is more than rounding,
what follows from it and what is said. It knows no framework.

A framework's part (`evener/torch/audit` for PyTorch) uses it like this:

1. It makes one `Audits` for each training. In each step, once the gradients of the step are there
   and before the optimizer uses them, it asks `audits.begin(signature)`. The signature is anything
   hashable that changes with the program: which weights are trained, which function computes the
   loss, the types of the batch's tensors (not lengths that vary from batch to batch).
2. Where that is true it computes the gradient of some rows both ways and makes a `Sketch` of each:
   a few random sums of every tensor's gradient, `PROJECTIONS` for each. All sketches of an audit
   use the same random signs, so sums over parts can simply be added up (`Sketch.add`). Nothing of
   the gradient's size is kept. Random numbers, buffers and metrics are put back.
3. `compare(reference, trained)` is the largest `GradientDifference` that isn't surely rounding; as
   a rule there is none. Else it computes the reference again in `REPEATS` other ways that are equal
   but for rounding (each product disturbed by the precision of its type, rows in another order,
   more padding), and `compare(reference, trained, repeats)` decides.
4. For a difference it looks for the likeliest cause, changing one thing at a time, and names it by
   a key of `CAUSES`; `find_cause` has the order of the questions.
5. `audits.decide(difference)` says what follows, on every rank the same where all ranks have been
   told the largest difference of all; `describe` makes the sentences.
6. `compare_ranks` compares the references of ranks that have computed the same rows: where they
   differ, each measures its rounding by repeats in the next step, and the comparison is made again.
   `find_unequal` compares, between ranks, what each has summed up of its buffers and of the numbers
   that enter its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from statistics import median

import msgspec

FIRST_STEPS = (1, 4, 16, 64, 256, 1024)  # that are audited; then every EVERY-th
EVERY = 2000
EARLY = 64  # up to this step one difference ends the training; later it is confirmed first
AGAIN_AFTER = 3  # steps after a change another batch is audited
MOST_CHANGES = 32  # of the signature that are audited at once

PROJECTIONS = 4  # random sums of each tensor's gradient
REPEATS = 3  # computations of the reference that are equal but for rounding
MIXED = "float64 by float32"  # models of float64 often compute norms and softmax in float32
# The relative difference that is looked at more closely. By another order of summation a mean over
# rows was seen to differ by 5e-6 on a CPU and by up to 3.3e-4 on a GPU (a billion parameters, after
# 25 steps; 2e-5 with 100 million); the mildest wrong losses that were tried differ by 2.4e-4 and
# 1.2e-3.
FLOORS = {"float64": 1e-10, MIXED: 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
LOSS_SAFETY = 0.1  # of a gradient's floor may a loss differ by rounding
# A difference counts where it is as many times the largest one by rounding; on an H200 a decoder of
# a billion parameters came to 12 times what disturbed sums show.
SAFETY = 30.0
SMALL = 1e-4  # of the largest gradient's size: tensors with less than that are judged by it
SEEN_LOSS = 1e-6  # of the loss: the least by which two losses differ visibly


LOSS = "the loss"  # its name in a sketch, where gradients can't be taken


class Sketch(msgspec.Struct):
    """The gradient of some rows: random sums of each tensor's gradient, by name, and the loss.

    A sum of gradient * random sign has the gradient's norm as its standard deviation, so the
    differences of two sketches' sums say how far two gradients are apart. `kinds` are the tensors'
    types, such as "float32"; a tensor without a gradient isn't in it.
    """

    sums: dict[str, tuple[float, ...]] = {}
    kinds: dict[str, str] = {}
    loss: float = math.nan

    def add(self, name: str, kind: str, sums: Sequence[float]) -> None:
        """Add a part of a tensor's gradient."""
        before = self.sums.get(name, (0.0,) * len(sums))
        self.sums[name] = tuple(one + other for one, other in zip(before, sums, strict=True))
        self.kinds[name] = kind

    def size(self, name: str) -> float:
        """The norm of a tensor's gradient, as its sums estimate it; 0 for one that has none."""
        return _size(self.sums.get(name, ()))


class GradientDifference(msgspec.Struct, frozen=True):
    """The tensor whose gradients differ most, or "" where only the losses can tell.

    `relative` is the difference as a part of `reference`'s size, and `allowed` what rounding may
    make of it. Sizes are norms of gradients.
    """

    name: str
    relative: float
    allowed: float
    reference: float
    trained: float
    losses: tuple[float, float]


def compare(
    reference: Sketch, trained: Sketch, repeats: Sequence[Sketch] = ()
) -> GradientDifference | None:
    """The difference that is farthest above what rounding allows; None where none is above it.

    Without `repeats` rounding is taken to be the floor of the tensor's type; with them it is what
    they show as well, times SAFETY. None also where the reference itself isn't finite.
    """
    return _compare(reference, trained, find_noises(reference, repeats))


def _compare(
    reference: Sketch, trained: Sketch, noises: Mapping[str, float]
) -> GradientDifference | None:
    worst = find_largest(reference, trained, noises)
    return worst if worst is not None and worst.relative > worst.allowed else None


def are_losses_near(reference: Sketch, other: Sketch, repeats: Sequence[Sketch] = ()) -> bool:
    """True if the losses of two sketches differ by no more than rounding, as `compare` takes it."""
    scale = max(abs(reference.loss), abs(other.loss))
    rounding = max((abs(each.loss - reference.loss) for each in repeats), default=0.0)
    precision = LOSS_SAFETY * max(map(floor, reference.kinds.values()), default=0.0)
    return abs(other.loss - reference.loss) <= max(precision * scale, SAFETY * rounding)


def find_largest(
    reference: Sketch, trained: Sketch, noises: Mapping[str, float]
) -> GradientDifference | None:
    """The difference that is the largest part of what rounding allows, or times as much; `noises`
    are those of `find_noises`. None where the reference isn't finite, or has no gradient.
    """
    names = sorted(reference.sums.keys() | trained.sums.keys())
    largest = max((reference.size(name) for name in names), default=0.0)
    if not math.isfinite(largest):
        return None
    every = [_compare_tensor(name, reference, trained, largest, noises) for name in names]
    found = [each for each in every if each is not None]
    return max(found, key=lambda each: each.relative / each.allowed, default=None)


def _compare_tensor(
    name: str,
    reference: Sketch,
    trained: Sketch,
    largest: float,
    noises: Mapping[str, float],
) -> GradientDifference | None:
    """The difference of one tensor; None for one whose gradient is 0 both ways."""
    sizes = reference.size(name), trained.size(name)
    scale = _scale(name, reference, trained, largest)
    if scale == 0.0:
        return None
    relative = _distance(reference, trained, name) / scale
    if not math.isfinite(relative):
        relative = math.inf
    allowed = max(floor(_kind(name, reference, trained)), SAFETY * noises.get(name, 0.0))
    return GradientDifference(name, relative, allowed, *sizes, (reference.loss, trained.loss))


def floor(kind: str) -> float:
    """The relative difference that is rounding in any case, for tensors of this type."""
    return FLOORS.get(kind.removeprefix("complex"), FLOORS["float32"])


def find_noises(reference: Sketch, repeats: Sequence[Sketch]) -> dict[str, float]:
    """The relative differences by rounding alone, by tensor, as repeats of the reference show them.

    A tensor's own are few random figures, which may be small by chance: none is taken to be less
    than the median of all tensors.
    """
    if not repeats:
        return {}
    largest = max(map(reference.size, reference.sums), default=0.0)
    own = {}
    for name in reference.sums:
        scale = _scale(name, reference, reference, largest)
        if scale > 0.0:
            own[name] = max(_distance(reference, each, name) / scale for each in repeats)
    usual = median(own.values()) if own else 0.0
    return {name: max(noise, usual) for name, noise in own.items()}


def _scale(name: str, one: Sketch, other: Sketch, largest: float) -> float:
    """The size by which a tensor's difference is judged.

    A gradient that is 0 but for rounding, as that of a bias before a softmax, has no size of its
    own: rounding there is a part of what was added up, which is as large as other tensors'.
    """
    return max(one.size(name), other.size(name), SMALL * largest)


def _kind(name: str, one: Sketch, other: Sketch) -> str:
    return one.kinds.get(name) or other.kinds.get(name, "float32")


def _distance(one: Sketch, other: Sketch, name: str) -> float:
    first = one.sums.get(name)
    second = other.sums.get(name)
    if first is None or second is None:
        return _size(first or second or ())
    return _size([a - b for a, b in zip(first, second, strict=True)])


def _size(sums: Sequence[float]) -> float:
    if not sums:
        return 0.0
    return math.sqrt(sum(each * each for each in sums) / len(sums))


def compare_ranks(
    every: Sequence[Sketch], noises: Sequence[Mapping[str, float]] = ()
) -> GradientDifference | None:
    """The largest difference between the gradients that ranks have computed from the same rows.

    It is the weights that are alike on all ranks, so it comes from something else that the loss
    uses. Ranks may be devices of several kinds, which round differently: without `noises` a
    difference is a reason to measure them on each rank (`find_noises`), and with them it counts
    where it is more than rounding on any makes of it.
    """
    rounding: dict[str, float] = {}
    for own in noises:
        for name, noise in own.items():
            rounding[name] = max(noise, rounding.get(name, 0.0))
    differences = [_compare(every[0], each, rounding) for each in every[1:]]
    found = [each for each in differences if each is not None]
    return max(found, key=lambda each: each.relative, default=None)


# ------------------------------------------------------------------ when, and what follows


class Action(Enum):
    """What follows from an audit."""

    GO_ON = "go on"
    CONFIRM = "confirm"  # audit the next step too: nothing is said yet
    REFUSE = "refuse"  # end the training with an error
    GO_EVEN = "go even"  # only `evener run`: shares are even from now on
    WARN = "warn"  # on every rank and in the app; the training goes on


class Audits:
    """The audits of one training: when the next is due, and what follows from each.

    `evens`: where gradients differ, shares can go even for good (`evener run`). With `strict` a
    confirmed difference ends the training.
    """

    def __init__(self, evens: bool = False, strict: bool = False) -> None:
        self.step = 0  # steps that have begun
        self.over = False  # a difference was acted on, and nothing is left to look for
        self._evens = evens
        self._strict = strict
        self._signatures: set[Hashable] = set()
        self._again: set[int] = set()  # steps that are audited once more after a change
        self._confirms = False

    def begin(self, signature: Hashable = None) -> bool:
        """Count a step; True if it is to be audited."""
        self.step += 1
        if self.over:
            return False
        changed = self.sees(signature)
        again = self.step in self._again
        self._again.discard(self.step)
        return changed or again or self._confirms or is_audited(self.step)

    def sees(self, signature: Hashable) -> bool:
        """Note a signature; True if it is a new one, whose step is to be audited."""
        if self.over or signature in self._signatures or len(self._signatures) >= MOST_CHANGES:
            return False
        self._signatures.add(signature)
        self._again.add(self.step + AGAIN_AFTER)
        return True

    def changes(self) -> bool:
        """Note that something else has changed; True if its step is to be audited."""
        return self.sees(("change", len(self._signatures)))

    @property
    def confirms(self) -> bool:
        """True if the next step is audited to confirm a difference."""
        return self._confirms

    def decide(self, difference: GradientDifference | None) -> Action:
        """What follows from the audit of this step."""
        return self.decide_by(difference is not None)

    def decide_by(self, differs: bool) -> Action:
        """What follows from the audit of this step, where any rank has seen a difference."""
        confirmed, self._confirms = self._confirms, False
        if not differs:
            return Action.GO_ON
        if self.step > EARLY and not confirmed:
            self._confirms = True
            return Action.CONFIRM
        self.over = True
        if self._evens:
            return Action.GO_EVEN
        if self._strict or self.step <= EARLY:
            return Action.REFUSE
        return Action.WARN


def is_audited(step: int) -> bool:
    """True for the steps that are audited whatever happens; the first step is 1."""
    return step in FIRST_STEPS or step % EVERY == 0


# ------------------------------------------------------------------ why, and what is said


AT_ONCE = "at once"  # rows, as one device computes them
IN_EQUAL_PARTS = "in equal parts"  # as a program's own launcher computes them


class LikelyCause(msgspec.Struct, frozen=True):
    """A likely cause of a difference: why it is one, and what its user can do."""

    why: str
    remedy: str


_MEAN = (
    "For a mean over tokens or class weights, say what it is a mean over (count=, or"
    " split.loss(total, count)); for a loss over all rows of the batch, take split.gather(rows)."
)
CAUSES = {
    "collation": LikelyCause(
        "The batch function (collate_fn) makes something else of the same rows when other rows are"
        " beside them: rows padded to the longest beside them where the model has no mask, rows"
        " mixed with each other, or weights by the batch's classes",
        "Pad all rows to one length or give the model their mask, and do in the loss or the model"
        " what looks at the other rows of a batch.",
    ),
    "passes": LikelyCause(
        "The parts of a batch would be right on each device, but not in passes of it",
        "Make a plan without passes (evener balance --micro off), or change the loss to a mean"
        " over rows.",
    ),
    "count": LikelyCause(
        "The loss isn't a mean over what count= counts: it is a mean over rows",
        "Leave count= out.",
    ),
    "sum": LikelyCause(
        "The loss grows with the number of rows: it is a sum, not a mean over rows",
        "Divide it by the number of rows that the device has.",
    ),
    "rows": LikelyCause(
        "The loss of a batch isn't the mean of its parts' losses: it isn't a mean over rows",
        _MEAN,
    ),
    "state": LikelyCause(
        "Ranks compute other gradients of the same rows with the same weights: the loss uses"
        " something that each rank has noted of its own rows, such as a running mean, a memory"
        " bank, a baseline or a weight by earlier losses",
        "Note it of the whole batch: by split.mean(value), split.total(value) or"
        " split.gather(rows).",
    ),
    "weight": LikelyCause(
        "The losses agree and their gradients don't: a part of the gradient isn't weighted by the"
        " rows",
        "Let all that is trained lie on the way from the model's output to the loss.",
    ),
}


def find_cause(answers: Mapping[str, Callable[[], bool]]) -> str:
    """The name of the likeliest cause: the first question, in the order of CAUSES, that is true.

    A question computes the path that trains with one thing changed, and is true if the difference
    is gone then. "rows" where none is.
    """
    for name in CAUSES:
        if name in answers and answers[name]():
            return name
    return "rows"


def describe(
    difference: GradientDifference,
    cause: str | LikelyCause,
    rows: Sequence[int],
    step: int = 1,
    reference: str = AT_ONCE,
) -> str:
    """The sentences for a difference; `rows` are those of the parts, or none if ranks differ, and
    `reference` says how they are computed rightly.
    """
    likely = CAUSES[cause] if isinstance(cause, str) else cause
    tensor = LOSS if difference.name == LOSS else f"the gradient of {difference.name}"
    compared = "on two ranks"
    if rows:
        parts = " and ".join(map(str, rows))
        compared = (
            f"from {sum(rows)} rows {reference} and from {parts} of them, as shares compute it,"
        )
    amount = f"{difference.relative:.2g}" if math.isfinite(difference.relative) else "any amount"
    text = (
        f"{likely.why}. In step {step}, {tensor} {compared} differs by {amount} of its size"
        f" ({difference.reference:.4g} and {difference.trained:.4g};"
        f" rounding: up to {difference.allowed:.1g})"
    )
    first, second = difference.losses
    if math.isfinite(first) and abs(first - second) > SEEN_LOSS * abs(first):
        text += f"; the losses are {_write_apart(first, second)}"
    return f"{text}."


def _write_apart(one: float, other: float) -> str:
    """Two numbers with as many digits as tell them apart."""
    digits = 6
    while f"{one:.{digits}g}" == f"{other:.{digits}g}" and digits < 17:
        digits += 1
    return f"{one:.{digits}g} and {other:.{digits}g}"


# ------------------------------------------------------------------ state that differs by rank


def find_unequal(
    every: Sequence[Mapping[str, Sequence[float]]], near: float = 1e-4
) -> tuple[str, float, float] | None:
    """The first name whose figures aren't alike on all ranks, with the two that are farthest apart.

    `every` has, for each rank, a few figures of each buffer and of each number that enters the
    loss. What a rank alone has isn't compared. None where all are alike.
    """
    names = [name for name in every[0] if all(name in each for each in every)]
    for name in names:
        lines = [each[name] for each in every]
        if len({len(line) for line in lines}) > 1:
            return name, float(len(lines[0])), float(len(lines[-1]))
        for figures in zip(*lines, strict=True):
            low, high = min(figures), max(figures)
            if high - low > near * max(abs(low), abs(high)):
                return name, low, high
    return None
