"""Models of step time as a function of the number of rows or of their lengths.

If all rows have the same length, step time is a rising piecewise linear curve of the number of
rows. If lengths differ, the duration of a pass is computed from its number of rows and the length
of its longest row.

A share of b rows in k passes takes k * t(b / k) + (k - 1) * extra seconds. Here t(rows) is the
duration of a whole step in one pass. Each pass after the first takes `extra` seconds more than such
a step. `extra` is negative if such a pass is faster, because a part such as the optimizer isn't
repeated. A share that fits in memory takes one pass. A larger share takes passes of at most `rows`
rows, which is the pass size with the highest samples/s.
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
    """Token counts that determine the cost of padded passes."""

    tokens: Amount  # without padding
    passes: Amount
    padded: Amount  # tokens with padding
    padded_lengths: Amount  # padded tokens * padded length, summed over passes


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a padded pass, as a polynomial in rows and length.

    A pass of r rows padded to L tokens takes fixed_s + r * L * (per_token_s + per_token_length_s *
    L) seconds.
    """

    fixed_s: float
    per_token_s: float
    per_token_length_s: float

    def seconds(self, rows: int, length: int) -> float:
        """Return the seconds of a pass of `rows` rows, padded to `length` tokens."""
        return self.fixed_s + rows * self.row_seconds(length)

    def row_seconds(self, length: int) -> float:
        """Return the seconds that one row of `length` tokens adds to a pass."""
        return length * (self.per_token_s + self.per_token_length_s * length)

    def all_row_seconds(self, lengths: Sequence[int]) -> list[float]:
        """Return the seconds that each row adds to a pass, by the rows' lengths in tokens."""
        token = self.per_token_s
        token_length = self.per_token_length_s
        return [length * (token + token_length * length) for length in lengths]

    def seconds_for(self, work: Work) -> float:
        """Return the seconds for passes with the given token counts."""
        passes = self.fixed_s * work.passes
        return (
            passes + self.per_token_s * work.padded + self.per_token_length_s * work.padded_lengths
        )

    def is_valid(self) -> bool:
        """Return True if all coefficients are finite and at least 0, and one is above 0."""
        # those of a plan may have been edited
        coefficients = (self.fixed_s, self.per_token_s, self.per_token_length_s)
        return all(
            math.isfinite(coefficient) and coefficient >= 0 for coefficient in coefficients
        ) and any(coefficients)


class RankCost(msgspec.Struct, frozen=True):
    """A device's cost model and the largest pass that fits in its memory; 0 is no limit."""

    cost: Cost
    tokens: int = 0  # maximum padded tokens per pass
    rows: int = 0  # maximum rows per pass

    def most_rows(self, length: int) -> float:
        """Return the largest number of rows of `length` tokens in a pass, inf without a limit."""
        by_tokens = self.tokens // length if self.tokens and length else math.inf
        return min(by_tokens, self.rows or math.inf)


MOST_FULL = 64  # maximum number of passes whose finish times are tried
ROUNDING = 1e-9  # relative tolerance when a time is compared with its own inverse


class Curve(msgspec.Struct, frozen=True):
    """Step time by rows, linear between measured points and beyond the last one."""

    batches: tuple[float, ...]  # increasing; the curve isn't evaluated below the first
    times: tuple[float, ...]  # seconds, not decreasing
    slope: float  # seconds per sample beyond the last knot
    # True if a line, with or without a level stretch before it, fits the points within their errors
    simple: bool = True
    error: float = 0.0  # relative standard error of a typical point

    def seconds(self, batch: float) -> float:
        """Return the step time of `batch` rows in seconds."""
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
        """Return the largest batch that takes at most `seconds`, or 0.

        The batch is a multiple of `quantum`, and at most `ceiling` rows.
        """
        most = self.most_rows(seconds)
        return (ceiling if most >= ceiling else int(most)) // quantum * quantum

    def most_rows(self, seconds: float) -> float:
        """Return the largest number of rows, perhaps a fraction, that takes at most `seconds`.

        It is 0 below the time of the first point, and inf if the time never exceeds `seconds`.
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
        """Return the step times at which the curve bends, in seconds."""
        # the times at the knots below `ceiling` samples, and at `ceiling` itself
        knots = zip(self.batches, self.times, strict=True)
        return [time for batch, time in knots if batch < ceiling] + [self.seconds(ceiling)]

    @property
    def bent(self) -> bool:
        """True if the curve isn't a straight line."""
        return len(self.batches) > 2 or self.flat

    @property
    def flat(self) -> bool:
        """True if small batches all take the same time."""
        return len(self.batches) > 1 and self.times[0] == self.times[1]


class PassCurve(msgspec.Struct, frozen=True):
    """Step time by rows on a device that computes large shares in several passes.

    `extra` is the time in seconds that each further pass adds.
    """

    curve: Curve
    pass_limit: int  # the largest share in one pass
    rows: int  # the rows per pass with the highest samples/s, if there are several passes
    extra: float = 0.0
    fits: int = 0  # maximum rows that fit in each of several passes; at least `rows`

    @property
    def simple(self) -> bool:
        """True if the curve for one pass is simple."""
        return self.curve.simple

    @property
    def error(self) -> float:
        """Relative standard error of a typical point of the curve for one pass."""
        return self.curve.error

    def passes(self, share: float) -> int:
        """Return the number of passes in which a share is computed."""
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
        """Return the step time of a share in seconds."""
        return step_in_passes(self.curve, share, self.passes(share), self.extra)

    def largest(self, seconds: float, ceiling: int, quantum: int) -> int:
        """Return the largest share found that takes at most `seconds`, or 0.

        The share is a multiple of `quantum`, and at most `ceiling` rows.
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
        """Return step times at which the curve bends or jumps, in seconds and ascending."""
        # at the knots of the single-pass curve, at shares in full passes, and at `ceiling` samples
        full = range(2 * self.rows, ceiling, self.rows * math.ceil(ceiling / self.rows / MOST_FULL))
        times = [
            *self.curve.breakpoints(min(ceiling, self.pass_limit)),
            *map(self.seconds, full),
            self.seconds(ceiling),
        ]
        return sorted(set(times))


def step_in_passes(curve: Curve, share: float, passes: int, extra: float) -> float:
    """Return the seconds of a step in equal passes, with `extra` seconds between passes."""
    return passes * curve.seconds(share / passes) + (passes - 1) * extra
