"""Build the verdict of a search: the recommended layout, its rivals, and what is uncertain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Literal, cast

import msgspec

from evener.devices.types import Device
from evener.shares.curves import Cost
from evener.training.limits import LimitKind, TrainingLimit

from ..families import SOLO, Family, is_even
from ..journal import JournalContents
from ..number_format import count_samples, relative_error
from ..objectives import find_objective
from ..probes.launch_plan import MIXED
from ..search.layouts import Candidate
from ..search.report import SearchReport
from ..statistics import is_known
from ..types import (
    End,
    Facts,
    Failed,
    Interval,
    Layout,
    Observation,
    OutOfMemory,
    Result,
    Stage,
    Stop,
    Timed,
)
from ..verdict import (
    Chosen,
    LayoutKind,
    LeftOut,
    MeasuredRate,
    ObjectiveReached,
    RanOut,
    RepeatedBuild,
    ReplacedLayout,
    Rival,
    RivalKind,
    ShortBudget,
    SplitLoss,
    StopCode,
    SumLoss,
    Unfinished,
    Verdict,
    WhyNotChosen,
)
from . import measurements
from .advice import advise
from .learning import find_learning
from .rivals import (
    NEAR,
    ComparedLayout,
    compare,
    compare_all,
    find_own_family,
    list_samples,
    name_layout,
    name_rivals,
    printed_gain,
)
from .state_memory import find_state_memory
from .training_limits import find_link, find_training_limits

MARGIN = 1.3  # factor on a budget that barely suffices, because start times are estimates
STEP_SECONDS = 10  # the budget is rounded up to a multiple of it
USUAL_ROWS = 8  # typical number of rows in a pass
COVERS = 0.8  # fraction of a loss that a cause must explain to be named
# a start that the end of the budget cut off is suspect if it had taken longer than the longest
# start of the search by this factor
OVERRUNS = 2.0


class SearchEnd(msgspec.Struct, frozen=True):
    """Why and when a search ended."""

    end: End
    seconds: float
    interrupted: bool = False  # by the user
    unfinished: tuple[Unfinished, ...] = ()

    @property
    def why_stopped(self) -> str:
        """Why the search ended, as a sentence for users."""
        return self.end.words

    @property
    def late(self) -> bool:
        """Whether the search ended because its time budget was used up."""
        return self.end.stop in (Stop.BUDGET, Stop.LATE)


def judge(record: JournalContents, report: SearchReport, end: SearchEnd) -> Verdict:
    """Return the verdict of a search: which layout to use, how it compares, and warnings."""
    chosen, devices, request = report.chosen, record.header.devices, record.header.request
    labels = tuple(device.label for device in devices)
    rivals = compare_all(chosen, report.ranking, report.results, report.single)
    interval, seen = chosen.throughput, record.observations
    known = is_known(interval)
    error = relative_error(interval.value, interval.low, interval.high)
    doubts = measurements.find_doubts(seen, chosen.layout, error)
    named = _name_rivals(report, rivals, labels)
    limits = find_training_limits(report, seen, devices)
    verdict = Verdict(
        chosen=_describe_chosen(report, labels),
        rate=_describe_rate(report, chosen.layout, interval),
        equal_shares=_has_equal_shares(chosen.layout),
        simulated=record.header.job.simulated,
        rivals=named,
        split_loss=_find_split_loss(report, rivals) if known else None,
        split_unmeasured=known and _lacks_split(chosen, rivals, len(labels)),
        tolerance=report.problem.tolerance,
        framework=record.header.framework,
        batch_given=request.global_batch is not None,
        doubts=measurements.describe_doubts(doubts, devices),
        on_gpus=any(not device.on_cpu for device in devices),
        left_out=(
            *(LeftOut("request", "", "impossible", text) for text in report.options.left_out),
            *find_unequal_rows(report),
            *find_not_compared(report, labels),
            *find_unmeasured(report, labels, end),
            *measurements.find_left_out(seen, devices, chosen.layout),
            *_find_left_out_hosts(report, devices),
            *_find_idle_devices(report, rivals, labels),
        ),
        notes=record.header.notes,
        short_budget=find_short_budget(report, seen, end),
        repeated_build=find_repeated_build(record.facts, seen),
        ran_out=tuple(_find_ran_out(report, seen, devices, end)),
        replaced=find_replaced(report, len(labels)),
        unfinished=() if end.interrupted else _find_overruns(end, seen),
        link=find_link(seen, report.chosen.layout, devices),
        taken_memory=measurements.find_taken_memory(seen, devices),
        code_limit=measurements.find_code_limit(seen),
        short_epoch=measurements.find_short_epoch(chosen.layout, record.facts.rows),
        pass_statistics=measurements.find_pass_statistics(
            chosen.layout, record.facts.batch_statistics
        ),
        slow_bfloat16=_find_slow_bfloat16(record, chosen.layout),
        objective=find_objective_reached(report) if known else None,
        learning=find_learning(request, report) if known else None,
        state=find_state_memory(record.facts, seen, devices, chosen.layout),
        stopped=cast(StopCode, end.end.code),
        stopped_detail=end.end.detail,
        failed=sum(isinstance(one, Failed) for one in seen),
        sum_loss=_find_sum_loss(report, rivals, limits) if known else None,
        unequal_devices=measurements.find_unequal_devices(
            _map_rates_alone(report, rivals),
            {one.layout.active[0]: _rate(one) for one in _list_compared_alone(report, rivals)},
            devices,
        ),
        limits=limits,
    )
    return msgspec.structs.replace(verdict, recommendation=advise(verdict))


# ---------------------------------------------------------------------- the answer


def _describe_chosen(report: SearchReport, labels: Sequence[str]) -> Chosen:
    """Describe the recommended layout for the verdict.

    `labels` are the names of all devices.
    """
    layout = report.chosen.layout
    family = find_own_family(layout)
    ratios = find_ratios(layout, report.mean_length)
    gap = work_gap(report.turns_of(layout)) if len(layout.computing) > 1 else None
    return Chosen(
        family=family.name,
        kind=find_kind(family, layout),
        description=family.describe(layout, labels, ratios),
        devices=tuple(labels[i] for i in layout.active),
        batches=tuple(layout.shares[i] for i in layout.active),
        micro=tuple(layout.pass_rows[i] for i in layout.active),
        global_batch=layout.global_batch,
        trainings=layout.processes,
        knobs=layout.knobs,
        own_work_gap=gap if report.mean_length else None,
    )


def find_kind(family: Family, layout: Layout) -> LayoutKind:
    """Return the verdict's name for a kind of layout, such as "one_device" or "sharded"."""
    traits = layout.traits
    if traits.placed:
        return "placed"
    if traits.side_by_side:
        return "side_by_side"
    if traits.alone:
        return "one_device"
    if traits.sharded:
        return "sharded"
    return "equal_shares" if family.equal_shares else "other_shares"


