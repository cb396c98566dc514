"""What it costs to start the children of a probe, by the starts seen so far.

A model of a billion parameters takes 20 s to load. Children that run serve all layouts of their
devices; one that ran out of memory may have ended, and then starts again.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from statistics import median

from ..families import family_of
from ..types import Layout, OutOfMemory, Timed
from .observations import STAGES, Observations, order_probe


class Starts:
    """The starts that one set of observations shows; all figures are seconds without imports."""

    def __init__(self, seen: Observations) -> None:
        self._seen = seen
        self._timed = seen.timed()

    def seconds(self, layout: Layout) -> float:
        """The start of a layout's children: 0 if they run already.

        It is their usual start if they ended as a probe ran out of memory, or start for each probe.
        For new children it is guessed from the solo starts, which come first and so are the
        slowest.
        """
        own = self._of_children.get(layout.children)
        if not own:
            return self._of_new(layout)
        paid = [seconds for seconds in own if seconds]
        ends = self._ends[layout.children] if self.after_out_of_memory else 0
        start_each_time = len(paid) > 1 + ends
        are_down = 0 < len(paid) <= ends
        return min(paid) if start_each_time or are_down else 0.0

    @cached_property
    def alone(self) -> float:
        """The longest start of a device alone; 0 if none is known."""
        return max((seen.restart_seconds for seen in self._seen.timed("solo")), default=0.0)

    @cached_property
    def after_out_of_memory(self) -> float:
        """The start that a device alone needs after it ran out of memory; 0 where all that did were
        seen to go on without one.
        """
        rounds: defaultdict[Layout, list[Timed | OutOfMemory]] = defaultdict(list)
        for seen in self._seen.in_stage("solo"):
            if isinstance(seen, (Timed, OutOfMemory)):
                rounds[seen.probe.layout.children].append(seen)
        went_on = []
        for each in rounds.values():
            each.sort(key=lambda seen: order_probe(seen.probe))
            for before, after in pairwise(each):
                if isinstance(before, OutOfMemory) and isinstance(after, Timed):
                    went_on.append(not after.restart_seconds)
        return 0.0 if went_on and all(went_on) else self.alone

    @cached_property
    def _of_children(self) -> dict[Layout, list[float]]:
        """What each group of children took to start, once for each probe."""
        starts: defaultdict[Layout, list[float]] = defaultdict(list)
        for seen in self._timed:
            starts[seen.probe.layout.children].append(seen.restart_seconds)
        return dict(starts)

    @cached_property
    def _ends(self) -> defaultdict[Layout, int]:
        """How often a probe of each group of children ran out of memory."""
        ends: defaultdict[Layout, int] = defaultdict(int)
        for seen in self._seen.in_stage(*STAGES):
            if isinstance(seen, OutOfMemory):
                ends[seen.probe.layout.children] += 1
        return ends

    def _of_new(self, layout: Layout) -> float:
        if layout.traits.side_by_side:
            pack = self._of_pack(layout.processes)
            if pack is not None:
                return pack
        return self.alone * family_of(layout).start_cost * layout.processes

    def _of_pack(self, processes: int) -> float | None:
        """The start of `processes` trainings; None before any pack was started.

        In proportion to the most that were, or less where a second size shows that cores are free.
        """
        found: defaultdict[int, list[float]] = defaultdict(list)
        for seen in self._timed:
            if seen.probe.layout.traits.side_by_side and seen.start_seconds:
                found[seen.probe.layout.processes].append(seen.restart_seconds)
        if not found:
            return None
        least, most = min(found), max(found)
        quickest, longest = median(found[least]), median(found[most])
        slope = longest / most
        if most > least:
            slope = min(slope, max(0.0, (longest - quickest) / (most - least)))
        return max(0.0, longest + slope * (processes - most))
