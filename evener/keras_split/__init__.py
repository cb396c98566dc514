"""Train a Keras model by a plan: unequal shares of each batch on unequal devices, with the same result.

    from evener.keras_split import Split

    split = Split("plan.toml")
    model = split.build(make_model)          # make_model returns a compiled Keras model
    model.fit(x, y, epochs=5)                # the batch size is the plan's

There are two engines: towers (one process, the default) and multiworker (a process for each device).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compatibility import SplitWarning, model_digest
    from .report import Report
    from .split import ENGINES, Split
    from .tf_devices import make_logical_cpus

__all__ = ["ENGINES", "Report", "Split", "SplitWarning", "make_logical_cpus", "model_digest"]

_MODULES = {
    "ENGINES": "split",
    "Report": "report",
    "Split": "split",
    "SplitWarning": "compatibility",
    "make_logical_cpus": "tf_devices",
    "model_digest": "compatibility",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'evener.keras_split' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"evener.keras_split.{_MODULES[name]}"), name)