def _describe_rate(report: SearchReport, layout: Layout, interval: Interval) -> MeasuredRate:
    """Return a layout's samples/s with its interval.

    If rows differ in length, the result also has the tokens/s and the fraction of padding.
    """
    plain = MeasuredRate(interval.value, interval.low, interval.high, is_known(interval))
    if not report.mean_length:
        return plain
    padding = padding_share(report.turns_of(layout))
    tokens = interval.value * report.mean_length
    return msgspec.structs.replace(plain, tokens_per_second=tokens, padding=padding)


def _has_equal_shares(layout: Layout) -> bool:
    """Return whether all devices have equal shares, without gradient accumulation.

    This is plain data parallelism, the default of frameworks.
    """
    if not layout.traits.together or layout.traits.sharded:
        return False
    everywhere = len(layout.active) == len(layout.shares)
    return everywhere and is_even(layout) and not layout.in_passes and not layout.knobs


def find_ratios(layout: Layout, row_tokens: float) -> tuple[float, ...]:
    """Return each device's fraction of the work in a step.

    For layouts that assign rows by their computing time, this is the device's fraction of the total
    speed on rows of `row_tokens` tokens.
    """
    if layout.costs:
        return cost_ratios(layout.costs, row_tokens)
    return tuple(share / layout.global_batch for share in layout.shares)


def cost_ratios(costs: Sequence[Cost | None], row_tokens: float) -> tuple[float, ...]:
    """Return the speed of each device as a fraction of the total speed of all devices.

    `costs` predict each device's computing time, and the speeds are for rows of `row_tokens`
    tokens. The fraction is 0 for a device whose cost is None.
    """
    speeds = [1 / cost.seconds(USUAL_ROWS, round(row_tokens)) if cost else 0.0 for cost in costs]
    return tuple(speed / sum(speeds) for speed in speeds)


