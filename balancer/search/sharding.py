"""Sharded trainings: the part of the model's state, and the rows, that each device gets.

Each device is first measured alone, on rows of a model whose units it gathers from a small
part of the state: that shows its time, and the memory that isn't state. Then the state fills
the memory that rows in proportion to speed leave free, and these parts don't change any
more. Rows are searched as in other trainings, within the memory that is left. Whole steps
show what gathering costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from evener.plan.layout import Knots
from evener.shares.waterfill import HALVINGS

from ..types import (
    MEASURED_PART,
    Layout,
    ModelState,
    Observation,
    OutOfMemory,
    Probe,
    Problem,
    Timed,
    layout_of,
)
from .budget import Budget
from .explore import explore
from .layouts import BALANCE
from .machine_model import MachineModel
from .model.evidence import FEWEST_SIZES, DeviceEvidence, read_device
from .model.memory import UNBOUNDED
from .observations import Observations
from .rows import RowPolicy
from .time_left import TimeLeft

# fraction of a device's memory left as headroom: allocators round up, and sums need buffers; it
# doubles for each sharded step that ran out of memory there, and is halved or quartered if the
# model doesn't fit otherwise
HEADROOM = 0.03
FEWEST_HALVINGS = 2  # how often the headroom may be halved
DIGITS = 4  # decimals of a part: 10 MB of a state of 100 GB, far below any card's headroom


class Need(msgspec.Struct, frozen=True):
    """A device's speed, and the memory that it needs in addition to its part of the state.

    That is `base_bytes` without rows, and `row_bytes` for each row of a pass.
    """

    base_bytes: float
    row_bytes: float
    rate: float  # rows per second


class Sharding:
    """The search for a sharded training, from what was `seen` of parts and of whole steps.

    The problem's budget is the time for this search alone.
    """

    def __init__(self, problem: Problem, seen: Sequence[Observation]) -> None:
        self._problem = msgspec.structs.replace(problem, lengths=(), all_together=True)
        self._seen, self._state = seen, problem.state or ModelState(0, 0)

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the next rows for every device alone, else the next whole step.

        The result is empty if nothing is wanted.
        """
        if self.parts is None:
            return ()
        policy = self.policy
        budget = Budget(policy.problem, BALANCE, policy.seen)
        probes = explore(policy, budget, with_splits=True)
        whole = any(probe.layout.traits.together for probe in probes)
        return () if whole and not self.parts else tuple(map(self._as_sharded, probes))

    def layouts(self) -> list[Layout]:
        """Return the whole steps that are worth a race."""
        found = self.policy.best_splits() if self.parts else []
        return [self._shard(one) for one in found if one.traits.together]

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return each device's curve, and the rows of one pass that surely fit."""
        return self.policy.curves(layout_of(layout.shares, layout.micro))

    # ------------------------------------------------------------------ parts of the state

    @cached_property
    def parts(self) -> tuple[float, ...] | None:
        """The fraction of the state that each device holds.

        Empty while it is unknown, None if the state doesn't fit together with a row.
        """
        problem = self._problem
        needs = self._needs
        if problem.state is None or len(needs) < problem.devices:
            return ()
        limits = [limit for limit in problem.memory_bytes if limit is not None]
        if len(limits) < problem.devices:
            return (1 / problem.devices,) * problem.devices
        failures = self._failures
        for fewer in range(max(failures) + FEWEST_HALVINGS + 1):
            left = [
                limit * (1 - HEADROOM * 2.0 ** max(times - fewer, -FEWEST_HALVINGS))
                for limit, times in zip(limits, failures, strict=True)
            ]
            parts = share_state(left, needs, problem)
            if parts:
                return parts
        return None

    @property
    def _failures(self) -> list[int]:
        """The number of whole steps that ran out of memory on each device."""
        counts = [0] * self._problem.devices
        for one in self._seen:
            if isinstance(one, OutOfMemory) and one.probe.layout.traits.together:
                for position in one.devices or one.probe.layout.active:
                    counts[position] += 1
        return counts

    @property
    def _needs(self) -> list[Need]:
        """The need of each device that ran alone, by its first two measurements.

        Later ones don't count, since the parts of the state must not change once a
        step was measured.
        """
        first = Observations(self._problem)
        for position in range(self._problem.devices):
            for one in self._alone(position)[:FEWEST_SIZES]:
                first.add(self._as_rows(one))
        devices = (read_device(first, position) for position in range(self._problem.devices))
        return [self._need(device) for device in devices if device.alone]

    def _alone(self, position: int) -> list[Timed]:
        """Return the measurements of a device alone, in order of their turns."""
        found = []
        for one in self._seen:
            layout = one.probe.layout
            if isinstance(one, Timed) and not layout.traits.together and layout.shares[position]:
                found.append(one)
        return sorted(found, key=lambda one: one.probe.turn)

    def _need(self, device: DeviceEvidence) -> Need:
        gathered, memory = self._state.gathered_bytes, device.memory
        batch, used = memory.points[-1] if memory.points else (1, gathered)
        base = min(used, gathered) if memory.line is None else memory.line[0]
        return Need(base, max(0.0, used - base) / batch, device.best_rate)

    # ------------------------------------------------------------------ rows, as with whole models

    @cached_property
    def policy(self) -> RowPolicy:
        """The policy for rows, as if each device held the model in the memory left by its part."""
        left = self._without_state(
            self._problem.memory_bytes, self.parts or (0.0,) * self._problem.devices
        )
        problem = msgspec.structs.replace(self._problem, memory_bytes=left)
        known = Observations(problem)
        for one in self._seen:
            if not isinstance(one, OutOfMemory) or one.probe.layout.state in ((), self.parts):
                known.add(self._beside_state(self._as_rows(one), left))
        return RowPolicy(MachineModel(problem, known, TimeLeft(problem, BALANCE, known)))

    def _without_state(
        self, sizes: Sequence[int | None], parts: Sequence[float]
    ) -> tuple[int | None, ...]:
        """Return the bytes of each device without its part of the state."""
        held = [round(part * self._state.state_bytes) for part in parts]
        return tuple(size and max(1, size - state) for size, state in zip(sizes, held, strict=True))

    def _as_rows(self, one: Observation) -> Observation:
        """Return the observation as if each device held the model, without its part's bytes."""
        layout = one.probe.layout
        probe = msgspec.structs.replace(
            one.probe,
            layout=layout_of(layout.shares, layout.micro),
            stage="split" if layout.traits.together else "solo",
        )
        if not isinstance(one, Timed):
            return msgspec.structs.replace(one, probe=probe)
        held = layout.state or (MEASURED_PART,) * len(layout.shares)
        memory = self._without_state(one.memory_bytes, held)
        return msgspec.structs.replace(one, probe=probe, memory_bytes=memory)

    def _beside_state(self, one: Observation, left: Sequence[int | None]) -> Observation:
        """Return the observation, or OutOfMemory if its rows don't fit together with the state.

        A device that was measured alone held a small part of the state, and so had more memory for
        rows than its own part leaves.
        """
        if not isinstance(one, Timed) or one.probe.layout.traits.together or not self.parts:
            return one
        short = []
        for position, used in enumerate(one.memory_bytes):
            limit = left[position]
            if used is not None and limit is not None and used > limit:
                short.append(position)
        if not short:
            return one
        why = "its part of the state leaves too little memory for these rows"
        return OutOfMemory(one.probe, tuple(short), why, one.elapsed_seconds)

    def _as_sharded(self, probe: Probe) -> Probe:
        """Return the probe of rows as a probe of a sharded training."""
        layout = probe.layout
        if layout.traits.together:
            return msgspec.structs.replace(probe, layout=self._shard(layout), stage="shard")
        part = msgspec.structs.replace(layout, kind="part")
        return msgspec.structs.replace(probe, layout=part, stage="part")

    def _shard(self, layout: Layout) -> Layout:
        return msgspec.structs.replace(layout, kind="shard", state=self.parts or ())


