"""What tells one PyTorch model from another: the plan's figures hold for the model that they were measured with."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any


def model_digest(model: Any) -> str:
    """16 hexadecimal digits of the shapes and types of a module's parameters and buffers; names don't count."""
    parameters = [f"{tuple(each.shape)}:{each.dtype}:{each.requires_grad}" for each in model.parameters()]
    buffers = [f"{tuple(each.shape)}:{each.dtype}" for each in model.buffers()]
    return blake2b("\n".join(["torch", *parameters, *buffers]).encode(), digest_size=8).hexdigest()