def waiting_share(measurements: Sequence[Timed]) -> float | None:
    """Return the mean fraction of a step in which no device computes.

    This time is spent on gradient exchange and other overhead. Returns None if the compute times
    are unknown.
    """
    own = _own_seconds(measurements)
    if own is None or any(timed.step_seconds <= 0 for timed in measurements):
        return None
    return fmean(
        max(0.0, 1 - max(each) / timed.step_seconds)
        for each, timed in zip(own, measurements, strict=True)
    )


def padding_share(measurements: Sequence[Timed]) -> float:
    """Return the mean fraction of tokens that is padding.

    Returns 0 without measurements.
    """
    return fmean([timed.padding for timed in measurements] or [0.0])


def work_gap(measurements: Sequence[Timed]) -> float | None:
    """Return how much the devices' compute times differ within a step, as a fraction.

    This is the difference between the longest and the shortest compute time, divided by the
    longest, and averaged over the measurements. Returns None if a compute time is unknown.
    """
    own = _own_seconds(measurements)
    if own is None or any(max(each) <= 0 for each in own):
        return None
    return fmean(1 - min(each) / max(each) for each in own)


def _own_seconds(measurements: Sequence[Timed]) -> list[list[float]] | None:
    """Return the compute times of the devices, in seconds per step, for each measurement.

    Returns None if any compute time is unknown.
    """
    own = [
        [timed.device_seconds[i] or 0.0 for i in timed.probe.layout.computing]
        for timed in measurements
    ]
    missing = any(
        timed.device_seconds[i] is None
        for timed in measurements
        for i in timed.probe.layout.computing
    )
    return None if missing or not own else own


# ---------------------------------------------------------------------- rivals


def list_alone(report: SearchReport) -> list[ComparedLayout]:
    """Compare the plan with each device on its own.

    For each device, this uses the measurement at the plan's global batch or, if there is none, the
    fastest measurement.
    """
    chosen, batch = report.chosen, report.chosen.layout.global_batch
    found = []
    for position, fastest in enumerate(report.solos):
        if fastest is None:
            continue
        same = [
            result
            for result in report.results
            if result.layout.traits.alone
            and result.layout.active == (position,)
            and result.layout.global_batch == batch
        ]
        best = max(same, key=lambda one: one.throughput.value, default=fastest)
        found.append(compare_alone(chosen, best))
    return found


def compare_alone(chosen: Result, result: Result) -> ComparedLayout:
    """Compare the plan with a measurement of a single device.

    If the plan uses this layout itself, the plan's latest samples/s are used for both.
    """
    interval = chosen.throughput if result.layout == chosen.layout else result.throughput
    return compare(chosen, Candidate(SOLO, result.layout), interval)


def _name_rivals(
    report: SearchReport, rivals: Sequence[ComparedLayout], labels: Sequence[str]
) -> tuple[Rival, ...]:
    """Return every layout that the plan is compared with, each with a distinct name."""
    # the single device with which the plan is compared comes first
    chosen = report.chosen
    known = {rival.layout for rival in rivals} | {chosen.layout}
    devices = {rival.layout.active for rival in rivals if rival.layout.traits.alone}
    alone = [compared for compared in list_alone(report) if compared.layout not in known]
    # besides the rivals of the race: each device alone, and the fastest layout of all
    further = [one for one in alone if one.layout.active not in devices]
    further.sort(key=lambda one: -one.throughput.value)
    further += _find_fastest(report, known | {one.layout for one in further})
    single = choose_single(report, rivals)
    if single in alone and single not in further:
        further.append(single)
    found = sorted((*rivals, *further), key=lambda one: one != single)  # `single` comes first
    names = name_rivals(chosen, found, len(labels))
    return tuple(
        _describe_rival(report, one, name, labels, alone)
        for name, one in zip(names, found, strict=True)
    )


