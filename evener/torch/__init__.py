"""Train a PyTorch model by a plan: unequal shares of each batch on unequal devices, with
the same result.

    from evener.torch import Split

    split = Split("plan.toml")
    loader = split.loader(dataset, seed=0)
    model = split.wrap(model)  # gradients are weighted and summed; the loop stays as it was

docs/training_torch.md has example loops, and says what is exact and what is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .rows.loader import Loader
    from .split import Split
    from .step.part import Part

__all__ = ["Loader", "Part", "Split"]

# when they are first used: a room of this package needs no other's
__getattr__ = lazy_names(
    __name__,
    {
        "Loader": "evener.torch.rows.loader",
        "Part": "evener.torch.step.part",
        "Split": "evener.torch.split",
    },
)
