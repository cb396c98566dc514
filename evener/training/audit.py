"""Audits: check that a training run computes the correct gradient.

An audit computes the gradient of a few rows of the current batch twice. The reference gradient is
computed as a single device would do it. The trained gradient is computed as in training: the rows
are divided into parts of unequal size, and each part is collated separately and weighted. If both
gradients are equal except for rounding, dividing a batch into shares doesn't change what the model
learns. This module decides when to audit, how large a difference may be to count as rounding, what
to do about a larger one, and what message to show. It doesn't depend on any framework.

The code for a framework (`evener/torch/audit` for PyTorch) uses it like this:

1. It creates one `Audits` for each training run. In each step, once the step's gradients are
   computed and before the optimizer uses them, it calls `audits.begin(signature)`. The signature is
   any hashable object that describes how the step is computed: which weights are trained, which
   function computes the loss, and which types the batch's tensors have. It doesn't contain lengths
   that vary from batch to batch.
2. If that returns True, it computes the gradient of some rows both ways, and creates a `Sketch`
   of each. A sketch has `PROJECTIONS` random projections of every tensor's gradient, so it is far
   smaller than the gradient. A projection is the sum of the gradient's elements with random signs.
   All sketches of an audit use the same signs, so the projections of several parts can simply be
   added (`Sketch.add`). The audit restores the state of random number generators, buffers and
   metrics.
3. `compare(reference, trained)` returns the largest `GradientDifference` that may be more than
   rounding; usually there is none. If there is one, the reference is computed again in `REPEATS`
   other ways that are equal except for rounding. For example, the results of products are changed
   by about the precision of their type, the rows are in another order, or there is more padding.
   Then `compare(reference, trained, repeats)` decides.
4. If the gradients differ, it looks for the likeliest cause by changing one thing at a time. Causes
   are named by the keys of `CAUSES`; `find_cause` tries them in order.
5. `audits.decide(difference)` returns the action to take. All ranks get the same action if each of
   them passes the largest difference of any rank. `describe` writes the message.
6. `compare_ranks` compares the reference gradients of ranks that have computed the same rows. If
   they differ, each rank measures its rounding by repeats in the next step, and they are compared
   again. `find_unequal` compares the ranks' buffers and the numbers that enter their losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from statistics import median

import msgspec

FIRST_STEPS = (1, 4, 16, 64, 256, 1024)  # audited steps; afterwards every EVERY-th step is audited
EVERY = 2000
# up to this step, one difference ends the training; in later steps it has to be confirmed
EARLY = 64
AGAIN_AFTER = 3  # number of steps after a change until another batch is audited
MOST_CHANGES = 32  # maximum number of signature changes that are audited immediately

PROJECTIONS = 4  # number of random projections per tensor's gradient
REPEATS = 3  # number of computations of the reference that are equal except for rounding
MIXED = "float64 by float32"  # float64 models often compute norms and softmax in float32
# Relative differences above which repeats measure the rounding. Another order of summation was
# measured to change a mean over rows by 5e-6 on a CPU and by up to 3.3e-4 on a GPU (a billion
# parameters, after 25 steps; 2e-5 with 100 million). The mildest wrong losses that were tried
# differ by 2.4e-4 and 1.2e-3.
FLOORS = {"float64": 1e-10, MIXED: 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
# Rounding of a gradient whose terms almost cancel, relative to the largest gradient of all tensors.
# A classifier's bias has such a gradient while both classes are predicted equally often. Up to 5.3
# times float32's precision was measured there, and repeats may show less by chance. Coarser types
# need no such limit, because their repeats always differ.
CANCELLED = {MIXED: 16 * 2.0**-23, "float32": 16 * 2.0**-23}
LOSS_SAFETY = 0.1  # rounding allowed in a loss, as a multiple of a gradient's floor
# A difference counts if it is this many times the largest difference by rounding; on an H200 a
# decoder of a billion parameters reached 12 times the difference of disturbed sums.
SAFETY = 30.0
# minimum norm by which a difference is divided, relative to the largest gradient's norm
SMALL = 1e-4
SEEN_LOSS = 1e-6  # smallest relative difference of two losses that is shown


LOSS = "the loss"  # the tensor's name in a sketch if no gradients can be computed


class Sketch(msgspec.Struct):
    """A small summary of a gradient, used to compare two computations of it.

    It contains a few random projections of each tensor's gradient (sums of its elements with random
    signs), and the loss.
    """

    # A sum adds up the gradient's elements with random signs. The standard deviation of such a sum
    # is the gradient's norm. So the differences between two sketches' sums estimate the distance of
    # the gradients.

    sums: dict[str, tuple[float, ...]] = {}
    kinds: dict[str, str] = {}
    loss: float = math.nan

    def add(self, name: str, dtype: str, sums: Sequence[float]) -> None:
        """Add the random projections of a tensor's gradient in one pass to those of earlier passes.

        `sums` are the projections. `dtype` is the tensor's type, such as "float32".
        """
        before = self.sums.get(name, (0.0,) * len(sums))
        self.sums[name] = tuple(one + other for one, other in zip(before, sums, strict=True))
        self.kinds[name] = dtype

    def size(self, name: str) -> float:
        """Return an estimate of the norm of a tensor's gradient, or 0 if the tensor is unknown."""
        return _size(self.sums.get(name, ()))