def choose_single(report: SearchReport, rivals: Sequence[ComparedLayout]) -> ComparedLayout | None:
    """Return the single device that the plan should be compared with.

    If the plan itself uses one device, this is a different one. Returns None if no such device was
    measured alone.
    """
    chosen, raced = report.chosen, {one.layout: one for one in rivals}
    # of a device in the final comparison, that comparison's figures are the ones that are printed
    alone = [raced.get(one.layout, one) for one in list_alone(report)]
    own = chosen.layout.active if chosen.layout.traits.alone else ()
    others = [compared for compared in alone if compared.layout.active != own]
    first = next((single for single in _list_singles(rivals) if single.layout.active != own), None)
    # no single device took part in the race
    if first is None:
        return max(others, key=_rate, default=None)
    batch = report.problem.global_batch
    same = [one for one in others if batch is None or one.layout.global_batch == batch]
    if first.compared:
        # a device that was even faster than the plan was measured when the machine was faster
        same = [one for one in same if _rate(one) <= chosen.throughput.value]
    return max([first, *same], key=lambda one: (one.compared, _rate(one)))


def _rate(compared: ComparedLayout) -> float:
    return compared.throughput.value


def _list_singles(rivals: Sequence[ComparedLayout]) -> list[ComparedLayout]:
    """Return the compared layouts that use a single device and no tuning options."""
    return [rival for rival in rivals if rival.family and rival.layout.traits.alone]


def _find_fastest(report: SearchReport, compared: set[Layout]) -> list[ComparedLayout]:
    """Return a list with the fastest measured layout, if it is faster than the plan.

    The list is empty if the plan is the fastest. It is also empty if the fastest layout is in
    `compared`, the layouts that are compared with the plan anyway.
    """
    batch, chosen = report.problem.global_batch, report.chosen
    able = [result for result in report.results if batch in (None, result.layout.global_batch)]
    fastest = max(able, key=lambda one: one.throughput.value, default=chosen)
    if fastest.layout in compared or fastest.throughput.value <= chosen.throughput.value:
        return []
    family = find_own_family(fastest.layout)
    return [compare(chosen, Candidate(family, fastest.layout), fastest.throughput)]


def _describe_rival(
    report: SearchReport,
    compared: ComparedLayout,
    name: str,
    labels: Sequence[str],
    singles: Sequence[ComparedLayout],
) -> Rival:
    """Return the verdict's entry for a layout that the plan is compared with.

    `name` is the layout's name, and `labels` are the names of all devices. `singles` has all
    measurements of single devices. If the layout uses a single device, and that device was faster
    in another of these measurements, the entry says so.
    """
    layout, gain = compared.layout, compared.gain_of(report.chosen) if compared.compared else None
    kind: RivalKind = find_kind(compared.candidate.family, layout)
    name = f"{labels[layout.active[0]]} alone" if kind == "one_device" else name
    if layout.knobs or report.chosen.layout.knobs:
        kind = "knobs"
    earlier = [
        other.throughput.value
        for other in singles
        if layout.traits.alone
        and other.layout.active == layout.active
        and other.layout.global_batch == layout.global_batch
    ]
    return Rival(
        kind=kind,
        name=name,
        devices=tuple(labels[i] for i in layout.active),
        batches=tuple(layout.shares[i] for i in layout.active),
        global_batch=layout.global_batch,
        rate=_describe_rate(report, layout, compared.throughput),
        gain=gain,
        tie=compared.tie,
        unclear=compared.unclear,
        paired=compared.paired,
        trainings=layout.processes,
        knobs=layout.knobs,
        why_not=_why_not_chosen(report, compared),
        earlier_samples_per_second=max(
            [0.0, *(rate for rate in earlier if rate > compared.throughput.value)]
        ),
        difference=compared.difference if compared.compared else None,
    )


def _why_not_chosen(report: SearchReport, compared: ComparedLayout) -> WhyNotChosen | None:
    """Return why a layout isn't recommended although it reached more samples/s than the plan.

    Returns None if it didn't, or if its samples/s are uncertain.
    """
    chosen, problem = report.chosen, report.problem
    if compared.throughput.value <= chosen.throughput.value or not is_known(compared.throughput):
        return None
    if compared.layout in report.nearly_full:
        return "memory"
    if find_objective(problem.objective).trades_speed:
        return "objective"
    larger = compared.layout.global_batch > chosen.layout.global_batch
    if (
        problem.global_batch is None
        and problem.tolerance
        and larger
        and compared.candidate.synchronous
    ):
        return "tolerance"
    if compared.paired and compared.gain >= 0:
        return "in_turn"
    own = Candidate(find_own_family(chosen.layout), chosen.layout)
    simpler = own.simplicity < compared.candidate.simplicity
    return "tie" if compared.tie and simpler else "measured_again"


