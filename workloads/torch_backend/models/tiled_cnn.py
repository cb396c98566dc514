"""A convolutional classifier whose image is cut in 2 x 2 tiles, each on a device of its own, borders exchanged.

Source: the slides on several GPUs, "Tile Parallelism for Images". What each device holds of an image is a quarter, so
images train that one device has no memory for; the result is that of the whole image (`torch_backend.tiling`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from evener.errors import RequestError

from ...datasets import stripes
from ...protocol import Place, Workload
from ..tiling import cut, run_tiled
from ..workload import TorchWorkload
from .classifiers import as_tensors, classifier, conv_blocks, lay_for

CHANNELS = (16, 32)
SMALLEST_SIDE = 4  # two poolings


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: `side`, `classes`, `learning_rate`."""
    side, classes = settings["side"], settings["classes"]
    if side < SMALLEST_SIDE:
        raise RequestError(f"torch_tiles can't have side={side}.", f"It is {SMALLEST_SIDE} or more.")
    return TorchWorkload(
        place,
        lambda: classifier(TilesNet(classes), settings["learning_rate"]),
        lambda rows: as_tensors(stripes(rows, side, classes)),
        lay_for(place, {"tiles": TilesNet.lay}),
    )


class TilesNet(nn.Module):  # type: ignore[misc]
    """Blocks of Conv3x3, BatchNorm, ReLU and MaxPool2 with 16 and 32 channels, the mean over pixels, a linear head.

    Input (samples, 3, height, width), both 4 or more; output (samples, classes), on the first device.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(*conv_blocks((3, *CHANNELS), "batch"))
        self.head = nn.Linear(CHANNELS[-1], classes)
        self._devices: tuple[torch.device, ...] = ()

    def lay(self, devices: Sequence[torch.device]) -> TilesNet:
        """Compute in tiles on these devices, in turn; the parameters stay on the first."""
        self._devices = tuple(devices)
        self.to(devices[0])
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the whole images."""
        if not self._devices:
            logits: Tensor = self.head(self.layers(images).mean(dim=(2, 3)))
            return logits
        home = self._devices[0]
        tiles = run_tiled(self.layers, cut(images, self._devices), self._devices)
        sums = [part.sum(dim=(2, 3)).to(home, non_blocking=True) for row in tiles.parts for part in row]
        tiled: Tensor = self.head(torch.stack(sums).sum(dim=0) / prod(tiles.size))
        return tiled
