"""The memory that a training's state takes, by the way it trains: all parameters, LoRA or QLoRA.

Bytes are of a parameter of the model. Adapters of rank 16 on all linear layers of models of 1 to 8
billion parameters have about a hundredth as many, with gradients and AdamW's averages in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ADAPTER_BYTES = 16 * 0.01  # whole on each device


class TrainingWay(msgspec.Struct, frozen=True):
    """A way to train a model: the bytes of a parameter that shards divide, and those that each
    device has whole.
    """

    kind: str
    words: str
    divided_bytes: float
    whole_bytes: float = 0.0

    def need(self, parameters: int) -> int:
        """The bytes of a model's state on one device."""
        return round(parameters * (self.divided_bytes + self.whole_bytes))

    def largest_whole(self, limits: Sequence[int]) -> int:
        """The most parameters where each device holds the model."""
        return int(min(limits) / (self.divided_bytes + self.whole_bytes))

    def largest_sharded(self, limits: Sequence[int]) -> int:
        """The most parameters where the devices hold parts of the model.

        Every device has its whole part beside them: a device that can't is the bound.
        """
        most = sum(limits) / (self.divided_bytes + len(limits) * self.whole_bytes)
        return int(min(most, min(limits) / self.whole_bytes) if self.whole_bytes else most)


# itself, its gradient and two averages
FULL = TrainingWay("full", "AdamW in float32", 16.0)
LORA = TrainingWay("lora", "LoRA (r=16, bfloat16)", 2.0, ADAPTER_BYTES)
# two parameters a byte, and statistics of 64 of them, which have statistics too
QLORA = TrainingWay("qlora", "QLoRA (r=16, 4 bits)", 0.5, 0.016 + ADAPTER_BYTES)