def _find_split_loss(report: SearchReport, rivals: Sequence[ComparedLayout]) -> SplitLoss | None:
    """Explain why the best layout over several devices is slower than the recommended device.

    Returns None if it isn't slower, or if the times are unknown.
    """
    chosen, split = report.chosen, _best_split(rivals)
    if not chosen.layout.traits.alone or split is None or not _is_surely_slower(split):
        return None
    layout = split.layout
    apart, known = report.seconds_alone.get(layout), report.sync_seconds
    if apart is None and known is None:
        return None
    batch, sync, share = layout.global_batch, known or 0.0, max(layout.shares)
    took, whole = (batch / one.throughput.value for one in (split, chosen))
    # the time that a smaller share saves too little
    kept = (apart or 0.0) - whole * share / batch
    if kept > sync and kept >= COVERS * (took - whole):
        same = batch == chosen.layout.global_batch
        return SplitLoss("longest_part", took, apart, whole if same else None, known)
    if sync >= COVERS * (took - whole):
        return SplitLoss("exchange", took, apart, None, known)
    return SplitLoss("unexplained", took, apart, None, known)


def _is_surely_slower(split: ComparedLayout) -> bool:
    """Return whether a layout is slower than the plan by more than the measurement error."""
    return not split.tie and split.gain >= 0


NEARLY = 0.9  # fraction of the sum of all devices alone: anything less is explained


def _find_sum_loss(
    report: SearchReport, rivals: Sequence[ComparedLayout], limits: Sequence[TrainingLimit]
) -> SumLoss | None:
    """Explain why the plan is over 10 % slower than the sum of all devices' solo speeds.

    A solo speed is what a device reaches when it trains alone. Returns None if the plan isn't that
    much slower, if waiting for data or busy CPU cores already explain the loss, or if a device's
    speed is unknown.
    """
    chosen = report.chosen
    alone = list(map(_rate, _list_compared_alone(report, rivals)))
    if not chosen.layout.traits.together or not chosen.layout.by_rows:
        return None
    if len(alone) < len(report.solos) or not is_known(chosen.throughput):
        return None
    part = 1 + printed_gain(chosen.throughput.value, sum(alone))
    waits = any(limit.kind in (LimitKind.INPUT, LimitKind.HOST_STARVED) for limit in limits)
    if part >= NEARLY or waits:
        return None
    batch = chosen.layout.global_batch
    took, ideal = batch / chosen.throughput.value, batch / sum(alone)
    apart, sync = report.seconds_alone.get(chosen.layout), report.sync_seconds
    lost = took - ideal
    return SumLoss(
        _find_cause_of_lost_time(lost, (apart or 0.0) - ideal, sync or 0.0), part, lost, apart, sync
    )


def _list_compared_alone(
    report: SearchReport, rivals: Sequence[ComparedLayout]
) -> list[ComparedLayout]:
    """Return one measurement of each device on its own, to add up their samples/s.

    Measurements at the plan's global batch are preferred, then those of the final comparison, then
    the fastest.
    """
    raced = {one.layout: one for one in _list_singles(rivals)}
    single = choose_single(report, rivals)
    if single is not None:
        raced.setdefault(single.layout, single)
    found: dict[tuple[int, ...], ComparedLayout] = {}
    batch = report.chosen.layout.global_batch

    def prefer(one: ComparedLayout) -> tuple[bool, bool, float]:
        return one.layout.global_batch == batch, one.layout in raced, _rate(one)

    alone = (raced.get(one.layout, one) for one in list_alone(report))
    for one in (*raced.values(), *alone):
        best = found.get(one.layout.active)
        if best is None or prefer(one) > prefer(best):
            found[one.layout.active] = one
    return list(found.values())


