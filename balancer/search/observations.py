"""Store what the probes of a search observed, and find it by device, layout or stage.

Equal sets of observations give equal answers, whatever their order. Until a winner has been
measured again, the models of the devices only use the stages that come before the final comparison:
solo, rest and split. This keeps the comparison from changing its own candidates. Time spent,
failures and the memory of other processes count in all stages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..types import Failed, Layout, Observation, OutOfMemory, Probe, Problem, Stage, Timed
from .layouts import is_no_larger

EXPLORATION: tuple[Stage, ...] = (Stage.SOLO, Stage.REST, Stage.SPLIT)
STAGES = tuple(Stage)
# attempts of a probe that fails for a reason other than memory: a child process may die by chance,
# but hardly twice
TRIES = 2
SHARDED: tuple[Stage, ...] = (Stage.PART, Stage.SHARD)  # the exploration of sharded trainings
FIRST_TURN = 0
# maximum number of probes of exploration after the solo stage (splits, and devices measured while
# the others are idle), and of turns in the race
MOST_TURNS = 8

Turns = dict[int, Timed]


class Observations:
    """All observations of a search, to be looked up by probe, stage, layout or device."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seen: dict[Probe, Observation] = {}
        self._by_layout: defaultdict[Layout, dict[Probe, Observation]] = defaultdict(dict)
        # seconds of each failed attempt
        self._failures: defaultdict[Probe, list[float]] = defaultdict(list)
        self._final_by_stage: dict[Stage, list[Observation]] = {}
        # by device: the turn of the race or of the check before it, or -1; and the bytes that other
        # processes held in that turn
        self._others_bytes: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (-1, 0))
        # devices that are no longer available, with a message that says why
        self.gone: dict[int, str] = {}
        # the exploration of sharded trainings, in the order of arrival
        self.sharded: list[Observation] = []

    def add(self, observation: Observation) -> None:
        """Add an observation.

        If the same probe was observed several times, only the most informative observation is kept.
        Observations of a different number of devices are ignored.
        """
        probe = observation.probe
        if len(probe.layout.shares) != self._problem.devices or not probe.layout.active:
            return
        self._final_by_stage.pop(probe.stage, None)
        if isinstance(observation, Failed):
            self._count_failure(observation)
        else:
            self._record_others_memory(observation)
        if probe.stage in SHARDED:
            self.sharded.append(observation)
        kept = max(self._seen.get(probe, observation), observation, key=rank_observation)
        self._seen[probe] = self._by_layout[probe.layout][probe] = kept

    def _count_failure(self, failure: Failed) -> None:
        self._failures[failure.probe].append(failure.elapsed_seconds)
        if failure.cause == "device" and len(self._failures[failure.probe]) >= TRIES:
            self.gone.update(dict.fromkeys(failure.devices, failure.detail))

    def _record_others_memory(self, observation: Timed | OutOfMemory) -> None:
        """Record how much memory other processes hold on each device.

        A value from a later round replaces an earlier one. Within a round, the highest value
        counts.
        """
        probe = observation.probe
        race_turn = probe.turn if probe.stage in (Stage.RACE, Stage.KNOBS, Stage.CHECK) else -1
        # a race's last turn counts, as memory may be free again; an observation after a check is as
        # recent as that check
        turn = max(race_turn, probe.after)
        shares_and_bytes = zip(probe.layout.shares, observation.short_bytes, strict=False)
        for position, (share, others_bytes) in enumerate(shares_and_bytes):
            if share or others_bytes:
                # in exploration, the highest number counts, as those processes may use as much
                # again
                self._others_bytes[position] = max(
                    self._others_bytes[position], (turn, others_bytes)
                )

    def is_still_full(self, position: int, failure: OutOfMemory) -> bool:
        """Whether a device that ran out of memory is expected to run out of it again.

        This is so if other processes hold at least as much of its memory now as they did then, or
        if that is unknown. `failure` is the observation in which the device ran out of memory.
        """
        return (
            not failure.short_bytes
            or failure.short_bytes[position] <= self._others_bytes[position][1]
        )

    # ------------------------------------------------------------------ by probe, stage and layout

    def in_stage(self, *stages: Stage) -> list[Observation]:
        """Return the observations of these stages, sorted by stage, then by probe.

        Failures that may still be retried are left out.
        """
        found: list[Observation] = []
        for stage in stages:
            if stage not in self._final_by_stage:
                self._final_by_stage[stage] = self._read_stage(stage)
            found += self._final_by_stage[stage]
        return found

    def _read_stage(self, stage: Stage) -> list[Observation]:
        own = (seen for seen in self._seen.values() if seen.probe.stage == stage)
        settled = [seen for seen in own if not self._is_worth_retry(seen)]
        return sorted(settled, key=lambda one: order_probe(one.probe))

    def timed(self, *stages: Stage) -> list[Timed]:
        """Return the observations that have step times, from these stages or from all."""
        return [seen for seen in self.in_stage(*stages or STAGES) if isinstance(seen, Timed)]

    def timed_in(self, layout: Layout, *stages: Stage) -> list[Timed]:
        """Return a layout's observations that have step times, from these stages or from all."""
        wanted = stages or STAGES
        own = self._by_layout.get(layout, {}).values()
        timed = (one for one in own if isinstance(one, Timed))
        return [one for one in timed if one.probe.stage in wanted]

    def timed_race(self) -> list[Timed]:
        """Return the observations with step times from the final comparison.

        Layouts with several jobs per device, or with placed layers, are left out.
        """
        return [timed for timed in self.timed(Stage.RACE) if timed.probe.layout.traits.by_shares]

    def turns(self, layout: Layout, stage: Stage | None = None) -> Turns:
        """Return the measurements that are used to compare a layout with others, by round.

        They come from `stage`; None means the final comparison or, for a layout with tuning
        options, the comparison of these options. An earlier measurement counts as the first round
        if no other device was busy then. If the winner was measured again and was slower than in
        all rounds before, the rounds before are dropped.
        """
        if stage is None:
            stage = Stage.KNOBS if layout.knobs else Stage.RACE
        timed = self.timed_in(layout)
        found = {one.probe.turn: one for one in timed if one.probe.stage == stage}
        if stage == Stage.RACE and FIRST_TURN not in found:
            earlier = [one for one in timed if one.probe.stage in self._uncontended]
            if earlier:
                found[FIRST_TURN] = max(earlier, key=lambda one: order_probe(one.probe))
        return _undisturbed_turns(
            self._turns_since_slowdown(timed, found) or dict(sorted(found.items()))
        )

    @property
    def _uncontended(self) -> tuple[Stage, ...]:
        """The stages in which devices that don't take part in a layout are idle."""
        stages: tuple[Stage, ...] = (Stage.REST, Stage.SPLIT, Stage.SHARD, Stage.PACK)
        # a single device runs alone in the solo stage too
        return (*stages, Stage.SOLO) if self._problem.devices == 1 else stages

    def _turns_since_slowdown(self, timed: Sequence[Timed], turns: Turns) -> Turns:
        """Return a winner's later measurements if they show that the machine has become slower.

        They show this if the winner, when it was measured again, was slower than in all rounds
        before. The result has these repeated measurements, and the winner's rounds of the final
        comparison since then. It is empty if the machine hasn't become slower.
        """
        checks = self._valid_checks(timed)
        if not checks:
            return {}
        first_check = min(checks)
        before = {turn: one for turn, one in turns.items() if turn < first_check}
        slowest_before = min(
            (one.throughput.low for one in _undisturbed_turns(before).values()), default=math.inf
        )
        if any(
            one.throughput.high >= slowest_before for one in _undisturbed_turns(checks).values()
        ):
            return {}
        since = {turn: one for turn, one in turns.items() if turn >= first_check}
        return {**checks, **since}

    def _valid_checks(self, timed: Sequence[Timed]) -> Turns:
        """Return the measurements of a layout that were made after it had won, by round.

        Measurements in which a device was throttled are left out if the device has recovered since.
        """
        checked = [one for one in timed if one.probe.stage == Stage.CHECK]
        active = checked[0].probe.layout.active if checked else ()
        recovered = [i for i in active if self.has_recovered(i)]
        valid = (one for one in checked if not any(one.was_throttled(i) for i in recovered))
        return {one.probe.turn: one for one in valid}

    def turns_after_choice(self, layout: Layout) -> Turns:
        """Return all measurements of a layout since it was first checked as the winner.

        They include this first check, and are numbered from 0. Empty if the layout was never
        checked.
        """
        seen = self.timed_in(layout, Stage.CHECK, Stage.RACE, Stage.KNOBS)
        checks = (one.probe.turn for one in seen if one.probe.stage == Stage.CHECK)
        began = min(checks, default=math.inf)
        since = (one for one in seen if one.probe.turn >= began)
        return _undisturbed_turns(dict(enumerate(since)))

    @property
    def checked_turn(self) -> int:
        """The round in which a winner was last measured again; -1 if that never happened."""
        return max((one.probe.turn for one in self.in_stage(Stage.CHECK)), default=-1)

    def first_failure(self, layout: Layout) -> Observation | None:
        """Return the layout's first failure in the final comparison or later, or None."""
        own = (
            one
            for one in self.in_stage(Stage.RACE, Stage.KNOBS, Stage.CHECK)
            if one.probe.layout == layout
        )
        return next((one for one in own if not isinstance(one, Timed)), None)

    def sharded_failures(self) -> list[OutOfMemory]:
        """Return the failures of sharded layouts that ran out of memory in the race or later.

        The elapsed seconds of these observations are set to 0, because that time doesn't belong to
        the search for sharded layouts.
        """
        late = self.in_stage(Stage.RACE, Stage.KNOBS, Stage.CHECK)
        found = [one for one in late if isinstance(one, OutOfMemory) and one.probe.layout.state]
        return [msgspec.structs.replace(one, elapsed_seconds=0.0) for one in found]

    def still_fit(self, timed: Iterable[Timed]) -> list[Timed]:
        """Return those measurements whose layouts can probably still run.

        All devices of a layout must still work, and probably have enough free memory.
        """
        full = []
        for seen in self._seen.values():
            layout = seen.probe.layout
            if isinstance(seen, OutOfMemory) and all(
                self.is_still_full(i, seen) for i in layout.active
            ):
                full.append(layout)
        return [one for one in timed if self._still_fits(one.probe.layout, full)]

    def _still_fits(self, layout: Layout, out_of_memory: Sequence[Layout]) -> bool:
        """Whether all devices of a layout still work, and probably have enough free memory for it.

        `out_of_memory` are the layouts that ran out of memory and would do so again.
        """
        if self.gone.keys() & layout.active:
            return False
        same_place = (layout.kind, layout.active)
        here = (one for one in out_of_memory if (one.kind, one.active) == same_place)
        if any(is_no_larger(one, layout) for one in here):
            return False
        ran = self.timed_in(layout)
        return all(self.leaves_room(i, one) for one in ran for i in layout.active)

    def leaves_room(self, position: int, timed: Timed) -> bool:
        """Whether a measured step still fits in a device's memory.

        This compares its peak memory with what other processes leave free now.
        """
        _, others_bytes = self._others_bytes[position]
        if not others_bytes:
            return True
        used = timed.memory_bytes[position]
        limit = self.memory_limit(position)
        return used is None or limit is None or used <= limit

    def memory_limit(self, position: int) -> int | None:
        """Return how much of a device's memory other processes leave free, in bytes.

        None if the size of the memory is unknown.
        """
        limit = self._problem.memory_bytes[position]
        if limit is None:
            return None
        _, others_bytes = self._others_bytes[position]
        return max(1, limit - others_bytes)

    # ------------------------------------------------------------------ failures and costs

    def _is_worth_retry(self, observation: Observation) -> bool:
        """Whether a probe should be run again, because it failed and this may be accidental."""
        if not isinstance(observation, Failed) or len(self._failures[observation.probe]) >= TRIES:
            return False
        if observation.cause == "unsupported":
            return False
        # an exception on a device alone would only be raised again
        return observation.cause != "raised" or observation.probe.stage != Stage.SOLO

    def failures_to_retry(self) -> list[Probe]:
        """Return the failed probes to run again."""
        found = [seen.probe for seen in self._seen.values() if self._is_worth_retry(seen)]
        return sorted(found, key=order_probe)

    def spent_seconds(self, *stages: Stage, until_turn: float = math.inf) -> float:
        """Return how many seconds the probes of these stages took; of all stages if none are given.

        If probes ran at the same time, only the longest counts. Rounds of the final comparison
        after `until_turn` are left out.
        """
        wanted = stages or STAGES
        rounds: defaultdict[object, defaultdict[int, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        for probe, seen in self._seen.items():
            if probe.stage not in wanted or (probe.stage == Stage.RACE and probe.turn > until_turn):
                continue
            at_once = probe.stage in (Stage.SOLO, Stage.PART)
            one_round = (probe.stage, probe.turn) if at_once else probe
            ran = 0.0 if isinstance(seen, Failed) else seen.elapsed_seconds
            failed = math.fsum(self._failures.get(probe, ()))
            rounds[one_round][probe.layout.active[0]] += failed + ran
        return math.fsum(max(devices.values()) for devices in rounds.values())

    # ------------------------------------------------------------------ by device

    def explored(self, position: int) -> list[Observation]:
        """Return the observations of probes that used a device before the final comparison."""
        return [one for one in self.in_stage(*EXPLORATION) if one.probe.layout.shares[position]]

    def largest_alone(self, position: int) -> float:
        """Return the largest micro-batch of the steps that ran on only this device.

        0.5 if none ran, so that the result can be a divisor.
        """
        layouts = [one.probe.layout for one in self.explored(position) if isinstance(one, Timed)]
        alone = (layout.pass_rows[position] for layout in layouts if layout.traits.alone)
        return max(alone, default=0.5)

    def has_recovered(self, position: int) -> bool:
        """Whether the device wasn't throttled when it was last measured.

        Only measurements from the final comparison and later count. False if there are none.
        """
        turns = self.raced(position)
        return bool(turns) and not turns[-1].was_throttled(position)

    def raced(self, position: int) -> list[Timed]:
        """Return a device's measurements from the final comparison and later, ordered by round."""
        own = (
            timed
            for timed in self.timed(Stage.RACE, Stage.CHECK)
            if timed.probe.layout.shares[position]
        )
        return sorted(own, key=lambda one: one.probe.turn)

    def raced_splits(self, position: int) -> list[Timed]:
        """Return a device's measurements in layouts over several devices, to fit its curve.

        Only measurements from the final comparison and later count, and only layouts without shards
        and tuning options. Empty until a winner has been measured again.
        """
        # the race mustn't change the candidates that it compares
        if not self.in_stage(Stage.CHECK):
            return []
        return [one for one in self.raced(position) if _is_plain_split(one.probe.layout)]


def _is_plain_split(layout: Layout) -> bool:
    """Whether a layout divides rows over several devices, without shards or tuning options."""
    if not layout.traits.together or layout.traits.sharded:
        return False
    return layout.by_rows and not layout.knobs


def rank_observation(observation: Observation) -> tuple[int, int, float]:
    """Sort key for observations of the same probe: the least informative comes first."""
    if isinstance(observation, OutOfMemory):
        return (2, 0, observation.elapsed_seconds)
    if isinstance(observation, Timed):
        return (1, observation.steps, -observation.step_seconds)
    return (0, 0, observation.elapsed_seconds)


def order_probe(probe: Probe) -> tuple[Any, ...]:
    """Sort key that puts probes in an order which doesn't depend on when they were observed."""
    layout = probe.layout
    return (
        STAGES.index(probe.stage),
        probe.turn,
        layout.shares,
        layout.pass_rows,
        layout.processes,
        probe.seconds,
        probe.after,
        layout.kind,
        layout.placement,
        layout.knobs,
        layout.length,
        layout.tokens,
        repr(layout.costs),
    )


def _undisturbed_turns(turns: Turns) -> Turns:
    """Leave out throttled measurements, and those of a single step, if any others remain."""
    steady = {turn: one for turn, one in turns.items() if not one.was_throttled()} or turns
    # the error of a single step is unknown
    return {turn: one for turn, one in steady.items() if not one.is_single_step} or steady
