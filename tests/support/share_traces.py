"""Simulates trainings on devices that change speed: with fixed shares, with the rule, with an
oracle.

Time is simulated: a step takes as long as the slowest rank's own work, plus what can't overlap with
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import NamedTuple

from evener.plan.solver import scale, solve_shares
from evener.shares.curves import Curve
from evener.shares.whole_rows import apportion
from evener.training.rebalance import Rebalancer

WINDOW_STEPS = 5  # steps per observation
DELAY_STEPS = 3  # from a decision to the first step with new shares
CHANGE_SECONDS = 0.2  # for new tensor shapes, at each change
RESTART_SECONDS = 15.0  # after a device is lost

Slowdown = Callable[[int, float], float]  # by device and time: 1.4 takes 40 % longer


class Machine(NamedTuple):
    """Devices that train `batch` rows per step.

    `curves` are their true times, `planned` those in the plan.
    """

    batch: int
    curves: tuple[Curve, ...]
    planned: tuple[Curve, ...]
    rest_seconds: float  # of a step, without own work

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares in the plan."""
        return solve_or_fail(self.planned, self.batch)

    def without(self, device: int) -> Machine:
        """Return the machine without one device."""
        curves, planned = (
            tuple(each for i, each in enumerate(some) if i != device)
            for some in (self.curves, self.planned)
        )
        return self._replace(curves=curves, planned=planned)


class Trace(NamedTuple):
    """The events of a simulated training run."""

    seconds: float
    slowdown: Slowdown
    noise: float = 0.02  # relative standard deviation of a step's own work
    stall_every: int = 0  # steps; then one rank takes 2 s longer
    input_every: int = 0  # steps; then all ranks wait 10 s for data, which isn't own work
    dead_at: float = math.inf  # seconds; then device 0 is lost


class Run(NamedTuple):
    """The result of a simulated training."""

    samples: int
    steps: int
    # for each change: the first step with the new shares, the shares, and the reason
    changes: tuple[tuple[int, tuple[int, ...], str], ...]


def machine(devices: int, seed: int, rows: int = 200, plan_error: float = 0.05) -> Machine:
    """Return devices with up to four times different speeds, whose planned step takes 0.1 s.

    `plan_error` is the relative error of the plan's times.
    """
    draw = random.Random(seed).uniform
    batch, fixed = devices * rows, draw(0.002, 0.03)
    speeds = [draw(1, 4) for _ in range(devices)]
    per_row = [(0.1 - fixed) * sum(speeds) / batch / speed for speed in speeds]
    curves = tuple(Curve((0.0,), (fixed,), slope) for slope in per_row)
    planned = tuple(
        Curve(
            (0.0,),
            (fixed * draw(1 - 4 * plan_error, 1 + 4 * plan_error),),
            slope * draw(1 - plan_error, 1 + plan_error),
        )
        for slope in per_row
    )
    return Machine(batch, curves, planned, 0.02)


def at_rest(_device: int, _at: float) -> float:
    """Return 1: nothing changes."""
    return 1.0


def slower(factor: float, start: float, end: float) -> Slowdown:
    """Slow the first device down for a while."""
    return lambda device, at: factor if device == 0 and start <= at < end else 1.0


def flipping(period: float, part: float, factor: float = 1.4) -> Slowdown:
    """Slow the first device down for a part of each period."""
    return lambda device, at: factor if device == 0 and at % period < part * period else 1.0


def solve_or_fail(curves: Sequence[Curve], batch: int) -> tuple[int, ...]:
    """Return the fastest shares; they must fit in memory."""
    found = solve_shares(curves, batch, (0,) * len(curves), False)
    assert found is not None
    return found


def stay(machine: Machine, trace: Trace, seed: int = 0) -> Run:
    """Train with the plan's shares throughout; after a loss, with their ratios."""
    return _both_parts(machine, trace, lambda _, shares: _Fixed(shares), seed, by_curves=False)


def rebalance(machine: Machine, trace: Trace, seed: int = 0) -> Run:
    """Train with the rule."""

    def begin(m: Machine, shares: tuple[int, ...]) -> _Ruled:
        return _Ruled(shares, Rebalancer(shares, m.planned, [m.batch] * len(shares), False))

    return _both_parts(machine, trace, begin, seed, by_curves=True)


