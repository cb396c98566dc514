"""The ledger of a rank: the bytes that it holds of a sharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from .unit import find_parameters


def count_gathered(model: Any, units: Mapping[str, Any], dtype: Any) -> int:
    """The most bytes that a rank holds beside its part of the state and activations.

    The model's own parameters, two units, and the gradients of all these before their sum.
    """
    sizes = []
    for own in find_parameters(model, units).values():
        tensors = [each.tensor for each in own]
        whole = sum(each.numel() * (dtype or each.dtype).itemsize for each in tensors)
        sizes.append(whole + sum(each.numel() * each.element_size() for each in tensors if each.requires_grad))
    return int(sizes[0] + sum(sorted(sizes[1:])[-2:]))


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
