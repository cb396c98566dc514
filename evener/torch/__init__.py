"""Train a PyTorch model by a plan: unequal shares of each batch on unequal devices, and the same
learning.

from evener.torch import Split

split = Split("plan.toml")
loader = split.loader(dataset, seed=0)
model = split.wrap(model)            # gradients are weighted and summed; the loop stays as it was

docs/training_torch.md has loops, what is exact, and what is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rows.loader import Loader
    from .split import Split
    from .step.part import Part

__all__ = ["Loader", "Part", "Split"]

_HOMES = {
    "Loader": "evener.torch.rows.loader",
    "Part": "evener.torch.step.batch",
    "Split": "evener.torch.split",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: a room of this package needs no other's."""
    if name not in _HOMES:
        raise AttributeError(f"module 'evener.torch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
