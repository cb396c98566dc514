"""Cut images into tiles on several devices, which copy the pixels at the borders from each other.

The result is exactly the same as for the whole image. Each output tile of a layer is a range of
rows and columns. The tile's device has most of the input for it, copies the rest from neighboring
tiles, and pads with zeros outside the image. Nothing is computed twice and nothing is approximated,
so sizes that don't divide evenly need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

SIDE = 2  # number of tiles along each axis
GROUPS = 8  # number of groups in GroupNorm
CHANNELS = (16, 32)


@dataclass(frozen=True)
class Tiles:
    """A batch of images that is cut into 2 x 2 tiles on several devices.

    `parts` are the tiles by row and column, of shape (batch, channels, height, width). `rows` and
    `columns` are the pixel positions of the cuts, from 0 to the image's size.
    """

    parts: Sequence[Sequence[Tensor]]
    rows: Sequence[int]
    columns: Sequence[int]
    devices: Sequence[torch.device]

    @property
    def all_tiles(self) -> list[Tensor]:
        """All tiles, row by row."""
        return [part for row in self.parts for part in row]

    def map(self, compute: Callable[[Tensor], Tensor]) -> Tiles:
        """Apply a function to each tile."""
        return replace(self, parts=[[compute(part) for part in row] for row in self.parts])

    def compute_windows(
        self, compute: Callable[[Tensor], Tensor], stride: int, border: int
    ) -> Tiles:
        """Apply a convolution or pooling to each tile.

        `compute` is the convolution or pooling, and `stride` is its stride. `border` is the number
        of pixels that it needs beyond each edge of a tile. They are copied from neighboring tiles,
        or 0 outside the image.
        """
        rows, columns = ([cut // stride for cut in cuts] for cuts in (self.rows, self.columns))

        def tile(i: int, j: int) -> Tensor:
            down, across = (
                (cuts[k] * stride - border, cuts[k + 1] * stride + border)
                for cuts, k in ((rows, i), (columns, j))
            )
            return compute(self.gather(down, across, tile_device(self.devices, i, j)))

        return Tiles(
            [[tile(i, j) for j in range(SIDE)] for i in range(SIDE)], rows, columns, self.devices
        )

    def gather(
        self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device
    ) -> Tensor:
        """Return a rectangle of the image as one tensor on a device.

        `rows` and `columns` are half-open ranges of pixels. Pixels outside the image are 0.
        """
        # `rows` and `columns` have one edge more than there are tiles along their axis
        across = [_slice_in_tile(columns, left) for left in self.columns[:-1]]
        bands = []
        for tiles, top in zip(self.parts, self.rows[:-1], strict=True):
            down = _slice_in_tile(rows, top)
            pieces = [tile[:, :, down, right] for tile, right in zip(tiles, across, strict=True)]
            here = [piece.to(device, non_blocking=True) for piece in pieces]
            bands.append(_concatenate(here, 3))
        inside = _concatenate(bands, 2)
        outside = (-columns[0], columns[1] - self.columns[-1], -rows[0], rows[1] - self.rows[-1])
        border = [max(0, size) for size in outside]
        return F.pad(inside, border) if any(border) else inside


def _slice_in_tile(positions: tuple[int, int], tile_start: int) -> slice:
    """Return the part of a range of pixels that is in a tile, relative to the tile's start.

    The tile starts at pixel `tile_start`.
    """
    begin, end = positions
    return slice(max(0, begin - tile_start), max(0, end - tile_start))


def _concatenate(parts: Sequence[Tensor], dimension: int) -> Tensor:
    """Concatenate those tensors that aren't empty."""
    held = [part for part in parts if part.numel()]
    return torch.cat(held, dimension) if len(held) > 1 else held[0] if held else parts[0]


