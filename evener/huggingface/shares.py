"""Which share of the plan is whose among a trainer's processes, and in how many passes each takes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from evener.errors import PlanError
from evener.passes import count_passes
from evener.plan import Plan, Share, load_plan
from evener.torch_split.process import Stand, find_stand, is_cpu, settle, visible_gpus
from evener.torch_split.rank_shares import plan_shares


class RankShares(msgspec.Struct, frozen=True):
    """The plan as the ranks of this training have it; `batches` and `passes` are in the order of ranks."""

    rank: int
    batches: tuple[int, ...]  # rows of each rank in a full global batch
    passes: tuple[int, ...]
    share: Share  # this rank's
    workload: str

    @property
    def world(self) -> int:
        """Processes that train together."""
        return len(self.batches)

    @property
    def global_batch(self) -> int:
        """Rows of a full global batch."""
        return sum(self.batches)

    @property
    def pass_rows(self) -> int | None:
        """Rows of the largest pass; None where every share is one pass."""
        if max(self.passes) == 1:
            return None
        return max(-(-batch // count) for batch, count in zip(self.batches, self.passes, strict=True))

    def with_equal_passes(self) -> RankShares:
        """Every rank in as many passes as the one that needs most."""
        return msgspec.structs.replace(self, passes=(max(self.passes),) * self.world)


def find_rank_shares(
    plan: Plan | str | os.PathLike[str], global_batch: int | None, device: Any, strict: bool
) -> RankShares:
    """By the device of each rank where the plan names it, else in the plan's order; PlanError where that can't be."""
    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    stand, gpus = find_stand(), visible_gpus()
    batches = plan_shares(loaded, None, global_batch, stand, gpus, strict)
    active = loaded.layout.active
    passes = tuple(count_passes(batch, share.micro) for batch, share in zip(batches, active, strict=True))
    order = _order(active, stand, device, gpus)
    mine = active[order[stand.rank]]
    if is_cpu(mine):
        settle(device, mine)
    return RankShares(
        stand.rank, tuple(batches[i] for i in order), tuple(passes[i] for i in order), mine, loaded.workload
    )


def _order(active: Sequence[Share], stand: Stand, device: Any, gpus: dict[str, int]) -> tuple[int, ...]:
    """The place in the plan of each rank's share; every rank calls it."""
    names = [name for name, number in gpus.items() if device.type == "cuda" and number == device.index]
    own: str | None = names[0] if names else None
    found: list[str | None] = [own]
    if stand.world > 1:
        found = [None] * stand.world
        dist.all_gather_object(found, own)
    places = {share.device: place for place, share in enumerate(active)}
    if not any(name in places for name in found):
        return tuple(range(stand.world))
    order = tuple(places.get(name or "", -1) for name in found)
    if sorted(order) != list(range(len(active))):
        raise PlanError(
            f"The ranks train on {', '.join(str(name) for name in found)}, which are not the plan's active devices.",
            "Start one process on each of them: CUDA_VISIBLE_DEVICES chooses.",
        )
    return order
