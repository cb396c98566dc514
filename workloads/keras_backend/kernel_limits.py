"""The most rows that TensorFlow's GPU kernels take: they count a tensor's elements in 32 bits and abort beyond that.

Source: GetGpuLaunchConfig in tensorflow/core/util/gpu_launch_config.h takes an int of elements and checks that it has
not overflowed; the process is ended by SIGABRT, often after minutes of tuning.
"""

from __future__ import annotations

from math import prod
from typing import Any

MOST_ELEMENTS = 2**31 - 1


class TooManyElementsError(MemoryError):
    """A batch whose tensors TensorFlow's GPU kernels can't count: a limit on the batch, as memory is."""


def largest_rows(model: Any) -> int | None:
    """Rows at which the largest input or output of a layer reaches the limit; None where no shape is known."""
    sizes = [prod(shape) for tensor in _tensors(model) if None not in (shape := tuple(tensor.shape[1:]))]
    return MOST_ELEMENTS // max(sizes) if sizes and max(sizes) else None


def check_rows(model: Any, rows: int) -> None:
    """TooManyElementsError for more rows on one GPU than TensorFlow's kernels count."""
    most = largest_rows(model)
    if most is not None and rows > most:
        raise TooManyElementsError(
            f"{rows} samples on one GPU: TensorFlow's kernels count 2^31 elements in a tensor, {most} samples here."
        )


def _tensors(model: Any) -> list[Any]:
    """The outputs of each layer, also of models within; a layer that was never called has none."""
    found: list[Any] = []
    for layer in model._flatten_layers(include_self=False):
        for node in layer._inbound_nodes:
            found += node.output_tensors
    return [tensor for tensor in found if tensor.shape is not None]
