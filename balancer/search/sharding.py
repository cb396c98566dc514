"""Choose how the model's state is divided among devices, and the rows of each device.

The state is the parameters, gradients and optimizer state. In sharded training, each device holds a
fraction of it, and gathers the model's units (blocks of layers) while it computes.

Each device is first measured on its own, with only a small part of the state. This shows its step
time, and the memory that it needs in addition to the state. Then the rows with the highest expected
samples/s are chosen, and the state is divided so that it fills the memory that these rows leave
free. From then on, this division stays the same. The best rows are searched for as in training
without shards, within the memory that is left. Measurements of steps over all devices show how much
time gathering takes. If processes start slowly, these steps come sooner, and larger ones follow
from the group of processes that runs already.

A slow or small device may hold a part of the state and compute no rows, if its rows would only keep
the others waiting. The best such layout is measured too if it should be faster.

Some headroom remains free on each device, because an allocator can't use all of the memory: free
blocks may be too small for a request. In the first gradient-accumulation pass of a step, gradients
don't exist yet when activations are at their peak. So memory for gradients and activations at the
same time is only needed if a step has several passes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from statistics import fmean, linear_regression

import msgspec

from evener.plan.layout import Knots
from evener.shares.waterfill import HALVINGS

from ..types import (
    MEASURED_PART,
    Layout,
    ModelState,
    Observation,
    OutOfMemory,
    PredictedCurve,
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
from .ranking import FAR_SLOWER, LEAST_GAIN
from .rows import RowPolicy
from .split_stage import SplitStage
from .starts import StartTimes
from .time_left import SHORTEST_PROBE_SECONDS, TimeLeft

# fraction of a device's memory left as headroom: allocators round up, fragments stay free, and
# sums need buffers; it doubles for each sharded step that ran out of memory there, and is halved
# or quartered if the model doesn't fit otherwise
HEADROOM = 0.05
# least headroom in bytes, as far as it is at most SMALL_HEADROOM of the memory. PyTorch's allocator
# maps large blocks in pages of 20 MiB. In sharded steps of a model of 8 billion parameters in 4
# bits, 200 to 290 MiB of such pages stayed unused, whatever the size of the GPU's memory.
LEAST_HEADROOM = 320 << 20
SMALL_HEADROOM = 0.1
FEWEST_HALVINGS = 2  # number of times that the headroom may be halved
DIGITS = 4  # decimals of a part: 10 MB of a state of 100 GB, far below any card's headroom
LEAST_PART = 1e-3  # of the state: a device whose rows leave less memory than this gets fewer rows
# minimum slope of the step time over rows, relative to a time in proportion to rows: step times on
# one plateau say little about larger batches
LEAST_GROWTH = 0.05
# fraction of the time left for the first probe of each device alone
FIRST_SHARE = 0.01
# factor over the most rows that a device ran alone, up to which its memory is predicted for the
# first whole step; memory per row may increase with the rows
TRUSTED_GROWTH = 1.25
# factors by which the memory of a further row may exceed that of earlier rows: if it was measured
# by two sizes, and if all memory but the gathered units was divided by the rows of one size
KNOWN_ROW_GROWTH, UNKNOWN_ROW_GROWTH = 1.2, 2.0
# predicted gain at which a layout with devices without rows is measured before one with rows on
# each: its devices with rows have less memory left than both predict, and gather more
CLEAR_GAIN = 0.05
# the planned rows are measured alone only if that takes at most this part of a group's start
MOST_OF_START = 0.5
STEPS_OF_SHORTEST = 3  # steps that the shortest probe takes, with its warm-up
# the first whole step is measured now if the time left is less than this many starts of its group
URGENT = 2.0


class RowDemand(msgspec.Struct, frozen=True):
    """The memory and time that a micro-batch needs on a device, without the device's state.

    A pass of r rows takes `fixed_seconds + r * row_seconds` seconds. `points` are pairs of rows and
    their bytes, in increasing order; memory is linear between them and below. Each row beyond the
    last point takes `row_bytes`.
    """

    points: tuple[tuple[int, float], ...]
    row_bytes: float
    fixed_seconds: float
    row_seconds: float

    def bytes(self, rows: float) -> float:
        """Return how many bytes a pass of this many rows takes."""
        last, most = self.points[-1]
        if rows >= last or len(self.points) == 1:
            return most - self.row_bytes * (last - rows)
        above = max(1, bisect_right(self.points, rows, key=lambda point: point[0]))
        (rows_below, size_below), (rows_above, size_above) = self.points[above - 1 : above + 1]
        slope = (size_above - size_below) / (rows_above - rows_below)
        return size_below + slope * (rows - rows_below)

    def rows_within(self, size: float) -> float:
        """Return how many rows take this many bytes, as a fractional number."""
        last, most = self.points[-1]
        if size >= most or len(self.points) == 1:
            return last + (size - most) / self.row_bytes if self.row_bytes else float(UNBOUNDED)
        above = max(1, bisect_right(self.points, size, key=lambda point: point[1]))
        (rows_below, size_below), (rows_above, size_above) = self.points[above - 1 : above + 1]
        slope = (size_above - size_below) / (rows_above - rows_below)
        return rows_below + (size - size_below) / slope if slope else float(rows_below)

    def rows_in(self, seconds: float) -> float:
        """Return how many rows the device computes in `seconds`, as a fractional number."""
        return max(0.0, seconds - self.fixed_seconds) / self.row_seconds

    def seconds(self, rows: float) -> float:
        """Return how many seconds a pass of this many rows takes."""
        return self.fixed_seconds + self.row_seconds * rows


class StateDivision(msgspec.Struct, frozen=True):
    """How the parameters, gradients and optimizer state are divided among devices.

    - `parts`: each device's fraction of the state; empty if not known yet.
    - `in_passes`: whether memory is left for gradients, which are kept between
      gradient-accumulation passes.
    - `limits`: usable bytes of each device; None where unknown.
    - `rows`: the micro-batch of each device. The division leaves enough memory for it.
    """

    parts: tuple[float, ...]
    in_passes: bool = False
    limits: tuple[int | None, ...] = ()
    rows: tuple[float, ...] = ()


class Proposal(msgspec.Struct, frozen=True):
    """A sharded layout and its predicted step time in seconds.

    The time to gather shards isn't included.
    """

    layout: Layout
    seconds: float

    def rate(self, more_seconds: float = 0.0) -> float:
        """Return the predicted throughput, in samples/s, if a step takes `more_seconds` longer."""
        return self.layout.global_batch / (self.seconds + more_seconds)


class Sharding:
    """The search for the fastest layout that shards the model over all devices.

    Each device is first measured on its own, with a small part of the state. The memory and time of
    its rows show how large a part of the state it should hold. Then steps over all devices are
    measured.
    """

    def __init__(self, problem: Problem, observations: Sequence[Observation]) -> None:
        self._problem = msgspec.structs.replace(problem, lengths=(), all_together=True)
        self._seen, self._state = observations, problem.state or ModelState(0, 0)
        # whole steps in which some devices had no rows
        self._held = [
            observation
            for observation in observations
            if _has_devices_without_rows(observation.probe.layout)
        ]
        if problem.budget_seconds is not None:
            left = problem.budget_seconds - sum(one.elapsed_seconds for one in self._held)
            self._problem = msgspec.structs.replace(self._problem, budget_seconds=max(0.0, left))

    def next_probes(self) -> tuple[Probe, ...]:
        """Return the next probes; empty if no further measurement is worth its time."""
        budget = Budget(self.policy.problem, BALANCE, self.policy.seen)
        budget.starts = self._starts
        probes = () if self.parts is None else explore(self.policy, budget, with_splits=True)
        first = self._urgent_whole_step(budget) or self._smaller_whole_step(budget)
        if first is not None:
            probes = self._larger_rows_alone(first, budget) or (first,)
        elif self._needs_start(probes, budget):
            larger = self._larger_whole_step(budget)
            if larger is not None:
                return (self._with_shards(larger),)
            probes = ()
        return self._prefer_without_rows(probes, budget)

    def _prefer_without_rows(self, probes: Sequence[Probe], budget: Budget) -> tuple[Probe, ...]:
        """Return these probes of the sharded model, or one in which some devices only hold state.

        Such a probe comes before other steps over all devices, and these are left out if it was
        far faster.
        """
        whole = any(probe.layout.traits.together for probe in probes)
        if whole or not probes:
            held = self._probe_without_rows(budget)
            if held:
                larger = self._larger_rows_alone(held, budget)
                return tuple(self._with_shards(probe) for probe in larger) or (held,)
            probes = tuple(probe for probe in probes if not self._is_far_slower(probe.layout))
        if whole and not self.parts:
            return ()
        return tuple(self._with_shards(self._shorten_first(probe, budget)) for probe in probes)

    @property
    def _starts(self) -> StartTimes:
        """How long processes took to start, also where their rows don't fit beside the state."""
        every = Observations(self._problem)
        for one in self._seen:
            every.add(self._without_shards(one))
        return StartTimes(every, groups_end_others=True)

    def _larger_rows_alone(self, whole: Probe, budget: Budget) -> tuple[Probe, ...]:
        """Return probes of single devices with the rows of the first step over all devices.

        They show the memory of these rows in seconds, while a whole step that runs out of memory
        costs another start of its processes. Only devices that would get clearly more rows than
        they ran alone are measured. Empty once a whole step was tried, or if their children would
        have to start first.
        """
        if any(one.probe.layout.state for one in self._seen):
            return ()
        every = (self._probe_rows_alone(i, whole, budget) for i in range(self._problem.devices))
        found = tuple(probe for probe in every if probe is not None)
        seconds = max((self._seconds_alone(probe.layout) for probe in found), default=0.0)
        ends = budget.spent + seconds + budget.least_seconds(whole.layout)
        pays = seconds <= MOST_OF_START * budget.starts.seconds(whole.layout)
        return found if pays and ends <= budget.seconds else ()

    def _probe_rows_alone(self, position: int, whole: Probe, budget: Budget) -> Probe | None:
        """Return a probe of one device with its rows of a step over all devices.

        None if it ran about as many rows alone, or if its process would have to start first.
        """
        rows, before = whole.layout.shares[position], self._measured_alone(position)
        most = max((one.probe.layout.shares[position] for one in before), default=0)
        if not most or rows <= TRUSTED_GROWTH * most:
            return None
        alone = layout_of(tuple(rows * (i == position) for i in range(self._problem.devices)))
        if any(one.probe.layout.shares == alone.shares for one in self._seen):
            return None
        if budget.is_expensive(budget.starts.seconds(alone)):
            return None
        turn = 1 + max(one.probe.turn for one in before)
        return Probe(alone, Stage.SOLO, SHORTEST_PROBE_SECONDS, turn)

    def _seconds_alone(self, layout: Layout) -> float:
        """Return how many seconds the shortest probe of a device takes, if its child is running."""
        return STEPS_OF_SHORTEST * self._row_demands[layout.active[0]].seconds(max(layout.shares))

    def _shorten_first(self, probe: Probe, budget: Budget) -> Probe:
        """Shorten a device's first solo probe to 1 % of the time left, but not below 0.2 s.

        Other probes are returned unchanged.
        """
        # a single step shows the memory of its rows, and about how long they take; the groups that
        # follow need the time for their starts
        position = probe.layout.active[0]
        if probe.layout.traits.together or self._measured_alone(position):
            return probe
        seconds = FIRST_SHARE * max(0.0, budget.seconds - budget.spent)
        seconds = max(SHORTEST_PROBE_SECONDS, min(probe.seconds, seconds))
        return msgspec.structs.replace(probe, seconds=round(seconds, 3))

    def _urgent_whole_step(self, budget: Budget) -> Probe | None:
        """Return the first step over all devices if it should run before more solo probes.

        Solo probes measure single devices. The step should run first if little time is left,
        because there is no plan without it, or if its processes take long to start. None if it can
        wait.
        """
        policy = self.policy
        if not self.parts or policy.machine.splits:
            return None
        probe = SplitStage(policy.predictions, budget, True).next_probe()
        if probe is None or not probe.layout.traits.together:
            return None
        left = budget.seconds - budget.spent
        start_seconds = budget.starts.seconds(probe.layout)
        # two sizes of each device show its time and memory; other rows are then better measured in
        # whole steps, by a group that runs already
        sizes = (self._measured_alone(i) for i in range(self._problem.devices))
        are_known = all(len(own) >= FEWEST_SIZES for own in sizes)
        if left < URGENT * start_seconds or (are_known and budget.is_expensive(start_seconds)):
            return self._interpolated_whole_step(budget) or probe
        return None

    def _interpolated_whole_step(self, budget: Budget) -> Probe | None:
        """Return a step with the planned rows if each device ran at least as many alone, or None.

        The memory of these rows lies between those of measured sizes, also if the larger size
        doesn't fit beside the device's part of the state.
        """
        division = self._division
        planned = division and propose(division, self._row_demands, self._problem)
        if not planned:
            return None
        for position, rows in enumerate(planned.layout.pass_rows):
            alone = self._measured_alone(position)
            if rows > max(one.probe.layout.shares[position] for one in alone):
                return None
        return self._make_whole_step(planned, budget)

    def _smaller_whole_step(self, budget: Budget) -> Probe | None:
        """Return a step over all devices with fewer rows, after one was short of memory, or None.

        It is used only if measuring single devices again would take long, because their processes
        have ended.
        """
        if not budget.is_expensive(budget.starts.longest_single_start):
            return None
        division = self._division
        ran = self._never_out_of_memory(self._seen)
        whole = [one for one in ran if one.probe.layout.state and not one.is_short_of_memory()]
        if not self.parts or not any(self._failures) or whole:
            return None
        smaller = division and propose(division, self._row_demands, self._problem)
        return self._make_whole_step(smaller, budget) if smaller else None

    def _make_whole_step(self, proposal: Proposal, budget: Budget) -> Probe | None:
        """Return a probe of a proposed step over all devices.

        None if it was tried already, gives a device no rows, or doesn't fit into the budget.
        """
        problem = self.policy.problem
        tried = [one.probe.layout for one in self._seen]
        if proposal.layout in tried or not all(proposal.layout.shares):
            return None
        rows_alone = layout_of(proposal.layout.shares, proposal.layout.micro)
        if problem.micro < bool(rows_alone.micro):
            return None
        if not budget.affords(rows_alone, Stage.RACE, proposal.seconds):
            return None
        seconds = budget.probe_seconds(rows_alone, Stage.SPLIT, step_seconds=proposal.seconds)
        return Probe(rows_alone, Stage.SPLIT, seconds)

    def _needs_start(self, probes: Sequence[Probe], budget: Budget) -> bool:
        """Whether these probes would start processes at a high cost, while a group runs already.

        True only after a step over all devices has run.
        """
        if not self._ran_whole or any(probe.layout.traits.together for probe in probes):
            return False
        return budget.is_expensive(budget.starts.longest_single_start)

    @property
    def _ran_whole(self) -> list[Timed]:
        """The measured steps over all devices with the current division, and rows on each."""
        ran = self._never_out_of_memory(self._seen)
        return [
            one
            for one in ran
            if one.probe.layout.state == self.parts and all(one.probe.layout.shares)
        ]

    def _larger_whole_step(self, budget: Budget) -> Probe | None:
        """Return a step over all devices with more rows than the largest that ran, or None.

        The group that ran it measures this step within seconds, while processes of single devices
        would have to start. Each device gets the rows that its memory is predicted to hold.
        """
        division, problem = self._division, self._problem
        if division is None or problem.global_batch is not None:
            return None
        largest = max(self._ran_whole, key=lambda one: one.probe.layout.global_batch)
        if largest.probe.layout.micro:
            return None
        before = largest.probe.layout.shares
        left = (problem.max_global_batch or UNBOUNDED) - sum(before)
        shares = []
        for position, rows in enumerate(before):
            most = self._most_rows_beside(position, largest, division)
            more = min(left, most - rows) // problem.multiple_of * problem.multiple_of
            left -= more
            shares.append(rows + more)
        layout = layout_of(tuple(shares))
        tried = [one.probe.layout.shares for one in self._seen if one.probe.layout.state]
        if sum(shares) <= sum(before) or layout.shares in tried:
            return None
        communication = self._communication_seconds(largest)
        seconds = expect_seconds(layout, self._row_demands) + communication
        if not budget.affords(layout, Stage.RACE, seconds):
            return None
        return Probe(
            layout, Stage.SPLIT, budget.probe_seconds(layout, Stage.SPLIT, step_seconds=seconds)
        )

    def _most_rows_beside(self, position: int, ran: Timed, division: StateDivision) -> int:
        """Return the most rows that a device is predicted to hold beside its part of the state.

        `ran` is a step over all devices with this division. The result isn't below its rows.
        """
        rows, used = ran.probe.layout.shares[position], ran.memory_bytes[position]
        limit = division.limits[position]
        need = self._row_demands[position]
        if used is None or limit is None or not need.row_bytes:
            return rows
        sizes = {one.probe.layout.shares[position] for one in self._measured_alone(position)}
        growth = KNOWN_ROW_GROWTH if len(sizes) > 1 else UNKNOWN_ROW_GROWTH
        return rows + max(0, int((limit - used) / (growth * need.row_bytes)))

    def layouts(self) -> list[Layout]:
        """Return the sharded layouts for the final comparison."""
        found = self.policy.best_splits() if self.parts else []
        held = [one.probe.layout for one in self._never_out_of_memory(self._held)]
        return [*(self._shard(one) for one in found if one.traits.together), *held]

    def curves(self, layout: Layout) -> tuple[tuple[Knots, int], ...]:
        """Return each device's compute time by rows, and its maximum rows, to be stored in a plan.

        Curves are empty if some devices have no rows, because training doesn't change the shares of
        such a layout.
        """
        if _has_devices_without_rows(layout):
            return NO_CURVE * len(layout.shares)
        return self.policy.curves(layout_of(layout.shares, layout.micro))

    def predicted_curve(self, position: int) -> PredictedCurve:
        """Return the predicted step times of a device, as points to plot."""
        return self.policy.predicted_curve(position)

    # ------------------------------------------------------------------ parts of the state

    @property
    def parts(self) -> tuple[float, ...] | None:
        """Each device's fraction of the state.

        Empty as long as it isn't known, and None if the state doesn't fit.
        """
        return None if self._division is None else self._division.parts

    @cached_property
    def _division(self) -> StateDivision | None:
        """How the state is divided among the devices; None if it doesn't fit."""
        problem = self._problem
        if not self._demands_are_known:
            # no parts until all devices were measured alone
            return StateDivision((), limits=problem.memory_bytes)
        limits = self._limits
        if len(limits) < problem.devices:
            equal = (1 / problem.devices,) * problem.devices
            return StateDivision(equal, problem.global_batch is not None, problem.memory_bytes)
        return self._divide(limits)

    @property
    def _demands_are_known(self) -> bool:
        return self._problem.state is not None and len(self._row_demands) == self._problem.devices

    @property
    def _limits(self) -> list[int]:
        """How many bytes each device has for its state and its rows.

        Devices whose memory is unknown are left out.
        """
        beside = self._state.beside_bytes
        return [max(1, size - beside) for size in self._problem.memory_bytes if size is not None]

    def _divide(
        self, limits: Sequence[int], without_rows: frozenset[int] = frozenset()
    ) -> StateDivision | None:
        """Return the best division of the state that leaves headroom, or None if it doesn't fit.

        Devices in `without_rows` hold state but compute nothing. A device's headroom is doubled for
        each step over several devices in which it ran out of memory. If the state then doesn't fit,
        the headroom of all devices is halved repeatedly.
        """
        failures, needs, problem = self._failures, self._row_demands, self._problem
        for forgiven in range(max(failures) + FEWEST_HALVINGS + 1):
            usable_bytes = tuple(
                max(0, round(limit - measure_headroom(limit, failure_count - forgiven)))
                for limit, failure_count in zip(limits, failures, strict=True)
            )
            division = divide_state(usable_bytes, needs, problem, without_rows)
            if division is not None:
                return msgspec.structs.replace(division, limits=usable_bytes)
        return None

    @property
    def _failures(self) -> list[int]:
        """How often each device ran out of memory in a step over several devices, or nearly so."""
        counts = [0] * self._problem.devices
        for one in self._seen:
            layout = one.probe.layout
            if not layout.traits.together:
                continue
            full: Sequence[int] = ()
            if isinstance(one, OutOfMemory):
                # if the devices aren't known, it counts for all that took part
                full = one.devices or layout.active
            elif isinstance(one, Timed):
                full = [i for i in layout.active if one.is_short_of_memory(i)]
            for position in full:
                counts[position] += 1
        return counts

    @property
    def _row_demands(self) -> list[RowDemand]:
        """Memory and time of rows on each device, from its solo probes that decide the division.

        A solo probe has no other device in its layout. Devices without such probes are left out.
        """
        first = Observations(self._problem)
        for position in range(self._problem.devices):
            for one in self._measured_for_division(position):
                first.add(self._without_shards(one))
        devices = (read_device(first, position) for position in range(self._problem.devices))
        return [self._row_demand(device) for device in devices if device.alone]

    def _measured_alone(self, position: int) -> list[Timed]:
        """Return the measurements in which only this device ran, ordered by round."""
        found = []
        for one in self._seen:
            layout = one.probe.layout
            if isinstance(one, Timed) and not layout.traits.together and layout.shares[position]:
                found.append(one)
        return sorted(found, key=lambda one: one.probe.turn)

    def _measured_for_division(self, position: int) -> list[Timed]:
        """Return the measurements of this device alone that decide the division of the state.

        These are all before the first step over several devices, and at least the first two.
        """
        # others would change the division, which must stay the same after a whole step
        alone = self._measured_alone(position)
        whole = (one.probe.turn for one in self._seen if one.probe.layout.state)
        first_whole = min(whole, default=math.inf)
        before = [one for one in alone if one.probe.turn < first_whole]
        return before if len(before) >= FEWEST_SIZES else alone[:FEWEST_SIZES]

    def _row_demand(self, device: DeviceEvidence) -> RowDemand:
        gathered, memory = self._state.gathered_bytes, device.memory
        if memory.line is None:
            batch, used = memory.points[-1] if memory.points else (1, gathered)
            slope = (used - min(used, gathered)) / batch
            return RowDemand(((batch, used),), slope, *_fit_time(device))
        _, slope = memory.line
        sizes = accumulate((size for _, size in memory.points), max)
        rows = (rows for rows, _ in memory.points)
        return RowDemand(tuple(zip(rows, sizes, strict=True)), slope, *_fit_time(device))

    # ------------------------------------------------------------------ devices without rows

    @cached_property
    def without_rows(self) -> Proposal | None:
        """The fastest predicted layout in which some devices hold state but compute nothing.

        None if there is no such layout.
        """
        limits = self._limits
        if not self._demands_are_known or len(limits) < self._problem.devices:
            return None
        found = []
        for holders in self._sets_without_rows():
            division = self._divide(limits, holders)
            proposal = division and propose(division, self._row_demands, self._problem)
            if proposal:
                found.append(proposal)
        return max(found, key=lambda one: one.rate(), default=None)

    def _sets_without_rows(self) -> list[frozenset[int]]:
        """Return sets of devices that might only hold state, without computing rows.

        There are two sets of each size: the slowest devices, and those with the least memory. At
        least one device is always left to compute.
        """
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
        return Probe(wanted.layout, Stage.SHARD, seconds, self._turn_of_whole_step)

    def _may_win(self, proposal: Proposal) -> bool:
        """Whether a layout is predicted to be faster than all sharded layouts that ran.

        If none ran yet, it is compared with the best layout in which all devices have rows.
        """
        ran = [one for one in self._never_out_of_memory(self._seen) if one.probe.layout.state]
        if ran:
            # the time to gather units isn't known: the shortest of those that ran is assumed
            more = min(self._communication_seconds(one) for one in ran)
            best = max(one.samples_per_second for one in ran)
            return proposal.rate(more) > (1 + LEAST_GAIN) * best
        division = self._division
        if division is None or not division.rows:
            return division is None
        everywhere = propose(division, self._row_demands, self._problem)
        return everywhere is None or proposal.rate() > (1 + CLEAR_GAIN) * everywhere.rate()

    def _is_far_slower(self, layout: Layout) -> bool:
        """Whether a layout is predicted to be less than half as fast as another that was measured.

        The other one is the fastest of those in which some devices hold state but compute nothing.
        """
        rates = [one.samples_per_second for one in self._never_out_of_memory(self._held)]
        if not rates or not layout.traits.together:
            return False
        expected = layout.global_batch / expect_seconds(layout, self._row_demands)
        return expected < FAR_SLOWER * max(rates)

    def _never_out_of_memory(self, observations: Sequence[Observation]) -> list[Timed]:
        """Return the measurements of layouts that have never run out of memory."""
        full = [one.probe.layout for one in self._seen if isinstance(one, OutOfMemory)]
        return [
            one for one in observations if isinstance(one, Timed) and one.probe.layout not in full
        ]

    def _communication_seconds(self, timed: Timed) -> float:
        """Return the communication time of a step, in seconds, such as for gathering parameters."""
        layout = timed.probe.layout
        return max(0.0, timed.step_seconds - expect_seconds(layout, self._row_demands))

    # ------------------------------------------------------------------ rows, as with whole models

    @cached_property
    def policy(self) -> RowPolicy:
        """The rules that choose each device's rows, within the memory that the state leaves."""
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
            if _has_devices_without_rows(one.probe.layout):
                continue
            if not isinstance(one, OutOfMemory) or one.probe.layout.state in ((), self.parts):
                known.add(self._check_fit_beside_state(self._without_shards(one), left))
        return RowPolicy(MachineModel(problem, known, TimeLeft(problem, BALANCE, known)))

    def _without_shards(self, observation: Observation) -> Observation:
        """Return an observation as if its layout had no shards and its devices held no state.

        The memory of the state is subtracted from the measured memory, because rows are chosen
        within the memory that the state leaves.
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
        """Return each device's peak bytes, minus the bytes of its state.

        None for a device whose memory use is unknown, or is no larger than the state itself, so
        that it shows nothing about the rows.
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
        self, observation: Observation, free_bytes: Sequence[int | None]
    ) -> Observation:
        """Turn a measurement of one device into a failure if its rows wouldn't fit in training.

        In such measurements, a device holds only a small part of the state, so more rows fit than
        in training. `free_bytes` is what the state leaves free on each device.
        """
        if (
            not isinstance(observation, Timed)
            or observation.probe.layout.traits.together
            or not self.parts
        ):
            return observation
        short = []
        for position, used in enumerate(observation.memory_bytes):
            limit = free_bytes[position]
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
        """Convert a probe of an unsharded layout into a probe of the sharded model."""
        layout = probe.layout
        if layout.traits.together:
            return msgspec.structs.replace(
                probe,
                layout=self._shard(layout),
                stage=Stage.SHARD,
                turn=self._turn_of_whole_step,
            )
        part = msgspec.structs.replace(layout, kind="part")
        return msgspec.structs.replace(probe, layout=part, stage=Stage.PART)

    @property
    def _turn_of_whole_step(self) -> int:
        """The turn of the next step over several devices, above those of all solo probes so far."""
        # observations may be read in any order, so this shows which solo probes came before
        alone = (one.probe.turn for one in self._seen if not one.probe.layout.state)
        return 1 + max(alone, default=-1)

    def _shard(self, layout: Layout) -> Layout:
        return msgspec.structs.replace(layout, kind="shard", state=self.parts or ())


