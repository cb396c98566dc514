"""What displays show of a running search, computed from the events of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from evener.devices.types import Device
from evener.plan.file import EQUAL_SHARES, Evidence, EvidenceKind, Plan, PlanLayout, Throughput

from .events import Event, Finished, Observed, Paused, ProbeProgress, ProbeStarted, Started
from .families import is_even
from .journal import ObservationEntry
from .result.rivals import is_comparable, printed_gain
from .types import Belief, Interval, Layout, OutOfMemory, Result, Timed, layout_of

KEPT_OBSERVATIONS = 2000  # for the screen: searches have 10 to 80, and a list of more isn't read
RivalKind = EvidenceKind | Literal["plan", "sum"]


class SessionState(msgspec.Struct, frozen=True):
    """What a display shows of a running or finished search."""

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
        """Whether the search is running, or about to start."""
        return bool(self.run or self.devices or self.stopping) and not self.ended


def first_state(
    devices: Sequence[Device],
    workload: str,
    run: str = "",
    previous: Sequence[ObservationEntry] = (),
) -> SessionState:
    """Return the state before the first event of a search.

    `previous` has the outcomes from before a run was resumed.
    """
    labels, names = zip(*((device.label, device.name) for device in devices), strict=True)
    return SessionState(
        run=run,
        devices=labels,
        names=names,
        workload=workload,
        seen=tuple(previous[-KEPT_OBSERVATIONS:]),
        probes=len(previous),
        out_of_memory=sum(isinstance(each.seen, OutOfMemory) for each in previous),
        at_seconds=previous[-1].at_seconds if previous else 0.0,
    )


def advance(state: SessionState, event: Event) -> SessionState:
    """Return the state of a search after an event."""
    replace = msgspec.structs.replace
    at_seconds = max(state.at_seconds, getattr(event, "at_seconds", 0.0))
    if isinstance(event, Started):
        return replace(state, **msgspec.structs.asdict(event))  # its fields are those of the state
    if isinstance(event, ProbeStarted):
        running = _replace_report(
            state, ProbeProgress(event.probe, "starting", None, None, event.at_seconds)
        )
        return replace(state, running=running, paused=False, at_seconds=at_seconds)
    if isinstance(event, ProbeProgress):
        return replace(state, running=_replace_report(state, event), at_seconds=at_seconds)
    if isinstance(event, Observed):
        return _observed(state, event, at_seconds)
    if isinstance(event, Paused):
        return replace(state, paused=True, at_seconds=at_seconds)
    return replace(state, running=(), paused=False, finished=event, at_seconds=at_seconds)


def _replace_report(state: SessionState, newest: ProbeProgress) -> tuple[ProbeProgress, ...]:
    """Return the latest progress of each running probe, updated with a new report."""
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
    """Return the successful measurements in the order in which they ended."""
    return [entry.seen for entry in state.seen if isinstance(entry.seen, Timed)]


def has_split(state: SessionState) -> bool:
    """Return whether any measurement trained on several devices together."""
    return any(len(each.probe.layout.active) > 1 for each in timed(state))


def best_solo(state: SessionState, device: int) -> Timed | None:
    """Return the fastest measurement in which a device trained alone, or None."""
    layouts = ((each, each.probe.layout) for each in timed(state) if not each.probe.layout.length)
    return _fastest(
        [each for each, layout in layouts if layout.traits.alone and layout.active == (device,)]
    )


def chosen_layout(state: SessionState) -> Layout | None:
    """Return the plan's layout or, during the search, the best layout so far.

    Returns None if there is none yet.
    """
    if state.finished is not None:
        shares = state.finished.plan.layout.share
        return layout_of(
            tuple(share.batch for share in shares), tuple(share.micro for share in shares)
        )
    return state.best.layout if state.best is not None else None


def smallest_out_of_memory(state: SessionState, device: int) -> int | None:
    """Return the smallest micro-batch, in rows, that ran out of memory on a device on its own.

    Returns None if that hasn't happened.
    """
    failed = [
        entry.seen.probe.layout.pass_rows[device]
        for entry in state.seen
        if isinstance(entry.seen, OutOfMemory) and entry.seen.probe.layout.active == (device,)
    ]
    return min(failed, default=None)


def largest_pass_run(state: SessionState, device: int) -> int:
    """Return the largest micro-batch, in rows, that ran on a device.

    Returns 0 if no probe succeeded.
    """
    return max((each.probe.layout.pass_rows[device] for each in timed(state)), default=0)


class RatedLayout(NamedTuple):
    """A layout with its throughput, as one row of the table that compares layouts."""

    kind: RivalKind
    name: str
    rate: Interval
    batches: tuple[int, ...] = ()
    device: str = ""
    tie: bool = False  # it ties with the plan
    paired: float | None = None  # the plan's gain over it, if both were measured in turns
    earlier: float = 0.0  # earlier samples/s of one device at this batch, if they were higher

    def gain_of(self, other: RatedLayout) -> float | None:
        """Return how much faster `other` is than this layout, as a fraction; 0.1 is 10 %.

        Returns None if the two can't be compared.
        """
        if not is_comparable(other.rate, other.batches, self.rate, self.batches):
            return None
        return (
            printed_gain(other.rate.value, self.rate.value) if self.paired is None else self.paired
        )

    @property
    def where(self) -> str:
        """Rows per device, such as "640+384"; devices without rows are left out."""
        return "+".join(str(batch) for batch in self.batches if batch)


def _rival(
    kind: RivalKind,
    name: str,
    interval: Interval,
    batches: tuple[int, ...],
    labels: tuple[str, ...],
) -> RatedLayout:
    active = [label for label, batch in zip(labels, batches, strict=False) if batch]
    device = active[0] if len(active) == 1 < len(labels) else ""
    return RatedLayout(kind, name, interval, batches, device)


def rivals(state: SessionState) -> tuple[RatedLayout, ...]:
    """Return the rows of the comparison: the best layout, then the layouts it is compared with.

    While the search is running, the best layout is the best so far.
    """
    if state.finished is None:
        return _rivals_so_far(state)
    plan, labels = state.finished.plan, state.devices
    compared = [rival for rival in plan_rivals(plan, labels) if rival.kind != "larger_batch"]
    return (plan_rate(plan, labels), *compared)


def _rivals_so_far(state: SessionState) -> tuple[RatedLayout, ...]:
    """Return the best layout of a running search so far, then the layouts to compare it with."""
    labels, best = state.devices, state.best
    compares = has_split(state) or len(labels) == 1
    solos = _list_solos(state)
    found: list[RatedLayout] = []
    if best is not None:
        name = "best so far" if compares else "fastest alone"
        found.append(_rival("plan", name, best.throughput, best.layout.shares, labels))
    even = _fastest(list(filter(_is_even_on_all, timed(state))))
    if even is not None and _is_other(even, best):
        shares = even.probe.layout.shares
        found.append(_rival("equal_shares", EQUAL_SHARES, even.throughput, shares, labels))
    single = _fastest(solos)
    if single is not None and _is_other(single, best):
        layout = single.probe.layout
        name = f"{labels[layout.active[0]]} alone"
        found.append(_rival("best_device", name, single.throughput, layout.shares, labels))
    if compares and len(solos) == len(labels):
        found += _make_sum_row([each.throughput for each in solos])
    return tuple(found)


def _list_solos(state: SessionState) -> list[Timed]:
    """Return each device's fastest measurement in which it trained alone."""
    alone = (best_solo(state, device) for device in range(len(state.devices)))
    return [each for each in alone if each is not None]


