"""Find what a loss is a mean over, by comparing the loss of a batch with the losses of its parts.

Shares don't change what is learned if the loss of a batch is the mean of its parts' losses,
weighted by something that can be counted: rows, or labels that aren't ignored. There is no list of
models; every adapter measures its loss before the first step, and interprets the result here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

FLOAT32_ROUNDING = 1e-5  # relative: kernels for other numbers of rows sum in another order
MIXED_ROUNDING = 1e-6  # models of float64 often compute softmax and norms in float32
FLOAT64_ROUNDING = 1e-11


class LossFigures(msgspec.Struct, frozen=True):
    """The loss of a batch (`whole`), the losses of its parts, and the counts of each part.

    `counts` are by name, in the order of preference: {"rows": (3, 5), "labels": (20, 61)}.
    `rounding` is the relative difference by which two computations of the loss may differ.
    """

    whole: float
    parts: tuple[float, ...]
    counts: Mapping[str, tuple[float, ...]]
    rounding: float = FLOAT32_ROUNDING


class LossMeaning(msgspec.Struct, frozen=True):
    """What a loss may be a mean over: names of counts, best first; empty if it is no mean.

    `error` is the smallest relative difference from a mean; differences below `rounding`
    can't be detected.
    """

    mean_over: tuple[str, ...]
    error: float
    rounding: float


def judge(figures: LossFigures) -> LossMeaning:
    """Find what the loss is a mean over.

    That is each name in `counts` for which the weighted mean of the parts' losses equals the loss
    of the whole batch.
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
    """Return the mean of the parts' losses, weighted by their counts of `name`.

    The loss of a part with count 0 is ignored, as a mean over nothing is NaN. If all counts are 0,
    the mean is infinite.
    """
    counts = figures.counts[name]
    total = sum(counts)
    pairs = zip(counts, figures.parts, strict=True)
    return sum(count * loss for count, loss in pairs if count) / total if total else math.inf


def describe(figures: LossFigures) -> str:
    """Return the message for losses in which `judge` finds no mean."""
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
