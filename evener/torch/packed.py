"""Handle weights that bitsandbytes packs in 4 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .private import own_parameters


def is_packed(tensor: Any) -> bool:
    """Return whether a tensor is a 4-bit weight of bitsandbytes."""
    return hasattr(tensor, "bnb_quantized") and hasattr(tensor, "quant_state")


def explain_unusable(tensor: Any) -> str:
    """Return the reason why a 4-bit weight of bitsandbytes can't be sharded, or "" if it can."""
    if tensor.requires_grad:
        return "Its 4-bit weights are trained, and bytes have no gradients."
    if tensor.bnb_quantized and not hasattr(tensor.quant_state, "to"):
        return "Its 4-bit weights have no statistics."
    if getattr(tensor.quant_state, "packing_format_for_cpu", False):
        return "Its 4-bit weights were packed again for inference on a CPU."
    return ""


def pack_weights(model: Any, device: torch.device) -> None:
    """Pack the model's unpacked 4-bit weights on `device`, one at a time, and move them to the CPU.

    Weights on the meta device are left unchanged.
    """
    # moving a weight to `device` packs it; one at a time saves memory
    for module in model.modules():
        for name, tensor in own_parameters(module).items():
            if is_packed(tensor) and not tensor.bnb_quantized and tensor.device.type != "meta":
                own_parameters(module)[name] = tensor.to(device).to("cpu")


def list_statistics(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that are needed to unpack 4-bit weights, such as their scales."""
    found: list[torch.Tensor] = []
    states = [
        tensor.quant_state for tensor in tensors if is_packed(tensor) and tensor.bnb_quantized
    ]
    while states:
        state = states.pop(0)
        for value in vars(state).values():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, type(state)):  # statistics of the statistics
                states.append(value)
    return found