def _is_other(measurement: Timed, best: Result | None) -> bool:
    """Return whether a measurement is of a layout other than the best one."""
    return best is None or not _is_same_layout(measurement.probe.layout, best.layout)


def _is_even_on_all(measurement: Timed) -> bool:
    layout = measurement.probe.layout
    return is_even(layout) and all(layout.shares)


def _is_same_layout(layout: Layout, other: Layout) -> bool:
    """Return whether two layouts have the same shares, or use the same single device."""
    return layout.shares == other.shares or (layout.traits.alone and layout.active == other.active)


def plan_rate(plan: Plan, labels: tuple[str, ...]) -> RatedLayout:
    """Return a plan's own layout and throughput as a row of the comparison."""
    return _rival(
        "plan", "the plan", throughput_interval(plan.throughput), plan.layout.batches, labels
    )


def plan_rivals(
    plan: Plan, labels: tuple[str, ...], at_plan_batch: bool = False
) -> tuple[RatedLayout, ...]:
    """Return the layouts to compare a plan with: equal shares, one device, a larger batch.

    The last row is the sum of the devices' throughputs when each trains alone, at its best batch.
    With `at_plan_batch`, the plan's global batch is used instead where it was measured.
    """
    shown = [each for each in (_find_split(plan), find_single(plan)) if each is not None]
    larger = [evidence for evidence in plan.evidence if evidence.kind == "larger_batch"][:1]
    shown += [each for each in larger if each.layout not in [one.layout for one in shown]]
    solos = alone_at_batch(plan) if at_plan_batch else best_alone(plan)
    return (
        *(_plan_rival(plan, each, labels) for each in shown),
        *_make_sum_row([throughput_interval(each.throughput) for each in solos.values()]),
    )