def measure_headroom(limit_bytes: float, doublings: int) -> float:
    """Return how many bytes of a device's memory a division of the state leaves free.

    `doublings` is how often the usual headroom is doubled, or halved if it is negative. It is
    halved at most twice.
    """
    least = min(LEAST_HEADROOM, SMALL_HEADROOM * limit_bytes)
    return max(HEADROOM * limit_bytes, least) * 2.0 ** max(doublings, -FEWEST_HALVINGS)


def _subtract_bytes(
    sizes: Sequence[int | None], subtracted: Sequence[float]
) -> tuple[int | None, ...]:
    """Return the sizes minus the subtracted bytes, at least 1 byte each; None stays None."""
    pairs = zip(sizes, subtracted, strict=True)
    return tuple(size and max(1, size - round(state)) for size, state in pairs)


def _fit_time(device: DeviceEvidence) -> tuple[float, float]:
    """Fit the time of a pass; return its fixed part and the time per row, in seconds."""
    batches = [point.batch for point in device.alone]
    seconds = [point.seconds for point in device.alone]
    largest = max(device.alone, key=lambda point: point.batch)
    proportion = largest.seconds / largest.batch
    if min(batches) == largest.batch:
        return 0.0, proportion
    slope = linear_regression(batches, seconds).slope
    slope = min(proportion, max(LEAST_GROWTH * proportion, slope))
    return max(0.0, fmean(seconds) - slope * fmean(batches)), slope


