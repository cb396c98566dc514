"""Everything that a search found out, as data from which its result is written."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from evener.plan.layout import Knots

from ..families import PackMode
from ..types import Layout, Observation, Problem, Result, Timed
from .layouts import Candidate, LayoutOptions
from .ranking import RankedLayout


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a search from which its result is written."""

    problem: Problem
    options: LayoutOptions
    chosen: Result
    ranking: tuple[RankedLayout, ...] = ()  # the layouts of the race, the winner first
    results: tuple[Result, ...] = ()  # every training that ran and may run again, the fastest first
    solos: tuple[Result | None, ...] = ()  # each device alone, at its fastest batch
    single: Result | None = None  # the best single device
    turns: Mapping[Layout, tuple[Timed, ...]] = {}  # the turns that determine a layout's samples/s
    others_idle: frozenset[Layout] = frozenset()  # layouts measured without contention
    # layouts that failed in the race, with the failure
    failed: tuple[tuple[Candidate, Observation], ...] = ()
    # layouts that ran out of memory in the race, with the smaller layouts that ran instead
    replaced_layouts: tuple[tuple[Candidate, Candidate], ...] = ()
    # sharded layouts that gave way to others, as memory was nearly full in a measurement of them
    nearly_full: frozenset[Layout] = frozenset()
    unmeasured: tuple[Candidate, ...] = ()  # not measured because the budget was spent
    ungrown: tuple[Candidate, ...] = ()  # packs that might still have gained
    packings: tuple[tuple[PackMode, tuple[Observation, ...]], ...] = ()
    enough_seconds: float = 0.0  # a budget that would suffice to measure what is missing
    mean_length: float = 0.0  # tokens per row; 0 if rows have no lengths
    # gradient exchange that computation doesn't hide; None: unknown
    sync_seconds: float | None = None
    seconds_alone: Mapping[Layout, float | None] = {}  # seconds of the slowest share alone
    # exchange time by number of hosts, in addition to that within one host
    network_seconds: tuple[float, ...] = ()
    curves: tuple[tuple[Knots, int], ...] = ()  # curves of the chosen layout's devices
    own_rate: float = 0.0  # predicted samples/s at the script's own batch; 0: unknown

    def turns_of(self, layout: Layout) -> tuple[Timed, ...]:
        """Return the measurements from which a layout's throughput is computed; empty if none."""
        return self.turns.get(layout, ())
