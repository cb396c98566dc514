"""What rows of unequal length cost: the seconds of a pass by its rows and its longest row."""

from __future__ import annotations

import math

import msgspec


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a pass of r rows padded to L tokens: fixed_s + r * L * (per_token_s + per_token_length_s * L)."""

    fixed_s: float
    per_token_s: float
    per_token_length_s: float

    def seconds(self, rows: int, length: int) -> float:
        """Of one pass of `rows` rows, each padded to `length` tokens."""
        return self.fixed_s + rows * length * (self.per_token_s + self.per_token_length_s * length)

    def is_valid(self) -> bool:
        """Whether its seconds are finite, 0 or above, and not all 0."""
        figures = (self.fixed_s, self.per_token_s, self.per_token_length_s)
        return all(math.isfinite(each) and each >= 0 for each in figures) and any(figures)
