"""A digest that tells one PyTorch model from another: the plan's figures hold for the model that was measured."""

from __future__ import annotations

import warnings
from hashlib import blake2b
from typing import Any

from ..plan.check import check_fit
from ..plan.file import Plan


def model_digest(model: Any) -> str:
    """16 hexadecimal digits of the shapes and types of a module's parameters and buffers; names don't count."""
    parameters = [f"{tuple(each.shape)}:{each.dtype}:{each.requires_grad}" for each in model.parameters()]
    buffers = [f"{tuple(each.shape)}:{each.dtype}" for each in model.buffers()]
    return blake2b("\n".join(["torch", *parameters, *buffers]).encode(), digest_size=8).hexdigest()


def check_model(model: Any, plan: Plan | None, strict: bool) -> None:
    """Warn, or raise PlanError with `strict`, if the plan was measured with another model."""
    if plan is not None:
        for difference in check_fit(plan, devices=None, world=None, workload_digest=model_digest(model), strict=strict):
            warnings.warn(difference, stacklevel=4)
