"""Models of step time as a function of the number of rows or of their lengths.

If all rows have the same length, step time is a rising piecewise linear curve of the number of
rows. If lengths differ, the duration of a pass is computed from its number of rows and the length
of its longest row.

A share of b rows in k passes takes k * t(b / k) + (k - 1) * extra seconds. Here t(rows) is the
duration of a whole step in one pass. Each pass after the first takes `extra` seconds more than such
a step. `extra` is negative if such a pass is faster, because a part such as the optimizer isn't
repeated. A share that fits in memory takes one pass. A larger share takes passes of at most `rows`
rows, which is the pass size with the highest samples/s.

This module has no side effects.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import msgspec

# seconds or tokens; a value above the maximum shows that the file was edited
Amount = Annotated[float, msgspec.Meta(ge=0, le=10**15)]


class Work(msgspec.Struct, frozen=True):
    """The numbers of passes and tokens that a device computes per step, averaged over steps.

    A `Cost` predicts the step's duration from them if rows differ in length.
    """

    tokens: Amount  # without padding
    passes: Amount
    padded: Amount  # tokens with padding
    padded_lengths: Amount  # padded tokens * padded length, summed over passes


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients that predict the duration of one pass over rows of unequal length.

    A pass of r rows padded to L tokens takes fixed_s + r * L * (per_token_s + per_token_length_s *
    L) seconds.
    """

    fixed_s: float
    per_token_s: float
    per_token_length_s: float

    def seconds(self, rows: int, length: int) -> float:
        """Return the duration of a pass of `rows` rows padded to `length` tokens, in seconds."""
        return self.fixed_s + rows * self.row_seconds(length)

    def row_seconds(self, length: int) -> float:
        """Return the seconds that each row adds to a pass padded to `length` tokens."""
        return length * (self.per_token_s + self.per_token_length_s * length)

    def all_row_seconds(self, lengths: Sequence[int]) -> list[float]:
        """Return `row_seconds` for each of these lengths."""
        token = self.per_token_s
        token_length = self.per_token_length_s
        return [length * (token + token_length * length) for length in lengths]

    def seconds_for(self, work: Work) -> float:
        """Return the predicted duration of a step with this `work`, in seconds."""
        passes = self.fixed_s * work.passes
        return (
            passes + self.per_token_s * work.padded + self.per_token_length_s * work.padded_lengths
        )

    def is_valid(self) -> bool:
        """True if all coefficients are finite, none is negative and one is positive."""
        # those of a plan may have been edited
        coefficients = (self.fixed_s, self.per_token_s, self.per_token_length_s)
        return all(
            math.isfinite(coefficient) and coefficient >= 0 for coefficient in coefficients
        ) and any(coefficients)


class RankCost(msgspec.Struct, frozen=True):
    """A rank's coefficients for the duration of a pass, and its size limits per pass.

    A limit of 0 means unlimited.
    """

    cost: Cost
    tokens: int = 0  # maximum padded tokens per pass
    rows: int = 0  # maximum rows per pass

    def most_rows(self, length: int) -> float:
        """Return the maximum number of rows in a pass padded to `length` tokens.

        The result is infinite if the rank has no limits.
        """
        by_tokens = self.tokens // length if self.tokens and length else math.inf
        return min(by_tokens, self.rows or math.inf)


MOST_FULL = 64  # maximum number of passes whose finish times are tried
ROUNDING = 1e-9  # relative tolerance when a time is compared with its own inverse


