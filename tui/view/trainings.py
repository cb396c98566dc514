"""Groups the reports of all processes into training runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from evener.devices.types import HostSample, Snapshot
from evener.live.files import PendingShares, ShareChange, Training
from evener.training.limits import LimitKind, TrainingLimit
from evener.training.noise_scale import NoiseScale
from evener.training.rebalance import Advice
from evener.training.step_limits import TrainingAnalysis, judge_training

from .ranks import (
    Cause,
    RankOnDevice,
    RankRow,
    SamplesByDevice,
    find_causes,
    measure_on_device,
    place_ranks,
)

AS_PLANNED = (
    0.95  # a training with this fraction of its plan's samples/s counts as fast as the plan
)
CROWDED = 1.25  # a host with this 1-minute load per core, or more, is overloaded


class TrainingRow(msgspec.Struct, frozen=True):
    """A training run, put together from the reports of its ranks."""

    training: str  # its id; empty for a process that trains alone
    workload: str
    framework: str
    ranks: tuple[RankRow, ...]
    missing_ranks: int  # ranks without a report here: on other hosts, or ended
    step: int
    samples_per_second: float
    tokens_per_second: float
    watts: float  # of all its devices; 0: unknown for at least one device
    samples_per_joule: float  # 0: unknown
    plan_samples_per_second: float  # 0: it has no plan
    of_plan: float  # samples/s over the plan's; 0: unknown, such as while ranks are missing
    step_s: float
    step_spread: float  # interquartile range over the median
    input_s: float  # seconds of a step waiting for data
    # seconds of a step between the backward pass and the next batch, without the optimizer
    between_s: float
    causes: tuple[Cause, ...]  # what slows it down, the most certain first
    advice: Advice | None  # shares that would be faster
    changes: tuple[ShareChange, ...]  # changes of the shares, the oldest first
    retreats: tuple[str, ...] = ()  # the last message of each rank that ran out of memory
    noise: NoiseScale | None = None  # noise scale of its gradient
    limits: tuple[TrainingLimit, ...] = ()  # limits of its steps, the largest first
    starved: float = 0.0  # fraction of the time in which threads of a rank waited for cores
    pending: PendingShares | None = None  # the change of shares that it will make next by itself
    run: str = ""  # id of the run that keeps its journal; empty: it keeps none
    ended_s: float = 0.0  # seconds since it ended; 0 while it runs
    summary: tuple[str, ...] = ()  # its summary after the end, if it wrote one

    @property
    def key(self) -> tuple[str, int]:
        """The key that identifies the run: (id, 0), or ("", pid) if the run has no id."""
        return self.training, 0 if self.training else self.ranks[0].pid


KEPT_SECONDS = 600.0  # seconds that an ended training stays on the screen
MOST_KEPT = 3  # maximum number of ended trainings shown; the newest ones are


class EndedTrainings:
    """Keeps up to three training runs on the screen for ten minutes after they have ended.

    `find_summary` gets a run's id, and returns the lines of its summary, or no lines.
    """

    def __init__(self, find_summary: Callable[[str], Sequence[str]]) -> None:
        self._find_summary = find_summary
        self._last: dict[tuple[str, int], tuple[TrainingRow, float]] = {}  # row, time last seen
        self._summaries: dict[str, tuple[str, ...]] = {}

    def add_ended(self, rows: Sequence[TrainingRow], at_seconds: float) -> tuple[TrainingRow, ...]:
        """Return the running training runs, followed by those that have ended, newest first.

        `rows` are the running ones. `at_seconds` is the current time in Unix seconds.
        """
        running = {row.key for row in rows}
        ended = [
            self._make_ended(row, seen_at, at_seconds)
            for key, (row, seen_at) in self._last.items()
            if key not in running and at_seconds - seen_at < KEPT_SECONDS
        ]
        kept = ended[-MOST_KEPT:]
        last = {row.key: self._last[row.key] for row in kept}
        self._last = last | {row.key: (row, at_seconds) for row in rows}
        return (*rows, *reversed(kept))

    def _make_ended(self, row: TrainingRow, seen_at: float, at_seconds: float) -> TrainingRow:
        """Return the row of a training run that has ended, with its summary.

        `seen_at` is when it was last running, and `at_seconds` the current time, in Unix seconds.
        """
        # Of the causes that slowed the training down, only unequal compute times are kept: the next
        # run can avoid them with the advised shares. Nothing can be done about the other causes any
        # more.
        if row.run and not self._summaries.get(row.run):
            self._summaries[row.run] = tuple(self._find_summary(row.run))
        ended_s = max(at_seconds - seen_at, 1e-3)
        ranks = tuple(msgspec.structs.replace(rank, ended_s=ended_s) for rank in row.ranks)
        return msgspec.structs.replace(
            row,
            ranks=ranks,
            ended_s=ended_s,
            summary=self._summaries.get(row.run, ()),
            causes=tuple(cause for cause in row.causes if cause.kind == LimitKind.UNEQUAL.value),
            limits=(),
        )


def join_trainings(snapshot: Snapshot) -> tuple[TrainingRow, ...]:
    """Group the reports of all processes into training runs and their ranks."""
    groups: dict[tuple[str, int], list[Training]] = {}
    for report in snapshot.reports:
        groups.setdefault((report.training, 0 if report.training else report.pid), []).append(
            report
        )
    samples = {(sample.device.host, sample.device.id): sample for sample in snapshot.devices}
    return tuple(_join(reports, samples, snapshot) for reports in groups.values())


def _join(reports: Sequence[Training], samples: SamplesByDevice, snapshot: Snapshot) -> TrainingRow:
    reports = sorted(reports, key=lambda each: (each.rank, each.pid))
    newest = max(reports, key=lambda each: each.updated_at)
    missing_ranks = max(0, _largest_value(reports, "world") - len({each.rank for each in reports}))
    reports_with_ranks = [
        (report, place)
        for report in reports
        for place in place_ranks(report, samples, snapshot.at_seconds)
    ]
    analysis = _analyse_steps(reports_with_ranks, missing_ranks)
    ranks = [place for _, place in reports_with_ranks]
    row = TrainingRow(
        training=newest.training,
        workload=newest.workload,
        framework=newest.framework,
        ranks=_add_steps([place.row for place in ranks], analysis),
        missing_ranks=missing_ranks,
        step=newest.step,
        samples_per_second=0.0,
        tokens_per_second=0.0,
        watts=_total_watts(ranks),
        samples_per_joule=0.0,
        plan_samples_per_second=_largest_value(reports, "plan_samples_per_second"),
        of_plan=0.0,
        step_s=_largest_value(reports, "step_s"),
        step_spread=_largest_value(reports, "step_spread"),
        input_s=_largest_value(reports, "input_s"),
        between_s=_largest_value(reports, "between_s"),
        causes=find_causes(ranks, analysis, snapshot.processes, missing_ranks),
        advice=analysis.advice,
        changes=max((each.changes for each in reports), key=len),
        retreats=tuple(each.retreat for each in reports if each.retreat),
        noise=newest.noise,
        limits=analysis.limits,
        starved=_largest_value(reports, "starved"),
        pending=newest.pending,
        run=newest.run,
    )
    return _add_load(_add_totals(row), snapshot.host)


def _add_load(row: TrainingRow, host: HostSample) -> TrainingRow:
    """Add a high CPU load as the cause if a run is slower than planned and no cause is known."""
    # A high load only suggests that the training's threads wait for cores. It is used because not
    # every kernel reports how long threads wait.
    late = 0 < row.of_plan < AS_PLANNED
    if row.causes or not late or host.load_1min < CROWDED * host.cores:
        return row
    text = (
        f"The host's load is {host.load_1min:.0f} on {host.cores} cores: more programs want to run "
        f"than there are cores, and this training may wait for one."
    )
    return msgspec.structs.replace(row, causes=(Cause(LimitKind.HOST_STARVED.value, text),))


def _add_totals(row: TrainingRow) -> TrainingRow:
    """Return the row with the run's speed, energy efficiency, and fraction of the plan's speed.

    The speed is in samples/s and tokens/s, and the efficiency in samples per joule. The efficiency
    and the fraction are 0 if some ranks don't report on this machine.
    """
    # If some ranks don't report on this machine, two values would be wrong and are 0: the samples
    # per joule, and the fraction of the plan's samples/s.
    reporting = [rank for rank in row.ranks if not rank.silent_s]
    speed = sum(rank.samples_per_second for rank in reporting)
    whole = not row.missing_ranks
    return msgspec.structs.replace(
        row,
        samples_per_second=speed,
        tokens_per_second=sum(rank.tokens_per_second for rank in reporting),
        samples_per_joule=speed / row.watts if row.watts and whole else 0.0,
        of_plan=(
            speed / row.plan_samples_per_second if row.plan_samples_per_second and whole else 0.0
        ),
    )


def _largest_value(reports: Sequence[Training], name: str) -> Any:
    """Return the largest value of a field in the reports."""
    return max(getattr(report, name) for report in reports)


def _analyse_steps(
    reports_with_ranks: Sequence[tuple[Training, RankOnDevice]], missing_ranks: int
) -> TrainingAnalysis:
    """Analyse the steps of a training run's ranks, to find what limits its speed."""
    rows = [place.row for _, place in reports_with_ranks]
    reporting = [
        measure_on_device(place, rows, report)
        for report, place in reports_with_ranks
        if not place.row.silent_s
    ]
    whole = not missing_ranks and len(reporting) == len(reports_with_ranks)
    return judge_training(reporting, whole)


def _add_steps(rows: Sequence[RankRow], analysis: TrainingAnalysis) -> tuple[RankRow, ...]:
    """Add the parts of the step time to the row of each rank that reports."""
    steps = iter(analysis.steps)
    return tuple(
        row if row.silent_s else msgspec.structs.replace(row, step=next(steps)) for row in rows
    )


def _total_watts(ranks: Sequence[RankOnDevice]) -> float:
    """Return the power of all devices together in watts, or 0 if the power of one is unknown."""
    samples = {place.sample.device.label: place.sample for place in ranks if place.sample}
    watts = [sample.power_watts.current for sample in samples.values()]
    known = [watt for watt in watts if watt is not None]
    return sum(known) if len(known) == len(watts) and all(place.sample for place in ranks) else 0.0
