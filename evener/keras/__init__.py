"""Train Keras models by unequal shares, on TensorFlow."""

from __future__ import annotations

from .compatibility import SplitWarning, model_digest
from .report import Report
from .split import ENGINES, Split
from .tf_devices import make_logical_cpus

__all__ = ["ENGINES", "Report", "Split", "SplitWarning", "make_logical_cpus", "model_digest"]
