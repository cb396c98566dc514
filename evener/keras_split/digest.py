"""A digest of a Keras model: the plan's figures hold for the model that they were measured with."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any


def model_digest(model: Any) -> str:
    """16 hexadecimal digits of the model's input shapes and weights' shapes and types; names don't count."""
    inputs = [str(tuple(each.shape)) for each in getattr(model, "inputs", None) or []]
    weights = [f"{tuple(weight.shape)}:{weight.dtype}:{weight.trainable}" for weight in model.weights]
    return blake2b("\n".join(["keras", *inputs, *weights]).encode(), digest_size=8).hexdigest()
