"""Find the bottlenecks of training from the ranks' measured step times.

The straggler, the last rank to reach the gradient exchange, determines the time of a step. A part
of the step that takes about as long on every rank slows the whole run. A part that takes long on
only one rank costs the time for which the other ranks wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from ..plan.layout import is_curve
from ..plan.solver import join_curves, proportional_curves
from ..shares.curves import Curve
from .limits import (
    HAND_OVER_S,
    LEAST_SHARE,
    TRAINER_S,
    LimitKind,
    StepPart,
    TrainingLimit,
    bound_error,
    find_limits,
)
from .rebalance import Advice, advise
from .step_sums import RankStep, StepSums, divide_steps

LEAST_EXCHANGE = 0.1  # minimum fraction of a step for the exchange to be a limit
# standard error of the median of 25 steps, relative to their interquartile range
MEDIAN_ERROR = 0.19
NOISE_ERRORS = 3.0  # minimum difference of two ranks, in standard errors
BEHIND_PART = 0.5  # the GPU is the limit if it is behind its host in this fraction of steps
# own code is a limit if a lack of cores explains at most this fraction of idle time
MOST_STARVED = 0.5
STARVED_ERROR = 0.25  # relative: threads don't all wait at the same time
STARVED_REST_ERROR = 0.15  # the same, relative to the rest of the step
# Relative: in trainings with one known cause, the rest of a step differed by up to this fraction
# from a step without the cause, because caches are cold and cores asleep after a pause.
REST_ERROR = 0.1
MOST_ROWS = 1 << 24  # maximum rows per step for which shares are searched
LEAST_WORK_S, MOST_WORK_S = 1e-6, 1e5
HALF = 0.5  # fraction of a once-per-step part that larger batches save

REMAINING_S = {LimitKind.INPUT: HAND_OVER_S, LimitKind.BETWEEN: TRAINER_S}
REMEDIES = {
    LimitKind.INPUT: (
        "Load rows in worker processes, or in more of them: DataLoader(num_workers=4, "
        "persistent_workers=True)."
    ),
    LimitKind.EXCHANGE: "Exchange half as often: a batch twice as large, or twice the passes.",
    LimitKind.HOST_LAUNCHES: "Take a batch twice as large, or compile the model (torch.compile).",
    LimitKind.OPTIMIZER: "Update half as often, with a batch twice as large; or use fused=True.",
    LimitKind.CHECKPOINTS: "Write checkpoints half as often, or in the background.",
    LimitKind.VALIDATION: "Validate half as often, or on half of the rows.",
}

# remedies that differ in Keras
IN_KERAS = {
    LimitKind.INPUT: (
        "Make rows in parallel and ahead: dataset.map(..., num_parallel_calls=tf.data.AUTOTUNE)"
        ".prefetch(2)."
    ),
    LimitKind.OPTIMIZER: "Update half as often, with a batch twice as large.",
}


class MeasuredRank(NamedTuple):
    """The measurements of one rank that are needed to find bottlenecks.

    Times are in seconds, and 0 if unknown.
    """

    name: str
    share: int
    sums: StepSums  # seconds of the rank's steps, by part
    errors: StepSums  # half of the 95 % interval of each mean of `sums`
    own_work_s: float  # median
    waiting_s: float  # median, with the exchange
    least_waiting_s: float  # the lowest tenth
    own_spread: float  # interquartile range of own work over its median
    curve: tuple[tuple[float, float], ...] = ()  # the plan's curve of its device
    micro: int = 0  # rows of a pass
    most: int = 0  # maximum rows per pass that fit in its memory
    behind: float = -1.0  # fraction of the steps in which the GPU was behind its host; -1: unknown
    starved: float = 0.0  # fraction of the time in which its threads waited for cores
    framework: str = ""  # "torch" or "tensorflow"


class TrainingAnalysis(NamedTuple):
    """What a training run spends its time on, and faster shares if there are any."""

    step_s: float  # mean
    steps: tuple[RankStep, ...]  # of each rank, in five parts
    limits: tuple[TrainingLimit, ...]  # the largest first
    advice: Advice | None  # shares that would be faster


def judge_training(
    ranks: Sequence[MeasuredRank], complete: bool = True, competitors: str = ""
) -> TrainingAnalysis:
    """Find out what slows a training run down, and whether other shares would be faster.

    `complete` says whether `ranks` contains all ranks; if not, no shares are recommended.
    `competitors` names other programs that use the CPU cores. In the result, `step_s` is 0 if no
    step times are known.
    """
    steps = tuple(
        divide_steps([rank.sums for rank in ranks], [rank.least_waiting_s for rank in ranks])
    )
    step_s = _find_step_seconds(steps)
    if step_s <= 0:
        return TrainingAnalysis(0.0, steps, (), None)
    parts = [*_list_single_parts(ranks, steps, step_s, competitors)]
    unequal = _find_unequal_work(ranks, steps, step_s)
    advice = None
    if unequal is not None:
        advice = advise_shares(ranks, step_s) if complete else None
        parts.append(_with_advice(unequal, advice, step_s))
    return TrainingAnalysis(step_s, steps, find_limits(step_s, parts), advice)


def _find_step_seconds(steps: Sequence[RankStep]) -> float:
    """Return the mean time of a step in seconds, or 0 if it is unknown."""
    # A step takes equally long on all ranks, because they wait for each other. Waits are timed in
    # only some of the steps, so a long wait in a single step may be missed. Therefore the ranks
    # that wait least know the duration best.
    known = [step for step in steps if step.step_s > 0]
    if not known:
        return 0.0
    last = list_stragglers(known, fmean(each.step_s for each in known))
    return fmean(known[place].step_s for place in last)


def _list_single_parts(
    ranks: Sequence[MeasuredRank], steps: Sequence[RankStep], step_s: float, competitors: str
) -> Iterator[StepPart]:
    """Yield the parts of a step that may be bottlenecks, except for unequal compute times.

    `steps` are the ranks' mean steps, and `step_s` is the duration of a step. `competitors` names
    other programs that use the CPU cores.
    """
    found = _Finder(ranks, steps, step_s)
    yield from found.find(LimitKind.INPUT, "input_s", alone=LimitKind.RANK_INPUT)
    yield from found.find(LimitKind.OPTIMIZER, "update_s", spared=HALF)
    yield from found.find(LimitKind.CHECKPOINTS, "files_s", spared=HALF)
    yield from found.find(LimitKind.VALIDATION, "validation_s", spared=HALF)
    yield from found.find(LimitKind.BETWEEN, "between_s")
    yield from _find_exchange(ranks, steps, step_s)
    yield from _find_host_waits(ranks, steps, step_s, competitors)


class _Finder:
    """Finds the parts of a step that take long on the stragglers, the ranks that finish last."""

    def __init__(
        self, ranks: Sequence[MeasuredRank], steps: Sequence[RankStep], step_s: float
    ) -> None:
        self._ranks, self._steps, self._step_s = ranks, steps, step_s
        self._last = list_stragglers(steps, step_s)

    def find(
        self, kind: LimitKind, name: str, spared: float = 1.0, alone: LimitKind | None = None
    ) -> Iterator[StepPart]:
        """Yield the part of a step that a field of StepSums measures.

        Nothing is yielded if the part takes less than 5 % of the step.

        - `kind`: the kind of bottleneck to report.
        - `name`: the field of StepSums.
        - `spared`: the fraction of the part's time that its remedy saves.
        - `alone`: the kind to report instead if the part takes long on only one rank.
        """
        # The part is long on only one rank if another rank needs less than half as long. A remedy
        # then saves at most the time that the others wait for that rank.
        means = [rank.sums.mean(name) for rank in self._ranks]
        place = max(self._last, key=means.__getitem__)
        seconds = means[place]
        if seconds < LEAST_SHARE * self._step_s:
            return
        error_s = float(getattr(self._ranks[place].errors, name))
        rest_error_s = _find_rest_error(seconds, self._step_s)
        remedy = REMEDIES.get(kind, "")
        if self._ranks[0].framework == "tensorflow":
            remedy = IN_KERAS.get(kind, remedy)
        remaining_s = REMAINING_S.get(kind, 0.0)
        if min(means) >= seconds / 2:
            yield StepPart(
                kind=kind,
                seconds=seconds,
                error_s=error_s,
                rest_error_s=rest_error_s,
                remaining_s=remaining_s,
                spared=spared,
                remedy=remedy,
            )
            return
        spared *= min(1.0, max(self._find_lead(place), 0.0) / seconds)
        yield StepPart(
            kind=alone or kind,
            seconds=seconds,
            error_s=error_s,
            rest_error_s=rest_error_s,
            remaining_s=remaining_s,
            spared=spared,
            remedy="" if alone else remedy,
            by=self._ranks[place].name,
        )

    def _find_lead(self, rank: int) -> float:
        """Return how much longer this rank is busy than any other rank, in seconds per step.

        The result is negative if another rank is busy for longer.
        """
        # Busy times show this better than measured waits, which may miss a long wait in a single
        # step, because waits are timed in only some of the steps. Files and validation are timed in
        # all steps.
        busy_s = [step.input_s + step.own_work_s + step.between_s for step in self._steps]
        others = [seconds for other, seconds in enumerate(busy_s) if other != rank]
        return busy_s[rank] - max(others)


def _find_rest_error(seconds: float, step_s: float) -> float:
    """Return the error margin, in seconds, of the step time that is predicted after a remedy.

    `seconds` is how much time the remedy saves in each step.
    """
    # The margin is half of the 95 % interval. The rest of the step may take more or less time than
    # before.
    return bound_error(seconds, step_s, REST_ERROR, REST_ERROR)


def list_stragglers(steps: Sequence[RankStep], step_s: float) -> list[int]:
    """Return the indices of the stragglers: the ranks that hardly wait for others.

    `steps` are the ranks' mean steps, and `step_s` is the duration of a step in seconds.
    """
    # they wait at most 5 % of a step longer than the rank that waits least
    least_s = min(step.waiting_s for step in steps)
    return [
        place
        for place, each in enumerate(steps)
        if each.waiting_s <= least_s + LEAST_SHARE * step_s
    ]


def _find_exchange(
    ranks: Sequence[MeasuredRank], steps: Sequence[RankStep], step_s: float
) -> Iterator[StepPart]:
    """Yield the all-reduce of gradients as a part of a step, if it takes at least 10 % of it."""
    # Only the time after the last gradient counts: an exchange during the computation costs no
    # time.
    if len(ranks) < 2:
        return
    seconds = min(step.exchange_s for step in steps)
    if seconds >= LEAST_EXCHANGE * step_s:
        yield StepPart(
            kind=LimitKind.EXCHANGE,
            seconds=seconds,
            error_s=min(rank.errors.meeting_s for rank in ranks),
            rest_error_s=_find_rest_error(seconds, step_s),
            spared=HALF,
            remedy=REMEDIES[LimitKind.EXCHANGE],
        )


def _find_host_waits(
    ranks: Sequence[MeasuredRank], steps: Sequence[RankStep], step_s: float, competitors: str
) -> Iterator[StepPart]:
    """Yield the parts of a step in which a rank waits for its host.

    It may wait for CPU cores, for kernels to start, or for the user's own code.
    """
    last = list_stragglers(steps, step_s)
    place = max(last, key=lambda each: ranks[each].starved)
    starved_s = ranks[place].starved * step_s
    if starved_s > 0:
        waiting_s = _find_wait_for_starved(ranks, steps[place], place, step_s)
        lost_s = min(step_s, starved_s + waiting_s)
        yield StepPart(
            kind=LimitKind.HOST_STARVED,
            seconds=lost_s,
            error_s=bound_error(lost_s, step_s, STARVED_ERROR, STARVED_REST_ERROR),
            by=competitors,
        )
    slowest = ranks[max(last, key=lambda each: steps[each].own_work_s)]
    own_s = slowest.sums.mean("own_work_s")
    if 0 <= slowest.behind < BEHIND_PART:
        yield StepPart(
            kind=LimitKind.HOST_LAUNCHES,
            seconds=own_s,
            error_s=own_s / 2,
            spared=HALF,
            remedy=REMEDIES[LimitKind.HOST_LAUNCHES],
        )
    idle_s = slowest.sums.mean("idle_own_s")
    if idle_s > 0 and starved_s <= MOST_STARVED * idle_s:
        yield StepPart(
            kind=LimitKind.OWN_CODE,
            seconds=idle_s - starved_s,
            error_s=slowest.errors.idle_own_s + starved_s,
            rest_error_s=_find_rest_error(idle_s - starved_s, step_s),
        )


def _find_wait_for_starved(
    ranks: Sequence[MeasuredRank], step: RankStep, rank: int, step_s: float
) -> float:
    """Return how long a rank waits in each step for other ranks that lack CPU cores, in seconds.

    `step` is the mean step of the rank with index `rank`. Ranks are assumed to wait for each other
    only if all of them lack CPU cores; otherwise, the result is 0.
    """
    # If all ranks lack cores, each is the last one in some steps, and the others wait for it. A
    # rank may also be starved while it waits; that time is already counted as starved. So the
    # result is at most the rest of a step after starved time, computing and the exchange.
    if not all(rank.starved >= LEAST_SHARE for rank in ranks):
        return 0.0
    sums = ranks[rank].sums
    idle_s = sums.mean("idle_own_s") + sums.mean("idle_input_s")
    computing_s = step.input_s + step.own_work_s + step.between_s - idle_s
    left_s = step_s * (1 - ranks[rank].starved) - computing_s - step.exchange_s
    return min(step.waiting_s, max(0.0, left_s))


def _find_unequal_work(
    ranks: Sequence[MeasuredRank], steps: Sequence[RankStep], step_s: float
) -> StepPart | None:
    """Return the time of a step that is lost because the ranks' compute times are unequal.

    Returns None if the loss is small or within the noise of the measurements.
    """
    # The lost time is the compute time of the slowest rank, minus the time in which all ranks would
    # finish together. The result is None if this difference, or the longest wait of another rank,
    # is within noise or below 5 % of a step, or if fewer than two compute times are known.
    timed = [place for place, rank in enumerate(ranks) if rank.own_work_s > 0]
    if len(timed) < 2:
        return None
    last = [place for place in list_stragglers(steps, step_s) if place in timed] or timed
    slowest = ranks[max(last, key=lambda each: ranks[each].own_work_s)]
    known = [ranks[place] for place in timed]
    beyond_s = slowest.own_work_s - _balanced_seconds(known)
    waited_s = max(each.waiting_s for each in known) - slowest.waiting_s
    noise_s = NOISE_ERRORS * MEDIAN_ERROR * max(each.own_spread * each.own_work_s for each in known)
    if min(beyond_s, waited_s) < max(LEAST_SHARE * step_s, noise_s):
        return None
    return StepPart(kind=LimitKind.UNEQUAL, seconds=beyond_s, error_s=noise_s, by=slowest.name)


def _balanced_seconds(ranks: Sequence[MeasuredRank]) -> float:
    """Return the compute time in seconds that all ranks would have if their shares were balanced.

    Balanced shares are in proportion to the ranks' speeds, so all ranks compute for the same time.
    """
    shares = [rank.share or 1 for rank in ranks]
    rates = [share / each.own_work_s for share, each in zip(shares, ranks, strict=True)]
    total = math.fsum(rates)
    return sum(shares) / total if total > 0 else 0.0


def _with_advice(part: StepPart, advice: Advice | None, step_s: float) -> StepPart:
    """Return `part` with the recommended shares as its remedy.

    `part` is the time that is lost because the ranks' work is unequal. If `advice` is None, the
    part is returned unchanged.
    """
    if advice is None:
        return part
    without_s = step_s / (1 + advice.gain)
    return StepPart(
        kind=part.kind,
        seconds=part.seconds,
        without_s=without_s,
        without_error_s=advice.error * without_s,
        remedy=f"Shares {' + '.join(map(str, advice.shares))}, as evener run and rebalance=True "
        f"find them.",
        by=part.by,
    )


def advise_shares(ranks: Sequence[MeasuredRank], step_s: float) -> Advice | None:
    """Return shares that would make training faster, or None if no gain is certain.

    `step_s` is the time of a step in seconds.
    """
    # None is returned if a share or a compute time is unknown, or if the gain is below 2 % or at
    # most two of its standard errors
    shares, own_work_s = [rank.share for rank in ranks], [rank.own_work_s for rank in ranks]
    if len(ranks) < 2 or not all(shares) or sum(shares) > MOST_ROWS:
        return None
    if not all(map(_is_plausible, own_work_s)):
        return None
    in_passes = any(0 < rank.micro < rank.share for rank in ranks)
    most = [rank.most for rank in ranks]
    found = advise(_read_curves(ranks), shares, own_work_s, step_s, most, in_passes)
    error = 2 * MEDIAN_ERROR * max(rank.own_spread for rank in ranks)
    if found is None or found.gain <= error:
        return None
    return Advice(found.shares, found.gain, found.by_curves, error)


def _read_curves(ranks: Sequence[MeasuredRank]) -> Sequence[Curve]:
    """Return, for each rank, its device's step time as a function of rows.

    Curves are from the ranks' reports. If any curve is missing or implausible, step times are
    assumed to be proportional to rows.
    """
    # Curves come from other processes' reports, so they aren't trusted.
    shares = [rank.share for rank in ranks]
    curves = join_curves([rank.curve if is_curve(rank.curve) else () for rank in ranks], shares)
    planned = (curve.seconds(share) for curve, share in zip(curves, shares, strict=True))
    return curves if all(map(_is_plausible, planned)) else proportional_curves(shares)


def _is_plausible(seconds: float) -> bool:
    """Return True if a reported compute time is between a microsecond and about a day."""
    # other processes report the time, and their reports may be wrong
    return LEAST_WORK_S < seconds < MOST_WORK_S
