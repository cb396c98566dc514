"""Collect what the layout families need to know about a search to propose layouts.

A family is a kind of layout, such as a single device, an unequal split or several jobs per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ..families import PackMode, pack_on
from ..types import Layout, OutOfMemory, Stage
from .budget import Budget
from .layouts import LayoutOptions
from .packing import Packing
from .rows import RowPolicy
from .texts import TextPolicy


class FamilyView:
    """The best known layouts of each kind, from which the layout families make their proposals."""

    def __init__(
        self,
        options: LayoutOptions,
        policy: RowPolicy | TextPolicy,
        budget: Budget,
        shards: Sequence[Layout] = (),
    ) -> None:
        self.options = options
        self.shards = shards
        self.devices = policy.problem.devices
        self._policy = policy
        self._budget = budget
        self._problem = policy.problem
        self._seen = policy.seen

    @cached_property
    def singles(self) -> Sequence[Layout]:
        """The best layout on a single device; empty if no device can run the batch.

        If that layout uses gradient accumulation although one pass is sure to fit, the layout with
        one pass comes second.
        """
        return self._policy.singles()

    @cached_property
    def splits(self) -> Sequence[Layout]:
        """The best layouts over several devices; empty if the search doesn't include them."""
        return self._policy.best_splits() if self.options.needs_split_probes else []

    @property
    def even_splits(self) -> Sequence[Layout]:
        """Layouts with equal shares; empty until the first step over several devices has run."""
        # a free batch has as many rows per device as the best split, which isn't known yet
        if self.options.needs_split_probes and not self._policy.machine.splits:
            return []
        return self._policy.even_splits(self.splits, self.options.scaling)

    @cached_property
    def common_batch(self) -> int | None:
        """The global batch for kinds of layouts that have no search for their best batch.

        It is the requested batch, or else the best batch of a single device. None if rows differ in
        length, or if no batch is known.
        """
        if not self._policy.machine.by_rows:
            return None
        if self._problem.global_batch is not None:
            return self._problem.global_batch
        if self.singles:
            return self.singles[0].global_batch
        alone = self._seen.in_stage(Stage.SOLO)
        full = [one.probe.layout.global_batch for one in alone if isinstance(one, OutOfMemory)]
        return min(full, default=None)

    @cached_property
    def packings(self) -> tuple[tuple[PackMode, Packing], ...]:
        """The searches for the best number of jobs on one device, one for each way to share it.

        Empty if no layouts with several jobs on a device were requested, if no device can compute
        its batch in one pass, or if rows differ in length.
        """
        if not any(family.traits.side_by_side for family in self.options.wanted):
            return ()
        at_once = [layout for layout in self.singles if not layout.in_passes]
        if not at_once or not isinstance(self._policy, RowPolicy):
            return ()
        modes = [mode for mode in self.options.pack_modes if mode != "logical"]
        return tuple((mode, Packing(self._policy, at_once[0], mode)) for mode in modes)

    @property
    def packs(self) -> list[Layout]:
        """The best layout with several jobs on one device, for each way to share the device."""
        best = {mode: packing.best_layout() for mode, packing in self.packings}
        plain = best.get("")
        if "logical" in self.options.pack_modes and plain is not None:
            best["logical"] = self._logical_pack(plain)
        return [layout for layout in best.values() if layout is not None]

    def _logical_pack(self, plain: Layout) -> Layout:
        """Return the layout in which jobs on one device each get an equal part of its memory.

        It has as many jobs as `plain`, the best layout of jobs that share memory freely. If there
        is no time left to measure it, but layouts of this kind with other numbers of jobs ran, the
        one with the most jobs among those is returned.
        """
        wanted = pack_on(plain, plain.processes, "logical")
        layouts = (timed.probe.layout for timed in self._seen.timed())
        tried = [layout for layout in layouts if layout.placement == "logical"]
        if wanted in tried or not tried or self._budget.affords(wanted, Stage.RACE):
            return wanted
        return max(tried, key=lambda layout: layout.processes)
