"""A session as the Balance screen sees it: events folded into one frozen state, and the figures that follow from it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from evener.balancer.events import Event, Finished, Observed, Paused, ProbeProgress, ProbeStarted, Started
from evener.balancer.types import Belief, Observation, OutOfMemory, Probe, Result, Timed
from evener.plan import Throughput

KEPT_OBSERVATIONS = 2000
EVEN = "even split"  # names in a plan's evidence
BEST_SINGLE = "best single device"
LARGER = "larger global batch"
SOLO = "solo "  # and the device's label


class Running(msgspec.Struct, frozen=True):
    """A measurement that goes on now."""

    probe: Probe
    phase: str
    samples_per_second: float | None
    relative_interval: float | None
    since_seconds: float


class Seen(NamedTuple):
    """A measurement that ended, and when."""

    observation: Observation
    at_seconds: float


class BalanceState(msgspec.Struct, frozen=True):
    """Everything that a session has reported so far."""

    run: str = ""
    devices: tuple[str, ...] = ()  # labels, in the order of the request
    names: tuple[str, ...] = ()  # product names, where known
    workload: str = ""
    budget_seconds: float | None = None
    replayed: int = 0
    notes: tuple[str, ...] = ()  # about the devices
    running: tuple[Running, ...] = ()
    seen: tuple[Seen, ...] = ()
    belief: Belief | None = None
    best: Result | None = None
    probes: int = 0
    out_of_memory: int = 0
    at_seconds: float = 0.0
    paused: bool = False
    stopping: bool = False
    finished: Finished | None = None
    ended: bool = False
    fault: str = ""
    remedy: str = ""

    @property
    def active(self) -> bool:
        """Whether a session is under way."""
        return bool(self.run or self.devices or self.stopping) and not self.ended


def advance(state: BalanceState, event: Event) -> BalanceState:
    """The state after one more event; pure, so a journal replays to the same picture."""
    replace = msgspec.structs.replace
    at_seconds = max(state.at_seconds, getattr(event, "at_seconds", 0.0))
    if isinstance(event, Started):
        return replace(
            state,
            run=event.run,
            devices=event.devices,
            workload=event.workload,
            budget_seconds=event.budget_seconds,
            replayed=event.replayed,
            notes=event.notes,
        )
    if isinstance(event, ProbeStarted):
        running = Running(event.probe, "starting", None, None, event.at_seconds)
        return replace(state, running=(*_without(state, event.probe), running), paused=False, at_seconds=at_seconds)
    if isinstance(event, ProbeProgress):
        return replace(state, running=_progressed(state, event), at_seconds=at_seconds)
    if isinstance(event, Observed):
        return _observed(state, event, at_seconds)
    if isinstance(event, Paused):
        return replace(state, paused=True, at_seconds=at_seconds)
    return replace(state, running=(), paused=False, finished=event, at_seconds=at_seconds)


def _without(state: BalanceState, probe: Probe) -> tuple[Running, ...]:
    return tuple(each for each in state.running if each.probe != probe)


def _progressed(state: BalanceState, event: ProbeProgress) -> tuple[Running, ...]:
    before = next((each for each in state.running if each.probe == event.probe), None)
    since = before.since_seconds if before is not None else event.at_seconds
    now = Running(event.probe, event.phase, event.samples_per_second, event.relative_interval, since)
    if before is None:
        return (*state.running, now)
    return tuple(now if each is before else each for each in state.running)


def _observed(state: BalanceState, event: Observed, at_seconds: float) -> BalanceState:
    return msgspec.structs.replace(
        state,
        running=_without(state, event.seen.probe),
        seen=(*state.seen, Seen(event.seen, event.at_seconds))[-KEPT_OBSERVATIONS:],
        belief=event.belief,
        best=event.best,
        probes=event.probes,
        out_of_memory=event.out_of_memory,
        at_seconds=at_seconds,
    )


def timed(state: BalanceState) -> list[Timed]:
    """Every measurement that ran, in the order in which they ended."""
    return [seen.observation for seen in state.seen if isinstance(seen.observation, Timed)]


def best_solo(state: BalanceState, device: int) -> Timed | None:
    """The fastest measurement of one device alone."""
    alone = [
        each for each in timed(state) if each.probe.layout.active == (device,) and each.probe.layout.kind == "solo"
    ]
    return max(alone, key=lambda each: each.samples_per_second, default=None)


def memory_wall(state: BalanceState, device: int) -> int | None:
    """The smallest batch at which the device alone ran out of memory."""
    walls = [
        seen.observation.probe.layout.shares[device]
        for seen in state.seen
        if isinstance(seen.observation, OutOfMemory) and seen.observation.probe.layout.active == (device,)
    ]
    return min(walls, default=None)


class Rival(NamedTuple):
    """One way to train, by its measured samples/s."""

    name: str
    samples_per_second: float
    low: float
    high: float
    detail: str


def _even(shares: tuple[int, ...]) -> bool:
    return len(shares) > 1 and min(shares) > 0 and max(shares) - min(shares) <= 1


def _rival(name: str, each: Timed) -> Rival:
    work = each.probe.layout.global_batch * each.probe.layout.processes
    detail = "+".join(str(share) for share in each.probe.layout.shares if share)
    return Rival(name, each.samples_per_second, work / each.high_seconds, work / each.low_seconds, detail)


def rivals(state: BalanceState) -> tuple[Rival, ...]:
    """The chosen layout so far, the even split, the best single device, the sum of solos: those that were measured."""
    if state.finished is not None:
        return _rivals_of_plan(state.finished, state.devices)
    found: list[Rival] = []
    if state.best is not None:
        figure, layout = state.best.throughput, state.best.layout
        shares = "+".join(str(share) for share in layout.shares if share)
        alone = f"{state.devices[layout.active[0]]} at " if len(layout.active) == 1 and len(state.devices) > 1 else ""
        found.append(Rival("best so far", figure.value, figure.low, figure.high, alone + shares))
    evens = [each for each in timed(state) if _even(each.probe.layout.shares)]
    if evens:
        found.append(_rival(EVEN, max(evens, key=lambda each: each.samples_per_second)))
    solos = [(device, best_solo(state, device)) for device in range(len(state.devices))]
    known = [(device, each) for device, each in solos if each is not None]
    if known:
        device, fastest = max(known, key=lambda pair: pair[1].samples_per_second)
        single = _rival(BEST_SINGLE, fastest)
        found.append(single._replace(detail=f"{state.devices[device]} at {single.detail}"))
    if len(known) == len(state.devices) > 1:
        found.append(_sum([_rival("", each) for _, each in known]))
    return tuple(found)


def _sum(solos: list[Rival]) -> Rival:
    return Rival(
        "sum of solos",
        sum(each.samples_per_second for each in solos),
        sum(each.low for each in solos),
        sum(each.high for each in solos),
        "",
    )


def _rivals_of_plan(finished: Finished, labels: tuple[str, ...]) -> tuple[Rival, ...]:
    plan = finished.plan

    def rival(name: str, throughput: Throughput, batches: tuple[int, ...]) -> Rival:
        detail = "+".join(str(batch) for batch in batches if batch)
        active = [label for label, batch in zip(labels, batches, strict=False) if batch]
        detail = f"{active[0]} at {detail}" if len(active) == 1 and len(labels) > 1 else detail
        return Rival(name, throughput.samples_per_second, throughput.low, throughput.high, detail)

    found = [rival("the plan", plan.throughput, plan.layout.batches)]
    for name in (EVEN, BEST_SINGLE):
        found += [rival(name, each.throughput, each.layout.batches) for each in plan.evidence if each.name == name][:1]
    solos = [rival("", each.throughput, each.layout.batches) for each in plan.evidence if each.name.startswith(SOLO)]
    if len(solos) > 1:
        found.append(_sum(solos))
    return tuple(found)


class CurvePoints(NamedTuple):
    """What the chart draws of one device: samples/s against batch."""

    device: int
    believed: tuple[tuple[int, float], ...]
    measured: tuple[tuple[int, float], ...]
    wall: int | None  # the smallest batch that ran out of memory


def curves(state: BalanceState) -> tuple[CurvePoints, ...]:
    """Each device's curve as throughput; devices of which nothing is known are left out."""
    sketches = {sketch.device: sketch for sketch in state.belief.curves} if state.belief is not None else {}
    found = []
    for device in range(len(state.devices)):
        sketch = sketches.get(device)
        believed = _speeds(sketch.points) if sketch is not None else ()
        measured = _speeds(sketch.measured) if sketch is not None else ()
        wall = memory_wall(state, device)
        if wall is None and sketch is not None:
            wall = sketch.smallest_failed
        if believed or measured or wall:
            found.append(CurvePoints(device, believed, measured, wall))
    return tuple(found)


def _speeds(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple((batch, batch / seconds) for batch, seconds in points if seconds > 0 and batch > 0)


def seconds_left(state: BalanceState) -> float | None:
    """Of the budget; None without one, 0 when it is used up."""
    if state.budget_seconds is None or state.finished is not None or state.ended:
        return None
    return max(0.0, state.budget_seconds - state.at_seconds)


def own_speed(running: Running, device: int) -> float:
    """One device's part of a running measurement's samples/s."""
    layout = running.probe.layout
    return (running.samples_per_second or 0.0) * layout.shares[device] / max(1, layout.global_batch)
