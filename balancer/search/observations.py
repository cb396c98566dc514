"""The store of observations, in any order; by device, by layout and by stage.

Equal sets of observations give equal answers. Devices are modelled from exploration alone (stages
solo, rest and split) until a winner is checked, so that the race does not change the candidates it
compares. Costs, failures and memory that others take count from all stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from ..types import Failed, Layout, Observation, OutOfMemory, Probe, Problem, Stage, Timed
from .layouts import is_no_larger

EXPLORATION: tuple[Stage, ...] = ("solo", "rest", "split")
STAGES: tuple[Stage, ...] = get_args(Stage)
# of a probe that fails for a reason other than memory: a child may die by chance, hardly twice
# (lost)
TRIES = 2
SHARDED: tuple[Stage, ...] = ("part", "shard")  # the exploration of sharded trainings
FIRST_TURN = 0
# of a stage: rounds alone (stairs, 16 devices), splits and devices at rest, whose edges of stairs
# are halved as often (stall) and whose noise moves predictions (noisy), and turns of the race
MOST_TURNS = 8

Turns = dict[int, Timed]


class Observations:
    """The set of observations of one search."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seen: dict[Probe, Observation] = {}
        self._by_layout: defaultdict[Layout, dict[Probe, Observation]] = defaultdict(dict)
        self._failures: defaultdict[Probe, list[float]] = defaultdict(
            list
        )  # the seconds of each failed try
        self._settled: dict[Stage, list[Observation]] = {}
        # by device: (turn of the race, -1 before; bytes that others held then)
        self._held: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (-1, 0))
        self.gone: dict[
            int, str
        ] = {}  # devices that are no longer there, with the message of their loss
        self.sharded: list[Observation] = []  # the exploration of sharded trainings, as it came

    def add(self, seen: Observation) -> None:
        """Take an observation.

        Of two on one probe OutOfMemory beats Timed beats Failed. Each failure counts as one more
        try.
        """
        probe = seen.probe
        if len(probe.layout.shares) != self._problem.devices or not probe.layout.active:
            return
        self._settled.pop(probe.stage, None)
        if isinstance(seen, Failed):
            self._count_failure(seen)
        else:
            self._note_others(seen)
        if probe.stage in SHARDED:
            self.sharded.append(seen)
        kept = max(self._seen.get(probe, seen), seen, key=rank_observation)
        self._seen[probe] = self._by_layout[probe.layout][probe] = kept

    def _count_failure(self, seen: Failed) -> None:
        self._failures[seen.probe].append(seen.elapsed_seconds)
        if seen.cause == "device" and len(self._failures[seen.probe]) >= TRIES:
            self.gone.update(dict.fromkeys(seen.devices, seen.detail))

    def _note_others(self, seen: Timed | OutOfMemory) -> None:
        """Note what others hold of each device: the most that was seen, as they may take it again.

        Once raced, a device has what it had in its last turn: what others held in exploration may
        be free again.
        """
        probe = seen.probe
        turn = probe.turn if probe.stage in ("race", "knobs", "check") else -1
        for position, (share, size) in enumerate(
            zip(probe.layout.shares, seen.short_bytes, strict=False)
        ):
            if share or size:
                self._held[position] = max(self._held[position], (turn, size))

    def full_now(self, position: int, seen: OutOfMemory) -> bool:
        """True if others hold as much of the device's memory as when a layout ran out of it."""
        return not seen.short_bytes or seen.short_bytes[position] <= self._held[position][1]

    # ------------------------------------------------------------------ by probe, stage and layout

    def in_stage(self, *stages: Stage) -> list[Observation]:
        """The settled observations of some stages, one after the other, each in the order of its
        probes.
        """
        for stage in stages:
            if stage not in self._settled:
                own = (
                    seen
                    for seen in self._seen.values()
                    if seen.probe.stage == stage and not self._is_open(seen)
                )
                self._settled[stage] = sorted(own, key=lambda one: order_probe(one.probe))
        return [seen for stage in stages for seen in self._settled[stage]]

    def timed(self, *stages: Stage) -> list[Timed]:
        """The timed observations of some stages, in the same order; of all stages if none is
        named.
        """
        return [seen for seen in self.in_stage(*stages or STAGES) if isinstance(seen, Timed)]

    def timed_in(self, layout: Layout, *stages: Stage) -> list[Timed]:
        """The timed observations of one layout, in some stages or all."""
        own = self._by_layout.get(layout, {}).values()
        return [
            one for one in own if isinstance(one, Timed) and one.probe.stage in (stages or STAGES)
        ]

    def timed_race(self) -> list[Timed]:
        """The timed observations of the race whose layouts are one training."""
        return [one for one in self.timed("race") if one.probe.layout.traits.by_shares]

    def turns(self, layout: Layout, stage: Stage | None = None) -> Turns:
        """The turns of a layout in the race, or in its stage of other knobs.

        An uncontended measurement from before the race counts as turn 0, unless the race has one.
        """
        timed, stage = self.timed_in(layout), stage or ("knobs" if layout.knobs else "race")
        found = {one.probe.turn: one for one in timed if one.probe.stage == stage}
        uncontended = (
            "rest",
            "split",
            "shard",
            "pack",
            *(("solo",) if self._problem.devices == 1 else ()),
        )
        earlier = [one for one in timed if one.probe.stage in uncontended]
        if stage == "race" and earlier and FIRST_TURN not in found:
            found[FIRST_TURN] = max(earlier, key=lambda one: order_probe(one.probe))
        return _steady(self._refuting_checks(timed, found) or dict(sorted(found.items())))

    def _refuting_checks(self, timed: Sequence[Timed], turns: Turns) -> Turns:
        """The checks of a layout and its turns since, if they are surely slower than before:
        something changed.
        """
        checked = [one for one in timed if one.probe.stage == "check"]
        if not checked:
            return {}
        over = [i for one in checked[:1] for i in one.probe.layout.active if self.recovered(i)]
        checks = {one.probe.turn: one for one in checked if not any(map(one.held_back, over))}
        before = {turn: one for turn, one in turns.items() if turn < min(checks, default=0)}
        least = min((one.throughput.low for one in _steady(before).values()), default=math.inf)
        slower = all(one.throughput.high < least for one in _steady(checks).values())
        since = {turn: one for turn, one in turns.items() if checks and turn >= min(checks)}
        return {**checks, **since} if checks and slower else {}

    def turns_once_chosen(self, layout: Layout) -> Turns:
        """The turns of a layout from its first check on: they had no part in choosing it."""
        seen = self.timed_in(layout, "check", "race", "knobs")
        began = min(
            (one.probe.turn for one in seen if one.probe.stage == "check"), default=math.inf
        )
        return _steady(dict(enumerate(one for one in seen if one.probe.turn >= began)))

    def broken(self, layout: Layout) -> Observation | None:
        """The first observation of this layout since the race began that wasn't timed, if any."""
        own = (one for one in self.in_stage("race", "knobs", "check") if one.probe.layout == layout)
        return next((one for one in own if not isinstance(one, Timed)), None)

    def still_fit(self, timed: Iterable[Timed]) -> list[Timed]:
        """The observations whose layouts may run again.

        A layout is refuted by one on the same devices that ran out of memory with no more on any of
        them, by memory that others were seen to hold, and by a device that has gone.
        """
        found = [one for one in self._seen.values() if isinstance(one, OutOfMemory)]
        full = [
            one.probe.layout
            for one in found
            if all(self.full_now(i, one) for i in one.probe.layout.active)
        ]
        return [one for one in timed if self._still_fits(one.probe.layout, full)]

    def _still_fits(self, layout: Layout, full: Sequence[Layout]) -> bool:
        here = (one for one in full if (one.kind, one.active) == (layout.kind, layout.active))
        if self.gone.keys() & layout.active or any(is_no_larger(one, layout) for one in here):
            return False
        return all(self.holds(i, one) for one in self.timed_in(layout) for i in layout.active)

    def holds(self, position: int, seen: Timed) -> bool:
        """True if the device still has the memory that the layout took there."""
        used, limit = seen.memory_bytes[position], self.memory_limit(position)
        return not self._held[position][1] or used is None or limit is None or used <= limit

    def memory_limit(self, position: int) -> int | None:
        """A device's bytes less those that others were seen to hold; None: unknown."""
        limit = self._problem.memory_bytes[position]
        return None if limit is None else max(1, limit - self._held[position][1])

    # ------------------------------------------------------------------ failures and costs

    def _is_open(self, seen: Observation) -> bool:
        """True if it failed and is worth another try: it has tries left, and the workload's own
        code didn't raise.
        """
        if not isinstance(seen, Failed) or len(self._failures[seen.probe]) >= TRIES:
            return False
        return seen.cause != "unsupported" and (
            seen.cause != "raised" or seen.probe.stage != "solo"
        )

    def open_failures(self) -> list[Probe]:
        """Probes that failed once and are worth another try."""
        return sorted(
            (seen.probe for seen in self._seen.values() if self._is_open(seen)), key=order_probe
        )

    def spent_seconds(self, *stages: Stage, until_turn: float = math.inf) -> float:
        """Seconds of the probes of some stages or all; of those that run at the same time only the
        longest counts.

        Turns of the race after `until_turn` are left out.
        """
        rounds: defaultdict[object, defaultdict[int, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        for probe, seen in self._seen.items():
            if probe.stage in (stages or STAGES) and (
                probe.stage != "race" or probe.turn <= until_turn
            ):
                together = (probe.stage, probe.turn) if probe.stage in ("solo", "part") else probe
                ran = 0.0 if isinstance(seen, Failed) else seen.elapsed_seconds
                rounds[together][probe.layout.active[0]] += (
                    math.fsum(self._failures.get(probe, ())) + ran
                )
        return math.fsum(max(devices.values()) for devices in rounds.values())

    # ------------------------------------------------------------------ by device

    def explored(self, position: int) -> list[Observation]:
        """The settled observations of a device in exploration, in the order of their probes."""
        return [one for one in self.in_stage(*EXPLORATION) if one.probe.layout.shares[position]]

    def largest_alone(self, position: int) -> float:
        """The most rows of a pass that the device ran alone in exploration; less than 1 before
        any.
        """
        timed = (one.probe.layout for one in self.explored(position) if isinstance(one, Timed))
        return max(
            (layout.pass_rows[position] for layout in timed if layout.traits.alone), default=0.5
        )

    def recovered(self, position: int) -> bool:
        """True if the device was raced and not held back in its last turn."""
        return any(not one.held_back(position) for one in self.raced(position)[-1:])

    def raced(self, position: int) -> list[Timed]:
        """The turns of the race and the checks in which the device took part."""
        own = (one for one in self.timed("race", "check") if one.probe.layout.shares[position])
        return sorted(own, key=lambda one: one.probe.turn)

    def raced_splits(self, position: int) -> list[Timed]:
        """The splits of the race and its checks in which the device took part, once a winner was
        checked.
        """
        found = [
            (one, one.probe.layout)
            for one in (self.raced(position) if self.in_stage("check") else ())
        ]
        own = [
            (one, layout)
            for one, layout in found
            if layout.traits.together and not layout.traits.sharded
        ]
        return [one for one, layout in own if layout.by_rows and not layout.knobs]


def rank_observation(seen: Observation) -> tuple[int, int, float]:
    """The rank of an observation: of two of one probe, the higher-ranked is kept."""
    if isinstance(seen, OutOfMemory):
        return (2, 0, seen.elapsed_seconds)
    if isinstance(seen, Timed):
        return (1, seen.steps, -seen.step_seconds)
    return (0, 0, seen.elapsed_seconds)


def order_probe(probe: Probe) -> tuple[Any, ...]:
    """The sort key of a probe: any set of observations has one order."""
    layout = probe.layout
    way = (
        layout.kind,
        layout.placement,
        layout.knobs,
        layout.length,
        layout.tokens,
        repr(layout.costs),
    )
    place = (STAGES.index(probe.stage), probe.turn)
    return (*place, layout.shares, layout.pass_rows, layout.processes, probe.seconds, *way)


def _steady(turns: Turns) -> Turns:
    """The turns without those in which a device was held back, unless it always was."""
    return {turn: one for turn, one in turns.items() if not one.held_back()} or turns
