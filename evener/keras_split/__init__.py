"""Train a Keras model by a plan: unequal shares of each batch on unequal devices, and the same learning.

    from evener.keras_split import Split

    split = Split("plan.toml")
    model = split.build(make_model)          # make_model returns a compiled Keras model
    model.fit(x, y, epochs=5)                # the batch size is the plan's

Three engines do it: towers (one process, the default), mirrored (one process, NCCL), multiworker (a process per device).
"""

from __future__ import annotations

from evener.keras_split.devices import make_logical_cpus
from evener.keras_split.digest import model_digest
from evener.keras_split.refusals import SplitWarning
from evener.keras_split.report import Report
from evener.keras_split.split import ENGINES, Split

__all__ = ["ENGINES", "Report", "Split", "SplitWarning", "make_logical_cpus", "model_digest"]
