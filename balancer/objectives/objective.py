"""The interface of an objective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..types import Timed


class Objective(msgspec.Struct, frozen=True):
    """Something to have most of; where nothing is overridden, samples/s.

    An objective that `trades_speed` chooses the layout of the most `value`, among those that are at most a given part
    slower than the fastest. Others choose by speed.
    """

    name: str  # on the command line, in journals and in JSON
    summary: str  # for the help, behind the name
    unit: str = "samples/s"
    trades_speed: bool = False
    uses_lengths: bool = True  # rows are dealt by what their lengths cost, where they have any
    needs_lengths: bool = False  # without lengths of rows it can't be counted
    needs_energy: bool = False  # without the devices' power it can't be counted

    def value(self, samples_per_second: float, turns: Iterable[Timed]) -> float:
        """The objective's value for a layout that trained at this rate in these measurements; 0 if it is unknown."""
        return samples_per_second

    def costs(self, seen: Sequence[Timed], devices: int) -> list[tuple[float, float]]:
        """The cost of each device for a second that it trains and for one that only others do; empty if unknown.

        The value of a split is predicted as its samples/s over the sum of these.
        """
        return []

    def write(self, value: float) -> str:
        """A value for a sentence, with its unit."""
        return f"{value:.3g} {self.unit}"
