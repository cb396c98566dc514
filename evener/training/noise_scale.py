"""The gradient noise scale: the batch size beyond which more rows gain little.

It is computed from squared norms of gradients. A gradient of n rows is the true gradient G plus
noise of variance tr(S) / n. Here S is the covariance of one row's gradient. The noise scale is
tr(S) / |G|^2, in rows (McCandlish et al. 2018, arXiv 1812.06162). A step of B rows makes B / (B +
noise scale) of the progress of a step with infinitely many rows.
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
    """Unbiased estimates of the gradient's noise and signal from one step.

    The ratio of two unbiased estimates is biased. Therefore both are averaged over steps
    before the noise scale is computed.
    """

    noise: float  # tr(S): variance of one row's gradient, added up over parameters
    signal: float  # |G|^2; negative values are possible for few rows


class NoiseScale(msgspec.Struct, frozen=True):
    """A gradient noise scale with its 95 % interval, in rows.

    `high` is ENDLESS if the batch is too small to give an upper bound.
    """

    rows: Rows  # ENDLESS if the signal isn't above 0
    low: Rows
    high: Rows
    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # number of measured steps

    @property
    def safe_rows(self) -> float:
        """The noise scale, or its lower bound if there is no upper bound.

        There is no upper bound if the batch was too small.
        """
        return self.low if self.high >= ENDLESS else self.rows


def separate_noise(sizes: Sequence[int], weighted: float, whole: float) -> Sample:
    """Return the noise and the signal of one step, from its parts' gradients.

    A part is what one rank or one pass computes. Raises ValueError if fewer than two have rows.

    - `sizes`: the rows n_i of each part.
    - `weighted`: the sum of n_i |g_i|^2, where g_i is the mean gradient of part i.
    - `whole`: |g|^2, where g is the mean gradient of the batch.
    """
    # by analysis of variance, the sum of n_i |g_i - g|^2 over K parts, divided by K - 1, has the
    # expected value tr(S)
    parts = sum(size > 0 for size in sizes)
    rows = sum(sizes)
    if parts < 2:
        raise ValueError("noise is seen between two parts or more")
    noise = (weighted - rows * whole) / (parts - 1)
    return Sample(noise, whole - noise / rows)


def efficiency(batch: int, noise_scale: float) -> float:
    """Return a row's contribution to learning, relative to a row of a tiny batch.

    The result is 0.5 if `batch` is equal to the noise scale.
    """
    return noise_scale / (noise_scale + batch)


def extra_rows(batch: int, other: int, noise_scale: float) -> float:
    """Return the factor by which larger batches need more rows for the same loss.

    Batches grow from `batch` to `other` rows. A factor of 1.2 means 20 % more rows; it is below 1
    if `other` is smaller.
    """
    return (noise_scale + other) / (noise_scale + batch)


def rate_gain(batch: int, other: int, noise_scale: float) -> float:
    """Return the factor for SGD's learning rate if `batch` rows become `other`.

    It is the gain ratio of AdaScale (arXiv 2007.05105).
    """
    return other / batch / extra_rows(batch, other, noise_scale)


class NoiseWindow:
    """Averages noise and signal over steps, with exponentially decaying weights.

    Each new block of BLOCK steps multiplies the weights of earlier blocks by `kept`; if that is 1,
    all samples have the same weight.
    """

    # Samples are summed in blocks. The weighted sum is divided by the sum of the weights; otherwise
    # the first averages would be too small.

    def __init__(self, kept: float = KEPT) -> None:
        self._kept = kept
        most = None if kept == 1 else math.ceil(math.log(1e-3) / math.log(kept))
        self._blocks: deque[Sample] = deque(maxlen=most)  # sums over BLOCK samples
        self._open: list[Sample] = []  # samples of the next block
        self._samples = 0

    def add(self, sample: Sample) -> None:
        """Add a step's sample, unless a value isn't finite, as after an overflow."""
        if not all(map(math.isfinite, sample)):
            return
        self._samples += 1
        self._open.append(sample)
        if len(self._open) == BLOCK:
            self._blocks.append(Sample(*map(math.fsum, zip(*self._open, strict=True))))
            self._open.clear()

    def scale(self) -> NoiseScale | None:
        """Return the noise scale with its interval; None before FEWEST_BLOCKS blocks of steps."""
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
    """Return the 95 % interval of mean(noise) / mean(signal) by Fieller's theorem."""
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
    """Return the two-sided 95 % quantile of Student's t."""
    # `freedom` are the degrees of freedom. The Cornish-Fisher expansion has a relative error below
    # 2 % for 4 or more degrees of freedom.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def describe(noise_scale: NoiseScale, batch: int, steps: int) -> str:
    """Return a sentence, without a period, about the noise scale and a batch's efficiency.

    `batch` is the batch's number of rows, and `steps` the number of measured steps.
    """
    # the noise scale was measured in that number of steps
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
    """Return a noise scale as text, such as "3,900 rows" or "at least 2,700 rows".

    "At least" means that the batch was too small for an upper bound.
    """
    return f"{'at least ' * (noise_scale.high >= ENDLESS)}{write_rows(noise_scale.safe_rows)} rows"


def write_rows(rows: float) -> str:
    """Return a number of rows as text with two significant digits, such as "3,900"."""
    return f"{rows:.1f}" if rows < 10 else f"{round(rows, 1 - math.floor(math.log10(rows))):,.0f}"
