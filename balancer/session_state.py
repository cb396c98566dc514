"""A session's events folded into one frozen state, and the figures that follow from it: rivals,
curves, time left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from evener.devices.types import Device
from evener.plan.file import (
    BEST_SINGLE,
    BEST_SPLIT,
    EVEN_SPLIT,
    LARGER_BATCH,
    SOLO_PREFIX,
    Plan,
    Throughput,
)

from .events import Event, Finished, Observed, Paused, ProbeProgress, ProbeStarted, Started
from .families import is_even
from .journal import ObservationEntry
from .result.rivals import is_comparable, printed_gain
from .types import Belief, Interval, Layout, OutOfMemory, Result, Timed, layout_of

KEPT_OBSERVATIONS = 2000
SUM = "sum of solos"


class SessionState(msgspec.Struct, frozen=True):
    """Everything that a session has reported so far."""

    run: str = ""
    devices: tuple[str, ...] = ()  # labels, in the order of the request
    names: tuple[str, ...] = ()  # product names, where known
    workload: str = ""
    budget_seconds: float | None = None
    replayed: int = 0
    notes: tuple[str, ...] = ()  # about the devices
    running: tuple[ProbeProgress, ...] = ()
    seen: tuple[ObservationEntry, ...] = ()
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
        """True while a session is running."""
        return bool(self.run or self.devices or self.stopping) and not self.ended


def first_state(
    devices: Sequence[Device], workload: str, run: str = "", kept: Sequence[ObservationEntry] = ()
) -> SessionState:
    """The state before anything was reported; `kept` is what a run that goes on has measured."""
    labels, names = zip(*((device.label, device.name) for device in devices), strict=True)
    return SessionState(
        run=run,
        devices=labels,
        names=names,
        workload=workload,
        seen=tuple(kept[-KEPT_OBSERVATIONS:]),
        probes=len(kept),
        out_of_memory=sum(isinstance(each.seen, OutOfMemory) for each in kept),
        at_seconds=kept[-1].at_seconds if kept else 0.0,
    )


def advance(state: SessionState, event: Event) -> SessionState:
    """The state after one more event; pure, so that a journal replays to the same state."""
    replace = msgspec.structs.replace
    at_seconds = max(state.at_seconds, getattr(event, "at_seconds", 0.0))
    if isinstance(event, Started):
        return replace(state, **msgspec.structs.asdict(event))  # its fields are the state's
    if isinstance(event, ProbeStarted):
        running = _with(state, ProbeProgress(event.probe, "starting", None, None, event.at_seconds))
        return replace(state, running=running, paused=False, at_seconds=at_seconds)
    if isinstance(event, ProbeProgress):
        return replace(state, running=_with(state, event), at_seconds=at_seconds)
    if isinstance(event, Observed):
        return _observed(state, event, at_seconds)
    if isinstance(event, Paused):
        return replace(state, paused=True, at_seconds=at_seconds)
    return replace(state, running=(), paused=False, finished=event, at_seconds=at_seconds)


def _with(state: SessionState, newest: ProbeProgress) -> tuple[ProbeProgress, ...]:
    """The running probes, with the newest report of one of them."""
    return tuple(({each.probe: each for each in state.running} | {newest.probe: newest}).values())


def _observed(state: SessionState, event: Observed, at_seconds: float) -> SessionState:
    return msgspec.structs.replace(
        state,
        running=tuple(each for each in state.running if each.probe != event.seen.probe),
        seen=(*state.seen, ObservationEntry(event.seen, event.at_seconds))[-KEPT_OBSERVATIONS:],
        belief=event.belief,
        best=event.best,
        probes=event.probes,
        out_of_memory=event.out_of_memory,
        at_seconds=at_seconds,
    )


def timed(state: SessionState) -> list[Timed]:
    """Every successful measurement, in the order in which they ended."""
    return [each.seen for each in state.seen if isinstance(each.seen, Timed)]


def best_solo(state: SessionState, device: int) -> Timed | None:
    """The fastest measurement of one device alone."""
    layouts = ((each, each.probe.layout) for each in timed(state) if not each.probe.layout.length)
    return _fastest(
        [each for each, layout in layouts if layout.traits.alone and layout.active == (device,)]
    )


def chosen_layout(state: SessionState) -> Layout | None:
    """The shares and passes of the plan, or of the best layout so far."""
    if state.finished is not None:
        shares = state.finished.plan.layout.share
        return layout_of(
            tuple(share.batch for share in shares), tuple(share.micro for share in shares)
        )
    return state.best.layout if state.best is not None else None


def memory_wall(state: SessionState, device: int) -> int | None:
    """The fewest rows of a pass at which the device alone ran out of memory."""
    walls = [
        each.seen.probe.layout.pass_rows[device]
        for each in state.seen
        if isinstance(each.seen, OutOfMemory) and each.seen.probe.layout.active == (device,)
    ]
    return min(walls, default=None)


def largest_run(state: SessionState, device: int) -> int:
    """The most rows that ran on the device in one pass, alone or with others; 0 if none did."""
    return max((each.probe.layout.pass_rows[device] for each in timed(state)), default=0)


class RivalRate(NamedTuple):
    """One way to train, and its measured samples/s; `device` is its label if it is one device of
    several.
    """

    name: str
    figure: Interval
    batches: tuple[int, ...] = ()
    device: str = ""
    tie: bool = False  # with the plan
    paired: float | None = None  # the gain of the plan over it, where that is one measured in turn

    def gain_of(self, other: RivalRate) -> float | None:
        """The gain of another layout by the printed rates, or as measured in turn; None if they
        can't be compared.
        """
        if not is_comparable(other.figure, other.batches, self.figure, self.batches):
            return None
        return (
            printed_gain(other.figure.value, self.figure.value)
            if self.paired is None
            else self.paired
        )

    @property
    def where(self) -> str:
        """The batches, and the device if it is one of several: 820+568, or GPU:0 at 1024."""
        batches = "+".join(str(batch) for batch in self.batches if batch)
        return f"{self.device} at {batches}" if self.device else batches


def _rival(
    name: str, figure: Interval, batches: tuple[int, ...], labels: tuple[str, ...]
) -> RivalRate:
    active = [label for label, batch in zip(labels, batches, strict=False) if batch]
    device = active[0] if len(active) == 1 < len(labels) else ""
    return RivalRate(name, figure, batches, device)


def rivals(state: SessionState) -> tuple[RivalRate, ...]:
    """The best layout so far, or the plan, and what it is compared with; only what was measured."""
    labels = state.devices
    if state.finished is not None:
        plan = state.finished.plan
        compared = [rival for rival in plan_rivals(plan, labels) if rival.name != LARGER_BATCH]
        return (plan_rate(plan, labels), *compared)
    found: list[RivalRate] = []
    if state.best is not None:
        found.append(_rival("best so far", state.best.throughput, state.best.layout.shares, labels))
    evens = [
        each
        for each in timed(state)
        if is_even(each.probe.layout) and all(each.probe.layout.shares)
    ]
    solos = [
        each for device in range(len(labels)) if (each := best_solo(state, device)) is not None
    ]
    for name, each in ((EVEN_SPLIT, _fastest(evens)), (BEST_SINGLE, _fastest(solos))):
        if each is not None and not (
            state.best and _same_way(each.probe.layout, state.best.layout)
        ):
            found.append(_rival(name, each.throughput, each.probe.layout.shares, labels))
    complete = len(solos) == len(labels)
    return (*found, *(_sum([each.throughput for each in solos]) if complete else ()))


def _same_way(one: Layout, other: Layout) -> bool:
    """True if both are one layout, or one device at two batches."""
    return one.shares == other.shares or (one.traits.alone and one.active == other.active)


def plan_rate(plan: Plan, labels: tuple[str, ...]) -> RivalRate:
    """The plan itself, to be compared."""
    return _rival("the plan", figure_of(plan.throughput), plan.layout.batches, labels)


def plan_rivals(plan: Plan, labels: tuple[str, ...]) -> tuple[RivalRate, ...]:
    """The rivals of a plan: even split, best single device, a larger batch, the sum of solos.

    One device is compared with the faster of the even and the best split, and not with itself at
    another batch.
    """
    named = {each.name: each for each in reversed(plan.evidence)}
    shown = [named.get(name) for name in (EVEN_SPLIT, BEST_SINGLE, LARGER_BATCH)]
    if plan.layout.traits.alone:
        splits = [each for name in (EVEN_SPLIT, BEST_SPLIT) if (each := named.get(name))]
        shown[0] = max(splits, key=lambda each: each.throughput.samples_per_second, default=None)
        single = shown[1]
        if single and list(map(bool, single.layout.batches)) == list(
            map(bool, plan.layout.batches)
        ):
            shown[1] = None
    found = (
        _rival(each.name, figure_of(each.throughput), each.layout.batches, labels)._replace(
            tie=each.tie, paired=each.gain if each.paired else None
        )
        for each in shown
        if each
    )
    return (
        *found,
        *_sum(
            [
                figure_of(each.throughput)
                for each in plan.evidence
                if each.name.startswith(SOLO_PREFIX)
            ]
        ),
    )


def _fastest(measurements: list[Timed]) -> Timed | None:
    return max(measurements, key=lambda each: each.samples_per_second, default=None)


def figure_of(throughput: Throughput) -> Interval:
    """Samples/s of a plan's file with their interval."""
    return Interval(throughput.samples_per_second, throughput.low, throughput.high)


