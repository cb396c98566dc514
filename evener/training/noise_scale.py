"""The gradient noise scale: the batch size above which more rows gain little.

It is computed from squared norms of gradients. The gradient of n rows is the true gradient G plus
noise with the variance tr(S) / n, where S is the covariance of one row's gradient. The noise scale
is tr(S) / |G|^2, in rows (McCandlish et al. 2018, arXiv 1812.06162). A step of B rows makes B / (B
+ noise scale) of the progress of a step with infinitely many rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import Annotated, NamedTuple

import msgspec

EVERY = 8  # every 8th step is measured: two norms cost about 1 % of a step
BLOCK = 8  # number of samples whose mean is one value of the interval's estimate
FEWEST_BLOCKS = 6  # minimum number of blocks for an interval
KEPT = 0.97  # decay of a block's weight per later block; about 33 blocks count
ENDLESS = 1e18  # rows; JSON has no infinity

Rows = Annotated[float, msgspec.Meta(ge=0, le=ENDLESS)]


class Sample(NamedTuple):
    """Estimates of the gradient's noise and signal in one step."""

    noise: float  # tr(S): variance of one row's gradient, added up over parameters
    signal: float  # |G|^2; negative values are possible for few rows


class NoiseScale(msgspec.Struct, frozen=True):
    """The gradient noise scale in rows, with its 95 % interval.

    `high` is ENDLESS if the batch is too small to give an upper bound.
    """

    rows: Rows  # ENDLESS if the signal isn't above 0
    low: Rows
    high: Rows
    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # number of measured steps

    @property
    def safe_rows(self) -> float:
        """The noise scale in rows, or its lower bound if there is no upper bound."""
        return self.low if self.high >= ENDLESS else self.rows


def separate_noise(sizes: Sequence[int], weighted_squares: float, batch_square: float) -> Sample:
    """Estimate the noise and signal of a gradient from a batch that is divided into parts.

    - `sizes`: rows of each part.
    - `weighted_squares`: the sum, over all parts, of a part's rows times the squared norm of its
      mean gradient.
    - `batch_square`: squared norm of the whole batch's mean gradient.

    Raises ValueError if fewer than two parts have rows.
    """
    # by analysis of variance, the sum of n_i |g_i - g|^2 over K parts, divided by K - 1, has the
    # expected value tr(S)
    parts = sum(size > 0 for size in sizes)
    rows = sum(sizes)
    if parts < 2:
        raise ValueError("noise is seen between two parts or more")
    noise = (weighted_squares - rows * batch_square) / (parts - 1)
    return Sample(noise, batch_square - noise / rows)


def efficiency(batch: int, noise_scale: float) -> float:
    """Return how much progress each row makes in a batch of this size, relative to tiny batches."""
    return noise_scale / (noise_scale + batch)


def extra_rows(batch: int, other: int, noise_scale: float) -> float:
    """Return the rows needed to reach a given loss with another batch size, as a ratio.

    The batch size changes from `batch` to `other` rows. The result is below 1 if it becomes
    smaller, because fewer rows are then needed.
    """
    return (noise_scale + other) / (noise_scale + batch)


def rate_gain(batch: int, other: int, noise_scale: float) -> float:
    """Return the factor for SGD's learning rate if the batch size changes from `batch` to `other`.

    Both are in rows. This is the gain ratio of AdaScale (arXiv 2007.05105).
    """
    return other / batch / extra_rows(batch, other, noise_scale)


