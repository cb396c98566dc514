"""The first stage of a search: measure the step time and memory of each device on its own.

All devices run at the same time, each in its own process. A round is one probe on each device that
takes part. The first two rounds run small batches. They give a first estimate of the step time as a
function of the batch, and of the memory per row.

The batches of later rounds are chosen by an upper bound on the throughput. For each batch that
hasn't run, the measurements leave a range of possible step times. The search takes the lower end of
that range for every device, and finds the layout that would then be fastest: the most promising
layout. Its batches are measured next if they are larger than all that ran, or if their range is
still wide. Rounds end when this layout promises less gain than a round costs. A device is left out
of a round if the others would wait long for it and gain little.
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
from .model.step_time import SAME_BATCH, WIDE_GAP, merge_points
from .predictions import Predictions
from .ranking import COMES_TRUE, LEAST_RATE

# maximum number of rounds, because an upper bound may always promise a gain; it suffices to halve
# the gaps of a steep curve nine times
MOST_ROUNDS = 12
# rows of the first batch, or fewer if an equal share of the global batch is smaller; the second is
# `BLIND_GROWTH` times as large
SMALL = 8


Batches = dict[DeviceModel, int]  # the batch of each device in a round


class SoloStage:
    """Chooses the batches to measure on single devices, before any step over several devices.

    The stage ends when no further batch promises enough speedup to be worth its time.
    """

    def __init__(self, predictions: Predictions, budget: Budget) -> None:
        self._predictions = predictions
        self._machine = predictions.machine
        self._budget = budget
        self._problem = predictions.problem
        self._quantum = self._machine.quantum
        self._live = [self._machine.devices[i] for i in self._machine.live]

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the probes to run now, at most one per device; empty when the stage is over."""
        first = self._first_rounds()
        if first or self._turn >= MOST_ROUNDS:
            return first
        return self._promising_round()

    # ------------------------------------------------------------------ a round

    def _first_rounds(self) -> tuple[Probe, ...]:
        """Return probes of the first or second small batch; empty once all devices have run them.

        A device that ran out of memory gets a smaller batch.
        """
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
            one: self._small_batch(one) for one in self._live if self._needs_small_batch(one)
        }
        quick = {
            one: batch
            for one, batch in retried.items()
            if self._has_time(self._probe_seconds(one, batch), _step_seconds(one, batch))
        }
        return self._round(quick, self._turn)

    def _next_small_batches(self, turn: int) -> Batches:
        """Return the first or second small batch of each device that hasn't run it yet.

        `turn` is 0 for the first small batch and 1 for the second.
        """
        due: Batches = {}
        for one in self._live:
            batch = self._small_batch(one)
            ran = any(point.batch == batch for point in one.evidence.alone)
            if one.evidence.rounds == turn and not ran:
                due[one] = batch
        return due

    def _needs_small_batch(self, device: DeviceModel) -> bool:
        """Whether the device still has to run one of the two small batches, to predict its memory.

        This is so before its first batch. It may also be so if it ran out of memory before its
        second one.
        """
        memory = device.memory
        if not device.evidence.alone:
            return True
        if memory.smallest_failed is None or memory.limit_bytes is None:
            return False
        if memory.line is not None or len(device.evidence.alone) > 1:
            return False
        # it ran out of memory before the second batch
        return self._is_unmeasured(device, self._small_batch(device))

    def _devices_worth_waiting_for(self, due: Batches) -> Batches:
        """Return the second batch of each device that should measure it in the next round.

        Slow devices are left out if waiting for them gains little. Empty if the round isn't worth
        its time. `due` maps each device that hasn't run its second batch to this batch.
        """
        costs = {one: self._probe_seconds(one, batch) for one, batch in due.items()}
        order = sorted(due, key=lambda one: costs[one])
        rounds = [order[:count] for count in range(1, len(order) + 1)]

        def gain_a_second(some: Sequence[DeviceModel]) -> float:
            return _rate_upper_bound(due, some) / max(costs[some[-1]], BASE_SECONDS[Stage.RACE])

        # the most gain per second of the round
        kept = max(rounds, key=gain_a_second)
        last = kept[-1]
        known_rate = math.fsum(one.evidence.best_rate for one in self._live)
        gain = _rate_upper_bound(due, kept) / max(known_rate, LEAST_RATE)
        pays = self._budget.pays(gain, costs[last])
        if not pays or not self._affords_second(last, due[last]):
            return {}
        return {one: due[one] for one in kept}

    def _affords_second(self, device: DeviceModel, batch: int) -> bool:
        """Whether there is enough time for a probe of the device's second batch."""
        step_seconds = _step_seconds(device, batch)
        if any(len(other.evidence.alone) > 1 for other in self._live):
            return self._has_time(self._probe_seconds(device, batch), step_seconds)
        # without a second batch on any device there is no curve, so it may take the time of later
        # stages
        layout = solo(self._problem.devices, device.position, batch)
        return self._budget.affords(layout, Stage.RACE, step_seconds)

    def _promising_round(self) -> tuple[Probe, ...]:
        """Return probes of the batches in the most promising layout.

        If they aren't worth their time, short probes of other batches are returned instead, if
        there are any.
        """
        wanted = self._most_promising
        if wanted is None:
            return ()
        batches = self._promising_batches
        longest = max((self._probe_seconds(*each) for each in batches.items()), default=0.0)
        if batches and self._budget.pays(self._expected_gain(wanted), longest):
            return self._round(self._add_other_devices(batches), self._turn)
        return self._cheap_round()

    def _add_other_devices(self, due: Batches) -> Batches:
        """Add batches for the other devices, if the round takes hardly longer with them.

        All devices should compute at the same time, because they do so in training.
        """
        longest = max(self._probe_seconds(one, batch) for one, batch in due.items())
        batches = dict(due)
        for one in self._live:
            even = max(self._even_share(one), batches.get(one, 0))
            measured = sorted({self._quantum, *(point.batch for point in one.evidence.alone)})
            batch = even or max(self._quantum, self._middle_of_widest_gap(measured))
            # equal shares may prolong the round, because every plan is compared with them
            if self._probe_seconds(one, batch) <= (
                1 + bool(even)
            ) * longest and self._is_unmeasured(one, batch):
                batches[one] = batch
        return batches

    def _fill_round(self, due: Batches) -> Batches:
        """Add promising batches for the devices that would otherwise be idle in a round.

        A device is added only if its probe ends no later than the longest one of `due`.
        """
        longest = max(self._probe_seconds(one, batch) for one, batch in due.items())
        idle = {
            one: batch
            for one, batch in self._promising_batches.items()
            if one not in due and self._probe_seconds(one, batch) <= longest
        }
        return due | idle

    def _cheap_round(self) -> tuple[Probe, ...]:
        """Return short probes that cost little of the remaining time; empty if there are none.

        They measure equal shares, or batches near the one with the highest throughput so far.
        """
        wanted: Batches = {}
        for one in self._devices_of_split:
            # in the middle of a gap, the samples/s may have a peak
            batch = self._even_share(one) or self._gap_at_best(one)
            if self._is_unmeasured(one, batch):
                wanted[one] = batch
        if not wanted:
            return ()
        longest = max(self._probe_seconds(one, batch) for one, batch in wanted.items())
        if not self._has_time(longest) or not self._budget.is_cheap(longest):
            return ()
        return self._round(self._add_other_devices(wanted), self._turn)

    def _gap_at_best(self, device: DeviceModel) -> int:
        """Return an unmeasured batch close to the fastest one, because it may be even faster.

        0 if the measured batches on both sides of the fastest one are close to it, if the
        measurements are too noisy, or if a requested global batch can't be computed in several
        passes.
        """
        undivided = self._problem.global_batch is not None and not device.pass_rows
        if device.solo_curve is None or device.solo_curve.error > TIE or undivided:
            return 0
        points = merge_points(device.points)
        rates = [point.batch / point.seconds for point in points]
        best = next(i for i, rate in enumerate(rates) if rate >= (1 - TIE) * max(rates))
        around = points[max(0, best - 1) : best + 2]
        return self._middle_of_widest_gap([point.batch for point in around], WIDE_GAP)

    def _even_share(self, device: DeviceModel) -> int:
        """Return how many rows the device gets in equal shares of a requested global batch.

        0 if no global batch was requested, or if this share isn't worth measuring. It isn't if the
        device already ran a batch of at least that size, if the share may not fit, or if the device
        has no part in the most promising layout.
        """
        batch = self._problem.global_batch or 0
        even = batch // len(self._devices_of_split) // self._quantum * self._quantum
        return (
            even
            if device in self._devices_of_split
            and device.memory.largest_ran < even <= device.trusted_alone_rows
            else 0
        )

    @cached_property
    def _devices_of_split(self) -> Sequence[DeviceModel]:
        """The devices of the most promising layout; all usable ones if it has fewer than two."""
        shares = self._most_promising.shares if self._most_promising else ()
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

    # ------------------------------------------------------------------ the most promising layout

    @cached_property
    def _most_promising(self) -> Allocation | None:
        """The fastest layout if each step time is at its lower bound; None if none is possible.

        It has the highest throughput that the measurements don't rule out.
        """
        return self._predictions.fastest_of(list(self._lower_bound_curves.values()))

    @cached_property
    def _promising_batches(self) -> Batches:
        """The batch to measure next on each device of the most promising layout.

        Devices for which no measurement is worthwhile are left out.
        """
        found: Batches = {}
        for position, share in self._most_promising.shares if self._most_promising else ():
            one = self._machine.devices[position]
            batch = min(self._micro_batch(position, share), one.trusted_alone_rows)
            if not self._may_show_higher_speed(one, batch):
                continue
            seconds = self._probe_seconds(one, batch)
            if self._has_time(seconds, _step_seconds(one, batch)):
                found[one] = batch
        return found

    @cached_property
    def _lower_bound_curves(self) -> dict[int, DeviceCurve]:
        """Lower bound on the step time of each usable device, by device position."""
        return {
            one.position: one.with_best_passes(one.lower_bound, one.guessed_alone_rows)
            for one in self._live
            if one.guessed_alone_rows and one.lower_bound
        }

    def _micro_batch(self, position: int, share: int) -> int:
        """Return how many rows of its share a device computes in each gradient-accumulation pass.

        This is the whole share if one pass is enough.
        """
        curve = self._lower_bound_curves[position].curve
        return curve.rows if isinstance(curve, PassCurve) and share > curve.pass_limit else share

    def _expected_gain(self, most_promising: Allocation) -> float:
        """Return the speedup to expect from the most promising layout, as a fraction.

        0.1 means 10 % more samples/s than the fastest layout in which no device has a larger batch
        than it ran before. Infinite if nothing ran yet.
        """
        ran = []
        for one in self._live:
            most = min(one.memory.largest_ran, one.trusted_alone_rows)
            if one.solo_curve and most:
                ran.append(one.with_best_passes(one.solo_curve, most))
        known = self._predictions.fastest_of(ran)
        if known is None:
            return math.inf
        errors = []
        for position, share in most_promising.shares:
            curve = self._machine.devices[position].solo_curve
            if curve:
                errors.append(share * curve.error)
        error = math.fsum(errors) / most_promising.global_batch
        # on average, about half of the promised gain turns out to be real
        return (
            COMES_TRUE * (most_promising.samples_per_second / known.samples_per_second - 1) - error
        )

    def _may_show_higher_speed(self, device: DeviceModel, share: int) -> bool:
        """Whether a measurement may show that the device is faster than predicted.

        `share` is the batch to measure, in rows.
        """
        if (
            device.solo_curve is None
            or device.lower_bound is None
            or not self._is_unmeasured(device, share)
        ):
            return False
        if share > device.memory.largest_ran:
            return True
        # the lower bound is clearly below the fitted curve there
        return device.lower_bound.seconds(share) < (1 - TIE) * device.solo_curve.seconds(share)

    def _is_unmeasured(self, device: DeviceModel, batch: int) -> bool:
        """Whether neither this batch nor one close to it was measured on the device yet."""
        return batch > 0 and all(abs(p.batch - batch) > SAME_BATCH * p.batch for p in device.points)

    def _probe_seconds(self, device: DeviceModel, batch: int) -> float:
        """Return the duration, in seconds, of the shortest useful probe of this batch."""
        layout = solo(self._problem.devices, device.position, batch)
        return self._budget.least_seconds(layout, _step_seconds(device, batch))

    def _has_time(self, seconds: float, step_seconds: float = 0.0) -> bool:
        """Whether a probe of `seconds` leaves enough time to measure the first possible plan.

        `step_seconds` is the expected step time of the probe; 0 if unknown.
        """
        return self._budget.has_time(seconds, self._reserved_seconds, step_seconds)

    @cached_property
    def _reserved_seconds(self) -> float:
        """The time, in seconds, to reserve for the first measurement of a possible plan.

        0 once there is such a measurement.
        """
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

    def _middle_of_widest_gap(self, batches: Sequence[int], least_ratio: float = 0.0) -> int:
        """Return the batch halfway between the two neighboring batches with the largest ratio.

        `batches` are in increasing order. Returns 0 if that ratio is at most `least_ratio`.
        """
        low, high = max(pairwise(batches), key=lambda gap: gap[1] / gap[0], default=(0, 0))
        if high <= least_ratio * low:
            return 0
        return (low + high) // 2 // self._quantum * self._quantum

    # ------------------------------------------------------------------ the first two batches

    def _small_batch(self, device: DeviceModel) -> int:
        """Return the small batch that the device should run next.

        It is the first or the second of the two small batches that all devices run. If the device
        ran out of memory, it is smaller.
        """
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
            smaller = memory.smallest_failed // BLIND_GROWTH
        elif memory.limit_bytes is not None and memory.largest_ran > quantum:
            smaller = memory.largest_ran // 2  # half of it fits, and two sizes give a line
        else:
            smaller = (memory.largest_ran + memory.smallest_failed) // 2
        return max(quantum, smaller // quantum * quantum)

    def _choose_second_batch(self, device: DeviceModel, first: int, second: int) -> int:
        """Return the second batch to measure on a device, at most `second` rows.

        `first` is the batch that the device ran. The second one is smaller than usual if steps are
        very slow, or if a restart after running out of memory would take long.
        """
        surely = device.memory.largest_in_proportion()
        if surely is None:
            return second
        if self._budget.is_expensive(self._budget.starts.out_of_memory_restart_seconds):
            likely = SAFE_GROWTH * first
        elif self._budget.time.times_single_step(_step_seconds(device, second)):
            likely = 2 * first
        else:
            return second
        wanted = int(max(likely, surely)) // self._quantum * self._quantum
        return max(first + self._quantum, min(second, wanted))

    def _first_two_batches(self, limit: int) -> tuple[int, int]:
        """Return the two small batches that every device runs first.

        They have 8 and 64 rows, or fewer if a requested global batch is small. Both are multiples
        of the quantum, and at most `limit` rows.
        """
        quantum = self._quantum
        batch = self._problem.global_batch or self._problem.max_global_batch
        second = SMALL * BLIND_GROWTH
        if batch is not None:
            # an equal share of the largest global batch
            second = min(second, max(2, batch // len(self._live)))
        first = max(1, min(SMALL, second // BLIND_GROWTH))
        first = min(math.ceil(first / quantum) * quantum, limit)
        second = max(first + quantum, math.ceil(second / quantum) * quantum)
        return first, min(second, limit)


def _step_seconds(device: DeviceModel, batch: int) -> float:
    """Return the predicted step time of a batch in seconds; 0 before any measurement."""
    if device.solo_curve is None:
        return 0.0
    if len(device.evidence.alone) == 1:
        # If the step takes much longer, the probe ends after one step, so little time is lost.
        return device.evidence.alone[0].seconds
    return device.solo_curve.seconds(batch)


def _rate_upper_bound(due: Batches, devices: Sequence[DeviceModel]) -> float:
    """Return an upper bound on the throughput that these devices reach together, in samples/s.

    It assumes that the batches in `due` take only as long as the first batch that each device ran.
    """
    ran = [device for device in devices if device.evidence.alone]
    return math.fsum(due[one] / one.evidence.alone[0].seconds for one in ran)
