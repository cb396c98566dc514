"""Chooses each device's part of the model's state, and its rows.

In sharded training, each device is first measured alone. It holds only a small part of the state,
and gathers the model's units (blocks of layers) from that part. This shows its step time, and the
memory that it needs besides the state. Then the rows with the highest expected samples/s are
chosen. The state is divided so that it fills the memory that these rows leave free. From then on,
the parts of the state stay the same. Rows are searched as in other trainings, within the memory
that is left. Measurements of whole steps show how much time gathering takes.

A slow or small device may hold a part of the state and compute no rows, if its rows would only keep
the others waiting. The best such training is measured too if it should be faster.

Headroom remains free on each device, because an allocator can't use all of the memory: free blocks
may be too small for a request. In the first pass of a step, gradients don't exist yet when
activations are at their peak. So only a training in several passes needs memory for gradients and
activations at the same time.
"""

from __future__ import annotations

import math
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
    Stage,
    Timed,
    layout_of,
)
from .budget import Budget
from .explore import explore
from .layouts import BALANCE, NO_CURVE, RETREATS
from .machine_model import MachineModel
from .model.evidence import FEWEST_SIZES, DeviceEvidence, read_device
from .model.memory import UNBOUNDED
from .observations import Observations
from .ranking import LEAST_GAIN
from .rows import RowPolicy
from .split_stage import SplitStage
from .time_left import TimeLeft

# fraction of a device's memory left as headroom: allocators round up, fragments stay free, and
# sums need buffers; it doubles for each sharded step that ran out of memory there, and is halved
# or quartered if the model doesn't fit otherwise
HEADROOM = 0.05
FEWEST_HALVINGS = 2  # number of times that the headroom may be halved
DIGITS = 4  # decimals of a part: 10 MB of a state of 100 GB, far below any card's headroom
LEAST_PART = 1e-3  # of the state: a device whose rows leave less memory than this gets fewer rows
# minimum slope of a step's time over its rows, relative to time in proportion to rows: step times
# that seem level say little about larger batches
LEAST_GROWTH = 0.05
# the first whole step is measured now if the time left is less than this many starts of its group
URGENT = 2.0
# fraction of a measured training's samples/s; a training that is predicted to reach less than that
# isn't measured
FAR_SLOWER = 0.5


class RowDemand(msgspec.Struct, frozen=True):
    """What a micro-batch needs on a device besides the device's part of the model's state.

    A pass of r rows takes `base_bytes + r * row_bytes` bytes and `fixed_seconds + r * row_seconds`
    seconds.
    """

    base_bytes: float
    row_bytes: float
    fixed_seconds: float
    row_seconds: float

    def rows_in(self, seconds: float) -> float:
        """Return how many rows the device can compute in `seconds`."""
        return max(0.0, seconds - self.fixed_seconds) / self.row_seconds

    def seconds(self, rows: float) -> float:
        """Return how long a pass of `rows` takes, in seconds."""
        return self.fixed_seconds + self.row_seconds * rows


class StateDivision(msgspec.Struct, frozen=True):
    """How the parameters, gradients and optimizer state are divided among devices.

    - `parts`: each device's fraction of the state; empty if not known yet.
    - `in_passes`: whether memory is left for gradients that are kept between
      gradient-accumulation passes.
    - `limits`: usable bytes of each device; None where unknown.
    - `rows`: the micro-batch of each device that the division leaves memory for.
    """

    parts: tuple[float, ...]
    in_passes: bool = False
    limits: tuple[int | None, ...] = ()
    rows: tuple[float, ...] = ()


class Proposal(msgspec.Struct, frozen=True):
    """A sharded layout and its predicted step time in seconds, without gathering parameters."""

    layout: Layout
    seconds: float

    def rate(self, more_seconds: float = 0.0) -> float:
        """Return the predicted samples/s, for a step that takes `more_seconds` longer."""
        return self.layout.global_batch / (self.seconds + more_seconds)


