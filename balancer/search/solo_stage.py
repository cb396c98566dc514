"""The solo stage: every device in a process of its own, all at the same time, mostly three or four batches each.

Two small batches give a first curve and the memory slope; the third is the largest that matters, which tests the
memory line and the straight line over their longest lever, or one on the way to it if that is far. A fourth where it is
still to come, or where lines or memory were refuted, and of a lone device a fifth; two more only where samples/s fell
from a batch to a larger one.
"""

from __future__ import annotations

import math
from itertools import pairwise

from evener.balancer.search.budget import Purse
from evener.balancer.search.model.device_model import guarded
from evener.balancer.search.model.step_time import Curve
from evener.balancer.search.model.throughput_peak import fallen, hoped
from evener.balancer.search.predictions import View
from evener.balancer.search.waterfill import Lane, alone_reaching
from evener.balancer.types import Layout, Probe, Stage, solo

MOST_ROUNDS = 4
PEAK_ROUNDS = 6  # where samples/s fell from a batch to a larger one
PATIENT_ROUNDS = 8  # while a device has not run at all, or grows without known memory
SMALL, SECOND = 8, 64  # the first two batches, of a free global batch
RATIO = 8  # between them
SLACK = 2.0  # the third batch may take so many times the predicted finish time
GROWTH = 32  # times the last batch, on the way to one that is far: beyond it a peak between is not seen
FARTHEST = 40  # times the last batch that is gone to at once: a little further is not worth a round
WORTH = 0.02  # relative gain in samples/s that is worth going on from there
ENOUGH = 0.01  # relative: what the batch that is gone on to may miss of it
FAR = 4  # times the largest batch that ran: the least that the third batch aims at
ON_SLOPE = 0.55  # of the largest batch: where the fourth point of a curve with a knee lies, beyond most knees
GROWN = 1.1  # times what ran: a growth worth a round
TESTED = 0.12  # a batch so near to a measured one, relatively, tells nothing new
RETREAT = 8  # a first batch that ran out of memory is divided by it


def next_probes(view: View, purse: Purse) -> tuple[Probe, ...]:
    """The next batch for every live device; empty when the stage is over."""
    live = view.live
    if not live:
        return ()
    turn = min(view.devices[i].rounds for i in live)
    stage: Stage = "solo" if turn > 1 else "race"  # without a second round there is nothing to go on with
    if not _wanted(view, purse, turn):
        return ()
    due = [i for i in live if view.devices[i].rounds == turn]
    batches = {i: _batch(view, purse, i, turn) for i in due}
    if turn and not purse.affords(stage, _longest(view, batches)):
        return ()
    if turn >= 2 and all(_tested(view, i, batch) for i, batch in batches.items()) and len(due) == len(live):
        return ()
    return tuple(_probe(view, purse, i, batch, turn) for i, batch in batches.items())


def _wanted(view: View, purse: Purse, turn: int) -> bool:
    """Whether another round tells anything: somebody has not run, or a shape or a memory line is in doubt."""
    live = view.live
    if any(not view.devices[i].alone for i in live):
        return turn < PATIENT_ROUNDS
    if turn < 3:
        return True
    lone = len(live) == 1 and view.problem.global_batch is None  # no other's points, nor a split's, help it
    if turn < MOST_ROUNDS + lone and any(
        _in_doubt(view, i) or _held_back(view, purse, i) or _further(view, purse, i) for i in live
    ):
        return True
    if turn < PEAK_ROUNDS and any(fallen(view.devices[i].alone) and _peak(view, i) for i in live):
        return True
    return turn < PATIENT_ROUNDS and any(_growing(view, purse, i) for i in live)


def _growing(view: View, purse: Purse, position: int) -> bool:
    """Whether a device whose memory can't be read may hold a batch that still gains something."""
    memory = view.devices[position].memory
    if memory.limit_bytes is not None and memory.line is not None:
        return False
    return _largest_that_matters(view, purse, position) > GROWN * memory.ran


def _held_back(view: View, purse: Purse, position: int) -> bool:
    """Whether the last batch was smaller than what matters because the memory line was unsure then."""
    memory = view.devices[position].memory
    return memory.was_unsure and _largest_that_matters(view, purse, position) > GROWN * memory.ran


def _peak(view: View, position: int) -> int:
    """The batch between two measured ones where samples/s may have their peak; 0: none, or only the edge of a stair."""
    curve = view.alone[position]
    if view.problem.global_batch is not None or curve is None or curve.stair:
        return 0
    return hoped(view.devices[position].alone, view.quantum)


def _in_doubt(view: View, position: int) -> bool:
    device = view.devices[position]
    curve = view.alone[position]
    if device.memory.failed is not None and device.memory.next_guess(view.cap, view.quantum) > device.memory.ran:
        return True
    return len(device.alone) < 3 or curve is None or not curve.straight or _flat(curve)


def _flat(curve: Curve) -> bool:
    """Whether the curve has a knee, which a fourth point places."""
    return len(curve.batches) > 1 and curve.times[0] == curve.times[1]


def _longest(view: View, batches: dict[int, int]) -> float:
    """The step of the slowest device in the round to come, as far as known."""
    sizes = {i: min(batch, view.devices[i].memory.ran) for i, batch in batches.items()}
    return max((curve.seconds(size) for i, size in sizes.items() if (curve := view.alone[i])), default=0.0)