class NoiseWindow:
    """Averages the gradient's noise and signal over recent steps.

    Samples are grouped into blocks. Each block has `decay` times the weight of the block after it,
    so older blocks count less.
    """

    # The weighted sum is divided by the sum of the weights; otherwise the first averages would be
    # too small.

    def __init__(self, decay: float = KEPT) -> None:
        self._kept = decay
        most = None if decay == 1 else math.ceil(math.log(1e-3) / math.log(decay))
        self._blocks: deque[Sample] = deque(maxlen=most)  # sums over BLOCK samples
        self._open: list[Sample] = []  # samples of the next block
        self._samples = 0

    def add(self, sample: Sample) -> None:
        """Add the noise and signal of a step. They are ignored if they aren't finite."""
        if not all(map(math.isfinite, sample)):
            return
        self._samples += 1
        self._open.append(sample)
        if len(self._open) == BLOCK:
            self._blocks.append(Sample(*map(math.fsum, zip(*self._open, strict=True))))
            self._open.clear()

    def scale(self) -> NoiseScale | None:
        """Return the noise scale, or None if there are too few samples."""
        if len(self._blocks) < FEWEST_BLOCKS:
            return None
        weights = [self._kept**age for age in range(len(self._blocks))][::-1]
        columns = list(zip(*self._blocks, strict=True))
        noise, signal = (_mean(weights, column) for column in columns)
        low, high = _interval(weights, *columns)
        if noise <= 0:
            return NoiseScale(0.0, 0.0, min(high, ENDLESS), self._samples)
        rows = min(noise / signal, ENDLESS) if signal > 0 else ENDLESS
        return NoiseScale(rows, min(low, rows), min(max(high, rows), ENDLESS), self._samples)


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(map(mul, weights, values)) / math.fsum(weights)


def _interval(
    weights: Sequence[float], noise: Sequence[float], signal: Sequence[float]
) -> tuple[float, float]:
    """Return the 95 % interval of the noise scale: the ratio of mean noise to mean signal.

    `noise` and `signal` have a value for each block of samples, and `weights` are the weights of
    the blocks. The method is Fieller's. The upper bound is ENDLESS if the signal may be 0.
    """
    # The interval contains every ratio r for which mean(noise) - r * mean(signal) may be 0.
    a = _mean(weights, noise)
    b = _mean(weights, signal)
    parts = [weight / math.fsum(weights) for weight in weights]
    concentration = math.fsum(part * part for part in parts)
    correction = concentration / (1 - concentration)  # variance of the mean / variance of a block

    def covary(first: Sequence[float], mean: float, second: Sequence[float], other: float) -> float:
        return correction * math.fsum(
            p * (x - mean) * (y - other) for p, x, y in zip(parts, first, second, strict=True)
        )

    t = _student(1 / concentration - 1) ** 2
    noise_term = a * a - t * covary(noise, a, noise, a)
    mixed = a * b - t * covary(noise, a, signal, b)
    signal_term = b * b - t * covary(signal, b, signal, b)
    inside = mixed * mixed - signal_term * noise_term
    if b > 0 and signal_term > 0:
        root = math.sqrt(max(0.0, inside))
        return max(0.0, (mixed - root) / signal_term), max(0.0, (mixed + root) / signal_term)
    if signal_term < 0 and inside > 0 and noise_term > 0:
        return max(0.0, (mixed - math.sqrt(inside)) / signal_term), ENDLESS
    # the signal isn't significantly above 0
    return 0.0, ENDLESS


def _student(freedom: float) -> float:
    """Return the 97.5th percentile of Student's t distribution for `freedom` degrees of freedom."""
    # The Cornish-Fisher expansion has a relative error below 2 % for 4 or more degrees of freedom.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def describe(noise_scale: NoiseScale, batch: int, steps: int) -> str:
    """Return a line of text about the noise scale after `steps` steps.

    It also says how much a row contributes in batches of `batch` rows, compared with tiny batches.
    """
    after = f"after {steps:,} steps"
    if noise_scale.rows == 0:
        return (
            f"noise scale below {write_rows(noise_scale.high)} rows {after}: the ranks' gradients "
            f"hardly differ"
        )
    span = f" ({write_rows(noise_scale.low)} - {write_rows(noise_scale.high)})" * (
        noise_scale.high < ENDLESS
    )
    part = f"{100 * efficiency(batch, noise_scale.safe_rows):.0f} % of the samples' worth"
    return f"noise scale {write_scale(noise_scale)}{span} {after}; {batch:,} rows: {part}"


def write_scale(noise_scale: NoiseScale) -> str:
    """Return the noise scale as text, such as "at least 120 rows"."""
    return f"{'at least ' * (noise_scale.high >= ENDLESS)}{write_rows(noise_scale.safe_rows)} rows"


def write_rows(rows: float) -> str:
    """Return a number of rows as text, with two significant digits."""
    return f"{rows:.1f}" if rows < 10 else f"{round(rows, 1 - math.floor(math.log10(rows))):,.0f}"
