"""Models of the step time, as a function of the number of rows or of their lengths.

If all rows have the same length, step time is a rising, piecewise linear function of the number of
rows: a curve. If lengths differ, the duration of a pass is computed from its number of rows and the
length of its longest row.

A share of b rows that is computed in k passes takes k * t(b / k) + (k - 1) * extra seconds. Here,
t(rows) is the duration of a whole step in one pass, and each pass after the first takes `extra`
seconds more than that. `extra` is negative if such a pass is faster, because parts such as the
optimizer aren't repeated. A share that fits in memory takes one pass. The passes of a larger share
have the number of rows with the highest samples/s, as far as possible.
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
    """Counts of the tokens and passes of padded batches, from which `Cost` computes their time."""

    tokens: Amount  # without padding
    passes: Amount
    padded: Amount  # tokens with padding
    padded_lengths: Amount  # padded tokens * padded length, summed over passes


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The duration of a padded pass in seconds, as a function of its rows and length.

    A pass of r rows padded to L tokens takes fixed_s + r * L * (per_token_s + per_token_length_s *
    L) seconds.
    """

    fixed_s: float
    per_token_s: float
    per_token_length_s: float

    def seconds(self, rows: int, length: int) -> float:
        """Return how many seconds a pass of `rows` rows takes, each padded to `length` tokens."""
        return self.fixed_s + rows * self.row_seconds(length)

    def row_seconds(self, length: int) -> float:
        """Return how many seconds one row of `length` tokens adds to a pass."""
        return length * (self.per_token_s + self.per_token_length_s * length)

    def all_row_seconds(self, lengths: Sequence[int]) -> list[float]:
        """Return, for each row, how many seconds it adds to a pass. `lengths` are in tokens."""
        token = self.per_token_s
        token_length = self.per_token_length_s
        return [length * (token + token_length * length) for length in lengths]

    def seconds_for(self, work: Work) -> float:
        """Return how long the passes that `work` describes take, in seconds."""
        passes = self.fixed_s * work.passes
        return (
            passes + self.per_token_s * work.padded + self.per_token_length_s * work.padded_lengths
        )

    def is_valid(self) -> bool:
        """Return True unless a coefficient is negative or not finite, or all of them are 0."""
        # a plan may have been edited
        coefficients = (self.fixed_s, self.per_token_s, self.per_token_length_s)
        return all(
            math.isfinite(coefficient) and coefficient >= 0 for coefficient in coefficients
        ) and any(coefficients)


class RankCost(msgspec.Struct, frozen=True):
    """The cost model of a rank's device, and how many tokens and rows fit in a pass.

    A limit of 0 means that there is none.
    """

    cost: Cost
    tokens: int = 0  # maximum padded tokens per pass
    rows: int = 0  # maximum rows per pass

    def most_rows(self, length: int) -> float:
        """Return how many rows of `length` tokens fit in a pass, or inf if there is no limit."""
        by_tokens = self.tokens // length if self.tokens and length else math.inf
        return min(by_tokens, self.rows or math.inf)


MOST_FULL = 64  # maximum number of passes whose finish times are tried
ROUNDING = 1e-9  # relative tolerance when a time is compared with its own inverse


class Curve(msgspec.Struct, frozen=True):
    """A device's step time as a function of rows.

    It is linear between the measured points, and continues beyond the last one with a given slope.
    """

    batches: tuple[float, ...]  # increasing; the curve isn't evaluated below the first
    times: tuple[float, ...]  # seconds, not decreasing
    slope: float  # seconds per sample beyond the last knot
    # True if a line, with or without a level stretch before it, fits the points within their errors
    simple: bool = True
    error: float = 0.0  # relative standard error of a typical point

    def seconds(self, batch: float) -> float:
        """Return how long a step of `batch` rows takes, in seconds."""
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
        """Return the largest batch that takes at most `seconds` seconds, or 0 if there is none.

        The batch is a multiple of `quantum` rows, and has at most `ceiling` rows.
        """
        most = self.most_rows(seconds)
        return (ceiling if most >= ceiling else int(most)) // quantum * quantum

    def most_rows(self, seconds: float) -> float:
        """Return the largest number of rows, which may be a fraction, that takes at most `seconds`.

        It is 0 if the first point takes longer, and inf if the time never exceeds `seconds`.
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
        """Return the step times, in seconds, at which the slope of the curve changes.

        Only batches of up to `ceiling` rows are considered. The last item is the step time of
        `ceiling` rows.
        """
        # the times at the points below `ceiling` rows, and at `ceiling` itself
        knots = zip(self.batches, self.times, strict=True)
        return [time for batch, time in knots if batch < ceiling] + [self.seconds(ceiling)]

    @property
    def bent(self) -> bool:
        """True if the curve isn't a straight line."""
        return len(self.batches) > 2 or self.flat

    @property
    def flat(self) -> bool:
        """True if the curve is level at first, so that small batches all take the same time."""
        return len(self.batches) > 1 and self.times[0] == self.times[1]


class PassCurve(msgspec.Struct, frozen=True):
    """A device's step time as a function of rows, when large shares are computed in several passes.

    Each pass after the first takes `extra` seconds more than its time on the curve. `extra` may be
    negative.
    """

    curve: Curve
    pass_limit: int  # the largest share in one pass
    rows: int  # the rows per pass with the highest samples/s, if there are several passes
    extra: float = 0.0
    fits: int = 0  # maximum rows that fit in each of several passes; at least `rows`

    @property
    def simple(self) -> bool:
        """True if the curve for one pass is a straight line, possibly after a flat start."""
        return self.curve.simple

    @property
    def error(self) -> float:
        """The relative standard error of a typical measured point of `curve`."""
        return self.curve.error

    def passes(self, share: float) -> int:
        """Return how many passes are needed to compute a share."""
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
        """Return how long a step takes with this share, in seconds."""
        return step_in_passes(self.curve, share, self.passes(share), self.extra)

    def largest(self, seconds: float, ceiling: int, quantum: int) -> int:
        """Return a large share that takes at most `seconds`, or 0 if none was found.

        It is usually the largest possible share, but that isn't guaranteed. It is a multiple of
        `quantum` rows, and has at most `ceiling` rows.
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
        """Return the step times at which the slope of the curve changes or the curve jumps.

        Only shares of up to `ceiling` rows are considered. The times are in seconds and in
        ascending order.
        """
        # at the points of the curve for one pass, at shares in full passes, and at `ceiling` rows
        full = range(2 * self.rows, ceiling, self.rows * math.ceil(ceiling / self.rows / MOST_FULL))
        times = [
            *self.curve.breakpoints(min(ceiling, self.pass_limit)),
            *map(self.seconds, full),
            self.seconds(ceiling),
        ]
        return sorted(set(times))


def step_in_passes(curve: Curve, share: float, passes: int, extra: float) -> float:
    """Return how long a step takes in seconds, if a share is computed in `passes` equal passes.

    Each pass after the first takes `extra` seconds more than its time on the curve.
    """
    return passes * curve.seconds(share / passes) + (passes - 1) * extra