class GradientDifference(msgspec.Struct, frozen=True):
    """The tensor whose gradient differs most between two computations, and the difference.

    `reference` and `trained` are the norms of the tensor's gradient in the two computations.
    `relative` is the difference and `allowed` the largest difference that counts as rounding, both
    as fractions of the norm. `name` is the tensor's name, LOSS if only losses are compared, or ""
    if the difference can't be measured.
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
    """Compare two gradients, and return the largest difference that is more than rounding.

    `repeats` are further computations of the reference, from which the rounding is estimated.
    Returns None if the gradients agree, or if the reference isn't finite.
    """
    # Without `repeats`, the allowed rounding is the `floor` for the tensor's type, or more if the
    # tensor's gradient is very small beside the largest one. With `repeats`, it is at least SAFETY
    # times the rounding that they show.
    return _compare(reference, trained, find_noises(reference, repeats))


def _compare(
    reference: Sketch, trained: Sketch, noises: Mapping[str, float]
) -> GradientDifference | None:
    worst = find_largest(reference, trained, noises)
    return worst if worst is not None and worst.relative > worst.allowed else None


def are_losses_near(reference: Sketch, other: Sketch, repeats: Sequence[Sketch] = ()) -> bool:
    """Return True if two computations of a loss agree except for rounding.

    `repeats` are further computations of the reference, from which the rounding is estimated.
    """
    # the allowed rounding is computed as in `compare`, but with a lower floor
    scale = max(abs(reference.loss), abs(other.loss))
    rounding = max((abs(repeat.loss - reference.loss) for repeat in repeats), default=0.0)
    precision = LOSS_SAFETY * max(map(floor, reference.kinds.values()), default=0.0)
    return abs(other.loss - reference.loss) <= max(precision * scale, SAFETY * rounding)


def find_largest(
    reference: Sketch, trained: Sketch, noises: Mapping[str, float]
) -> GradientDifference | None:
    """Return the difference for the tensor whose gradients differ most.

    `reference` and `trained` are two computations of the gradient. `noises` maps each tensor to the
    relative difference that rounding causes. Returns None if nothing can be compared.
    """
    # to compare tensors, each difference is divided by the rounding that is allowed for its tensor
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
    """Compare a tensor's gradients from two computations, and return the difference.

    `largest` is the norm of the largest gradient of all tensors in the reference. `noises` maps
    each tensor to the relative difference that rounding causes, as `find_noises` estimates it.
    Returns None if all gradients are 0.
    """
    sizes = reference.size(name), trained.size(name)
    scale = _scale(name, reference, trained, largest)
    if scale == 0.0:
        return None
    relative = _distance(reference, trained, name) / scale
    if not math.isfinite(relative):
        relative = math.inf
    kind = _kind(name, reference, trained)
    cancelled = CANCELLED.get(kind, 0.0) * largest / scale
    allowed = max(floor(kind), SAFETY * noises.get(name, 0.0), cancelled)
    return GradientDifference(name, relative, allowed, *sizes, (reference.loss, trained.loss))


def floor(dtype: str) -> float:
    """Return the relative difference below which gradients of a dtype always count as equal.

    `dtype` is the tensors' type, such as "float32".
    """
    return FLOORS.get(dtype.removeprefix("complex"), FLOORS["float32"])


def find_noises(reference: Sketch, repeats: Sequence[Sketch]) -> dict[str, float]:
    """Estimate how much rounding changes each tensor's gradient, as a fraction of its norm.

    The estimate is the difference between the reference and its repeats. The result is empty if
    there are no repeats.
    """
    # a tensor's difference, estimated from a few random projections, may be small by chance; so it
    # is at least the median over all tensors
    if not repeats:
        return {}
    largest = max(map(reference.size, reference.sums), default=0.0)
    own = {}
    for name in reference.sums:
        scale = _scale(name, reference, reference, largest)
        if scale > 0.0:
            own[name] = max(_distance(reference, repeat, name) / scale for repeat in repeats)
    usual = median(own.values()) if own else 0.0
    return {name: max(noise, usual) for name, noise in own.items()}


def _scale(name: str, one: Sketch, other: Sketch, largest: float) -> float:
    """Return the norm by which the difference between two gradients of a tensor is divided.

    It is the larger norm of the two gradients, but at least the fraction SMALL of `largest`.
    `largest` is the norm of the largest gradient of all tensors.
    """
    # A gradient that is 0 except for rounding, such as that of a bias before a softmax, has no
    # meaningful norm. Its rounding is a fraction of the summed terms, which are as large as those
    # of other tensors.
    return max(one.size(name), other.size(name), SMALL * largest)


def _kind(name: str, one: Sketch, other: Sketch) -> str:
    return one.kinds.get(name) or other.kinds.get(name, "float32")


def _distance(one: Sketch, other: Sketch, name: str) -> float:
    first = one.sums.get(name)
    second = other.sums.get(name)
    if first is None or second is None:
        return _size(first or second or ())
    return math.dist(first, second) / math.sqrt(len(first))


def _size(sums: Sequence[float]) -> float:
    return math.hypot(*sums) / math.sqrt(len(sums)) if sums else 0.0


def compare_ranks(
    sketches: Sequence[Sketch], noises: Sequence[Mapping[str, float]] = ()
) -> GradientDifference | None:
    """Compare the gradients that the ranks computed from the same rows, and return the difference.

    The first rank is compared with each of the others. Returns the largest difference that is more
    than rounding, or None. `noises` contains the result of `find_noises` for each rank. Without it,
    only the dtypes of the gradients decide what counts as rounding.
    """
    # Without `noises`, a returned difference only means that rounding has to be measured. The
    # weights are the same on all ranks. So a difference comes from something else that the loss
    # uses, or from rounding on different kinds of devices.
    rounding: dict[str, float] = {}
    for own in noises:
        for name, noise in own.items():
            rounding[name] = max(noise, rounding.get(name, 0.0))
    differences = [_compare(sketches[0], each, rounding) for each in sketches[1:]]
    found = [difference for difference in differences if difference is not None]
    return max(found, key=lambda each: each.relative, default=None)


# ------------------------------------------------------------------ when, and what follows


class Action(Enum):
    """What training does after an audit: continue, audit again, warn, make shares equal or end."""

    GO_ON = "go on"
    CONFIRM = "confirm"  # audit the next step too, without a message yet
    REFUSE = "refuse"  # end the training with an error
    GO_EVEN = "go even"  # only in `evener run`: make shares equal for the rest of the training
    WARN = "warn"  # warn on every rank and in the app; the training continues


class Audits:
    """Decides which steps are audited, and what to do if the gradient is wrong.

    - If the gradient of one of the first 64 steps is wrong, training ends with an error.
    - If the gradient of a later step is wrong and another audit confirms it, a warning is given.
      With `strict`, training ends with an error instead.
    - With `makes_even`, neither happens: shares are made equal instead, and training goes on.
    """

    # after an error, a warning or making shares equal, there are no more audits

    def __init__(self, makes_even: bool = False, strict: bool = False) -> None:
        self.step = 0  # steps that have begun
        self.over = False  # a difference had consequences, so no more audits are needed
        # True if this step's audit is the first one, follows a change or confirms a difference
        self.thorough = True
        self._evens = makes_even
        self._strict = strict
        self._signatures: set[Hashable] = set()
        self._again: set[int] = set()  # steps that are audited again after a change
        self._confirms = False

    def begin(self, signature: Hashable = None) -> bool:
        """Start a step, and return True if its gradient has to be audited.

        `signature` describes how the step is computed. A step with a new signature is audited.
        """
        self.step += 1
        if self.over:
            return False
        changed = self.add_signature(signature)
        self.thorough = changed or self._confirms or self.step == 1
        again = self.step in self._again
        self._again.discard(self.step)
        return changed or again or self._confirms or is_audited(self.step)

    def add_signature(self, signature: Hashable) -> bool:
        """Record how a step is computed, and return True if no earlier step was computed like that.

        Such a step is audited again three steps later. After 32 different signatures, and once
        audits have ended, new ones aren't recorded, and False is returned.
        """
        # without this limit, a signature that changes in every step would cause an audit in every
        # step
        if self.over or signature in self._signatures or len(self._signatures) >= MOST_CHANGES:
            return False
        self._signatures.add(signature)
        self._again.add(self.step + AGAIN_AFTER)
        self.thorough = True
        return True

    def plan_audits(self) -> bool:
        """Plan audits after a change in training, such as new shares.

        Returns False if none is planned, because audits have ended or there were too many changes.
        """
        return self.add_signature(("change", len(self._signatures)))

    def decide(self, difference: GradientDifference | None) -> Action:
        """Return what to do after an audit.

        `difference` is what the audit found, or None if the gradients agree.
        """
        return self.decide_by(difference is not None)

    def decide_by(self, differs: bool) -> Action:
        """Return what to do after an audit. `differs` is True if the gradients differ.

        After step 64, a difference counts only if the audit of the next step also finds a
        difference.
        """
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
    """Return True if a step has a regular audit, even if it is computed like earlier ones.

    Steps count from 1.
    """
    return step in FIRST_STEPS or step % EVERY == 0


# ------------------------------------------------------------------ causes and messages


AT_ONCE = "at once"  # rows, as one device computes them
IN_EQUAL_PARTS = "in equal parts"  # as a program's own launcher computes them


class LikelyCause(msgspec.Struct, frozen=True):
    """A likely cause of different gradients, and what to do about it."""

    why: str
    remedy: str


_MEAN = (
    "For a mean over tokens or class weights, say what it is a mean over (count=, or"
    " split.loss(total, count)); for a loss over all rows of the batch, take split.gather(rows)."
)
CAUSES = {
    "collation": LikelyCause(
        "The batch function (collate_fn) makes something else of the same rows when other rows are"
        " beside them: rows padded to the longest beside them where the model has no mask or looks"
        " past it, rows mixed with each other, or weights by the batch's classes",
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
    "size": LikelyCause(
        "The backward pass depends on the size of a gradient within it, such as a hook that clips"
        " the gradient of an activation, and a row's is larger where a loss is a mean over fewer"
        " rows",
        "Compute the loss by split.step, which multiplies it by its weight before the backward"
        " pass, or clip the gradients of weights.",
    ),
    "rows": LikelyCause(
        "The loss of a batch isn't the mean of its parts' losses: it isn't a mean over rows",
        _MEAN,
    ),
    "draws": LikelyCause(
        "The loss isn't a mean over rows: it is divided by a count that depends on random numbers,"
        " such as that of the tokens which a mask drawn in the forward pass leaves",
        "Draw the same count in each row, divide by the rows or by an expected count, or train on"
        " one device.",
    ),
    "state": LikelyCause(
        "Ranks compute different gradients of the same rows with the same weights: the loss uses"
        " something that each rank keeps from its own rows, such as a running mean, a memory"
        " bank, a baseline or a weight by earlier losses",
        "Compute it over the whole batch: with split.mean(value), split.total(value) or"
        " split.gather(rows).",
    ),
    "weight": LikelyCause(
        "The losses agree and their gradients don't: a part of the gradient isn't weighted by the"
        " rows",
        "Let all that is trained lie on the way from the model's output to the loss.",
    ),
}


def find_cause(checks: Mapping[str, Callable[[], bool]]) -> str:
    """Return the name of the likeliest cause of a wrong gradient.

    The keys of `checks` are the causes in CAUSES that may apply. Each value is a function that
    computes the gradient again without that cause, and returns True if the gradient is then
    correct. The result is the first cause whose function returns True, or "rows" if none does.
    """
    for name in CAUSES:
        if name in checks and checks[name]():
            return name
    return "rows"


def describe(
    difference: GradientDifference,
    cause: str | LikelyCause,
    rows: Sequence[int],
    step: int = 1,
    reference: str = AT_ONCE,
) -> str:
    """Return a message about a wrong gradient: its likely cause, the step, and how much it differs.

    `rows` are the ranks' row counts, or empty for a comparison of ranks. `reference` says how the
    correct gradient was computed.
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
        text += f"; the losses are {_write_distinct(first, second)}"
    return f"{text}."


