"""The memory of a training's state for different training methods.

The methods are full training, LoRA and QLoRA. The memory is given in bytes per parameter of the
model. Adapters are assumed to have rank 16 on all linear layers. In models of 1 to 8 billion
parameters, they then have about a hundredth as many parameters as the model. Their gradients and
AdamW's averages are in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ADAPTER_BYTES = 16 * 0.01  # each device holds the whole adapters


class TrainingMethod(msgspec.Struct, frozen=True):
    """A training method, and its state's memory in bytes per parameter.

    The parameters are the model's. In sharded training, `divided_bytes` are divided among the
    devices. Each device holds all of the `whole_bytes`.
    """

    kind: str
    description: str
    divided_bytes: float
    whole_bytes: float = 0.0

    def bytes_needed(self, parameters: int) -> int:
        """Return the bytes of the state on a device that holds the whole model.

        `parameters` is the number of the model's parameters.
        """
        return round(parameters * (self.divided_bytes + self.whole_bytes))

    def largest_whole(self, limits: Sequence[int]) -> int:
        """Return how many parameters a model may have to fit whole on each device.

        `limits` are the devices' memory in bytes.
        """
        return int(min(limits) / (self.divided_bytes + self.whole_bytes))

    def largest_sharded(self, limits: Sequence[int]) -> int:
        """Return how many parameters a sharded model may have.

        `limits` are the devices' memory in bytes. The device with the least memory may set the
        limit, because each device also holds the bytes that aren't sharded.
        """
        most = sum(limits) / (self.divided_bytes + len(limits) * self.whole_bytes)
        return int(min(most, min(limits) / self.whole_bytes) if self.whole_bytes else most)


# the parameter, its gradient and two averages
FULL = TrainingMethod("full", "AdamW in float32", 16.0)
LORA = TrainingMethod("lora", "LoRA (r=16, bfloat16)", 2.0, ADAPTER_BYTES)
# 4 bits per parameter, and a scale per block of 64 parameters, which is itself quantized
QLORA = TrainingMethod("qlora", "QLoRA (r=16, 4 bits)", 0.5, 0.016 + ADAPTER_BYTES)
