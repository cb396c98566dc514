"""What was seen: every observation once, whatever the order in which it came, read per device and per layout."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from evener.balancer.search.model.memory import Memory
from evener.balancer.search.model.points import Point
from evener.balancer.search.statistics import student
from evener.balancer.types import Failed, Layout, Observation, OutOfMemory, Probe, Problem, Stage, Timed

STAGES: tuple[Stage, ...] = ("solo", "split", "race")
TRIES = 2  # of a probe that fails for a reason other than memory
TYPICAL_BLOCKS = 8  # behind an interval; it turns a half-width into a standard error


class Device(msgspec.Struct, frozen=True):
    """What is known of one device. `rounds` counts its solo probes; `lost` says why it is left out, "" if it isn't."""

    alone: tuple[Point, ...]  # a process of its own, the other devices at work as well
    rested: tuple[Point, ...]  # a process of its own, the others at rest
    beside: tuple[Point, ...]  # its own part of splits
    memory: Memory
    rounds: int
    lost: str


class Ledger:
    """The set of observations; equal sets read equal."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seen: dict[Probe, Observation] = {}
        self._failures: Counter[Probe] = Counter()
        self._solo: defaultdict[int, list[Probe]] = defaultdict(list)
        self._joint: list[Probe] = []
        self._devices: dict[int, Device] = {}
        self._places: defaultdict[tuple[str, tuple[int, ...]], list[Probe]] = defaultdict(list)
        self._taken: dict[int, int] = {}  # position -> bytes that others were seen to hold, at most
        self._gone: set[int] = set()  # positions of devices that are no longer there
        self._refuted: dict[tuple[str, tuple[int, ...]], frozenset[Layout]] = {}
        self._settled: dict[Stage, list[Observation]] = {}
        self._costs: dict[Stage, float] = {}

    def add(self, seen: Observation) -> bool:
        """Take an observation; False if it says nothing new.

        Of two on one probe the worse news counts: out of memory once is out of memory. A failure counts each time it
        is told, since a failed probe is tried afresh; so a journal told twice may give up a device that it shouldn't.
        """
        probe = seen.probe
        layout = probe.layout
        if len(layout.shares) != self._problem.devices or not layout.active or layout.kind not in ("solo", "split"):
            return False
        if isinstance(seen, Failed):
            self._failures[probe] += 1
            if seen.cause == "device" and self._failures[probe] >= TRIES:
                self._gone.update(seen.devices)
        else:
            self.shrink(seen.short_bytes)
        self._settled.pop(probe.stage, None)
        self._costs.pop(probe.stage, None)
        known = self._seen.get(probe)
        if known is not None and _rank(known) >= _rank(seen):
            if isinstance(seen, Failed) and isinstance(known, Failed):
                self._forget(layout)
                return True
            return False
        self._seen[probe] = seen
        if known is None:
            (self._solo[layout.active[0]] if layout.kind == "solo" else self._joint).append(probe)
            self._places[layout.kind, layout.active].append(probe)
        self._refuted.pop((layout.kind, layout.active), None)
        self._forget(layout)
        return True

    def shrink(self, short_bytes: tuple[int, ...]) -> bool:
        """Others hold memory: the most that was seen counts, as it may be held again. Whether that is news."""
        news = {i: size for i, size in enumerate(short_bytes) if size > self._taken.get(i, 0)}
        for position in news:
            self._devices.pop(position, None)
        self._taken.update(news)
        if news:
            self._refuted.clear()
        return bool(news)

    def __len__(self) -> int:
        return len(self._seen) + sum(count - 1 for count in self._failures.values())

    def device(self, position: int) -> Device:
        """Everything known of one device."""
        known = self._devices.get(position)
        if known is None:
            known = self._devices[position] = self._read(position)
        return known

    def probe(self, probe: Probe) -> Observation | None:
        """What came of a probe; None if it is open, or failed once and is worth another try."""
        seen = self._seen.get(probe)
        return None if isinstance(seen, Failed) and self._failures[probe] < TRIES else seen

    def of(self, stage: Stage) -> Sequence[Observation]:
        """The settled observations of a stage, in order of their probes."""
        known = self._settled.get(stage)
        if known is None:
            probes = sorted((p for p in self._seen if p.stage == stage), key=_order)
            known = self._settled[stage] = [seen for p in probes if (seen := self.probe(p)) is not None]
        return known

    def timed(self, stages: Iterable[Stage]) -> dict[Layout, list[Timed]]:
        """Every layout that ran in `stages`, its turns in order."""
        layouts: dict[Layout, list[Timed]] = {}
        for stage in stages:
            for seen in self.of(stage):
                if isinstance(seen, Timed):
                    layouts.setdefault(seen.probe.layout, []).append(seen)
        return layouts

    def standing(self, timed: dict[Layout, list[Timed]]) -> dict[Layout, list[Timed]]:
        """Those of the layouts that ran which may still run.

        A layout is refuted by one on the same devices that ran out of memory with no more on any of them, by memory
        that others were seen to hold, and by a device that has gone.
        """
        return {layout: turns for layout, turns in timed.items() if self._stands(layout)}

    def _stands(self, layout: Layout) -> bool:
        place = layout.kind, layout.active
        if self._gone.intersection(place[1]):
            return False
        if place not in self._refuted:
            self._refuted[place] = self._refute(place)
        return layout not in self._refuted[place]

    def _refute(self, place: tuple[str, tuple[int, ...]]) -> frozenset[Layout]:
        seen = [self._seen[probe] for probe in self._places[place]]
        full = [one.probe.layout.shares for one in seen if isinstance(one, OutOfMemory)]
        return frozenset(
            one.probe.layout
            for one in seen
            if isinstance(one, Timed)
            and (
                any(all(a <= b for a, b in zip(shares, one.probe.layout.shares, strict=True)) for shares in full)
                or any(not self._holds(i, one) for i in place[1])
            )
        )

    def _holds(self, position: int, seen: Timed) -> bool:
        """Whether the device can still give what the layout held there."""
        used, limit = seen.memory_bytes[position], self._limit(position)
        return position not in self._taken or used is None or limit is None or used <= limit

    def _limit(self, position: int) -> int | None:
        limit = self._problem.memory_bytes[position]
        return None if limit is None else max(1, limit - self._taken.get(position, 0))

    def open_failures(self) -> list[Probe]:
        """Probes that failed once and are worth another try."""
        return sorted(
            (p for p, n in self._failures.items() if n < TRIES and isinstance(self._seen[p], Failed)), key=_order
        )

    def spent_seconds(self) -> float:
        """What all probes cost: solo probes of one turn run at the same time, everything else one after another."""
        return sum(self.spent_on(stage) for stage in STAGES)

    def spent_on(self, stage: Stage) -> float:
        """What the probes of a stage cost."""
        if stage in self._costs:
            return self._costs[stage]
        rounds: defaultdict[tuple[int, int], float] = defaultdict(float)
        total = 0.0
        for probe in sorted((p for p in self._seen if p.stage == stage), key=_order):
            cost = self._seen[probe].elapsed_seconds * max(1, self._failures[probe])
            if stage == "solo" and probe.layout.kind == "solo":
                rounds[probe.turn, probe.layout.active[0]] += cost
            else:
                total += cost
        longest: defaultdict[int, float] = defaultdict(float)
        for (turn, _), cost in rounds.items():
            longest[turn] = max(longest[turn], cost)
        self._costs[stage] = total + sum(longest[turn] for turn in sorted(longest))
        return self._costs[stage]

    def _forget(self, layout: Layout) -> None:
        if layout.kind == "solo":
            self._devices.pop(layout.active[0], None)
        else:
            self._devices.clear()

    def _read(self, position: int) -> Device:
        solo = [self._seen[p] for p in sorted(self._solo[position], key=_order)]
        joint = [self._seen[p] for p in sorted(self._joint, key=_order) if p.layout.shares[position]]
        settled = [seen for seen in solo if self.probe(seen.probe) is not None]
        return Device(
            alone=tuple(_points(solo, "solo")),
            rested=tuple(_points(solo, "split")),
            beside=tuple(_own_points(joint, position)),
            memory=self._memory(position, solo, joint),
            rounds=sum(1 for seen in settled if seen.probe.stage == "solo"),
            lost=self._lost(position, [*solo, *joint]),
        )

    def _memory(self, position: int, solo: list[Observation], joint: list[Observation]) -> Memory:
        alone: dict[int, int] = {}
        beside: dict[int, int] = {}
        sizes: list[int] = []
        failed, failures = None, 0
        for seen in (*solo, *joint):
            points = alone if seen.probe.layout.kind == "solo" else beside
            share = seen.probe.layout.shares[position]
            short = isinstance(seen, OutOfMemory) and position in self._short(seen)
            if short or (isinstance(seen, Failed) and self._too_large(position, seen)):
                failed, failures = share if failed is None else min(failed, share), failures + 1
            elif isinstance(seen, Timed):
                used = seen.memory_bytes[position]
                if self._holds(position, seen):
                    sizes.append(share)
                if used is not None:
                    points[share] = max(used, points.get(share, 0))
        ran = max((share for share in sizes if failed is None or share < failed), default=0)
        if len(alone) < 2:
            alone, beside = {**beside, **alone}, {}
        return Memory(
            self._limit(position),
            tuple(sorted(alone.items())),
            ran,
            failed,
            failures,
            tuple(sorted(beside.items())),
        )

    def _short(self, seen: OutOfMemory) -> tuple[int, ...]:
        """The devices that ran out: those it names, else the one nearest to the largest batch it ran."""
        shares = seen.probe.layout.shares
        if seen.devices:
            return seen.devices
        return (max(seen.probe.layout.active, key=lambda i: (shares[i] / self._largest_alone(i), -i)),)

    def _largest_alone(self, position: int) -> float:
        return max(
            (
                seen.probe.layout.shares[position]
                for p in self._solo[position]
                if isinstance(seen := self._seen[p], Timed)
            ),
            default=0.5,
        )

    def _lost(self, position: int, seen: list[Observation]) -> str:
        """Why the device is left out: it failed where nothing smaller ran, and not only with its one mate."""
        for one in seen:
            if not isinstance(one, Failed) or self._failures[one.probe] < TRIES:
                continue
            active = one.probe.layout.active
            named = one.devices == (position,) or active == (position,)
            if named and one.cause == "device":
                return one.detail
            if named and len(active) != 2 and not self._too_large(position, one):
                return one.detail
        return ""

    def _too_large(self, position: int, seen: Failed) -> bool:
        """Whether a device failed alone, twice, at more samples than it ran: some kernels end there, as memory does."""
        layout = seen.probe.layout
        ran = self._largest_alone(position)
        alone = layout.active == (position,) and seen.cause != "device"
        return alone and self._failures[seen.probe] >= TRIES and ran >= 1 and layout.shares[position] > ran


def relative_error(seen: Timed) -> float:
    """Relative standard error of a step time, from its 95 % interval."""
    half = (seen.high_seconds - seen.low_seconds) / 2
    return half / seen.step_seconds / student(TYPICAL_BLOCKS - 1) if seen.step_seconds > 0 else 1.0


def _points(seen: list[Observation], stage: Stage) -> Iterator[Point]:
    timed = [one for one in seen if isinstance(one, Timed) and one.probe.stage == stage and one.step_seconds > 0]
    for one, error in zip(timed, _errors(timed), strict=True):
        yield Point(one.probe.layout.global_batch, one.step_seconds, error)


def _own_points(seen: list[Observation], position: int) -> Iterator[Point]:
    timed = [one for one in seen if isinstance(one, Timed) and one.device_seconds[position]]
    for one, error in zip(timed, _errors(timed), strict=True):
        yield Point(one.probe.layout.shares[position], one.device_seconds[position] or 0.0, error)


def _errors(timed: list[Timed]) -> list[float]:
    """Relative standard errors: each one's own, or what the noise of a step in all of them says, if that is more.

    An interval of few blocks is often too narrow by luck, and a probe that ends once it is narrow enough selects those.
    """
    own = [relative_error(one) for one in timed]
    steps = [max(1, one.steps) for one in timed]
    noise = math.sqrt(math.fsum(e * e * n for e, n in zip(own, steps, strict=True)) / max(1, len(own)))
    return [max(e, noise / math.sqrt(n)) for e, n in zip(own, steps, strict=True)]


def _rank(seen: Observation) -> tuple[int, int, float]:
    """Which of two observations of one probe is kept, whatever the order of telling."""
    if isinstance(seen, OutOfMemory):
        return (2, 0, seen.elapsed_seconds)
    if isinstance(seen, Timed):
        return (1, seen.steps, -seen.step_seconds)
    return (0, 0, seen.elapsed_seconds)


def _order(probe: Probe) -> tuple[str, int, tuple[int, ...], float]:
    return (probe.stage, probe.turn, probe.layout.shares, probe.seconds)