def share_state(
    limits: Sequence[float], needs: Sequence[Need], problem: Problem
) -> tuple[float, ...] | None:
    """Return the fractions of the state that fill the memory left by rows.

    Rows are divided in proportion to speed. They are those of the fixed batch, or of the largest
    that fits in one pass, or fewer if only several passes fit. `limits` are the devices' bytes.
    Returns None if the state doesn't fit.
    """
    assert problem.state is not None
    state = problem.state.state_bytes
    speed = sum(need.rate for need in needs)
    # the optimizer's step runs without gathered units
    whole = state / (state + problem.state.step_bytes)

    def leave(batch: float) -> list[float]:
        """Return the bytes that each device's rows of a batch leave for the state."""
        left = []
        for limit, need in zip(limits, needs, strict=True):
            rows = max(problem.multiple_of, batch * need.rate / speed)
            left.append(min(limit - need.base_bytes - need.row_bytes * rows, limit * whole))
        return left

    def is_short(batch: float) -> bool:
        left = leave(batch)
        return min(left) <= 0 or sum(left) < state

    low = 0.0
    high = float(problem.global_batch or problem.max_global_batch or UNBOUNDED)
    if is_short(low):
        return None
    if not is_short(high):
        low = high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if is_short(middle):
            high = middle
        else:
            low = middle
    left = leave(low)
    parts = [round(size / sum(left), DIGITS) for size in left]
    return (*parts[:-1], round(1 - sum(parts[:-1]), DIGITS))