def _find_split(plan: Plan) -> Evidence | None:
    """Return the split to compare a plan with, or None.

    It is equal shares or, for a plan with one device, the best split.
    """
    # the plan's own shares in other passes aren't another way to divide the batch
    own = plan.layout.batches
    equal = [
        evidence
        for evidence in plan.evidence
        if evidence.kind == "equal_shares" and evidence.layout.batches != own
    ]
    if not plan.layout.traits.alone:
        return equal[0] if equal else None
    splits = [one for one in plan.evidence if one in equal or one.kind == "other_shares"]
    if any(one.gain is not None for one in plan.evidence):
        # the one that the verdict names: the best of the final comparison whose gain is known
        return next((one for one in splits if one.gain is not None), splits[0] if splits else None)
    # plans of older versions have no gains
    return max(splits, key=_speed, default=None)


def find_single(plan: Plan) -> Evidence | None:
    """Return the best measurement of a single device other than the plan's own, or None."""
    compared = [evidence for evidence in plan.evidence if evidence.kind == "best_device"]
    compared = _without_own_device(plan, compared)
    # plans of older versions have no such evidence if no single device took part in the race
    others = _without_own_device(plan, alone_at_batch(plan).values())
    return compared[0] if compared else max(others, key=_speed, default=None)


def _without_own_device(plan: Plan, solos: Iterable[Evidence]) -> list[Evidence]:
    """Return the measurements of single devices, without the one that the plan itself uses."""
    own = _positions(plan.layout) if plan.layout.traits.alone else ()
    return [evidence for evidence in solos if _positions(evidence.layout) != own]


def _plan_rival(plan: Plan, evidence: Evidence, labels: tuple[str, ...]) -> RatedLayout:
    batches = evidence.layout.batches
    rival = _rival(
        evidence.kind, evidence.name, throughput_interval(evidence.throughput), batches, labels
    )
    if evidence.kind in ("best_device", "one_device"):
        (position,) = _positions(evidence.layout)
        name = f"{labels[position]} alone"
        if plan.layout.traits.alone and len(labels) == 2:
            name = f"the other device alone, {labels[position]}"
        rival = rival._replace(name=name)
    elif evidence.kind == "equal_shares":
        rival = rival._replace(name=_name_even(plan, evidence))
    elif evidence.kind == "larger_batch":
        rival = rival._replace(name=f"larger batch, {sum(batches)} samples")
    paired = evidence.gain if evidence.paired else None
    return rival._replace(
        tie=evidence.tie, paired=paired, earlier=_find_earlier_throughput(plan, evidence)
    )


def _name_even(plan: Plan, even: Evidence) -> str:
    """Return the name of a layout with equal shares.

    If the plan has equal shares too, the name says whether this layout's batch is larger or
    smaller.
    """
    own, batch = plan.layout.batches, even.layout.global_batch
    if not all(own) or max(own) - min(own) > 1 or batch == sum(own):
        return EQUAL_SHARES
    return f"{EQUAL_SHARES}, {'larger' if batch > sum(own) else 'smaller'} batch"


def _find_earlier_throughput(plan: Plan, single: Evidence) -> float:
    """Return a device's throughput in an earlier measurement that was faster than `single`.

    Both measurements have the same device and global batch. Returns 0 if there is none.
    """
    if single.kind not in ("best_device", "one_device"):
        return 0.0
    same = [
        _speed(evidence)
        for evidence in plan.evidence
        if evidence.kind == "one_device"
        and evidence.layout.global_batch == single.layout.global_batch
        and _positions(evidence.layout) == _positions(single.layout)
    ]
    most = max(same, default=0.0)
    return most if most > _speed(single) else 0.0


def _positions(layout: PlanLayout) -> tuple[int, ...]:
    """Return the positions of the devices that have rows in a plan's layout."""
    return tuple(i for i, batch in enumerate(layout.batches) if batch)