def divide_state(
    limits: Sequence[float],
    demands: Sequence[RowDemand],
    problem: Problem,
    without_rows: frozenset[int] = frozenset(),
) -> StateDivision | None:
    """Return the division of the state with the highest throughput, or None if it doesn't fit.

    A requested global batch is computed in one pass if it fits, otherwise by gradient accumulation.

    - `limits`: usable bytes of each device.
    - `demands`: memory and time of rows on each device.
    - `without_rows`: devices that hold state but compute nothing.
    """
    # in their first pass, devices without rows compute one filler row that doesn't count
    room = StateDivider(limits, demands, problem, without_rows=without_rows)
    if problem.global_batch is None:
        return room.divide()
    at_once = room.divide_for(problem.global_batch)
    if at_once is not None or not problem.micro:
        return at_once
    return StateDivider(
        limits, demands, problem, in_passes=True, without_rows=without_rows
    ).divide()


def propose(
    division: StateDivision, demands: Sequence[RowDemand], problem: Problem
) -> Proposal | None:
    """Return the layout that follows from a division of the state, with its predicted step time.

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
    return Proposal(layout, expect_seconds(layout, demands))


def expect_seconds(layout: Layout, demands: Sequence[RowDemand]) -> float:
    """Return the predicted compute time of a sharded step in seconds, without communication."""
    passes = max(map(layout.passes, layout.computing))
    rows = [max(1.0, layout.shares[i] / passes) for i in layout.computing]
    pairs = zip(layout.computing, rows, strict=True)
    return passes * max(demands[i].seconds(own) for i, own in pairs)


def _has_devices_without_rows(layout: Layout) -> bool:
    """Whether some devices of a layout hold state but compute nothing."""
    return layout.computing != layout.active


class StateDivider:
    """Finds the division of the state that makes sharded training fastest.

    - `limits`: usable bytes of each device.
    - `demands`: memory and time of rows on each device.
    - `in_passes`: whether gradients are kept between gradient-accumulation passes, which takes
      memory.
    - `without_rows`: positions of devices that hold state but compute nothing.
    """

    def __init__(
        self,
        limits: Sequence[float],
        demands: Sequence[RowDemand],
        problem: Problem,
        in_passes: bool = False,
        without_rows: frozenset[int] = frozenset(),
    ) -> None:
        assert problem.state is not None
        self._computing = [i for i in range(len(demands)) if i not in without_rows]
        self._limits, self._row_demands, self._in_passes = limits, demands, in_passes
        self._fewest = problem.multiple_of
        self._most = float(problem.global_batch or problem.max_global_batch or UNBOUNDED)
        self._state = problem.state.state_bytes
        # bytes of the state that are held while activations are at their peak
        self._held = state_bytes_at_peak(problem.state, in_passes)
        # the optimizer's step runs without gathered units
        self._of_step = self._state / (self._state + problem.state.step_bytes)

    def divide(self) -> StateDivision | None:
        """Return the division with the highest throughput; None if the state doesn't fit.

        Call this if the global batch is free, or if a requested one takes several passes. For a
        requested batch in one pass, use `divide_for`.
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
        left = self._limits[position] - LEAST_PART * self._held
        return self._row_demands[position].rows_within(left)

    def _bytes_left(self, rows: Sequence[float]) -> list[float]:
        """Return how many bytes of state fit on each device in addition to these rows.

        Negative if the rows themselves don't fit.
        """
        found = []
        for limit, need, own in zip(self._limits, self._row_demands, rows, strict=True):
            # a device without rows computes a filler row, which leaves no gradients room
            filler = 0 if own else 1
            free = limit - need.bytes(filler)
            # gradients, for example, don't exist while activations are at their peak
            beside = (limit - need.bytes(own + filler)) * self._state / self._held
            found.append(min(beside, free, limit * self._of_step))
        return found

    def _fits(self, rows: Sequence[float]) -> bool:
        left = self._bytes_left(rows)
        return min(left) > 0 and sum(left) >= self._state

    def _rate(self, rows: Sequence[float]) -> float:
        """Return the predicted throughput, in samples/s, if the devices have these rows."""
        return sum(rows) / max(self._row_demands[i].seconds(rows[i]) for i in self._computing)

    def _parts(self, rows: Sequence[float]) -> StateDivision:
        left = self._bytes_left(rows)
        return StateDivision(_round_parts(left), self._in_passes, rows=tuple(rows))


def _round_parts(sizes: Sequence[float]) -> tuple[float, ...]:
    """Return each size as a fraction of their sum.

    The fractions are rounded so that they add up to exactly 1.
    """
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
    """Return the bytes of the state that exist while activations are at their peak.

    Gradients exist at that moment only if a step has several passes (`in_passes`).
    """
    return state.state_bytes - (0 if in_passes else state.gradient_bytes)
