"""Let checkpoints handle an unsharded model like a sharded one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ..packed import is_packed
from .place import ShardRank
from .slot import Slot


def is_alone() -> bool:
    """Return whether this process trains without other ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


class WholeModel:
    """An unsharded model, with the attributes of Sharded that checkpoints use."""

    # packed (4-bit) weights are left out, because checkpoints don't have them

    def __init__(self, model: Any) -> None:
        found: dict[int, Slot] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            if not is_packed(tensor):
                slot = found.setdefault(id(tensor), Slot(tensor))
                slot.names.append(name)
                slot.piece = slot.whole = tensor
        self.slots = list(found.values())
        self.whole = self  # the unsharded parameters are in its `slots`
        self.root, self.units = SimpleNamespace(flats=()), ()
        device = next((each.piece.device for each in self.slots), None)
        rank = 0 if is_alone() else dist.get_rank()
        self.place = ShardRank(rank, (1.0,), device, single_rank=True)

    def note_state(self, optimizer: Any) -> None:
        """Do nothing, because memory isn't counted for an unsharded model."""
