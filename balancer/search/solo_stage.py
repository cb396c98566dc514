"""The first stage: every device in a process of its own, all at the same time, mostly three or four batches each.

Two small batches give a first curve and the memory slope. The third is the largest that matters, or one on the way to
it if that is far; it tests both lines over their whole length. A fourth follows if that batch was not reached or a line
was refuted, for a lone device a fifth, and two more only where samples/s fell from a batch to a larger one. No batch is
measured twice.
"""

from __future__ import annotations

import math
from itertools import pairwise

from evener.balancer.search.budget import Budget
from evener.balancer.search.model.throughput_drop import guess_faster_batch, throughput_falls
from evener.balancer.search.predictions import Predictions, slope_is_clear
from evener.balancer.types import Probe, Stage, solo
from evener.shares.waterfill import DeviceCurve, single_reaching

MOST_ROUNDS = 4
FALLING_ROUNDS = 6  # where samples/s fell from a batch to a larger one
PATIENT_ROUNDS = 8  # while a device has not run at all, or grows without known memory
SMALL = 8  # the first batch, of a free global batch
SECOND = 64  # the second batch
RATIO = 8  # between the two
PAST_FINISH = 2.0  # the third batch may take this many times the predicted finish time
FARTHEST = 40  # a batch up to this many times the last is measured directly
LONGEST_STRIDE = 32  # beyond that, this many times the last comes first, so as not to miss a peak between
FURTHER_GAIN = 0.02  # relative gain in samples/s for which a larger batch is tried
ENOUGH = 0.01  # relative: stop at the batch that reaches 99 % of the predicted best rate
FAR = 4  # times the largest batch that ran: the least that the third batch aims at
ON_SLOPE = 0.55  # of the largest batch: the fourth point of a curve with a knee, beyond most knees
GROWN = 1.1  # times the largest batch that ran: growth worth a round
TESTED = 0.12  # relative: a batch this near to a measured one shows nothing new
MOST_PASSES = 4  # of the probe that shows what passes cost
FIRST_RETREAT = 8  # a first batch that ran out of memory is divided by this


