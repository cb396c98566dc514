"""Train a Keras model on unequal devices with the shares of a plan, as if on one device.

    from evener.keras import Split

    split = Split("plan.toml")
    model = split.build(make_model)          # make_model returns a compiled Keras model
    model.fit(x, y, epochs=5)                # uses the plan's global batch

There are two engines: towers (one process, the default) and multiworker (one process per device).
"""

from __future__ import annotations

from .compatibility import SplitWarning, model_digest
from .report import Report
from .split import ENGINES, Split
from .tf_devices import make_logical_cpus

__all__ = ["ENGINES", "Report", "Split", "SplitWarning", "make_logical_cpus", "model_digest"]
