"""Trainings: the ranks of each, joined over processes, devices and hosts. `training_lines` draws
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.devices.types import Snapshot
from evener.live.files import ShareChange, Training
from evener.plan.layout import is_curve
from evener.plan.solver import join_curves, proportional_curves
from evener.shares.curves import Curve
from evener.training.noise_scale import NoiseScale
from evener.training.rebalance import Advice, advise

from .ranks import MEDIAN_ERROR, Cause, Placed, RankPlace, RankRow, find_causes, place_ranks

MOST_ROWS = 1 << 24  # of a step for which shares are looked for
LEAST_WORK_S, MOST_WORK_S = 1e-6, 1e5


class TrainingRow(msgspec.Struct, frozen=True):
    """A training: its ranks, its figures over all of them, and what holds it up."""

    training: str  # its id; empty for a process that trains alone
    workload: str
    framework: str
    ranks: tuple[RankRow, ...]
    missing_ranks: int  # on other hosts, or gone
    step: int
    samples_per_second: float
    tokens_per_second: float
    watts: float  # of its devices; 0: one of them reports none, or isn't seen
    samples_per_joule: float  # 0: unknown
    plan_samples_per_second: float  # 0: it has no plan
    of_plan: float  # samples/s over the plan's; 0: unknown, as while ranks are missing
    step_s: float
    step_spread: float  # interquartile range over the median
    input_s: float  # of a step, waiting for data
    # of a step, between the backward pass and the next batch, without the optimizer
    between_s: float
    causes: tuple[Cause, ...]  # of its waiting, most certain first
    advice: Advice | None  # shares that would be faster
    changes: tuple[ShareChange, ...]  # of the shares, oldest first
    retreats: tuple[str, ...] = ()  # of each rank that ran out of memory, the last one
    noise: NoiseScale | None = None  # of its gradient

    @property
    def key(self) -> tuple[str, int]:
        """The training's identity from tick to tick."""
        return self.training, 0 if self.training else self.ranks[0].pid


def join_trainings(snapshot: Snapshot) -> tuple[TrainingRow, ...]:
    """Every training of the snapshot, with the ranks that report here."""
    groups: dict[tuple[str, int], list[Training]] = {}
    for report in snapshot.reports:
        groups.setdefault((report.training, 0 if report.training else report.pid), []).append(
            report
        )
    samples = {(sample.device.host, sample.device.id): sample for sample in snapshot.devices}
    return tuple(_join(reports, samples, snapshot) for reports in groups.values())


def _join(reports: Sequence[Training], samples: Placed, snapshot: Snapshot) -> TrainingRow:
    reports = sorted(reports, key=lambda each: (each.rank, each.pid))
    places = [
        place for each in reports for place in place_ranks(each, samples, snapshot.at_seconds)
    ]
    ranks = tuple(place.row for place in places)
    reporting = [row for row in ranks if not row.silent_s]
    newest = max(reports, key=lambda each: each.updated_at)
    missing = max(0, max(each.world for each in reports) - len({each.rank for each in reports}))
    speed = sum(row.samples_per_second for row in reporting)
    plan = max(each.plan_samples_per_second for each in reports)
    watts = _watts(places)
    step_s = max(each.step_s for each in reports)
    causes = find_causes(places, step_s, snapshot.processes, missing)
    uneven = not missing and any(cause.kind == "waiting" for cause in causes)
    return TrainingRow(
        training=newest.training,
        workload=newest.workload,
        framework=newest.framework,
        ranks=ranks,
        missing_ranks=missing,
        step=newest.step,
        samples_per_second=speed,
        tokens_per_second=sum(row.tokens_per_second for row in reporting),
        watts=watts,
        samples_per_joule=speed / watts if watts and not missing else 0.0,
        plan_samples_per_second=plan,
        of_plan=speed / plan if plan and not missing else 0.0,
        step_s=step_s,
        step_spread=max(each.step_spread for each in reports),
        input_s=max(each.input_s for each in reports),
        between_s=max(each.between_s for each in reports),
        causes=causes,
        advice=_advice(places, step_s) if uneven else None,
        changes=max((each.changes for each in reports), key=len),
        retreats=tuple(each.retreat for each in reports if each.retreat),
        noise=newest.noise,
    )


def _watts(places: Sequence[RankPlace]) -> float:
    """The power of a training's devices, each counted once."""
    samples = {place.sample.device.label: place.sample for place in places if place.sample}
    watts = [sample.power_watts.current for sample in samples.values()]
    known = [each for each in watts if each is not None]
    return sum(known) if len(known) == len(watts) and all(place.sample for place in places) else 0.0


def _advice(places: Sequence[RankPlace], step_s: float) -> Advice | None:
    """The shares that the ranks' own work calls for; None where it says too little, or they
    wouldn't gain clearly.
    """
    rows = [place.row for place in places]
    shares, own_work_s = [row.share for row in rows], [row.own_work_s for row in rows]
    if len(rows) < 2 or any(row.silent_s for row in rows) or not all(shares):
        return None
    if sum(shares) > MOST_ROWS or not all(map(_is_plausible, own_work_s)):
        return None
    in_passes = any(row.micro and row.micro < row.share for row in rows)
    most = [place.live.most for place in places]
    found = advise(_curves(places, shares), shares, own_work_s, step_s, most, in_passes)
    error = 2 * MEDIAN_ERROR * max(row.own_spread for row in rows)
    return (
        msgspec.structs.replace(found, error=error)
        if found is not None and found.gain > error
        else None
    )


def _curves(places: Sequence[RankPlace], shares: Sequence[int]) -> Sequence[Curve]:
    """The plan's curves; times in proportion to rows where a rank has none, or its curve can't be
    true.
    """
    curves = join_curves(
        [place.live.curve if is_curve(place.live.curve) else () for place in places], shares
    )
    steps = (curve.seconds(share) for curve, share in zip(curves, shares, strict=True))
    return curves if all(map(_is_plausible, steps)) else proportional_curves(shares)


def _is_plausible(seconds: float) -> bool:
    """True if a step can have taken that long: reports are foreign figures."""
    return LEAST_WORK_S < seconds < MOST_WORK_S