def _map_rates_alone(
    report: SearchReport, rivals: Sequence[ComparedLayout]
) -> dict[tuple[int, int], Interval]:
    """Return the samples/s of each device when it trains alone, by device position and batch.

    Measurements of the final comparison are preferred, then the fastest ones.
    """
    raced = {one.layout: one for one in _list_singles(rivals)}
    alone = [
        raced.get(result.layout) or compare_alone(report.chosen, result)
        for result in report.results
        if result.layout.traits.alone and not (result.layout.length or result.layout.knobs)
    ]
    alone.sort(key=lambda one: (one.layout in raced, _rate(one)))
    return {(one.layout.active[0], one.layout.global_batch): one.throughput for one in alone}


def _find_cause_of_lost_time(
    lost_seconds: float, share_seconds: float, exchange_seconds: float
) -> Literal["longest_part", "exchange", "both", "unexplained"]:
    """Return why the plan's throughput is below the sum of its devices' own throughputs.

    - `lost_seconds`: the time to explain, in seconds per step like the other times.
    - `share_seconds`: the time lost because the device with the most rows computes small,
      inefficient batches.
    - `exchange_seconds`: the time of gradient exchange.
    """
    if share_seconds >= COVERS * lost_seconds:
        return "longest_part"
    if exchange_seconds >= COVERS * lost_seconds:
        return "exchange"
    if share_seconds > 0 and share_seconds + exchange_seconds >= COVERS * lost_seconds:
        return "both"
    return "unexplained"


def _find_idle_devices(
    report: SearchReport, rivals: Sequence[ComparedLayout], labels: Sequence[str]
) -> Iterator[LeftOut]:
    """Yield the working devices that the plan doesn't use, each with the reason.

    The reason is either that no layout with this device was tried, or that the fastest one isn't
    faster than the plan.
    """
    chosen = report.chosen
    if not chosen.layout.traits.by_shares:
        return
    for position, label in enumerate(labels):
        ran = position < len(report.solos) and report.solos[position] is not None
        if chosen.layout.shares[position] or not ran:
            continue
        wider = _list_splits_with(report, position)
        if not wider:
            yield LeftOut("device", label, "not_tried")
        known = [one for one in wider if is_known(one.throughput)]
        if not known:
            continue
        fastest = max(known, key=lambda one: one.throughput.value)
        yield LeftOut(
            "device",
            label,
            "not_faster",
            list_samples(fastest.layout),
            global_batch=fastest.layout.global_batch,
            loss=-printed_gain(fastest.throughput.value, chosen.throughput.value),
            tie=any(one.tie for one in rivals if one.layout == fastest.layout),
            samples_per_second=fastest.throughput.value,
            devices=tuple(labels[i] for i in fastest.layout.computing),
        )


def _list_splits_with(report: SearchReport, position: int) -> list[Result]:
    """Return the measured layouts over several devices that include the device at `position`.

    Layouts with less than half of the plan's global batch are left out.
    """
    least = report.chosen.layout.global_batch / NEAR
    splits = [result for result in report.results if result.layout.traits.together]
    near = [split for split in splits if split.layout.global_batch >= least]
    return [one for one in near if one.layout.shares[position]]


def _best_split(rivals: Sequence[ComparedLayout]) -> ComparedLayout | None:
    """Return the best layout over several devices that can be compared with the plan, or None."""
    splits = [
        rival
        for rival in rivals
        if rival.family and rival.layout.traits.together and rival.compared
    ]
    # rivals are sorted, best first
    return splits[0] if splits else None


def _lacks_split(chosen: Result, rivals: Sequence[ComparedLayout], devices: int) -> bool:
    """Return whether one device is recommended although no split of the batch could be compared.

    This is the case if no layout over several devices was measured, or only with a much smaller
    batch.
    """
    if not chosen.layout.traits.alone or devices < 2:
        return False
    splits = [rival for rival in rivals if rival.family and rival.layout.traits.together]
    return not any(split.compared or not is_known(split.throughput) for split in splits)


def _find_slow_bfloat16(record: JournalContents, layout: Layout) -> tuple[str, ...]:
    """Return the labels of the plan's devices that lack bfloat16 hardware, if others have it.

    Returns an empty tuple if none of the plan's devices has such hardware, or if the workload
    doesn't use bfloat16.
    """
    request = record.header.request
    asked = request.precision == MIXED or "mixed" in layout.knobs
    if not (asked or record.facts.bfloat16):
        return ()
    devices = [record.header.devices[i] for i in layout.active]
    if not any(device.bfloat16 for device in devices):
        return ()
    return tuple(device.label for device in devices if device.bfloat16 is False)


