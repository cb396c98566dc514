"""The first stage: every device in a process of its own, all at the same time, a few batches each.

Two small batches give a first curve and the memory slope. Then the layout that would be fastest if
every curve were as fast as its points allow says what is worth a measurement: a share beyond what
ran, or one in a gap between two points in which time may rise late. A round is measured while that
layout promises more than it costs. A device that would keep the others waiting for little is left
out of a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from evener.shares.curves import PassCurve
from evener.shares.waterfill import Allocation, DeviceCurve

from ..types import Probe, solo
from .budget import BASE_SECONDS, Budget
from .device_model import DeviceModel
from .layouts import TIE
from .model.memory import BLIND_GROWTH
from .model.step_time import SAME_BATCH, WIDE, merge_points
from .predictions import Predictions
from .ranking import COMES_TRUE, LEAST_RATE

# where hopes have no end (stairs, 16 devices); a steep curve is halved nine times (even split)
MOST_ROUNDS = 12
# the first batch, or fewer if a device's even share is smaller; the second is `BLIND_GROWTH` times
# as large
SMALL = 8


Batches = dict[DeviceModel, int]  # of a round


class SoloStage:
    """The stage that chooses batches to measure on every device alone, by the model and its
    predictions.
    """

    def __init__(self, model: Predictions, budget: Budget) -> None:
        self._model, self._budget, self._problem, self._quantum = (
            model,
            budget,
            model.problem,
            model.quantum,
        )
        self._live = [model.devices[i] for i in model.live]

    def next_probes(self) -> tuple[Probe, ...]:
        """The next batch for every device that matters; empty when over."""
        return self._first_rounds() or (self._hopeful_round() if self._turn < MOST_ROUNDS else ())

    # ------------------------------------------------------------------ a round

    def _first_rounds(self) -> tuple[Probe, ...]:
        """One of two small batches on each device."""
        for turn in range(2):
            due = {one: self._small_batch(one) for one in self._live if one.evidence.rounds == turn}
            due = {
                one: batch
                for one, batch in due.items()
                if all(p.batch != batch for p in one.evidence.alone)
            }
            if due and (kept := self._worth_waiting(due) if turn else due):
                return self._round(kept, turn)
        retried = {one: self._small_batch(one) for one in self._live if self._lacks_a_line(one)}
        retried = {
            one: batch
            for one, batch in retried.items()
            if self._has_time(self._seconds(one, batch))
        }
        return self._round(retried, self._turn)

    def _lacks_a_line(self, one: DeviceModel) -> bool:
        """Whether it ran out of memory before two sizes showed how that grows, and a smaller one
        can.
        """
        memory, points = one.memory, one.evidence.alone
        known = (
            memory.failed is None
            or memory.limit_bytes is None
            or memory.line is not None
            or len(points) > 1
        )
        return not points or (not known and self._is_new(one, self._small_batch(one)))

    def _worth_waiting(self, due: Batches) -> Batches:
        """The devices whose second batch may gain most for each second of the round; the others
        don't wait for more.
        """
        costs = {one: self._seconds(one, batch) for one, batch in due.items()}
        order = sorted(due, key=lambda one: costs[one])
        rounds = [order[:count] for count in range(1, len(order) + 1)]
        kept = max(
            rounds, key=lambda some: _hope(due, some) / max(costs[some[-1]], BASE_SECONDS["race"])
        )
        last = kept[-1]
        if any(len(one.evidence.alone) > 1 for one in self._live):  # they can train without these
            affordable = self._has_time(costs[last])
        else:  # without a second batch there is no curve
            layout = solo(self._problem.devices, last.position, due[last])
            affordable = self._budget.affords(layout, "race", _step(last, due[last]))
        gain = _hope(due, kept) / max(
            math.fsum(one.evidence.best_rate for one in self._live), LEAST_RATE
        )
        return (
            {one: due[one] for one in kept}
            if affordable and self._budget.pays(gain, costs[last])
            else {}
        )

    def _hopeful_round(self) -> tuple[Probe, ...]:
        if (wanted := self._hoped) is None:
            return ()
        rows = {self._model.devices[i]: self._pass_of(i, share) for i, share in wanted.shares}
        batches = {one: min(most, one.far) for one, most in rows.items()}
        costs = {
            one: self._seconds(one, batch)
            for one, batch in batches.items()
            if self._shows_more(one, batch)
        }
        batches = {one: batches[one] for one, seconds in costs.items() if self._has_time(seconds)}
        if batches and self._budget.pays(
            self._expected_gain(wanted), max(costs[one] for one in batches)
        ):
            return self._round(self._with_the_others(batches), self._turn)
        return self._cheap_round()

    def _with_the_others(self, wanted: Batches) -> Batches:
        """The round in which the other devices work too, as in a split, where it lasts no longer
        for it.

        For the even share, with which every plan is compared, it may last twice as long.
        """
        longest = max(self._seconds(one, batch) for one, batch in wanted.items())
        batches = dict(wanted)
        for one in self._live:
            even = max(self._even_share(one), batches.get(one, 0))
            measured = sorted({self._quantum, *(point.batch for point in one.evidence.alone)})
            batch = even or max(self._quantum, self._middle_of_widest(measured))
            if self._seconds(one, batch) <= (1 + bool(even)) * longest and self._is_new(one, batch):
                batches[one] = batch
        return batches

    def _cheap_round(self) -> tuple[Probe, ...]:
        """The even share of a fixed batch that may not fit, or the middle of a gap that may hide a
        peak.
        """
        wanted = {one: self._even_share(one) or self._gap_at_best(one) for one in self._in_split}
        wanted = {one: batch for one, batch in wanted.items() if self._is_new(one, batch)}
        longest = max(
            (self._seconds(one, batch) for one, batch in wanted.items()), default=math.inf
        )
        cheap = self._has_time(longest) and self._budget.cheap(longest)
        return self._round(self._with_the_others(wanted), self._turn) if wanted and cheap else ()

    def _gap_at_best(self, one: DeviceModel) -> int:
        """The middle of the wider gap beside the first of the best batches, if it may hide a peak;
        0: none.
        """
        undivided = self._problem.global_batch is not None and not one.pass_rows
        if one.alone is None or one.alone.error > TIE or undivided:
            return 0
        points = merge_points(one.points)
        rates = [point.batch / point.seconds for point in points]
        best = next(i for i, rate in enumerate(rates) if rate >= (1 - TIE) * max(rates))
        return self._middle_of_widest([p.batch for p in points[max(0, best - 1) : best + 2]], WIDE)

    def _even_share(self, one: DeviceModel) -> int:
        """What an even split of a fixed batch over devices that may be worth it gives it, if that
        may fit.
        """
        even = (
            (self._problem.global_batch or 0)
            // len(self._in_split)
            // self._quantum
            * self._quantum
        )
        return even if one in self._in_split and one.memory.ran < even <= one.far else 0

    @cached_property
    def _in_split(self) -> Sequence[DeviceModel]:
        """The devices of the hoped layout, for which the others keep nobody waiting; all if it is
        of one alone.
        """
        hoped = [self._model.devices[i] for i, _ in self._hoped.shares] if self._hoped else []
        return hoped if len(hoped) > 1 else self._live

    def _round(self, batches: Batches, turn: int) -> tuple[Probe, ...]:
        probes = []
        for one, batch in sorted(batches.items(), key=lambda item: item[0].position):
            layout = solo(self._problem.devices, one.position, batch)
            seconds = self._budget.probe_seconds(
                layout, "solo", step_seconds=_step(one, batch), reserved=self._after
            )
            probes.append(Probe(layout, "solo", seconds, turn))
        return tuple(probes)

    @cached_property
    def _turn(self) -> int:
        solos = self._model.seen.in_stage("solo")
        return 1 + max((seen.probe.turn for seen in solos), default=-1)

    # ------------------------------------------------------------------ what is hoped for

    @cached_property
    def _hoped(self) -> Allocation | None:
        """The fastest layout by hope, however many rounds lie before it."""
        return self._model.fastest_of(list(self._hopeful.values()))

    @cached_property
    def _hopeful(self) -> dict[int, DeviceCurve]:
        """The devices as fast as they may be, in the passes that are best then."""
        found = ((one, one.hope) for one in self._live if one.farthest)
        return {one.position: one.in_best_passes(hope, one.farthest) for one, hope in found if hope}

    def _pass_of(self, position: int, share: int) -> int:
        """The rows of a pass of a share in the hoped layout."""
        curve = self._hopeful[position].curve
        return curve.rows if isinstance(curve, PassCurve) and share > curve.wall else share

    def _expected_gain(self, wanted: Allocation) -> float:
        """How much faster the hoped layout is than the best of what is known, beyond errors; half
        of it comes true.
        """
        ran = [(one, one.alone, min(one.memory.ran, one.far)) for one in self._live]
        known = self._model.fastest_of(
            [one.in_best_passes(curve, most) for one, curve, most in ran if curve and most]
        )
        if known is None:
            return math.inf
        errors = (
            share * curve.error
            for i, share in wanted.shares
            if (curve := self._model.devices[i].alone)
        )
        error = math.fsum(errors) / wanted.global_batch
        return COMES_TRUE * (wanted.samples_per_second / known.samples_per_second - 1) - error

    def _shows_more(self, one: DeviceModel, share: int) -> bool:
        """Whether a share lies beyond what ran, or where the device may be faster than the points
        around it.
        """
        if one.alone is None or one.hope is None or not self._is_new(one, share):
            return False
        return share > one.memory.ran or one.hope.seconds(share) < (1 - TIE) * one.alone.seconds(
            share
        )

    def _is_new(self, one: DeviceModel, batch: int) -> bool:
        return batch > 0 and all(abs(p.batch - batch) > SAME_BATCH * p.batch for p in one.points)

    def _seconds(self, one: DeviceModel, batch: int) -> float:
        """What a probe of a batch should take."""
        return self._budget.least_seconds(
            solo(self._problem.devices, one.position, batch), _step(one, batch)
        )

    def _has_time(self, seconds: float) -> bool:
        """Whether a round may take so long: the first split, without which there is no plan, comes
        after it.
        """
        return self._budget.has_time(seconds, self._after)

    @cached_property
    def _after(self) -> float:
        """Seconds of the first split or, of one device, the fixed batch: there is no plan without;
        0 once it ran.
        """
        if self._model.splits or (self._model.at_rest and len(self._live) == 1):
            return 0.0
        plan = self._model.fastest_split
        if plan is None and self._problem.global_batch is not None:
            plan = self._model.fastest_single
        return self._budget.least_seconds(self._model.layout(plan), plan.seconds) if plan else 0.0

    def _middle_of_widest(self, batches: Sequence[int], wider: float = 0.0) -> int:
        """The middle of the gap between two batches that is widest in proportion; 0 if none is so
        much wider.
        """
        low, high = max(pairwise(batches), key=lambda gap: gap[1] / gap[0], default=(0, 0))
        return (low + high) // 2 // self._quantum * self._quantum if high > wider * low else 0

    # ------------------------------------------------------------------ the first two batches

    def _small_batch(self, one: DeviceModel) -> int:
        """One of the first two batches, or a retreat from one that ran out of memory."""
        memory, quantum = one.memory, self._quantum
        first, second = self._first_two(one.asked)
        if not memory.ran and memory.failed is None:
            return first
        if memory.failed is None or (memory.ran and second < memory.failed):
            return second
        retreat = memory.failed // BLIND_GROWTH
        if memory.ran:
            down = (
                memory.limit_bytes is not None and memory.ran > quantum
            )  # that runs, and two sizes give a line
            retreat = memory.ran // 2 if down else (memory.ran + memory.failed) // 2
        return max(quantum, retreat // quantum * quantum)

    def _first_two(self, most: int) -> tuple[int, int]:
        """8 and 64 rows; if an even share of the global batch (or of the largest) is smaller, that
        and an eighth.
        """
        quantum, batch = self._quantum, self._problem.global_batch or self._problem.max_global_batch
        second = SMALL * BLIND_GROWTH
        second = second if batch is None else min(second, max(2, batch // len(self._live)))
        first = min(math.ceil(max(1, min(SMALL, second // BLIND_GROWTH)) / quantum) * quantum, most)
        return first, min(max(first + quantum, math.ceil(second / quantum) * quantum), most)


def _step(one: DeviceModel, batch: int) -> float:
    """Seconds of a step; from a single point, as long as that: a probe of much longer steps ends at
    once.
    """
    if one.alone is None:
        return 0.0
    return (
        one.evidence.alone[0].seconds if len(one.evidence.alone) == 1 else one.alone.seconds(batch)
    )


def _hope(due: Batches, some: Sequence[DeviceModel]) -> float:
    """Samples/s together, if batches take no longer than the first ones did."""
    return math.fsum(due[one] / points[0].seconds for one in some if (points := one.evidence.alone))