def _speed(evidence: Evidence) -> float:
    return evidence.throughput.samples_per_second


def best_alone(plan: Plan) -> dict[int, Evidence]:
    """Return the fastest measurement of each device on its own, by device position."""
    return _choose_alone(plan, _speed)


def alone_at_batch(plan: Plan) -> dict[int, Evidence]:
    """Return a measurement of each device on its own, at the plan's global batch where possible."""
    batch = plan.layout.global_batch

    def prefer(evidence: Evidence) -> tuple[bool, bool, float]:
        return (
            evidence.layout.global_batch == batch,
            evidence.kind == "best_device",
            _speed(evidence),
        )

    return _choose_alone(plan, prefer)


def _choose_alone(plan: Plan, prefer: Callable[[Evidence], Any]) -> dict[int, Evidence]:
    found: dict[int, Evidence] = {}
    for evidence in plan.evidence:
        if evidence.kind not in ("best_device", "one_device") or not evidence.layout.traits.alone:
            continue
        (position,) = _positions(evidence.layout)
        if position not in found or prefer(evidence) > prefer(found[position]):
            found[position] = evidence
    return dict(sorted(found.items()))


def _fastest(measurements: list[Timed]) -> Timed | None:
    return max(measurements, key=lambda measurement: measurement.samples_per_second, default=None)


def throughput_interval(throughput: Throughput) -> Interval:
    """Convert the throughput in a plan to an interval, in samples/s."""
    return Interval(throughput.samples_per_second, throughput.low, throughput.high)


def _make_sum_row(solos: list[Interval]) -> tuple[RatedLayout, ...]:
    """Return the sum of the devices' throughputs as a row of the comparison.

    Returns an empty tuple for fewer than two devices.
    """
    if len(solos) < 2:
        return ()
    total = Interval(*map(sum, zip(*map(msgspec.structs.astuple, solos), strict=True)))
    return (RatedLayout("sum", "sum of each alone", total),)


class ChartedCurve(NamedTuple):
    """Data for a chart of one device: throughput by batch size, predicted and measured."""

    device: int
    believed: tuple[tuple[int, float], ...]  # (batch, samples/s) that the search predicts
    measured: tuple[tuple[int, float], ...]  # (batch, samples/s) of each measurement alone
    failed_batch: int | None  # the smallest batch that ran out of memory

    @property
    def largest_tested(self) -> int:
        """Largest batch that was measured on this device on its own; 0 if none was."""
        return max((batch for batch, _ in self.measured), default=0)


def curves(state: SessionState) -> tuple[ChartedCurve, ...]:
    """Return the chart data of each device that has a measurement or a prediction."""
    sketches = (
        {sketch.device: sketch for sketch in state.belief.curves}
        if state.belief is not None
        else {}
    )
    found = []
    for device in range(len(state.devices)):
        sketch = sketches.get(device)
        believed = _speeds(sketch.points) if sketch is not None else ()
        measured = _measured_alone(state, device)
        failed_batch = smallest_out_of_memory(state, device)
        if failed_batch is None and sketch is not None:
            failed_batch = sketch.smallest_failed
        if believed or measured or failed_batch:
            found.append(ChartedCurve(device, believed, measured, failed_batch))
    return tuple(found)


def _measured_alone(state: SessionState, device: int) -> tuple[tuple[int, float], ...]:
    """Return (batch, samples/s) for each measurement in which the device trained alone."""
    alone = [
        each
        for each in timed(state)
        if each.probe.layout.traits.alone and each.probe.layout.active == (device,)
    ]
    return tuple(
        sorted(
            (each.probe.layout.global_batch, each.samples_per_second)
            for each in alone
            if not each.probe.layout.length and not each.probe.layout.knobs
        )
    )


def _speeds(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple((batch, batch / seconds) for batch, seconds in points if seconds > 0 and batch > 0)


def seconds_left(state: SessionState) -> float | None:
    """Return how many seconds of the budget are left.

    Returns None without a budget, or after the search has ended.
    """
    if state.budget_seconds is None or state.finished is not None or state.ended:
        return None
    return max(0.0, state.budget_seconds - state.at_seconds)


def own_speed(running: ProbeProgress, device: int) -> float:
    """Return the samples/s of one device in a running probe.

    Returns 0 if they aren't known yet.
    """
    layout = running.probe.layout
    return (running.samples_per_second or 0.0) * layout.shares[device] / max(1, layout.global_batch)
