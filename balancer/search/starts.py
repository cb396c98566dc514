"""Estimate how long the processes of a probe take to start, from earlier starts.

This matters because a model with a billion parameters takes 20 s to load. Once processes are
running, they can measure all layouts that differ only in their batch sizes. A process that ran out
of memory may have exited, and then has to be started again.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from statistics import median

from ..families import family_of
from ..types import Layout, OutOfMemory, Stage, Timed
from .observations import STAGES, Observations, order_probe

# maximum seconds to set up a group of processes, beyond the start of each of them: -0.7 to 2.2 s
# beyond 12 to 19 s on two H200s
GROUP_SECONDS = 4.0


class StartTimes:
    """Estimates how many seconds the processes of a probe take to start, excluding imports."""

    def __init__(self, observations: Observations, groups_end_others: bool = False) -> None:
        """Read from the observations how long processes took to start.

        `groups_end_others` says whether the processes of single devices end when a probe over
        several devices starts.
        """
        self._seen = observations
        self._timed = observations.timed()
        self._groups_end_others = groups_end_others

    def seconds(self, layout: Layout) -> float:
        """Return how many seconds the processes of a layout are expected to take to start.

        0 if they are already running. The estimate is rather high, because it is based on the first
        starts, which are the slowest.
        """
        own = self._seconds_by_group_key.get(layout.group_key)
        if not own:
            return 0.0 if layout.group_key in self._recovering_groups else self._of_new(layout)
        paid = [seconds for seconds in own if seconds]
        if layout.traits.alone and self._single_processes_ended:
            known = paid or self._failed_starts(layout)
            if known:
                return min(known)
        ends = self._exit_counts[layout.group_key] if self.out_of_memory_restart_seconds else 0
        start_each_time = len(paid) > 1 + ends
        are_down = 0 < len(paid) <= ends
        return min(paid) if start_each_time or are_down else 0.0

    def _failed_starts(self, layout: Layout) -> list[float]:
        """Return the time of the first probe of these processes if it ran out of memory, in a list.

        It includes their start, which no measurement shows if they kept running.
        """
        failed = [
            one.elapsed_seconds
            for one in self._seen.in_stage(Stage.SOLO)
            if isinstance(one, OutOfMemory) and one.probe.layout.group_key == layout.group_key
        ]
        return [max(failed)] if failed else []

    @cached_property
    def _single_processes_ended(self) -> bool:
        """Whether processes of single devices have ended to leave their memory to others."""
        if self._seen.in_stage(Stage.PART, Stage.SHARD):  # no device has memory for both
            return True
        groups = self._seen.in_stage(Stage.SPLIT)
        return self._groups_end_others and any(one.probe.layout.traits.together for one in groups)

    @cached_property
    def longest_single_start(self) -> float:
        """The longest start of a process for a single device, in seconds; 0 if none is known."""
        return max((seen.restart_seconds for seen in self._seen.timed(Stage.SOLO)), default=0.0)

    @cached_property
    def out_of_memory_restart_seconds(self) -> float:
        """The time, in seconds, to restart a process after it ran out of memory.

        0 if such processes keep running.
        """
        rounds: defaultdict[Layout, list[Timed | OutOfMemory]] = defaultdict(list)
        for seen in self._seen.in_stage(Stage.SOLO):
            if isinstance(seen, (Timed, OutOfMemory)):
                rounds[seen.probe.layout.group_key].append(seen)
        went_on = []
        for each in rounds.values():
            each.sort(key=lambda seen: order_probe(seen.probe))
            for before, after in pairwise(each):
                if isinstance(before, OutOfMemory) and isinstance(after, Timed):
                    went_on.append(not after.restart_seconds)
        return 0.0 if went_on and all(went_on) else self.longest_single_start

    @cached_property
    def _seconds_by_group_key(self) -> dict[Layout, list[float]]:
        """The measured start times in seconds, by `Layout.group_key`.

        Layouts with equal keys use the same processes. 0 for a probe whose processes were running
        already.
        """
        starts: defaultdict[Layout, list[float]] = defaultdict(list)
        for seen in self._timed:
            starts[seen.probe.layout.group_key].append(seen.restart_seconds)
        return dict(starts)

    @cached_property
    def _recovering_groups(self) -> set[Layout]:
        """The group keys of processes that kept running every time they ran out of memory.

        A group key (`Layout.group_key`) is a layout without its sizes. Layouts with equal keys use
        the same processes.
        """
        seen = [one for one in self._seen.in_stage(*STAGES) if isinstance(one, OutOfMemory)]
        return {
            one.probe.layout.group_key for one in seen if one.goes_on
        } - self._exit_counts.keys()

    @cached_property
    def _exit_counts(self) -> defaultdict[Layout, int]:
        """How often processes exited because they ran out of memory, by `Layout.group_key`."""
        ends: defaultdict[Layout, int] = defaultdict(int)
        for seen in self._seen.in_stage(*STAGES):
            if isinstance(seen, OutOfMemory) and not seen.goes_on:
                ends[seen.probe.layout.group_key] += 1
        return ends

    def _of_new(self, layout: Layout) -> float:
        if layout.traits.side_by_side:
            pack = self._pack_seconds(layout.processes)
            if pack is not None:
                return pack
        more = (family_of(layout).start_cost - 1.0) * self.longest_single_start
        return (self.longest_single_start + min(more, GROUP_SECONDS)) * layout.processes

    def _pack_seconds(self, processes: int) -> float | None:
        """Return how many seconds several jobs on one device are expected to take to start.

        This is extrapolated from other numbers of jobs. None if several jobs were never started.
        """
        found: defaultdict[int, list[float]] = defaultdict(list)
        for seen in self._timed:
            if seen.probe.layout.traits.side_by_side and seen.start_seconds:
                found[seen.probe.layout.processes].append(seen.restart_seconds)
        if not found:
            return None
        least, most = min(found), max(found)
        quickest, longest = median(found[least]), median(found[most])
        # in proportion to the largest pack, unless packs of two sizes show a smaller slope
        slope = longest / most
        if most > least:
            slope = min(slope, max(0.0, (longest - quickest) / (most - least)))
        return max(0.0, longest + slope * (processes - most))