class Sharding:
    """The search for the fastest layout that shards the model over all devices.

    Each device is first measured alone, with a small part of the state. The memory and time of its
    rows show how large a part of the state it should hold. Then steps over all devices are
    measured.
    """

    def __init__(self, problem: Problem, seen: Sequence[Observation]) -> None:
        self._problem = msgspec.structs.replace(problem, lengths=(), all_together=True)
        self._seen, self._state = seen, problem.state or ModelState(0, 0)
        # whole steps in which some devices had no rows
        self._held = [
            observation for observation in seen if _some_hold_only(observation.probe.layout)
        ]
        if problem.budget_seconds is not None:
            left = problem.budget_seconds - sum(one.elapsed_seconds for one in self._held)
            self._problem = msgspec.structs.replace(self._problem, budget_seconds=max(0.0, left))

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the next probes; empty if no further measurement is worth its time."""
        policy = self.policy
        budget = Budget(policy.problem, BALANCE, policy.seen)
        probes = () if self.parts is None else explore(policy, budget, with_splits=True)
        first = self._urgent_whole_step(budget) or self._smaller_whole_step(budget)
        if first is not None:
            probes = (first,)
        whole = any(probe.layout.traits.together for probe in probes)
        if whole or not probes:
            held = self._probe_without_rows(budget)
            if held:
                return (held,)
            probes = tuple(probe for probe in probes if not self._surely_loses(probe.layout))
        return () if whole and not self.parts else tuple(map(self._with_shards, probes))

    def _urgent_whole_step(self, budget: Budget) -> Probe | None:
        """Return the first step over all devices if it should run before further solo probes.

        It should if little time is left, or if starting its processes takes long. None if it can
        wait.
        """
        policy = self.policy
        if not self.parts or policy.machine.splits:
            return None
        probe = SplitStage(policy.predictions, budget, True).next_probe()
        if probe is None or not probe.layout.traits.together:
            return None
        # without a whole step there is no plan
        left = budget.seconds - budget.spent
        start_seconds = budget.starts.seconds(probe.layout)
        # two sizes of each device show its time and memory; other rows are then better measured in
        # whole steps, by a group that runs already
        sizes = (self._measured_alone(i) for i in range(self._problem.devices))
        are_known = all(len(own) >= FEWEST_SIZES for own in sizes)
        if left < URGENT * start_seconds or (are_known and budget.is_expensive(start_seconds)):
            return probe
        return None

    def _smaller_whole_step(self, budget: Budget) -> Probe | None:
        """Return a step with fewer rows to try after one ran out of memory, or None.

        Used only if measuring single devices again would take long, because their processes have
        ended.
        """
        # single devices could only be measured again after a new start of their children, which
        # ended for the whole step
        if not budget.is_expensive(budget.starts.alone):
            return None
        division, problem = self._division, self.policy.problem
        whole = [one for one in self._that_still_fit(self._seen) if one.probe.layout.state]
        if not self.parts or not any(self._failures) or whole:
            return None
        smaller = division and propose(division, self._row_demands, self._problem)
        tried = [one.probe.layout for one in self._seen]
        if not smaller or smaller.layout in tried or not all(smaller.layout.shares):
            return None
        rows_alone = layout_of(smaller.layout.shares, smaller.layout.micro)
        if problem.micro < bool(rows_alone.micro):
            return None
        if not budget.affords(rows_alone, Stage.RACE, smaller.seconds):
            return None
        seconds = budget.probe_seconds(rows_alone, Stage.SPLIT, step_seconds=smaller.seconds)
        return Probe(rows_alone, Stage.SPLIT, seconds)

    def layouts(self) -> list[Layout]:
        """Return the sharded layouts for the final comparison."""
        found = self.policy.best_splits() if self.parts else []
        held = [one.probe.layout for one in self._that_still_fit(self._held)]
        return [*(self._shard(one) for one in found if one.traits.together), *held]

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return the compute time by rows, and the row limit, of each device of a layout.

        Curves are empty if some devices have no rows, because shares aren't changed then.
        """
        if _some_hold_only(layout):
            return NO_CURVE * len(layout.shares)
        return self.policy.curves(layout_of(layout.shares, layout.micro))

    # ------------------------------------------------------------------ parts of the state

    @property
    def parts(self) -> tuple[float, ...] | None:
        """Each device's fraction of the state; empty before it is known, None if it doesn't fit."""
        return None if self._division is None else self._division.parts

    @cached_property
    def _division(self) -> StateDivision | None:
        """How the state is divided among the devices; None if they can't hold it."""
        problem = self._problem
        if not self._needs_are_known:
            # no parts until all devices were measured alone
            return StateDivision((), limits=problem.memory_bytes)
        limits = self._limits
        if len(limits) < problem.devices:
            # the memory of a device is unknown
            equal = (1 / problem.devices,) * problem.devices
            return StateDivision(equal, problem.global_batch is not None, problem.memory_bytes)
        return self._divide(limits)

    @property
    def _needs_are_known(self) -> bool:
        return self._problem.state is not None and len(self._row_demands) == self._problem.devices

    @property
    def _limits(self) -> list[int]:
        """The bytes that each device has for state and rows; unknown devices are left out."""
        beside = self._state.beside_bytes
        return [max(1, size - beside) for size in self._problem.memory_bytes if size is not None]

    def _divide(
        self, limits: Sequence[int], without_rows: frozenset[int] = frozenset()
    ) -> StateDivision | None:
        """Return how to divide the state with some headroom, or None if it doesn't fit.

        The devices in `without_rows` hold state but compute nothing.
        """
        failures, needs, problem = self._failures, self._row_demands, self._problem
        # headroom is doubled for each whole step that ran out of memory; if the state then doesn't
        # fit, it is halved repeatedly
        for forgiven in range(max(failures) + FEWEST_HALVINGS + 1):
            usable_bytes = tuple(
                int(limit * (1 - HEADROOM * 2.0 ** max(failure_count - forgiven, -FEWEST_HALVINGS)))
                for limit, failure_count in zip(limits, failures, strict=True)
            )
            division = divide_state(usable_bytes, needs, problem, without_rows)
            if division is not None:
                return msgspec.structs.replace(division, limits=usable_bytes)
        return None

    @property
    def _failures(self) -> list[int]:
        """How often each device ran out of memory in a step over several devices."""
        counts = [0] * self._problem.devices
        for one in self._seen:
            if isinstance(one, OutOfMemory) and one.probe.layout.traits.together:
                # if the devices aren't known, it counts for all that took part
                for position in one.devices or one.probe.layout.active:
                    counts[position] += 1
        return counts

    @property
    def _row_demands(self) -> list[RowDemand]:
        """Memory and time per row of each device, from its first two measurements alone."""
        # later ones would change the division, which must stay the same after a whole step
        first = Observations(self._problem)
        for position in range(self._problem.devices):
            for one in self._measured_alone(position)[:FEWEST_SIZES]:
                first.add(self._without_shards(one))
        devices = (read_device(first, position) for position in range(self._problem.devices))
        return [self._need(device) for device in devices if device.alone]

    def _measured_alone(self, position: int) -> list[Timed]:
        """Return the measurements in which only this device ran, in order."""
        found = []
        for one in self._seen:
            layout = one.probe.layout
            if isinstance(one, Timed) and not layout.traits.together and layout.shares[position]:
                found.append(one)
        return sorted(found, key=lambda one: one.probe.turn)

    def _need(self, device: DeviceEvidence) -> RowDemand:
        gathered, memory = self._state.gathered_bytes, device.memory
        batch, used = memory.points[-1] if memory.points else (1, gathered)
        base = min(used, gathered) if memory.line is None else memory.line[0]
        return RowDemand(base, max(0.0, used - base) / batch, *_fit_time(device))

    # ------------------------------------------------------------------ devices without rows

    @cached_property
    def without_rows(self) -> Proposal | None:
        """The fastest predicted layout in which some devices hold state but compute nothing.

        None if there is none.
        """
        limits = self._limits
        if not self._needs_are_known or len(limits) < self._problem.devices:
            return None
        found = []
        for holders in self._sets_of_holders():
            division = self._divide(limits, holders)
            proposal = division and propose(division, self._row_demands, self._problem)
            if proposal:
                found.append(proposal)
        return max(found, key=lambda one: one.rate(), default=None)

    def _sets_of_holders(self) -> list[frozenset[int]]:
        """Return the sets of devices to try as holders of state that compute nothing."""
        positions = range(self._problem.devices)
        slowest = sorted(positions, key=lambda i: -self._row_demands[i].seconds(1))
        smallest = sorted(positions, key=lambda i: self._limits[i])
        # at least one device must compute; for each number, the slowest and the smallest devices
        counts = range(1, self._problem.devices)
        return [frozenset(order[:count]) for order in (slowest, smallest) for count in counts]

    def _probe_without_rows(self, budget: Budget) -> Probe | None:
        """Return a probe of the fastest layout in which some devices only hold state, or None."""
        wanted = self.without_rows
        if wanted is None or len(self._held) >= RETREATS or not self._may_win(wanted):
            return None
        if any(one.probe.layout == wanted.layout for one in self._held):
            return None
        if not budget.affords(wanted.layout, Stage.RACE, wanted.seconds):
            return None
        seconds = budget.probe_seconds(wanted.layout, Stage.SHARD, step_seconds=wanted.seconds)
        return Probe(wanted.layout, Stage.SHARD, seconds)

    def _may_win(self, wanted: Proposal) -> bool:
        """Whether a layout is predicted to be faster than all sharded layouts that ran."""
        ran = [one for one in self._that_still_fit(self._seen) if one.probe.layout.state]
        if ran:
            # the time to gather units isn't known: the shortest of those that ran is assumed
            more = min(self._beyond_rows(one) for one in ran)
            best = max(one.samples_per_second for one in ran)
            return wanted.rate(more) > (1 + LEAST_GAIN) * best
        division = self._division
        if division is None or not division.rows:
            return division is None
        # nothing ran yet: compared with a training in which all devices have rows
        everywhere = propose(division, self._row_demands, self._problem)
        return everywhere is None or wanted.rate() > (1 + LEAST_GAIN) * everywhere.rate()

    def _surely_loses(self, layout: Layout) -> bool:
        """Whether a step is predicted to have less than half the speed of a measured one.

        The measured ones are those in which some devices hold state but compute nothing.
        """
        rates = [one.samples_per_second for one in self._that_still_fit(self._held)]
        if not rates or not layout.traits.together:
            return False
        expected = layout.global_batch / expect_seconds(layout, self._row_demands)
        return expected < FAR_SLOWER * max(rates)

    def _that_still_fit(self, seen: Sequence[Observation]) -> list[Timed]:
        """Return the measurements of layouts that have never run out of memory."""
        full = [one.probe.layout for one in self._seen if isinstance(one, OutOfMemory)]
        return [one for one in seen if isinstance(one, Timed) and one.probe.layout not in full]

    def _beyond_rows(self, timed: Timed) -> float:
        """Return the seconds of a step that aren't computation, such as gathering parameters."""
        layout = timed.probe.layout
        # the prediction leaves out gathering
        return max(0.0, timed.step_seconds - expect_seconds(layout, self._row_demands))

    # ------------------------------------------------------------------ rows, as with whole models

    @cached_property
    def policy(self) -> RowPolicy:
        """The rules that choose each device's rows, within the memory left by the state."""
        division = self._division or StateDivision((), limits=self._problem.memory_bytes)
        # parts are rounded, and may leave a little less than the rows for which they were chosen
        held = [
            max(0.0, part - 10.0**-DIGITS) * state_bytes_at_peak(self._state, division.in_passes)
            for part in division.parts
        ]
        left = _subtract_bytes(division.limits, held) if held else division.limits
        # passes need memory for gradients, but these parts of the state leave that memory to rows
        in_passes = division.in_passes or not division.parts
        problem = msgspec.structs.replace(
            self._problem, memory_bytes=left, micro=self._problem.micro and in_passes
        )
        known = Observations(problem)
        for one in self._seen:
            if _some_hold_only(one.probe.layout):
                continue
            if not isinstance(one, OutOfMemory) or one.probe.layout.state in ((), self.parts):
                known.add(self._check_fit_beside_state(self._without_shards(one), left))
        return RowPolicy(MachineModel(problem, known, TimeLeft(problem, BALANCE, known)))

    def _without_shards(self, observation: Observation) -> Observation:
        """Return an observation as the search for unsharded layouts would see it.

        The memory of the state is subtracted.
        """
        layout = observation.probe.layout
        probe = msgspec.structs.replace(
            observation.probe,
            layout=layout_of(layout.shares, layout.micro),
            stage=Stage.SPLIT if layout.traits.together else Stage.SOLO,
        )
        if not isinstance(observation, Timed):
            return msgspec.structs.replace(observation, probe=probe)
        return msgspec.structs.replace(
            observation, probe=probe, memory_bytes=self._bytes_without_state(observation)
        )

    def _bytes_without_state(self, timed: Timed) -> tuple[int | None, ...]:
        """Return each device's peak bytes minus its part of the state.

        None where the memory is unknown, or shows nothing about the rows.
        """
        layout = timed.probe.layout
        parts = layout.state or (MEASURED_PART,) * len(layout.shares)
        held = [part * state_bytes_at_peak(self._state, layout.in_passes) for part in parts]
        left = list(_subtract_bytes(timed.memory_bytes, held))
        if not layout.state:
            return tuple(left)
        for i, (part, used) in enumerate(zip(parts, timed.memory_bytes, strict=True)):
            whole = part * self._state.state_bytes + self._state.gathered_bytes
            # no more than the state and the gathered units would take
            if used is not None and used <= whole:
                left[i] = None
        return tuple(left)

    def _check_fit_beside_state(
        self, observation: Observation, left: Sequence[int | None]
    ) -> Observation:
        """Turn a solo measurement into a failure if its rows don't fit beside the state.

        Solo probes hold only a small part of the state, so more rows fit in them than in training.
        `left` is the bytes that the state leaves free on each device.
        """
        # a device measured alone held less of the state
        if (
            not isinstance(observation, Timed)
            or observation.probe.layout.traits.together
            or not self.parts
        ):
            return observation
        short = []
        for position, used in enumerate(observation.memory_bytes):
            limit = left[position]
            if used is not None and limit is not None and used > limit:
                short.append(position)
        if not short:
            return observation
        why = "its part of the state leaves too little memory for these rows"
        # its children ran, so the next probe needs no start
        return OutOfMemory(
            observation.probe, tuple(short), why, observation.elapsed_seconds, goes_on=True
        )

    def _with_shards(self, probe: Probe) -> Probe:
        """Return a probe of unsharded rows as a probe of the sharded model."""
        layout = probe.layout
        if layout.traits.together:
            return msgspec.structs.replace(probe, layout=self._shard(layout), stage=Stage.SHARD)
        part = msgspec.structs.replace(layout, kind="part")
        return msgspec.structs.replace(probe, layout=part, stage=Stage.PART)

    def _shard(self, layout: Layout) -> Layout:
        return msgspec.structs.replace(layout, kind="shard", state=self.parts or ())