# ---------------------------------------------------------------------- what is missing


def find_objective_reached(report: SearchReport) -> ObjectiveReached | None:
    """Return the value that the plan reaches for the objective, such as samples per joule.

    Returns None if the objective is speed.
    """
    objective, chosen = find_objective(report.problem.objective), report.chosen

    def value(result: Result) -> float:
        return objective.value(result.throughput.value, report.turns_of(result.layout))

    own = value(chosen)
    if not objective.trades_speed or not own:
        return None
    others = (*report.results, *(ranked.result for ranked in report.ranking))
    with_room = [one for one in others if one.layout not in report.nearly_full]
    fastest = max((chosen, *with_room), key=lambda one: one.throughput.value)
    other = value(fastest)
    is_fastest = fastest.throughput.value <= chosen.throughput.value or not other
    gain = None if is_fastest else own / other - 1
    return ObjectiveReached(objective.name, own, report.problem.max_slowdown, gain)


def find_not_compared(report: SearchReport, labels: Sequence[str]) -> Iterator[LeftOut]:
    """Yield the layouts that couldn't be compared because they failed or ran out of memory."""
    for candidate, seen in report.failed:
        name = _name_missing(candidate, labels)
        if isinstance(seen, Failed):
            yield LeftOut("layout", name, "failed", seen.detail.rstrip("."))
        else:
            yield LeftOut("layout", name, "out_of_memory")


def find_unequal_rows(report: SearchReport) -> Iterator[LeftOut]:
    """Yield the kinds of layouts that can't be compared because rows differ in length."""
    if not report.mean_length:
        return
    for family in report.options.wanted:
        if not family.traits.by_shares:
            yield LeftOut("family", family.plural, "by_rows")


def find_unmeasured(
    report: SearchReport, labels: Sequence[str], end: SearchEnd
) -> Iterator[LeftOut]:
    """Yield the layouts left unmeasured for lack of time, each with a budget that should suffice.

    Yields nothing if the search had no budget or was interrupted.
    """
    cut = end.end.stop in (Stop.INTERRUPTED, Stop.CUT_OFF)
    if report.problem.budget_seconds is None or cut:
        return
    enough = _round_enough(report)
    rates = {result.layout.shares: result.throughput.value for result in report.results}
    for one in report.unmeasured:
        name, earlier = _name_missing(one, labels), rates.get(one.layout.shares, 0.0)
        yield LeftOut("layout", name, "no_time", enough_seconds=enough, samples_per_second=earlier)
    for one in report.ungrown:
        yield LeftOut(
            "layout", name_layout(one, len(labels)), "packs_growing", enough_seconds=enough
        )


def _name_missing(candidate: Candidate, labels: Sequence[str]) -> str:
    """Return the name of a layout that was never measured, or only before the final comparison."""
    layout, devices = candidate.layout, len(labels)
    if layout.traits.alone and devices > 1 and not layout.knobs:
        return f"{labels[layout.active[0]]} alone at {count_samples(layout.global_batch)}"
    if candidate.family.equal_shares and len(layout.active) == devices:
        # the plan may be an even split over fewer devices
        over = "both" if devices == 2 else f"all {devices}"
        return f"equal shares over {over} devices"
    return name_layout(candidate, devices)


def find_replaced(report: SearchReport, devices: int) -> tuple[ReplacedLayout, ...]:
    """List the layouts that ran out of memory, each with the smaller one measured in its place."""
    return tuple(
        ReplacedLayout(
            name_layout(wished, devices),
            list_samples(wished.layout),
            list_samples(instead.layout),
        )
        for wished, instead in report.replaced_layouts
    )


def _round_enough(report: SearchReport) -> int:
    return STEP_SECONDS * math.ceil(MARGIN * report.enough_seconds / STEP_SECONDS)


def find_short_budget(
    report: SearchReport, observations: Sequence[Observation], end: SearchEnd
) -> ShortBudget | None:
    """Return a warning if the budget ended before a step over several devices was tried, or None.

    The warning says how much of the budget went into starting processes.
    """
    budget = report.problem.budget_seconds
    tried = any(len(observation.probe.layout.active) > 1 for observation in observations)
    wanted = report.problem.devices > 1 and report.options.needs_split_probes
    if tried or not end.late or budget is None or not wanted:
        return None
    timed = [observation for observation in observations if isinstance(observation, Timed)]
    at_once = [one.start_seconds for one in timed if one.probe.stage == Stage.SOLO]
    later = [one.start_seconds for one in timed if one.probe.stage != Stage.SOLO]
    starts = max(at_once, default=0.0) + sum(later)
    return ShortBudget(budget, starts, _round_enough(report))


