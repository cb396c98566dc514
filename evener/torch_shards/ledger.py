"""The ledger of a rank: the bytes that it holds of a sharded model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


class Ledger:
    """Bytes of `shards`, `gathered` units with their gradients before the sum, and `gradients` after it; `peak` of all.

    The optimizer's state comes with its first step, and stays.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.peak = 0

    def add(self, kind: str, size: int) -> None:
        """Count bytes that come, or go where `size` is negative."""
        self.now[kind] += size
        self.most[kind] = max(self.most[kind], self.now[kind])
        self.peak = max(self.peak, self.now.total())

    def note_state(self, optimizer: Any) -> None:
        """Count the state of an optimizer of the model's pieces, but for its counters of steps."""
        tensors = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        size = sum(each.numel() * each.element_size() for each in tensors if each.ndim)
        self.add("state", size - self.now["state"])
