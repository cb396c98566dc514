"""Found by each Python of a program that benchmarks.installed_programs starts: keeps its weights,
and moves its shares.

OBSERVED is the folder for the weights, as they were when a model was wrapped and as they are after
the last step. With MOVED in the environment, evener's shares go from even to 3:1, 1:3 and so on,
every five steps.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Any

from wrapt import register_post_import_hook, wrap_function_wrapper

_kept: dict[str, Any] = {}


def _copy(module: Any) -> dict[str, Any]:
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def _keep_model(wrapped: Any, model: Any, arguments: Any, keywords: Any) -> None:
    if any(getattr(each, "type", "") == "cpu" for each in keywords.get("device_ids") or ()):
        del keywords["device_ids"]  # timm's, which DistributedDataParallel takes for GPUs only
    wrapped(*arguments, **keywords)
    if os.environ.get("RANK", "0") == "0" and not _kept:
        _kept.update(module=weakref.ref(model.module), before=_copy(model.module))
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_keep_weights)


def _keep_weights(*_: Any) -> None:
    # a model that this kept alive would keep gloo from leaving its group
    module = _kept["module"]()
    if module is not None:
        _kept["after"] = _copy(module)


def _save() -> None:
    if "after" in _kept:
        del _kept["module"]
        sys.modules["torch"].save(_kept, os.path.join(os.environ["OBSERVED"], "weights.pt"))


def _watch_torch(module: Any) -> None:
    wrap_function_wrapper(module.nn.parallel, "DistributedDataParallel.__init__", _keep_model)
    atexit.register(_save)


class _Moved:
    """A rule for shares, in place of a Rebalancer."""

    windows_needed = windows_seen = 1

    def observe(self, step: int, _: Any, rows: Any, **__: Any) -> Any:
        from evener.training.rebalance import Change

        total, large = sum(rows), max(1, sum(rows) * 3 // 4)
        first = large if rows[0] <= total / 2 else total - large
        return Change(
            (first, total - first), (first, total - first), f"a script, at step {step}", 0.1
        )


def _move(module: Any) -> None:
    module.MOST_STEPS, module.EXCHANGED_WINDOWS = module.FEWEST_STEPS, 1
    wrap_function_wrapper(module, "Rebalancing._make_rule", lambda *_: _Moved())


if os.environ.get("LOCAL_RANK") is not None:
    register_post_import_hook(_watch_torch, "torch")
    if os.environ.get("MOVED"):
        register_post_import_hook(_move, "evener.torch.rebalancing")
