"""Train a PyTorch model with a plan: unequal shares of each batch on unequal devices.

Training gives the same result as with equal shares.

    from evener.torch import Split

    split = Split("plan.toml")
    loader = split.loader(dataset, seed=0)
    model = split.wrap(model)  # gradients are weighted and summed; the loop stays unchanged

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

# imported on first use, because most modules of this package don't need them
__getattr__ = lazy_names(
    __name__,
    {
        "Loader": "evener.torch.rows.loader",
        "Part": "evener.torch.step.part",
        "Split": "evener.torch.split",
    },
)
