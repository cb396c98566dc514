"""Train one model on devices of unequal speed.

`load_plan` reads a plan, `report` reports training steps to the monitor, and `metrics` returns
metrics for experiment trackers. What scripts import to train with a plan is in `evener.torch`,
`evener.huggingface`, `evener.lightning` and `evener.keras`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy_names import lazy_names

if TYPE_CHECKING:
    from .live.metrics import metrics
    from .live.reporter import report
    from .plan.file import Plan, load_plan

__version__ = "0.3.0"
__all__ = ["Plan", "__version__", "load_plan", "metrics", "report"]

__getattr__ = lazy_names(
    __name__,
    {
        "Plan": "evener.plan.file",
        "load_plan": "evener.plan.file",
        "metrics": "evener.live.metrics",
        "report": "evener.live.reporter",
    },
)
