"""The first stage: every device runs alone with a few batches.

All devices run at the same time. A round is one probe of each device that takes part. Rounds of two
small batches give a first curve and the memory per row. The next rounds measure shares of an
optimistic layout: the one that would be fastest if every device were as fast as its points allow.

A share is worth a measurement if it is larger than all measured batches. It also is if it lies in a
gap between two points in which the time may rise only late. Rounds go on while that layout promises
to gain more than a round costs. A device that would keep the others waiting for little gain is left
out of a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from evener.shares.curves import PassCurve
from evener.shares.waterfill import Allocation, DeviceCurve

from ..types import Probe, Stage, solo
from .budget import BASE_SECONDS, Budget
from .device_model import DeviceModel
from .layouts import TIE
from .model.memory import BLIND_GROWTH, SAFE_GROWTH
from .model.step_time import SAME_BATCH, WIDE, merge_points
from .predictions import Predictions
from .ranking import COMES_TRUE, LEAST_RATE

# maximum number of rounds, because optimistic predictions may always promise a gain; it suffices to
# halve the gaps of a steep curve nine times
MOST_ROUNDS = 12
# rows of the first batch, or fewer if a device's equal share is smaller; the second batch is
# `BLIND_GROWTH` times as large
SMALL = 8


Batches = dict[DeviceModel, int]  # the batch of each device in a round


class SoloStage:
    """Measures the devices alone, all at the same time, until more batches promise no gain."""

    def __init__(self, predictions: Predictions, budget: Budget) -> None:
        self._predictions = predictions
        self._machine = predictions.machine
        self._budget = budget
        self._problem = predictions.problem
        self._quantum = self._machine.quantum
        self._live = [self._machine.devices[i] for i in self._machine.live]

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the probes of the next round; empty if no round is worth its time."""
        first = self._first_rounds()
        if first or self._turn >= MOST_ROUNDS:
            return first
        return self._optimistic_round()

    # ------------------------------------------------------------------ a round

    def _first_rounds(self) -> tuple[Probe, ...]:
        """Return a round with the first two batches of each device, or smaller ones."""
        for turn in range(2):
            due = self._next_small_batches(turn)
            if due and turn:
                due = self._devices_worth_waiting_for(due)
            if due and len(due) < len(self._live) and turn:
                # the devices of the second round, or those that it left out: the others would wait
                return self._round(self._fill_round(due), self._turn)
            if due:
                return self._round(due, self._turn if turn else turn)
        # smaller batches for the devices that ran out of memory
        retried = {
            one: self._small_batch(one) for one in self._live if self._lacks_memory_line(one)
        }
        quick = {
            one: batch
            for one, batch in retried.items()
            if self._has_time(self._probe_seconds(one, batch), _step_seconds(one, batch))
        }
        return self._round(quick, self._turn)

    def _next_small_batches(self, turn: int) -> Batches:
        """Return the first or second batch of the devices that haven't run it."""
        due: Batches = {}
        for one in self._live:
            batch = self._small_batch(one)
            ran = any(point.batch == batch for point in one.evidence.alone)
            # unless that batch already ran
            if one.evidence.rounds == turn and not ran:
                due[one] = batch
        return due

    def _lacks_memory_line(self, device: DeviceModel) -> bool:
        """Whether the device needs another small batch to predict its memory."""
        memory = device.memory
        # two batches are needed, and it never ran
        if not device.evidence.alone:
            return True
        if memory.smallest_failed is None or memory.limit_bytes is None:
            return False
        if memory.line is not None or len(device.evidence.alone) > 1:
            return False
        # it ran out of memory before the second batch
        return self._is_new(device, self._small_batch(device))

    def _devices_worth_waiting_for(self, due: Batches) -> Batches:
        """Return the devices whose second batch is worth the time of the round."""
        costs = {one: self._probe_seconds(one, batch) for one, batch in due.items()}
        order = sorted(due, key=lambda one: costs[one])
        rounds = [order[:count] for count in range(1, len(order) + 1)]

        def gain_a_second(some: Sequence[DeviceModel]) -> float:
            return _optimistic_rate(due, some) / max(costs[some[-1]], BASE_SECONDS[Stage.RACE])

        # the most gain per second of the round
        kept = max(rounds, key=gain_a_second)
        last = kept[-1]
        known_rate = math.fsum(one.evidence.best_rate for one in self._live)
        gain = _optimistic_rate(due, kept) / max(known_rate, LEAST_RATE)
        pays = self._budget.pays(gain, costs[last])
        if not pays or not self._affords_second(last, due[last]):
            return {}
        return {one: due[one] for one in kept}

    def _affords_second(self, device: DeviceModel, batch: int) -> bool:
        """Whether there is time for a device's second batch."""
        step_seconds = _step_seconds(device, batch)
        if any(len(other.evidence.alone) > 1 for other in self._live):
            return self._has_time(self._probe_seconds(device, batch), step_seconds)
        # without a second batch on any device there is no curve, so it may take the time of later
        # stages
        layout = solo(self._problem.devices, device.position, batch)
        return self._budget.affords(layout, Stage.RACE, step_seconds)

    def _optimistic_round(self) -> tuple[Probe, ...]:
        """Return a round of the batches that may give the fastest layout."""
        wanted = self._optimistic
        if wanted is None:
            return ()
        batches = self._optimistic_batches
        longest = max((self._probe_seconds(*each) for each in batches.items()), default=0.0)
        if batches and self._budget.pays(self._expected_gain(wanted), longest):
            return self._round(self._add_other_devices(batches), self._turn)
        return self._cheap_round()

    def _add_other_devices(self, wanted: Batches) -> Batches:
        """Give the other devices batches too, if they don't prolong the round much."""
        # all devices should compute at the same time, like in a split
        longest = max(self._probe_seconds(one, batch) for one, batch in wanted.items())
        batches = dict(wanted)
        for one in self._live:
            even = max(self._even_share(one), batches.get(one, 0))
            measured = sorted({self._quantum, *(point.batch for point in one.evidence.alone)})
            batch = even or max(self._quantum, self._middle_of_widest(measured))
            # an equal share, with which every plan is compared, may prolong the round
            if self._probe_seconds(one, batch) <= (1 + bool(even)) * longest and self._is_new(
                one, batch
            ):
                batches[one] = batch
        return batches

    def _fill_round(self, due: Batches) -> Batches:
        """Add idle devices whose optimistic batches take no longer than the round."""
        longest = max(self._probe_seconds(one, batch) for one, batch in due.items())
        idle = {
            one: batch
            for one, batch in self._optimistic_batches.items()
            if one not in due and self._probe_seconds(one, batch) <= longest
        }
        return due | idle

    def _cheap_round(self) -> tuple[Probe, ...]:
        """Return a round that costs little, with equal shares or gaps near the best batch."""
        wanted: Batches = {}
        for one in self._devices_of_split:
            # the equal share or, as the samples/s may have a peak there, the middle of a gap
            batch = self._even_share(one) or self._gap_at_best(one)
            if self._is_new(one, batch):
                wanted[one] = batch
        if not wanted:
            return ()
        longest = max(self._probe_seconds(one, batch) for one, batch in wanted.items())
        if not self._has_time(longest) or not self._budget.is_cheap(longest):
            return ()
        return self._round(self._add_other_devices(wanted), self._turn)

    def _gap_at_best(self, device: DeviceModel) -> int:
        """Return a batch in the widest gap around the best batch; 0 if no peak can hide there."""
        undivided = self._problem.global_batch is not None and not device.pass_rows
        if device.solo_curve is None or device.solo_curve.error > TIE or undivided:
            # the measurements are too noisy to show a peak
            return 0
        points = merge_points(device.points)
        rates = [point.batch / point.seconds for point in points]
        best = next(i for i, rate in enumerate(rates) if rate >= (1 - TIE) * max(rates))
        around = points[max(0, best - 1) : best + 2]
        return self._middle_of_widest([point.batch for point in around], WIDE)

    def _even_share(self, device: DeviceModel) -> int:
        """Return the device's equal share of a fixed batch, or 0 if it shows nothing new."""
        batch = self._problem.global_batch or 0
        even = batch // len(self._devices_of_split) // self._quantum * self._quantum
        return (
            even
            # it may fit, and is larger than all batches that ran
            if device in self._devices_of_split
            and device.memory.largest_ran < even <= device.trusted_alone_rows
            else 0
        )

    @cached_property
    def _devices_of_split(self) -> Sequence[DeviceModel]:
        """The devices of the optimistic split, or all."""
        shares = self._optimistic.shares if self._optimistic else ()
        devices = [self._machine.devices[i] for i, _ in shares]
        return devices if len(devices) > 1 else self._live

    def _round(self, batches: Batches, turn: int) -> tuple[Probe, ...]:
        probes = []
        for one, batch in sorted(batches.items(), key=lambda item: item[0].position):
            layout = solo(self._problem.devices, one.position, batch)
            seconds = self._budget.probe_seconds(
                layout,
                Stage.SOLO,
                step_seconds=_step_seconds(one, batch),
                reserved=self._reserved_seconds,
            )
            probes.append(Probe(layout, Stage.SOLO, seconds, turn))
        return tuple(probes)

    @cached_property
    def _turn(self) -> int:
        solos = self._machine.seen.in_stage(Stage.SOLO)
        return 1 + max((seen.probe.turn for seen in solos), default=-1)

    # ------------------------------------------------------------------ the optimistic layout

    @cached_property
    def _optimistic(self) -> Allocation | None:
        """The fastest allocation that the measurements still allow, or None."""
        return self._predictions.fastest_of(list(self._optimistic_curves.values()))

    @cached_property
    def _optimistic_batches(self) -> Batches:
        """The batches of this allocation that are worth measuring."""
        found: Batches = {}
        for position, share in self._optimistic.shares if self._optimistic else ():
            one = self._machine.devices[position]
            batch = min(self._micro_batch(position, share), one.trusted_alone_rows)
            if not self._would_show_more(one, batch):
                continue
            seconds = self._probe_seconds(one, batch)
            if self._has_time(seconds, _step_seconds(one, batch)):
                found[one] = batch
        return found

    @cached_property
    def _optimistic_curves(self) -> dict[int, DeviceCurve]:
        """The optimistic curve of each usable device, by position."""
        return {
            one.position: one.with_best_passes(one.optimistic, one.guessed_alone_rows)
            for one in self._live
            if one.guessed_alone_rows and one.optimistic
        }

    def _micro_batch(self, position: int, share: int) -> int:
        """Return the rows of a pass that the share would be computed in."""
        curve = self._optimistic_curves[position].curve
        return curve.rows if isinstance(curve, PassCurve) and share > curve.pass_limit else share

    def _expected_gain(self, wanted: Allocation) -> float:
        """Return the relative gain to expect from an allocation; infinite if nothing ran."""
        ran = []
        for one in self._live:
            most = min(one.memory.largest_ran, one.trusted_alone_rows)
            if one.solo_curve and most:
                ran.append(one.with_best_passes(one.solo_curve, most))
        known = self._predictions.fastest_of(ran)
        if known is None:
            return math.inf
        errors = []
        for position, share in wanted.shares:
            curve = self._machine.devices[position].solo_curve
            if curve:
                errors.append(share * curve.error)
        error = math.fsum(errors) / wanted.global_batch
        # about half of the optimistic predictions come true
        return COMES_TRUE * (wanted.samples_per_second / known.samples_per_second - 1) - error

    def _would_show_more(self, device: DeviceModel, share: int) -> bool:
        """Whether measuring this share could improve the curve."""
        if (
            device.solo_curve is None
            or device.optimistic is None
            or not self._is_new(device, share)
        ):
            return False
        if share > device.memory.largest_ran:
            return True
        # the optimistic curve is clearly faster there
        return device.optimistic.seconds(share) < (1 - TIE) * device.solo_curve.seconds(share)

    def _is_new(self, device: DeviceModel, batch: int) -> bool:
        """Whether no batch near this one was measured."""
        return batch > 0 and all(abs(p.batch - batch) > SAME_BATCH * p.batch for p in device.points)

    def _probe_seconds(self, device: DeviceModel, batch: int) -> float:
        """Return the least seconds of a probe of the batch."""
        layout = solo(self._problem.devices, device.position, batch)
        return self._budget.least_seconds(layout, _step_seconds(device, batch))

    def _has_time(self, seconds: float, step_seconds: float = 0.0) -> bool:
        """Whether a probe leaves enough time for the first split."""
        # without the first split, there is no plan
        return self._budget.has_time(seconds, self._reserved_seconds, step_seconds)

    @cached_property
    def _reserved_seconds(self) -> float:
        """Seconds to keep for the first measurement of a plan."""
        # 0 once it has run
        if self._machine.splits or (self._machine.others_idle and len(self._live) == 1):
            return 0.0
        plan = self._predictions.fastest_split
        if plan is None and self._problem.global_batch is not None:
            plan = self._predictions.fastest_single
        if plan is None:
            return 0.0
        layout = self._predictions.layout(plan)
        if not self._budget.affords(layout, Stage.RACE, plan.seconds):
            return 0.0  # only larger batches can show a faster split
        return self._budget.least_seconds(layout, plan.seconds)

    def _middle_of_widest(self, batches: Sequence[int], wider: float = 0.0) -> int:
        """Return the middle of the relatively widest gap between batches."""
        low, high = max(pairwise(batches), key=lambda gap: gap[1] / gap[0], default=(0, 0))
        # 0 if the ratio of its batches is at most `wider`
        if high <= wider * low:
            return 0
        return (low + high) // 2 // self._quantum * self._quantum

    # ------------------------------------------------------------------ the first two batches

    def _small_batch(self, device: DeviceModel) -> int:
        """Return the next small batch of a device: the first, the second, or one that may fit."""
        memory = device.memory
        quantum = self._quantum
        first, second = self._first_two_batches(device.requested_rows)
        second = self._choose_second_batch(device, first, second)
        if not memory.largest_ran and memory.smallest_failed is None:
            return first
        if memory.smallest_failed is None or (
            memory.largest_ran and second < memory.smallest_failed
        ):
            return second
        if not memory.largest_ran:
            # the device ran out of memory: a smaller batch
            smaller = memory.smallest_failed // BLIND_GROWTH
        elif memory.limit_bytes is not None and memory.largest_ran > quantum:
            smaller = memory.largest_ran // 2  # half of it fits, and two sizes give a line
        else:
            smaller = (memory.largest_ran + memory.smallest_failed) // 2
        return max(quantum, smaller // quantum * quantum)

    def _choose_second_batch(self, device: DeviceModel, first: int, second: int) -> int:
        """Return the second batch, smaller if running out of memory or long steps are costly."""
        surely = device.memory.largest_in_proportion()
        if surely is None:
            return second
        if self._budget.is_expensive(self._budget.starts.after_out_of_memory):
            # restarting a child process takes long
            likely = SAFE_GROWTH * first
        elif self._budget.time.takes_lone_steps(_step_seconds(device, second)):
            # steps are so slow that a probe times only one
            likely = 2 * first
        else:
            return second
        wanted = int(max(likely, surely)) // self._quantum * self._quantum
        return max(first + self._quantum, min(second, wanted))

    def _first_two_batches(self, most: int) -> tuple[int, int]:
        """Return the first two batches to measure, at most `most` rows."""
        # 8 and 64 rows or fewer, rounded up to multiples of the quantum
        quantum = self._quantum
        batch = self._problem.global_batch or self._problem.max_global_batch
        second = SMALL * BLIND_GROWTH
        if batch is not None:
            # an equal share of the largest global batch
            second = min(second, max(2, batch // len(self._live)))
        first = max(1, min(SMALL, second // BLIND_GROWTH))
        first = min(math.ceil(first / quantum) * quantum, most)
        second = max(first + quantum, math.ceil(second / quantum) * quantum)
        return first, min(second, most)


def _step_seconds(device: DeviceModel, batch: int) -> float:
    """Return the expected step time of a batch in seconds; 0 if unknown."""
    if device.solo_curve is None:
        return 0.0
    if len(device.evidence.alone) == 1:
        # of a single point; if steps are much longer, the probe ends after one, so little time is
        # lost
        return device.evidence.alone[0].seconds
    return device.solo_curve.seconds(batch)


def _optimistic_rate(due: Batches, some: Sequence[DeviceModel]) -> float:
    """Return the samples/s of the devices if their batches took no longer than the first."""
    ran = [device for device in some if device.evidence.alone]
    # the batches take no longer than the first batch that each device ran
    return math.fsum(due[one] / one.evidence.alone[0].seconds for one in ran)