def _write_distinct(one: float, other: float) -> str:
    """Return two numbers as text, with enough digits to show that they differ."""
    digits = 6
    while f"{one:.{digits}g}" == f"{other:.{digits}g}" and digits < 17:
        digits += 1
    return f"{one:.{digits}g} and {other:.{digits}g}"


# ------------------------------------------------------------------ state that differs by rank


def find_unequal(
    ranks: Sequence[Mapping[str, Sequence[float]]], tolerance: float = 1e-4
) -> tuple[str, float, float] | None:
    """Return the first buffer or loss input whose values differ between ranks.

    The result is its name, its lowest value and its highest value. For each rank, `ranks` maps the
    names of buffers and loss inputs to a few of their values. Returns None if all values agree
    except for relative differences up to `tolerance`. If ranks have different numbers of values,
    the counts of the first and the last rank are returned instead of the lowest and highest value.
    """
    # only names that all ranks have are compared
    names = [name for name in ranks[0] if all(name in each for each in ranks)]
    for name in names:
        lines = [each[name] for each in ranks]
        if len({len(line) for line in lines}) > 1:
            return name, float(len(lines[0])), float(len(lines[-1]))
        for values in zip(*lines, strict=True):
            low, high = min(values), max(values)
            if high - low > tolerance * max(abs(low), abs(high)):
                return name, low, high
    return None