def foresee(machine: Machine, trace: Trace, seed: int = 0) -> Run:
    """Train with an oracle, which always has the best shares and changes them at no cost."""
    return _both_parts(machine, trace, lambda left, _: _Oracle(left, trace), seed, by_curves=True)


class _Fixed:
    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.changes: list[tuple[int, tuple[int, ...], str]] = []

    def before(self, step: int, factors: tuple[float, ...]) -> float:
        """Return the seconds that a change takes before this step."""
        return 0.0

    def after(self, step: int, own: Sequence[float]) -> None:
        """Take note of the ranks' own work."""


class _Oracle(_Fixed):
    def __init__(self, machine: Machine, trace: Trace) -> None:
        super().__init__(machine.shares)

        @cache
        def best(factors: tuple[float, ...]) -> tuple[int, ...]:
            curves = [
                scale(curve, factor) for curve, factor in zip(machine.curves, factors, strict=True)
            ]
            return solve_or_fail(curves, machine.batch)

        self._best = best

    def before(self, step: int, factors: tuple[float, ...]) -> float:
        self.shares = self._best(tuple(round(factor, 2) for factor in factors))
        return 0.0


class _Ruled(_Fixed):
    def __init__(self, shares: tuple[int, ...], rebalancer: Rebalancer) -> None:
        super().__init__(shares)
        self._rebalancer = rebalancer
        self._window: list[Sequence[float]] = []
        self._next: tuple[int, tuple[int, ...]] | None = None

    def before(self, step: int, factors: tuple[float, ...]) -> float:
        if self._next is None or step < self._next[0]:
            return 0.0
        self.shares, self._next = self._next[1], None
        self._window.clear()
        return CHANGE_SECONDS

    def after(self, step: int, own: Sequence[float]) -> None:
        self._window.append(own)
        if len(self._window) < WINDOW_STEPS:
            return
        medians = [median(each) for each in zip(*self._window, strict=True)]
        self._window.clear()
        change = self._rebalancer.observe(step, medians, self.shares)
        if change is not None:
            self._next = step + DELAY_STEPS, change.shares
            self.changes.append((step + DELAY_STEPS, change.shares, change.reason))


def _both_parts(
    machine: Machine,
    trace: Trace,
    begin: Callable[[Machine, tuple[int, ...]], _Fixed],
    seed: int,
    by_curves: bool,
) -> Run:
    """Train until a device is lost, and then without it after a restart."""
    numbers = random.Random(seed)
    end = min(trace.seconds, trace.dead_at)
    first = _train(machine, trace, begin(machine, machine.shares), 0.0, end, numbers)
    if trace.dead_at >= trace.seconds:
        return first
    left = machine.without(0)
    shares = (
        solve_or_fail(left.planned, left.batch)
        if by_curves
        else apportion(left.batch, machine.shares[1:])
    )
    later = trace._replace(slowdown=lambda device, at: trace.slowdown(device + 1, at))
    second = _train(left, later, begin(left, shares), end + RESTART_SECONDS, trace.seconds, numbers)
    return Run(
        first.samples + second.samples, first.steps + second.steps, first.changes + second.changes
    )


def _train(
    machine: Machine, trace: Trace, policy: _Fixed, start: float, end: float, numbers: random.Random
) -> Run:
    at, step, devices = start, 0, range(len(machine.curves))
    while at < end:
        factors = tuple(trace.slowdown(device, at) for device in devices)
        at += policy.before(step, factors)
        own = [
            factors[i]
            * machine.curves[i].seconds(policy.shares[i])
            * math.exp(numbers.gauss(0.0, trace.noise))
            for i in devices
        ]
        if trace.stall_every and step % trace.stall_every == trace.stall_every - 1:
            own[numbers.randrange(len(own))] += 2.0
        if trace.input_every and step % trace.input_every == trace.input_every - 1:
            at += 10.0
        at += max(own) + machine.rest_seconds
        policy.after(step, own)
        step += 1
    return Run(step * machine.batch, step, tuple(policy.changes))