def _batch(view: View, purse: Purse, position: int, turn: int) -> int:
    device, quantum, cap = view.devices[position], view.quantum, view.cap
    memory = device.memory
    if not memory.ran:
        first, _ = _smalls(view)
        return first if memory.failed is None else max(quantum, memory.failed // RETREAT // quantum * quantum)
    if turn == 1 or len(device.alone) == 1:
        _, second = _smalls(view)
        if memory.failed is None or second < memory.failed:
            return min(second, cap)
        return max(quantum, (memory.ran + memory.failed) // 2 // quantum * quantum)
    if memory.failed is not None and (guess := memory.next_guess(cap, quantum)) > memory.ran:
        return guess
    if turn == 2:
        return _stride(view, memory.ran, _largest_that_matters(view, purse, position))
    if further := _further(view, purse, position) or _peak(view, position):
        return further
    if _growing(view, purse, position) or _held_back(view, purse, position):
        return _largest_that_matters(view, purse, position)
    curve = view.alone[position]
    if curve is not None and _flat(curve) and len(device.alone) == 3:
        return max(quantum, int(ON_SLOPE * memory.ran) // quantum * quantum)
    wanted = _predicted_share(view, position)
    return wanted if not _tested(view, position, wanted) else _middle(view, position)


def _stride(view: View, ran: int, most: int) -> int:
    """As far towards `most` as one round goes; all the way for a fixed global batch, whose shares are bounded."""
    if view.problem.global_batch is not None or most <= FARTHEST * ran:
        return most
    return max(view.quantum, GROWTH * ran // view.quantum * view.quantum)


def _further(view: View, purse: Purse, position: int) -> int:
    """The batch to go on to, where one that gains was too far from those before; 0: none."""
    curve, ran = view.alone[position], view.devices[position].memory.ran
    if curve is None or not ran or view.problem.global_batch is not None:
        return 0
    most = _largest_that_matters(view, purse, position)
    if most <= GROWN * ran:
        return 0
    rate = most / curve.seconds(most)
    seen = max((p.batch / p.seconds for p in view.devices[position].alone), default=0.0)
    if rate <= seen * (1 + WORTH):
        return 0
    enough = alone_reaching(Lane(position, curve, most), rate * (1 - ENOUGH), view.quantum)
    return _stride(view, ran, max(ran, enough.global_batch if enough else most))


def _smalls(view: View) -> tuple[int, int]:
    """The first two batches: around an even share of a fixed global batch, and never large."""
    quantum, batch = view.quantum, view.problem.global_batch or view.problem.max_global_batch
    second = SECOND if batch is None else min(SECOND, max(2, batch // len(view.live)))
    first = max(1, min(SMALL, second // RATIO))
    first = min(math.ceil(first / quantum) * quantum, view.cap)
    return first, min(max(first + quantum, math.ceil(second / quantum) * quantum), view.cap)


def _largest_that_matters(view: View, purse: Purse, position: int) -> int:
    """The least of: room by memory, what the fill could give it, a gain worth measuring, a step the budget allows."""
    quantum = view.quantum
    curve = view.alone[position]
    room = view.devices[position].memory.next_guess(view.cap, quantum)
    if curve is None:
        return room
    lane = Lane(position, curve, room)
    least = quantum if view.problem.longest_step_seconds is None else view.devices[position].memory.ran
    most = min(room, max(quantum, least, curve.largest(purse.longest_step, room, quantum)))
    told = guarded(lane) is lane
    if view.problem.global_batch is not None:
        return max(quantum, min(most, _share_of_fixed(view, position, told)))
    most = max(quantum, min(most, view.useful(lane)))
    if not told:
        return most  # no slope yet: only a large batch tells one
    finish = view.first_guess.seconds if view.first_guess else math.inf
    wanted = curve.largest(SLACK * finish, room, quantum)
    device = view.devices[position]
    return min(most, wanted if len(device.alone) > 2 else max(wanted, FAR * device.memory.ran))


def _share_of_fixed(view: View, position: int, told: bool) -> int:
    """The share that the fill predicts; all that fits where no slope is told yet and the device is fast enough."""
    split = view.first_guess
    if split is None:
        return view.cap
    even = (view.problem.global_batch or 0) // len(view.live) // view.quantum * view.quantum
    curve = view.alone[position]
    if not told and curve is not None and curve.seconds(0) <= SLACK * split.seconds:
        return view.cap
    return max(even, dict(split.shares).get(position, 0))


def _predicted_share(view: View, position: int) -> int:
    split = view.fastest_split
    return dict(split.shares).get(position, 0) if split else 0


def _middle(view: View, position: int) -> int:
    """Between the two batches measured furthest apart, where the shape is known least."""
    batches = sorted({p.batch for p in view.devices[position].alone} | {view.quantum})
    gaps = [(high / low, low, high) for low, high in pairwise(batches)]
    if not gaps:
        return batches[0]
    _, low, high = max(gaps)
    return max(view.quantum, round((low + high) / 2) // view.quantum * view.quantum)


def _tested(view: View, position: int, batch: int) -> bool:
    return batch <= 0 or any(abs(p.batch - batch) <= TESTED * batch for p in view.devices[position].alone)


def _probe(view: View, purse: Purse, position: int, batch: int, turn: int) -> Probe:
    curve = view.alone[position]
    seconds = purse.seconds("solo", curve.seconds(batch) if curve else 0.0, MOST_ROUNDS - turn)
    layout: Layout = solo(view.problem.devices, position, batch)
    return Probe(layout, "solo", seconds, turn)
