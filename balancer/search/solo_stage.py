"""The first stage: every device in a process of its own, all at the same time, a few batches each.

Two small batches give a first curve and the memory slope. Then the layout that would be fastest if every curve were as
fast as its points allow says what is worth a measurement: a share beyond what ran, or one in a gap between two points
in which time may rise late. A round is measured while that layout promises more than it costs. A device that would keep
the others waiting for little is left out of a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from evener.shares.curves import Curve, PassCurve
from evener.shares.waterfill import Allocation, DeviceCurve, single_best

from ..types import Probe, solo
from .budget import BASE_SECONDS, Budget
from .layouts import TIE
from .machine_model import most_in_one
from .model.hope import hopeful_curve
from .model.memory import BLIND_GROWTH
from .model.step_time import LEVEL, SAME_BATCH, WIDE, merge_points
from .predictions import Predictions
from .ranking import COMES_TRUE, LEAST_RATE

FAR, GAP = 2, 1.5  # times: looks go so far beyond what ran, or into gaps wider than that (concave; tol_jagged)
MOST_ROUNDS = 12  # where hopes have no end (stairs, 16 devices); a steep curve is halved nine times (even split)
SMALL = 8  # the first batch, or fewer if a device's even share is smaller; the second is `BLIND_GROWTH` times as large
STRIDE = 32  # times what ran: as far as a batch grows at once; a recorded kernel has a peak between


class SoloStage:
    """The stage that chooses batches to measure on every device alone, by the model and its predictions."""

    def __init__(self, model: Predictions, budget: Budget) -> None:
        self._model, self._budget = model, budget
        self._problem, self._quantum = self._model.problem, self._model.quantum

    def next_probes(self) -> tuple[Probe, ...]:
        """The next batch for every device that matters; empty when over."""
        return self._first_rounds() or self._hopeful_round()

    # ------------------------------------------------------------------ a round

    def _first_rounds(self) -> tuple[Probe, ...]:
        """One of two small batches on each device."""
        devices = self._model.devices
        for turn in range(2):
            due = {i: self._small_batch(i) for i in self._model.live if devices[i].rounds == turn}
            due = {i: batch for i, batch in due.items() if all(p.batch != batch for p in devices[i].alone)}
            if due and (kept := self._worth_waiting(due) if turn else due):
                return tuple(self._probe(i, batch, turn) for i, batch in kept.items())
        retried = {i: self._small_batch(i) for i in self._model.live if self._lacks_a_line(i)}
        retried = {i: batch for i, batch in retried.items() if self._has_time(self._seconds(i, batch))}
        return self._round(retried) if self._turn < MOST_ROUNDS else ()

    def _lacks_a_line(self, position: int) -> bool:
        """Whether it ran out of memory before two sizes showed how that grows, and a smaller one can."""
        device = self._model.devices[position]
        if not device.alone:
            return True
        known = device.memory.limit_bytes is None or device.memory.line is not None or len(device.alone) > 1
        return device.memory.failed is not None and not known and self._is_new(position, self._small_batch(position))

    def _worth_waiting(self, due: dict[int, int]) -> dict[int, int]:
        """The devices whose second batch may gain most for each second of the round; the others don't wait for more."""
        alone = {i: self._model.devices[i].alone for i in due}
        hopes = {i: due[i] / points[0].seconds if points else 0.0 for i, points in alone.items()}
        costs = {i: self._seconds(i, batch) for i, batch in due.items()}
        order = sorted(due, key=lambda i: costs[i])
        counts = range(1, len(order) + 1)
        ends = [max(costs[i], BASE_SECONDS["race"]) for i in order]
        best = max(counts, key=lambda n: math.fsum(hopes[i] for i in order[:n]) / ends[n - 1])
        kept = order[:best]
        layout = solo(self._problem.devices, kept[-1], due[kept[-1]])  # without a second batch there is no curve
        affordable = self._budget.affords(layout, "race", self._step(kept[-1], due[kept[-1]]))
        if any(len(self._model.devices[i].alone) > 1 for i in self._model.live):  # they can train without these
            affordable = self._has_time(costs[kept[-1]])
        known = [
            max((p.batch / p.seconds for p in self._model.devices[i].alone), default=0.0) for i in self._model.live
        ]
        gain = math.fsum(hopes[i] for i in kept) / max(math.fsum(known), LEAST_RATE)
        return {i: due[i] for i in kept} if affordable and self._budget.pays(gain, costs[kept[-1]]) else {}

    def _hopeful_round(self) -> tuple[Probe, ...]:
        wanted = self._hoped
        if wanted is None or self._turn >= MOST_ROUNDS:
            return ()
        divided = {one.position: one.curve for one in self._hopeful if isinstance(one.curve, PassCurve)}
        rows = {i: divided[i].rows if i in divided and share > divided[i].wall else share for i, share in wanted.shares}
        shares = {i: min(most, self._far(i)) for i, most in rows.items()}
        batches = {i: share for i, share in shares.items() if self._shows_more(i, share)}
        batches = {i: batch for i, batch in batches.items() if self._has_time(self._seconds(i, batch))}
        if not batches:
            return self._cheap_round()
        longest = max(self._seconds(i, batch) for i, batch in batches.items())
        if not self._budget.pays(self._expected_gain(wanted), longest):
            return self._cheap_round()
        return self._round(self._with_the_others(batches))

    def _with_the_others(self, wanted: dict[int, int]) -> dict[int, int]:
        """The round in which the other devices work too, as in a split, where it lasts no longer for it.

        For the even share, with which every plan is compared, it may last twice as long.
        """
        longest = max(self._seconds(i, batch) for i, batch in wanted.items())
        batches = dict(wanted)
        for i in self._model.live:
            even = max(self._even_share(i), batches.get(i, 0))
            batch = even or self._widest_gap(i)
            if self._seconds(i, batch) <= (1 + bool(even)) * longest and self._is_new(i, batch):
                batches[i] = batch
        return batches

    def _cheap_round(self) -> tuple[Probe, ...]:
        """The even share of a fixed batch that may not fit, the middle of a gap that may hide a peak, or a look."""
        wanted = {i: self._even_share(i) or self._gap_at_best(i) or self._look(i) for i in self._worth_a_split}
        wanted = {i: batch for i, batch in wanted.items() if self._is_new(i, batch)}
        costs = [self._seconds(i, batch) for i, batch in wanted.items()]
        cheap = wanted and self._has_time(max(costs)) and self._budget.cheap(max(costs))
        return self._round(self._with_the_others(wanted)) if cheap else ()

    def _gap_at_best(self, position: int) -> int:
        """The middle of the wider gap beside the first of the best batches, if it may hide a peak; 0: none."""
        curve, points = self._model.alone[position], merge_points(self._model.solo_points(position))
        undivided = self._problem.global_batch is not None and not self._model.pass_rows[position]
        if curve is None or curve.error > TIE or undivided:
            return 0
        rates = [point.batch / point.seconds for point in points]
        best = next(i for i, rate in enumerate(rates) if rate >= (1 - TIE) * max(rates))
        return self._middle_of_widest([p.batch for p in points[max(0, best - 1) : best + 2]], WIDE)

    def _look(self, position: int) -> int:
        """A batch far beyond what ran, or the plan's share in a gap of a curve that no line explains; 0: neither.

        Curves only guess there. It is for the time that is left once the race is over.
        """
        points, curve = merge_points(self._model.solo_points(position)), self._model.alone[position]
        if not points or curve is None or not self._budget.race_is_over:
            return 0
        ran, failures = points[-1].batch, self._model.devices[position].memory.failures
        beyond = min(self._far(position), WIDE * ran) if failures < 2 and self._problem.global_batch is None else 0
        if beyond >= (1 + LEVEL if failures else FAR) * ran:
            return beyond
        plans = [one for one in (self._model.fastest_split, self._model.within(1.0)) if one]
        gaps = [(a.batch, b.batch) for a, b in pairwise(points) if b.batch > GAP * a.batch and not curve.simple]
        shares = (dict(one.shares).get(position, 0) for one in plans)
        return next((b for b in shares if self._is_new(position, b) and any(x < b < y for x, y in gaps)), 0)

    def _even_share(self, position: int) -> int:
        """What an even split of a fixed batch over devices that may be worth it gives it, if that may fit."""
        devices, ran = self._worth_a_split, self._model.devices[position].memory.ran
        even = (self._problem.global_batch or 0) // len(devices) // self._quantum * self._quantum
        return even if position in devices and ran < even <= self._far(position) else 0

    @property
    def _worth_a_split(self) -> Sequence[int]:
        """The devices of the hoped layout, for which the others keep nobody waiting; all if it is of one alone."""
        hoped = [i for i, _ in self._hoped.shares] if self._hoped else []
        return hoped if len(hoped) > 1 else self._model.live

    def _round(self, batches: dict[int, int]) -> tuple[Probe, ...]:
        return tuple(self._probe(i, batch, self._turn) for i, batch in sorted(batches.items()))

    @cached_property
    def _turn(self) -> int:
        solos = self._model.seen.in_stage("solo")
        return 1 + max((seen.probe.turn for seen in solos), default=-1)

    # ------------------------------------------------------------------ what is hoped for

    @cached_property
    def _hopes(self) -> tuple[Curve | None, ...]:
        """Each device's curve as fast as it may be, by the points of indistinguishable ones."""
        curves: list[Curve | None] = [None] * len(self._model.devices)
        for group in self._model.groups:
            points = [p for i in group for p in self._model.solo_points(i)]
            for i in group:
                curve = self._model.alone[i]
                curves[i] = hopeful_curve(points, curve) if curve else None
        return tuple(curves)

    @cached_property
    def _hoped(self) -> Allocation | None:
        """The fastest layout by hope, however many rounds lie before it."""
        return self._fastest(self._hopeful)

    @cached_property
    def _hopeful(self) -> list[DeviceCurve]:
        found = [DeviceCurve(i, hope, self._farthest(i)) for i in self._model.live if (hope := self._hopes[i])]
        return [self._in_passes(one) for one in found]

    def _in_passes(self, device: DeviceCurve) -> DeviceCurve:
        """The device as it may take a fixed batch in passes of the rows that it does best."""
        batch, i, curve = self._problem.global_batch, device.position, device.curve
        if batch is None or not self._problem.micro or self._model.devices[i].undivided or not isinstance(curve, Curve):
            return device
        best = single_best(device, self._quantum)
        if best is None:
            return device
        rows, extra = best.global_batch, self._model.extra_seconds[i] or 0.0
        wall = most_in_one(curve, rows, device.limit, extra)
        if wall >= self._model.asked_in_passes:
            return device
        return DeviceCurve(i, PassCurve(curve, wall, rows, extra, wall), self._model.asked_in_passes)

    def _fastest(self, devices: list[DeviceCurve]) -> Allocation | None:
        return self._model.fastest_of([one for one in devices if one.limit])

    def _far(self, position: int) -> int:
        """The largest batch that the next round may measure, by its stride."""
        ran, curve = self._model.devices[position].memory.ran, self._model.alone[position]
        most = min(self._farthest(position), self._model.largest_alone(position))
        growth = self._model.growth(DeviceCurve(position, curve, most)) if curve else math.inf
        stride = STRIDE if math.isinf(growth) else min(BLIND_GROWTH, growth)
        return min(most, max(int(stride * ran) // self._quantum, 1) * self._quantum)

    def _farthest(self, position: int) -> int:
        """The largest batch that any round may measure: by memory and by time."""
        model, curve = self._model, self._model.alone[position]
        if curve is None or not model.devices[position].memory.ran:
            return 0
        return model.quick(DeviceCurve(position, curve, model.largest_alone(position, hoped=True)))

    def _expected_gain(self, wanted: Allocation) -> float:
        """How much faster the hoped layout is than the best of what is known, beyond errors; half of it comes true."""
        ran = [
            DeviceCurve(i, curve, min(self._model.devices[i].memory.ran, self._far(i)))
            for i in self._model.live
            if (curve := self._model.alone[i])
        ]
        known = self._fastest([self._in_passes(one) for one in ran])
        if known is None:
            return math.inf
        errors = (share * curve.error for i, share in wanted.shares if (curve := self._model.alone[i]))
        error = math.fsum(errors) / wanted.global_batch
        return COMES_TRUE * (wanted.samples_per_second / known.samples_per_second - 1) - error

    def _shows_more(self, position: int, share: int) -> bool:
        """Whether a share lies beyond what ran, or where the device may be faster than the points around it."""
        known, hope, ran = self._model.alone[position], self._hopes[position], self._model.devices[position].memory.ran
        if known is None or hope is None or not self._is_new(position, share):
            return False
        return share > ran or hope.seconds(share) < (1 - TIE) * known.seconds(share)

    def _is_new(self, position: int, batch: int) -> bool:
        points = self._model.solo_points(position)
        return batch > 0 and all(abs(p.batch - batch) > SAME_BATCH * p.batch for p in points)

    def _seconds(self, position: int, batch: int) -> float:
        """What a probe of a batch should take."""
        layout = solo(self._problem.devices, position, batch)
        return self._budget.least_seconds(layout, self._step(position, batch))

    def _step(self, position: int, batch: int) -> float:
        """Seconds of a step; from a single point, as long as that: a probe of much longer steps ends at once."""
        curve, points = self._model.alone[position], self._model.devices[position].alone
        if curve is None:
            return 0.0
        return points[0].seconds if len(points) == 1 else curve.seconds(batch)

    def _has_time(self, seconds: float) -> bool:
        """Whether a round may take so long: the first split, without which there is no plan, comes after it."""
        return self._budget.has_time(seconds, self._after)

    @cached_property
    def _after(self) -> float:
        """Seconds of the first split or, of one device, the fixed batch: there is no plan without; 0 once it ran."""
        if self._model.splits or (self._model.at_rest and len(self._model.live) == 1):
            return 0.0
        plan = self._model.fastest_split
        if plan is None and self._problem.global_batch is not None:
            plan = self._model.fastest_single
        return self._budget.least_seconds(self._model.layout(plan), plan.seconds) if plan else 0.0

    def _widest_gap(self, position: int) -> int:
        """The middle of the widest gap between measured batches."""
        batches = sorted({p.batch for p in self._model.devices[position].alone} | {self._quantum})
        return max(self._quantum, self._middle_of_widest(batches))

    def _middle_of_widest(self, batches: Sequence[int], wider: float = 0.0) -> int:
        """The middle of the gap between two batches that is widest in proportion; 0 if none is so much wider."""
        low, high = max(pairwise(batches), key=lambda gap: gap[1] / gap[0], default=(0, 0))
        return (low + high) // 2 // self._quantum * self._quantum if high > wider * low else 0

    # ------------------------------------------------------------------ the first two batches

    def _small_batch(self, position: int) -> int:
        """One of the first two batches, or a retreat from one that ran out of memory."""
        memory, quantum = self._model.devices[position].memory, self._quantum
        first, second = self._first_two()
        if not memory.ran and memory.failed is None:
            return first
        wanted = min(second, self._model.asked)
        if memory.failed is not None and not (memory.ran and second < memory.failed):
            down = memory.limit_bytes is not None and memory.ran > quantum  # that runs, and two sizes give a line
            retreat = memory.failed // BLIND_GROWTH
            if memory.ran:
                retreat = memory.ran // 2 if down else (memory.ran + memory.failed) // 2
            wanted = max(quantum, retreat // quantum * quantum)
        return wanted

    def _first_two(self) -> tuple[int, int]:
        """8 and 64 rows; if an even share of the global batch (or of the largest) is smaller, that and an eighth."""
        quantum, cap = self._quantum, self._model.asked
        batch = self._problem.global_batch or self._problem.max_global_batch
        second = SMALL * BLIND_GROWTH
        second = second if batch is None else min(second, max(2, batch // len(self._model.live)))
        first = min(math.ceil(max(1, min(SMALL, second // BLIND_GROWTH)) / quantum) * quantum, cap)
        return first, min(max(first + quantum, math.ceil(second / quantum) * quantum), cap)

    def _probe(self, position: int, batch: int, turn: int) -> Probe:
        layout, step = solo(self._problem.devices, position, batch), self._step(position, batch)
        return Probe(layout, "solo", self._budget.probe_seconds(layout, "solo", 2, step, self._after), turn)