def _subtract_bytes(sizes: Sequence[int | None], taken: Sequence[float]) -> tuple[int | None, ...]:
    """Return each size minus the bytes taken, at least 1; None stays None."""
    pairs = zip(sizes, taken, strict=True)
    return tuple(size and max(1, size - round(state)) for size, state in pairs)


def _fit_time(device: DeviceEvidence) -> tuple[float, float]:
    """Return the fixed seconds of a pass, and its seconds per row."""
    points = sorted(device.alone, key=lambda point: point.batch)
    first, last = points[0], points[-1]
    proportion = last.seconds / last.batch
    if last.batch == first.batch:
        return 0.0, proportion
    # the line through the smallest and the largest batch
    slope = (last.seconds - first.seconds) / (last.batch - first.batch)
    slope = min(proportion, max(LEAST_GROWTH * proportion, slope))
    return last.seconds - slope * last.batch, slope


def divide_state(
    limits: Sequence[float],
    needs: Sequence[RowDemand],
    problem: Problem,
    without_rows: frozenset[int] = frozenset(),
) -> StateDivision | None:
    """Return the division of the state with the highest samples/s, or None if it doesn't fit.

    - `limits`: usable bytes of each device.
    - `needs`: memory and time per row of each device.
    - `without_rows`: devices that hold state but compute nothing.

    A requested global batch is computed in one pass if it fits, otherwise by gradient accumulation.
    """
    # in their first pass, devices without rows compute one filler row that doesn't count
    room = StateRoom(limits, needs, problem, without_rows=without_rows)
    if problem.global_batch is None:
        return room.divide()
    at_once = room.divide_for(problem.global_batch)
    if at_once is not None or not problem.micro:
        return at_once
    return StateRoom(limits, needs, problem, in_passes=True, without_rows=without_rows).divide()