def _sum(solos: list[Interval]) -> tuple[RivalRate, ...]:
    """All devices' solos added up; nothing for fewer than two."""
    if len(solos) < 2:
        return ()
    total = Interval(*map(sum, zip(*map(msgspec.structs.astuple, solos), strict=True)))
    return (RivalRate(SUM, total),)


class CurvePoints(NamedTuple):
    """A device's points in the chart: samples/s against batch."""

    device: int
    believed: tuple[tuple[int, float], ...]
    measured: tuple[tuple[int, float], ...]
    wall: int | None  # the smallest batch that ran out of memory

    @property
    def largest_tested(self) -> int:
        """The largest measured batch; beyond it the curve is a prediction."""
        return max((batch for batch, _ in self.measured), default=0)


def curves(state: SessionState) -> tuple[CurvePoints, ...]:
    """Each device's curve as throughput; devices without any data are left out."""
    sketches = (
        {sketch.device: sketch for sketch in state.belief.curves}
        if state.belief is not None
        else {}
    )
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


def seconds_left(state: SessionState) -> float | None:
    """The seconds left of the budget; None without one, 0 when it is used up."""
    if state.budget_seconds is None or state.finished is not None or state.ended:
        return None
    return max(0.0, state.budget_seconds - state.at_seconds)


def own_speed(running: ProbeProgress, device: int) -> float:
    """One device's part of the samples/s of a running measurement."""
    layout = running.probe.layout
    return (running.samples_per_second or 0.0) * layout.shares[device] / max(1, layout.global_batch)
