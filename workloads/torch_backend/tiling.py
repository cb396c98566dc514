"""An image cut into tiles on several devices, with borders exchanged: the result is the whole image's, exactly.

Each output tile of a layer is a range of rows and columns. A tile has most of the input rows that its windows read,
borrows the rest from its neighbours, and fills what lies outside the image as the layer itself would. Nothing is
computed twice and nothing is approximated, so sizes that don't divide need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.errors import RequestError

from ..datasets import stripes
from ..protocol import Place, Workload
from .models import as_tensors, classifier, conv_blocks, lay_for
from .workload import TorchWorkload

SIDE = 2  # tiles along each axis


@dataclass(frozen=True)
class Window:
    """A layer's window on one axis of its input; `reach` is from the first to the last position that it reads."""

    stride: int
    padding: int
    reach: int

    def reads(self, first: int, stop: int) -> tuple[int, int]:
        """The half-open input range behind output positions [first, stop); it may leave the image on either side."""
        return first * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach

    def cut_output(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The places where the output is cut: near the input's cuts, so that few rows are borrowed."""
        length = (cuts[-1] + 2 * self.padding - self.reach) // self.stride + 1
        if length < 1:
            raise RequestError(f"An image side of {cuts[-1]} is too small for its layers.", "Give larger images.")
        return (0, *(min(length, cut // self.stride) for cut in cuts[1:-1]), length)


@dataclass(frozen=True)
class Tiles:
    """A batch of images, shaped (samples, channels, height, width) as a whole, cut into SIDE x SIDE tiles.

    `rows` and `columns` are the cuts, both ends included; a tile of a tiny image may be empty.
    """

    parts: tuple[tuple[Tensor, ...], ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the whole image."""
        return self.rows[-1], self.columns[-1]

    def map(self, compute: Callable[[Tensor], Tensor]) -> Tiles:
        """Tiles computed one by one, of the same sizes."""
        return replace(self, parts=tuple(tuple(compute(part) for part in row) for row in self.parts))

    def gather(
        self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device, outside: float = 0.0
    ) -> Tensor:
        """The part of the whole image in these half-open ranges, on `device`; `outside` beyond the image."""
        bands = []
        for tiles, top in zip(self.parts, self.rows, strict=False):
            down = slice(max(0, rows[0] - top), max(0, rows[1] - top))
            across = (slice(max(0, columns[0] - left), max(0, columns[1] - left)) for left in self.columns)
            pieces = (tile[:, :, down, right] for tile, right in zip(tiles, across, strict=False))
            bands.append(_join([piece.to(device, non_blocking=True) for piece in pieces], 3))
        inside, (height, width) = _join(bands, 2), self.size
        border = (-columns[0], columns[1] - width, -rows[0], rows[1] - height)
        return F.pad(inside, [max(0, each) for each in border], value=outside) if max(border) > 0 else inside


def _join(parts: Sequence[Tensor], dimension: int) -> Tensor:
    """The parts that aren't empty, as one."""
    held = [part for part in parts if part.numel()]
    return torch.cat(held, dimension) if len(held) > 1 else (held or parts)[0]


def cut(images: Tensor, devices: Sequence[torch.device]) -> Tiles:
    """Cut (samples, channels, height, width) in half along both axes; tiles go to the devices in turn."""
    rows, columns = (tuple(size * k // SIDE for k in range(SIDE + 1)) for size in images.shape[2:])
    parts = tuple(
        tuple(
            images[:, :, top:bottom, left:right].to(tile_device(devices, i, j), non_blocking=True)
            for j, (left, right) in enumerate(pairwise(columns))
        )
        for i, (top, bottom) in enumerate(pairwise(rows))
    )
    return Tiles(parts, rows, columns)


def tile_device(devices: Sequence[torch.device], i: int, j: int) -> torch.device:
    """The device of the tile in row i and column j."""
    return devices[(i * SIDE + j) % len(devices)]


def run_tiled(layers: nn.Sequential, tiles: Tiles, devices: Sequence[torch.device]) -> Tiles:
    """The output of `layers` for the whole image, computed tile by tile; RequestError for a layer that can't be cut.

    The parameters stay where they are: each device gets a copy for the step, through which gradients flow back and add.
    """
    for layer in layers:
        match layer:
            case nn.Conv2d():
                tiles = _convolve(layer, tiles, devices)
            case nn.MaxPool2d():
                tiles = _pool(layer, tiles, devices)
            case nn.BatchNorm2d():
                tiles = _normalise(layer, tiles)
            case nn.ReLU() | nn.Tanh() | nn.Identity():
                tiles = tiles.map(layer)
            case _:
                raise RequestError(
                    f"A {type(layer).__name__} layer can't be computed in tiles.",
                    "Tiles know Conv2d, MaxPool2d, BatchNorm2d, ReLU and Tanh.",
                )
    return tiles


def _convolve(layer: nn.Conv2d, tiles: Tiles, devices: Sequence[torch.device]) -> Tiles:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise RequestError("Tiles know convolutions padded by a number of zeros.", "Give padding as a number.")
    # `to` is differentiable, so gradients land on the layer itself
    copies = {
        device: [each if each is None else each.to(device, non_blocking=True) for each in (layer.weight, layer.bias)]
        for device in set(devices)
    }

    def compute(part: Tensor) -> Tensor:
        return F.conv2d(part, *copies[part.device], layer.stride, 0, layer.dilation, layer.groups)

    return _compute_windows(layer, tiles, devices, compute, 0.0, layer.out_channels)


def _pool(layer: nn.MaxPool2d, tiles: Tiles, devices: Sequence[torch.device]) -> Tiles:
    if layer.ceil_mode or layer.return_indices:
        raise RequestError("Tiles know MaxPool2d without ceil_mode and indices.", "Leave both False.")

    def compute(part: Tensor) -> Tensor:
        return F.max_pool2d(part, layer.kernel_size, layer.stride, 0, layer.dilation)

    return _compute_windows(layer, tiles, devices, compute, float("-inf"), tiles.parts[0][0].shape[1])


def _compute_windows(
    layer: nn.Conv2d | nn.MaxPool2d,
    tiles: Tiles,
    devices: Sequence[torch.device],
    compute: Callable[[Tensor], Tensor],
    outside: float,
    channels: int,
) -> Tiles:
    """Give each output tile the input that it reads, `outside` beyond the image, and compute it on its device."""
    down, across = _windows(layer)
    rows, columns = down.cut_output(tiles.rows), across.cut_output(tiles.columns)

    def part(i: int, j: int) -> Tensor:
        (top, bottom), (left, right) = rows[i : i + 2], columns[j : j + 2]
        if top == bottom or left == right:
            return tiles.parts[i][j].new_zeros((tiles.parts[i][j].shape[0], channels, bottom - top, right - left))
        device = tile_device(devices, i, j)
        return compute(tiles.gather(down.reads(top, bottom), across.reads(left, right), device, outside))

    grid = range(SIDE)
    return Tiles(tuple(tuple(part(i, j) for j in grid) for i in grid), rows, columns)


def _windows(layer: nn.Conv2d | nn.MaxPool2d) -> list[Window]:
    """The layer's windows on rows and on columns."""
    options = (layer.stride, layer.padding, layer.dilation, layer.kernel_size)
    pairs = (option if isinstance(option, tuple) else (option, option) for option in options)
    windows = [
        Window(stride, padding, dilation * (kernel - 1) + 1)
        for stride, padding, dilation, kernel in zip(*pairs, strict=True)
    ]
    if any(window.padding >= window.reach for window in windows):
        raise RequestError("Tiles know layers whose padding is smaller than their kernel.", "Give less padding.")
    return windows


def _normalise(layer: nn.BatchNorm2d, tiles: Tiles) -> Tiles:
    """Batch normalisation with the whole image's statistics: sums cross the devices, pixels don't."""
    mean, variance = layer.running_mean, layer.running_var
    if layer.training:
        parts = [part for row in tiles.parts for part in row]
        count = parts[0].shape[0] * tiles.size[0] * tiles.size[1]
        mean = _total(parts, layer.weight.device) / count
        variance = _total([(part - _as_channels(mean, part)).square() for part in parts], layer.weight.device) / count
        # the running statistics move as BatchNorm2d's: with the unbiased variance
        layer.running_mean.lerp_(mean.detach(), layer.momentum)
        layer.running_var.lerp_(variance.detach() * count / max(1, count - 1), layer.momentum)
        layer.num_batches_tracked.add_(1)
    scale = layer.weight * torch.rsqrt(variance + layer.eps)

    def apply(part: Tensor) -> Tensor:
        return (part - _as_channels(mean, part)) * _as_channels(scale, part) + _as_channels(layer.bias, part)

    return tiles.map(apply)


def _total(parts: Sequence[Tensor], home: torch.device) -> Tensor:
    """The sum over samples and pixels for each channel, of all tiles, at home."""
    return torch.stack([part.sum(dim=(0, 2, 3)).to(home, non_blocking=True) for part in parts]).sum(dim=0)


def _as_channels(values: Tensor, part: Tensor) -> Tensor:
    return values.to(part.device, non_blocking=True)[None, :, None, None]


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
