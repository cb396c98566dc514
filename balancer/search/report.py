"""What a search has come to, as one value: all that a plan, a verdict and tables are made of."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from evener.plan.layout import Knots

from ..families import PackMode
from ..types import Layout, Observation, Problem, Result, Timed
from .layouts import Candidate, LayoutOptions
from .ranking import Standing


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A search between two probes, or at its end."""

    problem: Problem
    options: LayoutOptions
    chosen: Result
    ranking: tuple[Standing, ...] = ()  # the layouts of the race, the winner first
    results: tuple[Result, ...] = ()  # every training that ran and may run again, fastest first
    solos: tuple[Result | None, ...] = ()  # of each device alone, at its fastest batch
    single: Result | None = None  # the best single device
    turns: Mapping[Layout, tuple[Timed, ...]] = {}  # that give a layout's figure
    at_rest: frozenset[Layout] = frozenset()  # measured while other devices weren't working
    broken: tuple[tuple[Candidate, Observation], ...] = ()  # of the race, with its failure
    retreats: tuple[tuple[Candidate, Candidate], ...] = ()  # too large, and what ran instead
    unmeasured: tuple[Candidate, ...] = ()  # the budget was over before
    ungrown: tuple[Candidate, ...] = ()  # packs that would still have gained
    packings: tuple[tuple[PackMode, tuple[Observation, ...]], ...] = ()
    enough_seconds: float = 0.0  # of a budget that measures what is missing
    mean_length: float = 0.0  # tokens of a row; 0 where rows have no lengths
    sync_seconds: float | None = None  # exchange that computation doesn't hide; None: unknown
    apart_seconds: Mapping[Layout, float | None] = {}  # the longest share of a split, alone
    network_seconds: tuple[float, ...] = ()  # by the number of hosts: beyond those of one host
    curves: tuple[tuple[Knots, int], ...] = ()  # of the chosen layout's devices
    own_rate: float = 0.0  # samples/s at the script's own batch, as predicted; 0: unknown

    def turns_of(self, layout: Layout) -> tuple[Timed, ...]:
        """The turns that give a layout's figure."""
        return self.turns.get(layout, ())
