"""The results of exploration from which families choose their layouts (`families.SearchView`)."""

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
    """Implements `families.SearchView` for one set of observations.

    Lists of layouts start with the best layout. `shards` are the sharded layouts worth racing.
    """

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
        """The best solo layout; empty if there is none.

        If it has several passes although its whole batch is known to fit in memory, the same layout
        with one pass comes second.
        """
        return self._policy.singles()

    @cached_property
    def splits(self) -> Sequence[Layout]:
        """The best split and others worth racing; empty unless splits were requested."""
        return self._policy.best_splits() if self.options.with_splits else []

    @property
    def even_splits(self) -> Sequence[Layout]:
        """The even splits over all live devices.

        If the options ask for scaling, even splits over fewer devices are included. Empty if splits
        were requested and exploration hasn't measured any yet.
        """
        # a free batch has as many rows per device as the best split, which isn't known yet
        if self.options.with_splits and not self._policy.machine.splits:
            return []
        return self._policy.even_splits(self.splits, self.options.scaling)

    @cached_property
    def common_batch(self) -> int | None:
        """The global batch for layouts without a measured best batch, such as placements.

        It is the fixed batch. Without one, it is the batch of the best solo layout, or else the
        smallest batch that didn't fit on a device alone. None if all are unknown, or if rows are
        assigned by cost.
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
        """The modes of packs to try, each with its `Packing`.

        A `Packing` finds the best pack. Empty if no packs were requested, or if no device can train
        alone in one pass.
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
        """The best measured pack of each mode, or the next one to measure.

        The next one is given if no pack of the mode has run yet. A pack is several trainings on one
        device. Its mode is how the trainings share the device.
        """
        best = {mode: packing.best_layout() for mode, packing in self.packings}
        plain = best.get("")
        if "logical" in self.options.pack_modes and plain is not None:
            best["logical"] = self._logical_pack(plain)
        return [layout for layout in best.values() if layout is not None]

    def _logical_pack(self, plain: Layout) -> Layout:
        """Return a pack like `plain`, with a logical device for each training."""
        wanted = pack_on(plain, plain.processes, "logical")
        layouts = (timed.probe.layout for timed in self._seen.timed())
        tried = [layout for layout in layouts if layout.placement == "logical"]
        if wanted in tried or not tried or self._budget.affords(wanted, Stage.RACE):
            return wanted
        # the budget doesn't suffice for the wanted pack
        return max(tried, key=lambda layout: layout.processes)
