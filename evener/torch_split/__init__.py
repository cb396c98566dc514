"""Train a PyTorch model by a plan: unequal shares of each batch on unequal devices, and the same
learning.

from evener.torch_split import Split

split = Split("plan.toml")
loader = split.loader(dataset, seed=0)
model = split.wrap(model)            # gradients are weighted and summed; the loop stays as it was

docs/training_torch.md has loops, what is exact, and what is refused.
"""

from __future__ import annotations

from ..torch_rows.loader import Loader
from .batch import Part
from .split import Split

__all__ = ["Loader", "Part", "Split"]