class Curve(msgspec.Struct, frozen=True):
    """Step time as a rising, piecewise linear function of the batch size.

    `batches` and `times` are the coordinates of its knots. `slope` continues the curve beyond the
    last knot.
    """

    batches: tuple[float, ...]  # increasing; the curve isn't evaluated below the first
    times: tuple[float, ...]  # seconds, not decreasing
    slope: float  # seconds per sample beyond the last knot
    # True if a line, with or without a level stretch before it, fits the points within their errors
    simple: bool = True
    error: float = 0.0  # relative standard error of a typical point

    def seconds(self, batch: float) -> float:
        """Return the predicted step time for `batch` samples, in seconds."""
        batches = self.batches
        times = self.times
        i = bisect_right(batches, batch)
        if i == len(batches):
            return times[-1] + self.slope * (batch - batches[-1])
        if i == 0:
            return times[0]
        left = batches[i - 1]
        return times[i - 1] + (times[i] - times[i - 1]) * (batch - left) / (batches[i] - left)

    def largest(self, seconds: float, ceiling: int, quantum: int) -> int:
        """Return the largest batch that takes at most `seconds`; 0 if there is none.

        The batch is a multiple of `quantum` and at most `ceiling`.
        """
        most = self.most_rows(seconds)
        return (ceiling if most >= ceiling else int(most)) // quantum * quantum

    def most_rows(self, seconds: float) -> float:
        """Return how many samples take at most `seconds`; it may be a fraction.

        Returns 0 below the time of the first knot, and infinity if the curve never exceeds
        `seconds`.
        """
        seconds *= 1 + ROUNDING
        times = self.times
        i = bisect_right(times, seconds)
        if i == 0:
            return 0.0
        if i == len(times):
            return (
                self.batches[-1] + (seconds - times[-1]) / self.slope
                if self.slope > 0
                else math.inf
            )
        low = times[i - 1]
        high = times[i]
        return self.batches[i - 1] + (self.batches[i] - self.batches[i - 1]) * (seconds - low) / (
            high - low
        )

    def breakpoints(self, ceiling: int) -> list[float]:
        """Return the step times, in seconds, at which this device's samples/s may peak.

        `ceiling` is the maximum number of samples.
        """
        # the times at the knots below `ceiling` samples, and at `ceiling` itself
        knots = zip(self.batches, self.times, strict=True)
        return [time for batch, time in knots if batch < ceiling] + [self.seconds(ceiling)]

    @property
    def bent(self) -> bool:
        """True if the curve isn't a single straight line."""
        return len(self.batches) > 2 or self.flat

    @property
    def flat(self) -> bool:
        """True if the curve's first segment is level.

        Its batch sizes then all take the same time.
        """
        return len(self.batches) > 1 and self.times[0] == self.times[1]


class PassCurve(msgspec.Struct, frozen=True):
    """The step-time curve of a device that computes large shares in several passes.

    It has the same methods as `Curve`.
    """

    curve: Curve
    pass_limit: int  # the largest share in one pass
    rows: int  # the rows per pass with the highest samples/s, if there are several passes
    extra: float = 0.0
    fits: int = 0  # maximum rows that fit in each of several passes; at least `rows`

    @property
    def simple(self) -> bool:
        """True if the step-time curve of a single pass is simple, as defined by `Curve.simple`."""
        return self.curve.simple

    @property
    def error(self) -> float:
        """The relative standard error of a typical point of the single-pass curve."""
        return self.curve.error

    def passes(self, share: float) -> int:
        """Return how many passes a share of this size takes.

        It is 1 if the share fits in one pass, or else the smallest number of passes of at most
        `rows` rows. One pass fewer is used if that fits in memory (`fits`) and is faster.
        """
        if share <= self.pass_limit:
            return 1
        many = math.ceil(share / self.rows)
        fewer = many - 1
        if fewer < 2 or math.ceil(share / fewer) > self.fits:
            return many
        return min(
            fewer, many, key=lambda passes: step_in_passes(self.curve, share, passes, self.extra)
        )

    def seconds(self, share: float) -> float:
        """Return the predicted step time for `share` samples, in seconds."""
        return step_in_passes(self.curve, share, self.passes(share), self.extra)

    def largest(self, seconds: float, ceiling: int, quantum: int) -> int:
        """Return the largest share that takes at most `seconds`; 0 if there is none.

        The share is a multiple of `quantum` and at most `ceiling`.
        """
        most = self.curve.largest(seconds, min(ceiling, self.pass_limit), quantum)
        if math.isinf(seconds):
            return ceiling // quantum * quantum
        if most >= ceiling or most < self.pass_limit == self.rows:
            return most
        full = int(
            (seconds + self.extra) / (self.curve.seconds(self.rows) + self.extra) * (1 + ROUNDING)
        )
        if full > 1:
            each = min(self.curve.most_rows((seconds + self.extra) / full - self.extra), self.fits)
            each = max(self.rows, min(int(each), self.rows * (full + 1) // full))
            most = max(most, min(full * each, ceiling) // quantum * quantum)
        if most + quantum > ceiling:
            return most
        passes = max(2, full + 1)
        each = self.curve.most_rows((seconds + self.extra) / passes - self.extra)
        return max(most, int(min(passes * min(each, self.rows), ceiling)) // quantum * quantum)

    def breakpoints(self, ceiling: int) -> list[float]:
        """Return the step times at which this device's samples/s may peak, in rising order.

        `ceiling` is the maximum number of samples.
        """
        # at the knots of the single-pass curve, at shares in full passes, and at `ceiling` samples
        full = range(2 * self.rows, ceiling, self.rows * math.ceil(ceiling / self.rows / MOST_FULL))
        times = [
            *self.curve.breakpoints(min(ceiling, self.pass_limit)),
            *map(self.seconds, full),
            self.seconds(ceiling),
        ]
        return sorted(set(times))


def step_in_passes(curve: Curve, share: float, passes: int, extra: float) -> float:
    """Return the duration of a step of `share` samples in `passes` equal passes, in seconds.

    `extra` is added for each pass after the first; see the module's docstring.
    """
    return passes * curve.seconds(share / passes) + (passes - 1) * extra
