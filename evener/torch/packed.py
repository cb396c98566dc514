"""Weights packed into 4 bits, as bitsandbytes has them: a frozen parameter of bytes, and statistics
beside it by which its layer unpacks them.

A packed parameter is known by two attributes: `bnb_quantized`, False until it has been packed, and
`quant_state`, the statistics, which can be moved by `to(device)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def is_packed(tensor: Any) -> bool:
    """True for a parameter of packed weights, or of weights that are packed once they are moved to
    a device.
    """
    return hasattr(tensor, "bnb_quantized") and hasattr(tensor, "quant_state")


def explain_unusable(tensor: Any) -> str:
    """Why a packed parameter can't be trained beside, as a sentence; empty where it can."""
    if tensor.requires_grad:
        return "Its 4-bit weights are trained, and bytes have no gradients."
    if tensor.bnb_quantized and not hasattr(tensor.quant_state, "to"):
        return "Its 4-bit weights have no statistics."
    if getattr(tensor.quant_state, "packing_format_for_cpu", False):
        return "Its 4-bit weights were packed again for inference on a CPU."
    return ""


def pack_weights(model: Any, device: torch.device) -> None:
    """Pack what isn't packed yet on this device, a parameter at a time; it lies on the host
    after.
    """
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if is_packed(tensor) and not tensor.bnb_quantized and tensor.device.type != "meta":
                module._parameters[name] = tensor.to(device).to("cpu")


def list_statistics(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors by which packed parameters among these are unpacked."""
    found: list[torch.Tensor] = []
    states = [each.quant_state for each in tensors if is_packed(each) and each.bnb_quantized]
    while states:
        state = states.pop(0)
        for value in vars(state).values():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, type(state)):  # statistics of the statistics
                states.append(value)
    return found
