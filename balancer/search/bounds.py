"""The most rows that a device may compute at once: as asked for, by memory, by time, and by what ran.

Each bound is a multiple of the quantum, and within the ones above it; 0 leaves the device out.

    asked       the request: largest share, fixed global batch, largest global batch
    largest_alone  by memory: the next guess, where the memory line ends or between what ran and what failed
    walls       the same in splits, which go no farther than what ran where bytes are unknown
    safe        what ran, or a little more if memory is far from full
    quick       beyond it a step takes too long
    reachable   a multiple of what ran: as far as a curve is trusted; a fixed batch goes beyond it where it has to
"""

from __future__ import annotations

import math
from functools import cached_property

from evener.shares.waterfill import DeviceCurve

from ..types import Layout, Problem
from .budget import Budget
from .model.evidence import CLEAR, read_device
from .model.memory import BLIND_GROWTH, SAFE_GROWTH, UNBOUNDED
from .model.step_time import LEVEL
from .observations import Observations


class Bounds:
    """The devices by one set of observations, and their bounds; each value is computed when it is first asked for."""

    def __init__(self, problem: Problem, seen: Observations, budget: Budget) -> None:
        self.problem, self.seen, self._budget = problem, seen, budget
        self.quantum = problem.multiple_of
        self.devices = tuple(read_device(seen, i) for i in range(problem.devices))

    @cached_property
    def asked(self) -> int:
        """The most rows that the request lets one device have."""
        problem = self.problem
        return self._least(problem.largest_share, problem.global_batch, problem.max_global_batch)

    @cached_property
    def asked_in_passes(self) -> int:
        """The most rows that the request lets one device have in several passes; of a fixed batch, all."""
        problem = self.problem
        return self._least(problem.global_batch or problem.largest_share, problem.max_global_batch)

    def _least(self, *limits: int | None) -> int:
        given = (limit for limit in limits if limit is not None)
        return min(given, default=UNBOUNDED) // self.quantum * self.quantum

    def largest_alone(self, position: int, hoped: bool = False) -> int:
        """The largest batch that is worth trying on a device alone, by its memory; with `hoped`, that may fit."""
        return self.devices[position].memory.largest_to_try(self.asked, self.quantum, hoped)

    @cached_property
    def walls(self) -> tuple[int, ...]:
        """The largest share of each device that is worth trying in a split, by memory; 0 for a lost device."""
        bold = self.problem.global_batch is not None  # a fixed batch has to go somewhere
        return tuple(
            0 if device.out_of_use(self.quantum) else device.memory.largest_in_split(self.asked, self.quantum, bold)
            for device in self.devices
        )

    @cached_property
    def safe(self) -> tuple[int, ...]:
        """The largest share of each device that surely fits at once."""
        return tuple(device.memory.largest_safe(self.asked, self.quantum) for device in self.devices)

    def hold(self, layout: Layout) -> bool:
        """True if every pass of a layout is predicted to fit."""
        return all(rows <= wall for rows, wall in zip(layout.pass_rows, self.walls, strict=True))

    def surely_hold(self, layout: Layout) -> bool:
        """True if every pass of a layout ran before, or is far below what the memory line allows."""
        return all(layout.pass_rows[i] <= self.safe[i] for i in layout.active)

    def reachable(self, device: DeviceCurve) -> int:
        """The largest batch, of a free one quick enough, that is near to what ran, so that the curve can be trusted."""
        ran, quantum = self.devices[device.position].memory.ran, self.quantum
        most = self.quick(device) if self.problem.global_batch is None else device.limit
        growth = min(BLIND_GROWTH, self.growth(device))
        return min(most, max(int(growth * ran) // quantum, 1) * quantum) if ran else most

    def growth(self, device: DeviceCurve) -> float:
        """By how much a batch may exceed what ran: where time doesn't rise yet, by no more than there is time for.

        Level curves hide where it begins to rise, and a step may take longer in proportion (knee, slow_start).
        """
        evidence, curve = self.devices[device.position], device.curve
        smallest = evidence.alone[0].batch if evidence.alone else 0
        first, last = curve.seconds(smallest), curve.seconds(evidence.memory.ran)
        rises = last > (1 + LEVEL + CLEAR * curve.error) * first
        return math.inf if rises else self._budget.growth(last)

    def quick(self, device: DeviceCurve) -> int:
        """The limit, reduced so that no step takes longer than is allowed, but not below the largest that ran."""
        if math.isinf(self._budget.seconds):
            return device.limit
        ran = self.devices[device.position].memory.ran
        longest = max(self._budget.longest_step(), SAFE_GROWTH * device.curve.seconds(ran))
        quick = device.curve.largest(longest, device.limit, self.quantum)
        return max(self.quantum, min(device.limit, max(ran, quick)))