def find_repeated_build(facts: Facts, observations: Sequence[Observation]) -> RepeatedBuild | None:
    """Return a warning if at least two processes took long to build the same model, or None."""
    timed = [observation for observation in observations if isinstance(observation, Timed)]
    built = [observation.restart_seconds >= facts.build_seconds for observation in timed]
    if not facts.builds_again or sum(built) < 2:
        return None
    return RepeatedBuild(facts.build_seconds, facts.builds_again)


def _find_ran_out(
    report: SearchReport, seen: Sequence[Observation], devices: Sequence[Device], end: SearchEnd
) -> Iterator[RanOut]:
    """Yield the attempts to train on several devices, sharded or not, if all ran out of memory.

    Yields nothing if the plan trains on several devices.
    """
    if report.chosen.layout.traits.together:
        return
    lacked_time = end.late and report.problem.budget_seconds is not None
    for in_shards in (True, False):
        full = _list_full_if_none_ran(seen, in_shards)
        if full:
            yield RanOut(
                in_shards,
                _list_full_devices(full, devices),
                tuple(dict.fromkeys(one.probe.layout.shares for one in full)),
                fmean(one.elapsed_seconds for one in full),
                lacked_time=lacked_time,
            )


def _list_full_if_none_ran(seen: Sequence[Observation], in_shards: bool) -> list[OutOfMemory]:
    """Return the probes over several devices that ran out of memory, sharded or not.

    The list is empty if such a probe was timed.
    """
    full: list[OutOfMemory] = []
    for observation in seen:
        traits = observation.probe.layout.traits
        if not traits.together or traits.sharded is not in_shards:
            continue
        if isinstance(observation, Timed):
            return []
        if isinstance(observation, OutOfMemory):
            full.append(observation)
    return full


def _list_full_devices(full: Sequence[OutOfMemory], devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the labels of the devices whose memory ran out; if unknown, of all that took part."""
    positions = {i for one in full for i in one.devices or one.probe.layout.active}
    return tuple(devices[i].label for i in sorted(positions))


def _find_overruns(end: SearchEnd, observations: Sequence[Observation]) -> tuple[Unfinished, ...]:
    """Return the probes that were still starting at the end of the search, and took unusually long.

    Their time so far is compared with the start-up of other probes. So probes that had only just
    been started when the budget ended aren't returned.
    """
    # a probe that ran out of memory doesn't say when its start ended
    starts = [
        one.start_seconds if isinstance(one, Timed) else one.elapsed_seconds
        for one in observations
        if not isinstance(one, Failed)
    ]
    longest = max(starts, default=0.0)
    return tuple(one for one in end.unfinished if one.seconds > OVERRUNS * longest)


def _find_left_out_hosts(report: SearchReport, devices: Sequence[Device]) -> Iterator[LeftOut]:
    """Yield the hosts that the plan doesn't use because the network would make it slower."""

    def list_hosts(layout: Layout) -> list[str]:
        return list(dict.fromkeys(devices[i].host for i in layout.active))

    chosen = report.chosen
    own = list_hosts(chosen.layout)
    wider = [result for result in report.results if len(list_hosts(result.layout)) > len(own)]
    fastest = max(wider, key=lambda one: one.throughput.value, default=None)
    if not chosen.layout.traits.together or fastest is None:
        return
    speed, batch = fastest.throughput.value, fastest.layout.global_batch
    if speed >= chosen.throughput.value:
        return
    there, loss = list_hosts(fastest.layout), -printed_gain(speed, chosen.throughput.value)
    seconds = report.network_seconds[len(there)]
    for host in there:
        if host not in own:
            yield LeftOut(
                "host",
                host,
                "slower",
                loss=loss,
                samples_per_second=speed,
                hosts=len(there),
                global_batch=batch if batch != chosen.layout.global_batch else 0,
                network_seconds=seconds if seconds >= COVERS * loss * batch / speed else 0.0,
            )
