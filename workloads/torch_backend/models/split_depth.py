"""A convolutional stack cut in depth: its first half on one device, its second half on the next.

Source: the slides on several GPUs, "Model Parallelism in Depth" (their second half is never handed the first one's
output across devices; here it is). Plain, only one half works at a time; with micro-batches in flight the first half
computes the next one while the second half has the last. The loss is taken on all outputs together, so the gradient is
the whole batch's either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evener.errors import RequestError

from ...datasets import stripes
from ...protocol import Place, Workload
from ..workload import Lay, TorchWorkload
from .classifiers import as_tensors, classifier, conv_blocks, lay_for

FIRST_CHANNELS = (16, 32)
SECOND_CHANNELS = (128, 256, 512)
NORMS = ("group", "batch")
SMALLEST_SIDE = 32  # five poolings


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `side`, `classes`, `norm`, `micro_batches`, `learning_rate`."""
    pieces, side, classes = settings["micro_batches"], settings["side"], settings["classes"]
    if pieces < 2 or side < SMALLEST_SIDE:
        raise RequestError(
            f"torch_depth can't have micro_batches={pieces} and side={side}.",
            f"micro_batches is 2 or more, side {SMALLEST_SIDE} or more.",
        )
    placements: dict[str, Lay] = {"halves": DepthNet.lay, "halves-micro": partial(DepthNet.lay, micro_batches=pieces)}
    return TorchWorkload(
        place,
        lambda: classifier(DepthNet(classes, settings["norm"]), settings["learning_rate"]),
        lambda rows: as_tensors(stripes(rows, side, classes)),
        lay_for(place, placements),
    )


class DepthNet(nn.Module):  # type: ignore[misc]
    """Blocks of Conv3x3, normalisation, ReLU and MaxPool2 with 16, 32 | 128, 256, 512 channels, then a linear head.

    Input (samples, 3, side, side) with a side of 32 or more, output (samples, classes). `norm` is "group", which looks
    at one sample at a time, or the slides' "batch", which makes micro-batches another model.
    """

    def __init__(self, classes: int = 10, norm: str = "group") -> None:
        super().__init__()
        if norm not in NORMS:
            raise RequestError(f"torch_depth has no normalisation {norm!r}.", f"Choose {' or '.join(NORMS)}.")
        self.norm = norm
        self.first = nn.Sequential(*conv_blocks((3, *FIRST_CHANNELS), norm))
        self.second = nn.Sequential(*conv_blocks((FIRST_CHANNELS[-1], *SECOND_CHANNELS), norm))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(SECOND_CHANNELS[-1], classes))
        self._devices: tuple[torch.device, ...] = ()
        self._micro_batches = 1

    def lay(self, devices: Sequence[torch.device], micro_batches: int = 1) -> DepthNet:
        """Move the halves to the first two of `devices`; RequestError if they can't work so."""
        if len(devices) < 2:
            raise RequestError("The halves of torch_depth need two devices.", "Name two with --devices.")
        if micro_batches > 1 and self.norm == "batch":
            raise RequestError(
                "Batch normalisation over a micro-batch is not that over the batch.",
                "Take --set norm=group, or the placement halves.",
            )
        self._devices, self._micro_batches = tuple(devices[:2]), micro_batches
        self.first.to(devices[0])
        self.second.to(devices[1])
        self.head.to(devices[1])
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Logits, on the device of the second half."""
        if not self._devices:
            return self._end(self.first(images))
        first, second = self._devices
        outputs = []
        for piece in images.chunk(self._micro_batches):
            # nothing here waits: the copy and the second half queue behind this piece, the first half goes on
            middle = self.first(piece.to(first, non_blocking=True))
            outputs.append(self._end(middle.to(second, non_blocking=True)))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _end(self, middle: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(middle))
        return logits
