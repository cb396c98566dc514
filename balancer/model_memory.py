"""Memory for parameters, gradients and optimizer state, in bytes per parameter.

LoRA adapters are assumed to have a hundredth of the model's parameters, as with rank 16 on all
linear layers of models with 1 to 8 billion parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ADAPTER_BYTES = 16 * 0.01  # each device holds the whole adapters


class TrainingMethod(msgspec.Struct, frozen=True):
    """Memory per parameter of a training method, in bytes.

    Sharding divides `divided_bytes` among the devices; each device holds `whole_bytes` itself.
    """

    kind: str
    description: str
    divided_bytes: float
    whole_bytes: float = 0.0

    def bytes_needed(self, parameters: int) -> int:
        """Return the bytes that training a model of this many parameters takes on one device."""
        return round(parameters * (self.divided_bytes + self.whole_bytes))

    def largest_whole(self, limits: Sequence[int]) -> int:
        """Return the largest parameter count that fits on each device without sharding.

        `limits` are the usable bytes of each device.
        """
        return int(min(limits) / (self.divided_bytes + self.whole_bytes))

    def largest_sharded(self, limits: Sequence[int]) -> int:
        """Return the largest parameter count that fits if the model is sharded over all devices.

        `limits` are the usable bytes of each device.
        """
        most = sum(limits) / (self.divided_bytes + len(limits) * self.whole_bytes)
        return int(min(most, min(limits) / self.whole_bytes) if self.whole_bytes else most)


# the parameter, its gradient and two averages
FULL = TrainingMethod("full", "AdamW in float32", 16.0)
LORA = TrainingMethod("lora", "LoRA (r=16, bfloat16)", 2.0, ADAPTER_BYTES)
# 4 bits per parameter, and a scale per block of 64 parameters, which is itself quantized
QLORA = TrainingMethod("qlora", "QLoRA (r=16, 4 bits)", 0.5, 0.016 + ADAPTER_BYTES)