def propose(
    division: StateDivision, needs: Sequence[RowDemand], problem: Problem
) -> Proposal | None:
    """Return the layout for a division of the state, with its predicted step time.

    None if no device has rows.
    """
    quantum, batch = problem.multiple_of, problem.global_batch
    shares = [int(rows) // quantum * quantum for rows in division.rows]
    if not any(shares):
        return None
    passes = 1
    if batch is not None:
        whole = sum(shares) if division.in_passes else sum(division.rows)
        passes = max(1, math.ceil(batch / whole - LEAST_PART))
        room = [rows * batch / whole for rows in (shares if division.in_passes else division.rows)]
        shares = [int(rows) // quantum * quantum for rows in room]
        while sum(shares) < batch:
            # the device that is the farthest below its rows
            shares[max(range(len(room)), key=lambda i: room[i] - shares[i])] += quantum
    micro = tuple(-(-share // passes) for share in shares) if passes > 1 else ()
    rows_alone = layout_of(tuple(shares), micro)
    layout = msgspec.structs.replace(rows_alone, kind="shard", state=division.parts)
    return Proposal(layout, expect_seconds(layout, needs))


def expect_seconds(layout: Layout, needs: Sequence[RowDemand]) -> float:
    """Return the predicted compute seconds of a sharded step, without any communication."""
    passes = max(map(layout.passes, layout.computing))
    rows = [max(1.0, layout.shares[i] / passes) for i in layout.computing]
    pairs = zip(layout.computing, rows, strict=True)
    return passes * max(needs[i].seconds(own) for i, own in pairs)


def _some_hold_only(layout: Layout) -> bool:
    """Whether some devices of a layout hold state but compute nothing."""
    return layout.computing != layout.active


class StateRoom:
    """Computes how to divide the state, for the memory that each device's rows leave free.

    - `limits`: usable bytes of each device.
    - `in_passes`: whether gradients are kept between gradient-accumulation passes, which takes
      memory.
    - `without_rows`: positions of devices that only hold state.
    """

    def __init__(
        self,
        limits: Sequence[float],
        needs: Sequence[RowDemand],
        problem: Problem,
        in_passes: bool = False,
        without_rows: frozenset[int] = frozenset(),
    ) -> None:
        assert problem.state is not None
        self._computing = [i for i in range(len(needs)) if i not in without_rows]
        self._limits, self._row_demands, self._in_passes = limits, needs, in_passes
        self._fewest = problem.multiple_of
        self._most = float(problem.global_batch or problem.max_global_batch or UNBOUNDED)
        self._state = problem.state.state_bytes
        # bytes of the state that are held while activations are at their peak
        self._held = state_bytes_at_peak(problem.state, in_passes)
        # the optimizer's step runs without gathered units
        self._of_step = self._state / (self._state + problem.state.step_bytes)

    def divide(self) -> StateDivision | None:
        """Return the division with the highest samples/s; None if the state doesn't fit.

        The global batch is free, or computed in several passes of any size.
        """
        if not self._fits(self._rows_in(0.0)):
            return None
        low, high = 0.0, max(self._row_demands[i].seconds(self._most) for i in self._computing)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            rows = self._rows_in(middle)
            if sum(rows) <= self._most and self._fits(rows):
                low = middle
            else:
                high = middle
        # samples/s rise with time unless some device is full: then they may fall
        full = [self._row_demands[i].seconds(self._most_rows(i)) for i in self._computing]
        found = [low, *(seconds for seconds in full if 0 < seconds < low)]
        return self._parts(max(map(self._rows_in, found), key=self._rate))

    def divide_for(self, batch: int) -> StateDivision | None:
        """Return the division for a requested batch in one pass; None if it doesn't fit."""
        low, high = 0.0, max(self._row_demands[i].seconds(batch) for i in self._computing)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if sum(self._rows_in(middle)) < batch:
                low = middle
            else:
                high = middle
        rows = self._rows_in(high)
        if sum(rows) < batch * (1 - LEAST_PART) or not self._fits(rows):
            return None
        return self._parts(rows)

    def _rows_in(self, seconds: float) -> list[float]:
        """Return the rows that each device can compute in `seconds`, as far as memory allows."""
        found = [0.0] * len(self._row_demands)
        for i in self._computing:
            rows = max(self._fewest, self._row_demands[i].rows_in(seconds))
            # at least one quantum, and otherwise at most the rows that fit
            found[i] = max(self._fewest, min(rows, self._most_rows(i)))
        return found

    def _most_rows(self, position: int) -> float:
        """Return the most rows that fit on a device if it holds hardly any state."""
        need = self._row_demands[position]
        left = self._limits[position] - need.base_bytes - LEAST_PART * self._held
        return left / need.row_bytes if need.row_bytes else float(UNBOUNDED)

    def _bytes_left(self, rows: Sequence[float]) -> list[float]:
        """Return how many bytes of state each device can hold besides these rows.

        Negative if the rows themselves don't fit.
        """
        # negative if the rows themselves don't fit
        found = []
        for limit, need, own in zip(self._limits, self._row_demands, rows, strict=True):
            # the filler row of a device without rows leaves no gradients room
            free = limit - need.base_bytes - (0.0 if own else need.row_bytes)
            # gradients, for example, don't exist while activations are at their peak
            beside = (free - need.row_bytes * own) * self._state / self._held
            found.append(min(beside, free, limit * self._of_step))
        return found

    def _fits(self, rows: Sequence[float]) -> bool:
        left = self._bytes_left(rows)
        return min(left) > 0 and sum(left) >= self._state

    def _rate(self, rows: Sequence[float]) -> float:
        """Return the predicted samples/s if the devices have these rows."""
        return sum(rows) / max(self._row_demands[i].seconds(rows[i]) for i in self._computing)

    def _parts(self, rows: Sequence[float]) -> StateDivision:
        left = self._bytes_left(rows)
        return StateDivision(_round_parts(left), self._in_passes, rows=tuple(rows))


def _round_parts(sizes: Sequence[float]) -> tuple[float, ...]:
    """Return each size as a fraction of their total, rounded to sum to exactly 1."""
    units = 10**DIGITS
    exact = [units * size / sum(sizes) for size in sizes]
    rounded = [max(1, math.floor(part)) for part in exact]
    # the remaining units go to the parts that lost the most
    by_loss = sorted(range(len(sizes)), key=lambda i: rounded[i] - exact[i])
    for i in by_loss[: max(0, units - sum(rounded))]:
        rounded[i] += 1
    # parts that were raised to the least one may make the sum too large
    largest = rounded.index(max(rounded))
    rounded[largest] += units - sum(rounded)
    return tuple(part / units for part in rounded)


def state_bytes_at_peak(state: ModelState, in_passes: bool) -> int:
    """Return the bytes of the state while activations are at their peak.

    Without gradient accumulation, gradients don't exist yet at that moment.
    """
    return state.state_bytes - (0 if in_passes else state.gradient_bytes)
