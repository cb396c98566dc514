"""The kind of mean that a loss is, judged by figures: the loss of a batch beside the losses of its
parts.

Shares change nothing in what is learned if the loss of a batch is the mean of its parts' losses,
weighted by something that can be counted: rows, or labels that aren't ignored. No list of models
says so; every adapter measures it before the first step, and asks here what the figures mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

FLOAT32_ROUNDING = 1e-5  # of the loss: kernels for other numbers of rows add up in another order
MIXED_ROUNDING = 1e-6  # models of float64 often compute softmax and norms in float32
FLOAT64_ROUNDING = 1e-11


class LossFigures(msgspec.Struct, frozen=True):
    """The loss of a batch (`whole`), of each of its parts, and what each part has of everything
    that can be counted.

    `counts` are by name, in the order of preference: {"rows": (3, 5), "labels": (20, 61)}.
    `rounding` is the part of the loss by which two computations of it may differ.
    """

    whole: float
    parts: tuple[float, ...]
    counts: Mapping[str, tuple[float, ...]]
    rounding: float = FLOAT32_ROUNDING


class LossMeaning(msgspec.Struct, frozen=True):
    """The meaning of a loss by its figures: names that it may be a mean over, best first; none
    where it isn't one.

    `error` is the difference that is left, as a part of the loss; smaller ones than `rounding`
    can't be seen.
    """

    mean_over: tuple[str, ...]
    error: float
    rounding: float


def judge(figures: LossFigures) -> LossMeaning:
    """Find what the loss is a mean over: each name in `counts` whose weighted mean of the parts is
    the whole's loss.
    """
    losses = [loss for loss in (figures.whole, *figures.parts) if math.isfinite(loss)]
    scale = max(map(abs, losses), default=0.0) or 1.0
    differences = {
        name: abs(figures.whole - mean_by(figures, name)) / scale for name in figures.counts
    }
    errors = {
        name: error if math.isfinite(error) else math.inf for name, error in differences.items()
    }
    fitting = tuple(name for name, error in errors.items() if error <= figures.rounding)
    return LossMeaning(fitting, min(errors.values()), figures.rounding)


def mean_by(figures: LossFigures, name: str) -> float:
    """The parts' losses as one mean, weighted by what each part has of `name`; infinite where none
    has any.

    The loss of a part that has none doesn't count: a mean over nothing is NaN.
    """
    counts = figures.counts[name]
    total = sum(counts)
    pairs = zip(counts, figures.parts, strict=True)
    return sum(count * loss for count, loss in pairs if count) / total if total else math.inf


def describe(figures: LossFigures) -> str:
    """A sentence of what was seen where `judge` finds no mean."""
    rows: Sequence[float] = figures.counts["rows"]
    each = " and ".join(f"{count:g}" for count in rows)
    names = " or ".join(dict.fromkeys(name.removeprefix("shifted ") for name in figures.counts))
    mean = mean_by(figures, "rows")
    digits = next(
        (
            digits
            for digits in range(6, 17)
            if f"{figures.whole:.{digits}g}" != f"{mean:.{digits}g}"
        ),
        17,
    )
    seen = (
        f"The loss of {sum(rows):g} rows is {figures.whole:.{digits}g}, of {each} of them together"
    )
    if abs(figures.whole - sum(figures.parts)) <= figures.rounding * abs(figures.whole):
        return f"{seen} as much in sum: it is a sum, not a mean over {names}."
    return f"{seen} {mean:.{digits}g}: it isn't a mean over {names}."
