"""Costs of rows of unequal length: the seconds of a pass by its rows and its longest row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Work(msgspec.Struct, frozen=True):
    """A device's work in a step of rows of unequal length, on average over steps."""

    tokens: float  # without padding
    passes: float
    padded: float  # tokens with padding
    padded_lengths: float  # the sum of each pass's padded tokens times its length


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a pass of r rows padded to L tokens: fixed_s + r * L * (per_token_s + per_token_length_s * L)."""

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
        token, token_length = self.per_token_s, self.per_token_length_s
        return [length * (token + token_length * length) for length in lengths]

    def seconds_for(self, work: Work) -> float:
        """Seconds of all passes of a step."""
        passes = self.fixed_s * work.passes
        return passes + self.per_token_s * work.padded + self.per_token_length_s * work.padded_lengths

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
