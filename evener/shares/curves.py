"""The seconds that rows take a device, by their number or by their lengths. Pure.

By number, a rising broken line, and the same where a share is taken in several passes. By length,
the cost of a pass by its rows and its longest row.

k passes of a share b take k * t(b / k) + (k - 1) * extra: t is the step time of one pass, `extra`
what each further pass costs beside a whole step of its rows. It is negative where a part of the
step, as the optimizer's, isn't repeated. A share that fits at once is one pass; of a larger one the
passes are as large as `rows` allows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import msgspec

# of seconds, tokens: a file with a larger one was changed
Amount = Annotated[float, msgspec.Meta(ge=0, le=10**15)]


class Work(msgspec.Struct, frozen=True):
    """A device's work in a step of rows of unequal length, on average over steps."""

    tokens: Amount  # without padding
    passes: Amount
    padded: Amount  # tokens with padding
    padded_lengths: Amount  # the sum of each pass's padded tokens times its length


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a pass of r rows padded to L tokens: fixed_s + r * L * (per_token_s +
    per_token_length_s * L).
    """

    fixed_s: float
    per_token_s: float
    per_token_length_s: float

    def seconds(self, rows: int, length: int) -> float:
        """Seconds of one pass of `rows` rows, each padded to `length` tokens."""
        return self.fixed_s + rows * self.row_seconds(length)

    def row_seconds(self, length: int) -> float:
        """Seconds of one more row in a pass that is padded to `length` tokens."""
        return length * (self.per_token_s + self.per_token_length_s * length)

    def all_row_seconds(self, lengths: Sequence[int]) -> list[float]:
        """Seconds of one more row, for each of these lengths."""
        token = self.per_token_s
        token_length = self.per_token_length_s
        return [length * (token + token_length * length) for length in lengths]

    def seconds_for(self, work: Work) -> float:
        """Seconds of all passes of a step."""
        passes = self.fixed_s * work.passes
        return (
            passes + self.per_token_s * work.padded + self.per_token_length_s * work.padded_lengths
        )

    def is_valid(self) -> bool:
        """True if the seconds are finite, 0 or above, and not all 0."""
        figures = (self.fixed_s, self.per_token_s, self.per_token_length_s)
        return all(math.isfinite(each) and each >= 0 for each in figures) and any(figures)


class RankCost(msgspec.Struct, frozen=True):
    """The cost of passes on one rank, and the largest pass that it can hold; 0 is no limit."""

    cost: Cost
    tokens: int = 0  # the most padded tokens of one pass
    rows: int = 0  # the most rows of one pass

    def most_rows(self, length: int) -> float:
        """Rows of one pass that is padded to `length`."""
        by_tokens = self.tokens // length if self.tokens and length else math.inf
        return min(by_tokens, self.rows or math.inf)


MOST_FULL = 64  # numbers of passes whose finish times are tried
ROUNDING = 1e-9  # relative slack where a time is compared with its own inverse


class Curve(msgspec.Struct, frozen=True):
    """seconds(batch) as a rising broken line through knots, straight beyond the last."""

    batches: tuple[float, ...]  # increasing, the first at or below every batch asked for
    times: tuple[float, ...]  # seconds, not decreasing
    slope: float  # seconds a sample beyond the last knot
    # a line, or one that is level up to a knee, explains the points within their errors
    simple: bool = True
    error: float = 0.0  # relative standard error of a typical point

    def seconds(self, batch: float) -> float:
        """Predicted step time of `batch` samples."""
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
        """The most samples, a multiple of `quantum` up to `ceiling`, that take no longer than
        `seconds`; 0: none.
        """
        most = self.most_rows(seconds)
        return (ceiling if most >= ceiling else int(most)) // quantum * quantum

    def most_rows(self, seconds: float) -> float:
        """The most samples that take no longer than `seconds`, without a ceiling; the last one may
        be a part.
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
        """The finish times at which throughput may be best: those of the knots below `ceiling`, and
        its own.
        """
        knots = zip(self.batches, self.times, strict=True)
        return [time for batch, time in knots if batch < ceiling] + [self.seconds(ceiling)]

    @property
    def bent(self) -> bool:
        """True if the curve has a knee or a bend."""
        return len(self.batches) > 2 or self.flat

    @property
    def flat(self) -> bool:
        """True if the curve begins level, up to a knee."""
        return len(self.batches) > 1 and self.times[0] == self.times[1]


class PassCurve(msgspec.Struct, frozen=True):
    """The curve of a device that takes large shares in several passes; it answers as a `Curve`
    does.
    """

    curve: Curve
    wall: int  # the largest share in one pass
    rows: int  # the rows of a pass that do most samples/s, where it takes several
    extra: float = 0.0
    fits: int = 0  # the most rows of each of several passes; at least `rows`

    @property
    def simple(self) -> bool:
        """True if the curve of one pass is simple."""
        return self.curve.simple

    @property
    def error(self) -> float:
        """Relative standard error of a typical point of one pass."""
        return self.curve.error

    def passes(self, share: float) -> int:
        """The number of passes: one where the share fits at once, else as few as `rows` allows; one
        less if faster.
        """
        if share <= self.wall:
            return 1
        many = math.ceil(share / self.rows)
        fewer = many - 1
        if fewer < 2 or math.ceil(share / fewer) > self.fits:
            return many
        return min(
            fewer, many, key=lambda passes: step_in_passes(self.curve, share, passes, self.extra)
        )

    def seconds(self, share: float) -> float:
        """Predicted step time of `share` samples."""
        return step_in_passes(self.curve, share, self.passes(share), self.extra)

    def largest(self, seconds: float, ceiling: int, quantum: int) -> int:
        """The most samples, a multiple of `quantum` up to `ceiling`, that take no longer than
        `seconds`; 0: none.
        """
        most = self.curve.largest(seconds, min(ceiling, self.wall), quantum)
        if math.isinf(seconds):
            return ceiling // quantum * quantum
        if most >= ceiling or most < self.wall == self.rows:
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
        """The batches at which one pass bends, then those at which every pass is full."""
        full = range(2 * self.rows, ceiling, self.rows * math.ceil(ceiling / self.rows / MOST_FULL))
        times = [
            *self.curve.breakpoints(min(ceiling, self.wall)),
            *map(self.seconds, full),
            self.seconds(ceiling),
        ]
        return sorted(set(times))


def step_in_passes(curve: Curve, share: float, passes: int, extra: float) -> float:
    """Seconds of a step of `share` samples in this number of passes."""
    return passes * curve.seconds(share / passes) + (passes - 1) * extra
