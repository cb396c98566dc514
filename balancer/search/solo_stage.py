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
from .model.memory import BLIND_GROWTH, SAFE_GROWTH
from .model.step_time import SAME_BATCH, WIDE, merge_points
from .predictions import Predictions
from .ranking import COMES_TRUE, LEAST_RATE

# rounds, as optimistic predictions may have no end; a steep curve is halved nine times
MOST_ROUNDS = 12
# the first batch, or fewer if a device's even share is smaller; the second is `BLIND_GROWTH` times
# as large
SMALL = 8


Batches = dict[DeviceModel, int]  # of a round


class SoloStage:
    """The stage that chooses batches to measure on every device alone, by the model and its
    predictions.
    """

    def __init__(self, predictions: Predictions, budget: Budget) -> None:
        self._predictions = predictions
        self._machine = predictions.machine
        self._budget = budget
        self._problem = predictions.problem
        self._quantum = self._machine.quantum
        self._live = [self._machine.devices[i] for i in self._machine.live]

    def next_probes(self) -> tuple[Probe, ...]:
        """The next batch for every device that matters; empty when over."""
        first = self._first_rounds()
        if first or self._turn >= MOST_ROUNDS:
            return first
        return self._hopeful_round()

    # ------------------------------------------------------------------ a round

    def _first_rounds(self) -> tuple[Probe, ...]:
        """One of two small batches on each device."""
        for turn in range(2):
            due = self._due(turn)
            if due and turn:
                due = self._worth_waiting(due)
            if due:
                # a device that was left out of the second round has one of its own later
                return self._round(due, self._turn if turn else turn)
        retried = {one: self._small_batch(one) for one in self._live if self._lacks_a_line(one)}
        quick = {
            one: batch
            for one, batch in retried.items()
            if self._has_time(self._seconds(one, batch), _step(one, batch))
        }
        return self._round(quick, self._turn)

    def _due(self, turn: int) -> Batches:
        """The small batch of each device that had as many rounds, if it hasn't run."""
        due: Batches = {}
        for one in self._live:
            batch = self._small_batch(one)
            ran = any(point.batch == batch for point in one.evidence.alone)
            if one.evidence.rounds == turn and not ran:
                due[one] = batch
        return due

    def _lacks_a_line(self, one: DeviceModel) -> bool:
        """True if the device never ran, or ran out of memory before two sizes were measured, and a
        smaller size is left to try.
        """
        memory = one.memory
        if not one.evidence.alone:
            return True
        if memory.failed is None or memory.limit_bytes is None:
            return False
        if memory.line is not None or len(one.evidence.alone) > 1:
            return False
        return self._is_new(one, self._small_batch(one))

    def _worth_waiting(self, due: Batches) -> Batches:
        """The devices whose second batch may gain most for each second of the round; the others
        don't wait for more.
        """
        costs = {one: self._seconds(one, batch) for one, batch in due.items()}
        order = sorted(due, key=lambda one: costs[one])
        rounds = [order[:count] for count in range(1, len(order) + 1)]

        def gain_a_second(some: Sequence[DeviceModel]) -> float:
            return _optimistic_rate(due, some) / max(costs[some[-1]], BASE_SECONDS["race"])

        kept = max(rounds, key=gain_a_second)
        last = kept[-1]
        if any(len(one.evidence.alone) > 1 for one in self._live):  # they can train without these
            affordable = self._has_time(costs[last], _step(last, due[last]))
        else:  # without a second batch there is no curve
            layout = solo(self._problem.devices, last.position, due[last])
            affordable = self._budget.affords(layout, "race", _step(last, due[last]))
        known_rate = math.fsum(one.evidence.best_rate for one in self._live)
        gain = _optimistic_rate(due, kept) / max(known_rate, LEAST_RATE)
        if not affordable or not self._budget.pays(gain, costs[last]):
            return {}
        return {one: due[one] for one in kept}

    def _hopeful_round(self) -> tuple[Probe, ...]:
        """The batches that the optimistic layout would use and that show something new, if what
        they may gain pays for their time; else a cheap round.
        """
        wanted = self._optimistic
        if wanted is None:
            return ()
        batches: Batches = {}
        longest = 0.0
        for position, share in wanted.shares:
            one = self._machine.devices[position]
            batch = min(self._micro_batch(position, share), one.trusted_alone_rows)
            if not self._shows_more(one, batch):
                continue
            seconds = self._seconds(one, batch)
            if self._has_time(seconds, _step(one, batch)):
                batches[one] = batch
                longest = max(longest, seconds)
        if batches and self._budget.pays(self._expected_gain(wanted), longest):
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
        wanted: Batches = {}
        for one in self._in_split:
            batch = self._even_share(one) or self._gap_at_best(one)
            if self._is_new(one, batch):
                wanted[one] = batch
        if not wanted:
            return ()
        longest = max(self._seconds(one, batch) for one, batch in wanted.items())
        if not self._has_time(longest) or not self._budget.cheap(longest):
            return ()
        return self._round(self._with_the_others(wanted), self._turn)

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
        around = points[max(0, best - 1) : best + 2]
        return self._middle_of_widest([point.batch for point in around], WIDE)

    def _even_share(self, one: DeviceModel) -> int:
        """What an even split of a fixed batch over devices that may be worth it gives it, if that
        may fit.
        """
        batch = self._problem.global_batch or 0
        even = batch // len(self._in_split) // self._quantum * self._quantum
        return (
            even if one in self._in_split and one.memory.ran < even <= one.trusted_alone_rows else 0
        )

    @cached_property
    def _in_split(self) -> Sequence[DeviceModel]:
        """The devices of the optimistic layout, for which the others keep nobody waiting; all if it
        is of one alone.
        """
        shares = self._optimistic.shares if self._optimistic else ()
        devices = [self._machine.devices[i] for i, _ in shares]
        return devices if len(devices) > 1 else self._live

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
        solos = self._machine.seen.in_stage("solo")
        return 1 + max((seen.probe.turn for seen in solos), default=-1)

    # ------------------------------------------------------------------ the optimistic layout

    @cached_property
    def _optimistic(self) -> Allocation | None:
        """The fastest layout if every optimistic prediction holds, however many rounds lie before
        it.
        """
        return self._predictions.fastest_of(list(self._optimistic_curves.values()))

    @cached_property
    def _optimistic_curves(self) -> dict[int, DeviceCurve]:
        """The devices as fast as they may be, in the passes that are best then."""
        return {
            one.position: one.in_best_passes(one.hope, one.guessed_alone_rows)
            for one in self._live
            if one.guessed_alone_rows and one.hope
        }

    def _micro_batch(self, position: int, share: int) -> int:
        """The rows of a pass for this share in the optimistic layout."""
        curve = self._optimistic_curves[position].curve
        return curve.rows if isinstance(curve, PassCurve) and share > curve.wall else share

    def _expected_gain(self, wanted: Allocation) -> float:
        """The relative gain of the optimistic layout over the best of what is known, beyond errors;
        half of it comes true.
        """
        ran = []
        for one in self._live:
            most = min(one.memory.ran, one.trusted_alone_rows)
            if one.alone and most:
                ran.append(one.in_best_passes(one.alone, most))
        known = self._predictions.fastest_of(ran)
        if known is None:
            return math.inf
        errors = []
        for position, share in wanted.shares:
            curve = self._machine.devices[position].alone
            if curve:
                errors.append(share * curve.error)
        error = math.fsum(errors) / wanted.global_batch
        return COMES_TRUE * (wanted.samples_per_second / known.samples_per_second - 1) - error

    def _shows_more(self, one: DeviceModel, share: int) -> bool:
        """True if a share lies beyond what ran, or where the device may be faster than the points
        around it.
        """
        if one.alone is None or one.hope is None or not self._is_new(one, share):
            return False
        if share > one.memory.ran:
            return True
        return one.hope.seconds(share) < (1 - TIE) * one.alone.seconds(share)

    def _is_new(self, one: DeviceModel, batch: int) -> bool:
        """True if no batch near this one was measured on the device."""
        return batch > 0 and all(abs(p.batch - batch) > SAME_BATCH * p.batch for p in one.points)

    def _seconds(self, one: DeviceModel, batch: int) -> float:
        """What a probe of a batch should take."""
        layout = solo(self._problem.devices, one.position, batch)
        return self._budget.least_seconds(layout, _step(one, batch))

    def _has_time(self, seconds: float, step_seconds: float = 0.0) -> bool:
        """True if a round may take so long: the first split, without which there is no plan, comes
        after it.
        """
        return self._budget.has_time(seconds, self._after, step_seconds)

    @cached_property
    def _after(self) -> float:
        """Seconds of the first split or, of one device, the fixed batch: there is no plan without;
        0 once it ran.
        """
        if self._machine.splits or (self._machine.at_rest and len(self._live) == 1):
            return 0.0
        plan = self._predictions.fastest_split
        if plan is None and self._problem.global_batch is not None:
            plan = self._predictions.fastest_single
        if plan is None:
            return 0.0
        return self._budget.least_seconds(self._predictions.layout(plan), plan.seconds)

    def _middle_of_widest(self, batches: Sequence[int], wider: float = 0.0) -> int:
        """The middle of the gap between two batches that is widest in proportion; 0 if its ratio is
        at most `wider`.
        """
        low, high = max(pairwise(batches), key=lambda gap: gap[1] / gap[0], default=(0, 0))
        if high <= wider * low:
            return 0
        return (low + high) // 2 // self._quantum * self._quantum

    # ------------------------------------------------------------------ the first two batches

    def _small_batch(self, one: DeviceModel) -> int:
        """One of the first two batches, or a retreat from one that ran out of memory."""
        memory = one.memory
        quantum = self._quantum
        first, second = self._first_two(one.asked_rows)
        second = self._likely_to_fit(one, first, second)
        if not memory.ran and memory.failed is None:
            return first
        if memory.failed is None or (memory.ran and second < memory.failed):
            return second
        if not memory.ran:
            retreat = memory.failed // BLIND_GROWTH
        elif memory.limit_bytes is not None and memory.ran > quantum:
            retreat = memory.ran // 2  # that runs, and two sizes give a line
        else:
            retreat = (memory.ran + memory.failed) // 2
        return max(quantum, retreat // quantum * quantum)

    def _likely_to_fit(self, one: DeviceModel, first: int, second: int) -> int:
        """The second batch; where running out of memory is dear, one that surely fits or one that
        isn't much larger than the first.

        It costs a slow step, or the start of a child: then even less is risked.
        """
        surely = one.memory.largest_in_proportion()
        if surely is None:
            return second
        if self._budget.is_dear(self._budget.starts.after_out_of_memory):
            likely = SAFE_GROWTH * first
        elif self._budget.time.takes_lone_steps(_step(one, second)):
            likely = 2 * first
        else:
            return second
        wanted = int(max(likely, surely)) // self._quantum * self._quantum
        return max(first + self._quantum, min(second, wanted))

    def _first_two(self, most: int) -> tuple[int, int]:
        """8 and 64 rows; if an even share of the global batch (or of the largest) is smaller, that
        and an eighth.
        """
        quantum = self._quantum
        batch = self._problem.global_batch or self._problem.max_global_batch
        second = SMALL * BLIND_GROWTH
        if batch is not None:
            second = min(second, max(2, batch // len(self._live)))
        first = max(1, min(SMALL, second // BLIND_GROWTH))
        first = min(math.ceil(first / quantum) * quantum, most)
        second = max(first + quantum, math.ceil(second / quantum) * quantum)
        return first, min(second, most)


def _step(one: DeviceModel, batch: int) -> float:
    """Seconds of a step; from a single point, as long as that: a probe of much longer steps ends at
    once.
    """
    if one.alone is None:
        return 0.0
    if len(one.evidence.alone) == 1:
        return one.evidence.alone[0].seconds
    return one.alone.seconds(batch)


def _optimistic_rate(due: Batches, some: Sequence[DeviceModel]) -> float:
    """Samples/s together, if batches take no longer than the first ones did."""
    ran = [one for one in some if one.evidence.alone]
    return math.fsum(due[one] / one.evidence.alone[0].seconds for one in ran)