def cut(images: Tensor, devices: Sequence[torch.device]) -> Tiles:
    """Cut a batch of images into tiles, and send them to the devices.

    The images have shape (batch, channels, height, width).
    """
    rows, columns = ([size * k // SIDE for k in range(SIDE + 1)] for size in images.shape[2:])
    parts = [
        [
            images[:, :, top:bottom, left:right].to(tile_device(devices, i, j), non_blocking=True)
            for j, (left, right) in enumerate(pairwise(columns))
        ]
        for i, (top, bottom) in enumerate(pairwise(rows))
    ]
    return Tiles(parts, rows, columns, devices)


def tile_device(devices: Sequence[torch.device], i: int, j: int) -> torch.device:
    """Return the device of the tile in row `i` and column `j`."""
    return devices[(i * SIDE + j) % len(devices)]


def run_tiled(layers: nn.Sequential, tiles: Tiles) -> Tiles:
    """Apply layers to a tiled image, with the same output as for the whole image."""
    for layer in layers:
        match layer:
            case nn.Conv2d():
                # `to` is differentiable, so gradients are accumulated in the layer itself
                copies = {
                    device: layer.weight.to(device, non_blocking=True)
                    for device in set(tiles.devices)
                }
                tiles = tiles.compute_windows(partial(_convolve, copies), 1, 1)
            case nn.MaxPool2d():
                tiles = tiles.compute_windows(layer, layer.kernel_size, 0)
            case nn.BatchNorm2d():
                tiles = _normalize(layer, tiles)
            case _:
                tiles = tiles.map(layer)
    return tiles


def _convolve(weights: Mapping[torch.device, Tensor], part: Tensor) -> Tensor:
    return F.conv2d(part, weights[part.device])


def _normalize(layer: nn.BatchNorm2d, tiles: Tiles) -> Tiles:
    """Apply batch normalization with the statistics of the whole image.

    Only sums are copied between devices, not pixels.
    """
    mean, variance = layer.running_mean, layer.running_var
    if layer.training:
        home, count = (
            layer.weight.device,
            tiles.parts[0][0].shape[0] * tiles.rows[-1] * tiles.columns[-1],
        )
        mean = _sum_channels(tiles, home) / count
        variance = (
            _sum_channels(tiles.map(lambda part: (part - _as_channels(mean, part)).square()), home)
            / count
        )
        # update the running statistics as BatchNorm2d does: with the unbiased variance
        layer.running_mean.lerp_(mean.detach(), layer.momentum)
        layer.running_var.lerp_(variance.detach() * count / max(1, count - 1), layer.momentum)
        layer.num_batches_tracked.add_(1)
    scale = layer.weight * torch.rsqrt(variance + layer.eps)

    def apply(part: Tensor) -> Tensor:
        return (part - _as_channels(mean, part)) * _as_channels(scale, part) + _as_channels(
            layer.bias, part
        )

    return tiles.map(apply)


def _sum_channels(tiles: Tiles, device: torch.device) -> Tensor:
    """Return the sum of each channel over all tiles, on one device."""
    return torch.stack(
        [part.sum(dim=(0, 2, 3)).to(device, non_blocking=True) for part in tiles.all_tiles]
    ).sum(dim=0)


def _as_channels(values: Tensor, part: Tensor) -> Tensor:
    return values.to(part.device, non_blocking=True)[None, :, None, None]


def conv_blocks(channels: Sequence[int], norm: str) -> list[nn.Module]:
    """Return the layers of several blocks: convolution, normalization, ReLU and pooling.

    `channels` are the channels before the first block and after each block.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        normalise = nn.GroupNorm(GROUPS, after) if norm == "group" else nn.BatchNorm2d(after)
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            normalise,
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return layers


class TilesNet(nn.Module):  # type: ignore[misc]
    """Convolutional network whose images can be cut into tiles on several devices.

    The input has shape (rows, 3, height, width) with sides of at least 8 pixels, the output (rows,
    classes).
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(*conv_blocks((3, *CHANNELS), "batch"))
        self.head = nn.Linear(CHANNELS[-1], classes)
        self._devices: tuple[torch.device, ...] = ()

    def place(self, devices: Sequence[torch.device]) -> TilesNet:
        """Assign the tiles to the given devices, and return the network.

        The weights are on the first device.
        """
        self._devices = tuple(devices)
        self.to(devices[0])
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits.

        After `place`, the convolutions are computed tile by tile on several devices.
        """
        if not self._devices:
            logits: Tensor = self.head(self.layers(images).mean(dim=(2, 3)))
            return logits
        tiles = run_tiled(self.layers, cut(images, self._devices))
        sums = [
            part.sum(dim=(2, 3)).to(self._devices[0], non_blocking=True) for part in tiles.all_tiles
        ]
        tiled: Tensor = self.head(
            torch.stack(sums).sum(dim=0) / (tiles.rows[-1] * tiles.columns[-1])
        )
        return tiled