class SoloStage:
    """Which batches to measure on every device alone, by the model and its predictions."""

    def __init__(self, predictions: Predictions, budget: Budget) -> None:
        self._predictions, self._model, self._budget = predictions, predictions.model, budget
        self._problem, self._quantum = self._model.problem, self._model.quantum

    def next_probes(self) -> tuple[Probe, ...]:
        """The next batch for every live device, at last in passes where that may help; empty when the stage is over."""
        return self._next_round() or self._next_in_passes()

    def _next_round(self) -> tuple[Probe, ...]:
        left = list(self._model.live)
        while left:
            turn = min(self._model.devices[i].rounds for i in left)
            due = [i for i in left if self._model.devices[i].rounds == turn]
            batches = {i: self._next_batch(i, turn) for i in due}
            if not self._worth_a_round(turn, batches, len(due) == len(left)):
                return ()
            repeated = {
                i for i, batch in batches.items() if any(p.batch == batch for p in self._model.devices[i].alone)
            }
            if new := [i for i in due if i not in repeated]:
                return tuple(self._probe(i, batches[i], turn) for i in new)
            left = [i for i in left if i not in due]
        return ()

    def _next_in_passes(self) -> tuple[Probe, ...]:
        """A few passes of a size that ran, on each device whose passes may be wanted and were never measured."""
        turn = max((device.rounds for device in self._model.devices), default=0)
        wanted = self._predictions.unsure_of_passes.items()
        probes = [probe for i, share in wanted if (probe := self._probe_in_passes(i, share, turn))]
        return tuple(probes)

    def _probe_in_passes(self, position: int, share: int, turn: int) -> Probe | None:
        model, quantum = self._model, self._quantum
        ran = min(model.pass_rows[position], model.devices[position].memory.ran)
        passes = min(MOST_PASSES, max(2, share // ran)) if ran else 2
        rows = min(ran, model.largest_share // passes // quantum * quantum)
        curve = model.alone[position]
        if not rows or curve is None:
            return None
        probe = self._probe(position, rows, turn, passes)
        return probe if self._budget.affords(probe.layout, "solo", passes * curve.seconds(rows)) else None

    def _worth_a_round(self, turn: int, batches: dict[int, int], everyone: bool) -> bool:
        """Whether the round says something new and is affordable."""
        stage: Stage = "solo" if turn > 1 else "race"  # without a second round there is nothing to go on with
        if not self._wanted(turn) or (turn and not all(self._affords(i, b, stage) for i, b in batches.items())):
            return False
        return turn < 2 or not everyone or not all(self._tested(i, batch) for i, batch in batches.items())

    def _wanted(self, turn: int) -> bool:
        """Whether another round helps: a device has not run yet, or a curve or a memory line is in doubt."""
        live, devices = self._model.live, self._model.devices
        if any(not devices[i].alone for i in live):
            return turn < PATIENT_ROUNDS
        if turn < 3:
            return True
        lone = len(live) == 1 and self._problem.global_batch is None  # no other device or split adds points
        if turn < MOST_ROUNDS + lone and any(self._in_doubt(i) or self._further(i) for i in live):
            return True
        if turn < FALLING_ROUNDS and any(throughput_falls(devices[i].alone) and self._between(i) for i in live):
            return True
        return turn < PATIENT_ROUNDS and any(self._growing(i) for i in live)

    def _growing(self, position: int) -> bool:
        """Whether a larger batch may fit and gain, on a device whose memory can't be read."""
        memory = self._model.devices[position].memory
        if memory.limit_bytes is not None and memory.line is not None:
            return False
        return self._largest_that_matters(position) > GROWN * memory.ran

    def _between(self, position: int) -> int:
        """The batch between two measured ones that may be faster than both; 0: none."""
        if self._problem.global_batch is not None:
            return 0
        return guess_faster_batch(self._model.devices[position].alone, self._quantum)

    def _in_doubt(self, position: int) -> bool:
        device, curve = self._model.devices[position], self._model.alone[position]
        memory = device.memory
        if memory.failed is not None and memory.largest_to_try(self._model.cap, self._quantum) > memory.ran:
            return True
        return len(device.alone) < 3 or curve is None or not curve.simple or curve.flat

    def _affords(self, position: int, batch: int, stage: Stage) -> bool:
        curve = self._model.alone[position]
        known = min(batch, self._model.devices[position].memory.ran)
        layout = solo(self._problem.devices, position, batch)
        return self._budget.affords(layout, stage, curve.seconds(known) if curve else 0.0)

    def _next_batch(self, position: int, turn: int) -> int:
        model, quantum = self._model, self._quantum
        device, curve = model.devices[position], model.alone[position]
        memory = device.memory
        if not memory.ran or turn == 1 or len(device.alone) == 1:
            return self._small_batch(position)
        if memory.failed is not None and (guess := memory.largest_to_try(model.cap, quantum)) > memory.ran:
            return guess
        if turn == 2:
            return self._stride(memory.ran, self._largest_that_matters(position))
        if further := self._further(position) or self._between(position):
            return further
        if self._growing(position):
            return self._largest_that_matters(position)
        if curve is not None and curve.flat and len(device.alone) == 3:
            return max(quantum, int(ON_SLOPE * memory.ran) // quantum * quantum)
        split = self._predictions.fastest_split
        share = min(dict(split.shares).get(position, 0), memory.largest_to_try(model.cap, quantum)) if split else 0
        return share if not self._tested(position, share) else self._widest_gap(position)

    def _small_batch(self, position: int) -> int:
        """One of the first two batches, or a retreat from one that ran out of memory."""
        memory, quantum = self._model.devices[position].memory, self._quantum
        first, second = self._first_two()
        if not memory.ran and memory.failed is None:
            return first
        wanted = min(second, self._model.cap)
        if memory.failed is not None and not (memory.ran and second < memory.failed):
            retreat = (memory.ran + memory.failed) // 2 if memory.ran else memory.failed // FIRST_RETREAT
            wanted = max(quantum, retreat // quantum * quantum)
        return memory.bound(wanted, quantum)

    def _first_two(self) -> tuple[int, int]:
        """Around an even share of a fixed global batch, and never large."""
        quantum, cap = self._quantum, self._model.cap
        batch = self._problem.global_batch or self._problem.max_global_batch
        second = SECOND if batch is None else min(SECOND, max(2, batch // len(self._model.live)))
        first = min(math.ceil(max(1, min(SMALL, second // RATIO)) / quantum) * quantum, cap)
        return first, min(max(first + quantum, math.ceil(second / quantum) * quantum), cap)

    def _stride(self, ran: int, most: int) -> int:
        """The next batch on the way to `most`; `most` itself for a fixed global batch, whose shares are bounded."""
        if self._problem.global_batch is not None or most <= FARTHEST * ran:
            return most
        return max(self._quantum, LONGEST_STRIDE * ran // self._quantum * self._quantum)

    def _further(self, position: int) -> int:
        """A larger batch that should gain but was too far from those measured before; 0: none."""
        curve, device = self._model.alone[position], self._model.devices[position]
        ran = device.memory.ran
        if curve is None or not ran or self._problem.global_batch is not None:
            return 0
        most = self._largest_that_matters(position)
        if most <= GROWN * ran:
            return 0
        rate = most / curve.seconds(most)
        if rate <= (1 + FURTHER_GAIN) * max((p.batch / p.seconds for p in device.alone), default=0.0):
            return 0
        enough = single_reaching(DeviceCurve(position, curve, most), rate * (1 - ENOUGH), self._quantum)
        return self._stride(ran, max(ran, enough.global_batch if enough else most))

    def _largest_that_matters(self, position: int) -> int:
        """The least of: what fits memory, what a split could give it, a gain worth measuring, an affordable step."""
        model, quantum, problem = self._model, self._quantum, self._problem
        device, curve = model.devices[position], model.alone[position]
        holds = device.memory.largest_to_try(model.cap, quantum)
        if curve is None:
            return holds
        bounded = DeviceCurve(position, curve, holds)
        most = min(holds, max(quantum, curve.largest(self._budget.longest_step(), holds, quantum)))
        clear = slope_is_clear(bounded)
        if problem.global_batch is not None:
            return max(quantum, min(most, self._share_of_fixed(position, clear)))
        most = max(quantum, min(most, model.useful_limit(bounded)))
        if not clear:
            return most  # only a large batch shows a slope
        guess = self._predictions.first_guess
        wanted = curve.largest(PAST_FINISH * (guess.seconds if guess else math.inf), holds, quantum)
        return min(most, wanted if len(device.alone) > 2 else max(wanted, FAR * device.memory.ran))

    def _share_of_fixed(self, position: int, clear: bool) -> int:
        """The predicted share; all that fits where no slope is clear yet and the device is fast enough."""
        split, curve, cap = self._predictions.first_guess, self._model.alone[position], self._model.cap
        if split is None or (not clear and curve is not None and curve.seconds(0) <= PAST_FINISH * split.seconds):
            return cap
        even = (self._problem.global_batch or 0) // len(self._model.live) // self._quantum * self._quantum
        return max(even, dict(split.shares).get(position, even))

    def _widest_gap(self, position: int) -> int:
        """The middle of the widest gap between measured batches."""
        batches = sorted({p.batch for p in self._model.devices[position].alone} | {self._quantum})
        gaps = [(high / low, low, high) for low, high in pairwise(batches)]
        if not gaps:
            return batches[0]
        _, low, high = max(gaps)
        return max(self._quantum, round((low + high) / 2) // self._quantum * self._quantum)

    def _tested(self, position: int, batch: int) -> bool:
        points = self._model.devices[position].alone
        return batch <= 0 or any(abs(p.batch - batch) <= TESTED * batch for p in points)

    def _probe(self, position: int, batch: int, turn: int, passes: int = 1) -> Probe:
        curve = self._model.alone[position]
        layout = solo(self._problem.devices, position, passes * batch, batch)
        step = passes * curve.seconds(batch) if curve else 0.0
        return Probe(layout, "solo", self._budget.probe_seconds(layout, "solo", MOST_ROUNDS - turn, step), turn)
