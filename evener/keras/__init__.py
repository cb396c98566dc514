"""Train a Keras model by a plan: unequal shares of each batch on unequal devices, with the same
result.

    from evener.keras import Split

    split = Split("plan.toml")
    model = split.build(make_model)          # make_model returns a compiled Keras model
    model.fit(x, y, epochs=5)                # the batch size is the plan's

There are two engines: towers (one process, the default) and multiworker (a process for each
device).
"""

from __future__ import annotations

from .compatibility import SplitWarning, model_digest
from .report import Report
from .split import ENGINES, Split
from .tf_devices import make_logical_cpus

__all__ = ["ENGINES", "Report", "Split", "SplitWarning", "make_logical_cpus", "model_digest"]
