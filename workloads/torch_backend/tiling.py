"""An image cut into tiles on several devices, with borders exchanged: the result is the whole image's, exactly.

Each output tile of a layer is a range of rows and columns. The rows that a window of `kernel` and `stride` reads for
output rows [first, stop) are [first * stride - padding, (stop - 1) * stride - padding + reach): the tile has most of
them, borrows the rest from its neighbours, and fills what lies outside the image as the layer itself would. Nothing
is computed twice and nothing is approximated, so sizes that don't divide need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.errors import RequestError

SIDE = 2  # tiles along each axis


@dataclass(frozen=True)
class Window:
    """How a layer reads one axis of its input."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """Input positions from the first to the last that one output position reads."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, size: int) -> int:
        """Output positions for `size` input positions, as torch's layers count them."""
        return (size + 2 * self.padding - self.reach) // self.stride + 1

    def reads(self, first: int, stop: int) -> tuple[int, int]:
        """The half-open input range behind output positions [first, stop); it may leave the image on either side."""
        return first * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach


@dataclass(frozen=True)
class Tiles:
    """A batch of images, shaped (samples, channels, height, width) as a whole, cut into SIDE x SIDE tiles.

    `rows` and `columns` are the cuts, both ends included; a tile of a tiny image may be empty.
    """

    parts: tuple[tuple[Tensor, ...], ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def height(self) -> int:
        """Rows of the whole image."""
        return self.rows[-1]

    @property
    def width(self) -> int:
        """Columns of the whole image."""
        return self.columns[-1]

    def window(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor:
        """The part of the whole image in these half-open ranges, gathered on `device` from the tiles that hold it."""
        bands = []
        for i, (top, bottom) in enumerate(pairwise(self.rows)):
            first, last = max(rows[0], top), min(rows[1], bottom)
            if first < last:
                bands.append(self._band(i, (first - top, last - top), columns, device))
        return torch.cat(bands, dim=2) if len(bands) > 1 else bands[0]

    def _band(self, i: int, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor:
        pieces = []
        for j, (left, right) in enumerate(pairwise(self.columns)):
            first, last = max(columns[0], left), min(columns[1], right)
            if first < last:
                piece = self.parts[i][j][:, :, rows[0] : rows[1], first - left : last - left]
                pieces.append(piece.to(device, non_blocking=True))
        return torch.cat(pieces, dim=3) if len(pieces) > 1 else pieces[0]

    def stitch(self, device: torch.device) -> Tensor:
        """The whole image on one device."""
        return self.window((0, self.height), (0, self.width), device)


def cut(images: Tensor, devices: Sequence[torch.device]) -> Tiles:
    """Cut (samples, channels, height, width) in half along both axes; tiles go to the devices in turn."""
    rows, columns = _cuts(images.shape[2]), _cuts(images.shape[3])
    parts = tuple(
        tuple(
            images[:, :, top:bottom, left:right].to(tile_device(devices, i, j), non_blocking=True)
            for j, (left, right) in enumerate(pairwise(columns))
        )
        for i, (top, bottom) in enumerate(pairwise(rows))
    )
    return Tiles(parts, rows, columns)


def tile_device(devices: Sequence[torch.device], i: int, j: int) -> torch.device:
    """Where the tile in row i and column j lies."""
    return devices[(i * SIDE + j) % len(devices)]


def _cuts(size: int) -> tuple[int, ...]:
    return tuple(size * k // SIDE for k in range(SIDE + 1))


def run_tiled(layers: nn.Sequential, tiles: Tiles, devices: Sequence[torch.device]) -> Tiles:
    """What `layers` make of the whole image, tile by tile; RequestError for a layer that can't be cut.

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
                tiles = _each(tiles, layer)
            case _:
                raise RequestError(
                    f"A {type(layer).__name__} layer can't be computed in tiles.",
                    "Tiles know Conv2d, MaxPool2d, BatchNorm2d, ReLU and Tanh.",
                )
    return tiles


def _each(tiles: Tiles, layer: nn.Module) -> Tiles:
    parts = tuple(tuple(layer(part) for part in row) for row in tiles.parts)
    return Tiles(parts, tiles.rows, tiles.columns)


def _convolve(layer: nn.Conv2d, tiles: Tiles, devices: Sequence[torch.device]) -> Tiles:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise RequestError("Tiles know convolutions padded by a number of zeros.", "Give padding as a number.")
    windows = _windows(layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    copies = {device: _copies(layer, device) for device in set(devices)}

    def compute(part: Tensor) -> Tensor:
        weight, bias = copies[part.device]
        return F.conv2d(part, weight, bias, layer.stride, 0, layer.dilation, layer.groups)

    return _windowed(tiles, windows, devices, compute, 0.0, layer.out_channels)


def _pool(layer: nn.MaxPool2d, tiles: Tiles, devices: Sequence[torch.device]) -> Tiles:
    if layer.ceil_mode or layer.return_indices:
        raise RequestError("Tiles know MaxPool2d without ceil_mode and indices.", "Leave both False.")
    windows = _windows(layer.kernel_size, layer.stride, layer.padding, layer.dilation)

    def compute(part: Tensor) -> Tensor:
        return F.max_pool2d(part, layer.kernel_size, layer.stride, 0, layer.dilation)

    return _windowed(tiles, windows, devices, compute, float("-inf"), tiles.parts[0][0].shape[1])


def _windows(kernel: object, stride: object, padding: object, dilation: object) -> tuple[Window, Window]:
    pairs = [value if isinstance(value, tuple) else (value, value) for value in (kernel, stride, padding, dilation)]
    rows, columns = (Window(*(int(pair[axis]) for pair in pairs)) for axis in (0, 1))
    if rows.padding >= rows.reach or columns.padding >= columns.reach:
        raise RequestError("Tiles know layers whose padding is smaller than their kernel.", "Give less padding.")
    return rows, columns


def _copies(layer: nn.Conv2d, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The layer's parameters on `device`; `to` is differentiable, so gradients land on the layer itself."""
    bias = None if layer.bias is None else layer.bias.to(device, non_blocking=True)
    return layer.weight.to(device, non_blocking=True), bias


def _windowed(
    tiles: Tiles,
    windows: tuple[Window, Window],
    devices: Sequence[torch.device],
    compute: Callable[[Tensor], Tensor],
    outside: float,
    channels: int,
) -> Tiles:
    """Give each output tile the input that it reads, `outside` beyond the image, and compute it on its device."""
    rows = _output_cuts(tiles.rows, windows[0])
    columns = _output_cuts(tiles.columns, windows[1])

    def part(i: int, j: int) -> Tensor:
        device = tile_device(devices, i, j)
        (top, bottom), (left, right) = rows[i : i + 2], columns[j : j + 2]
        if top == bottom or left == right:
            return tiles.parts[i][j].new_zeros((tiles.parts[i][j].shape[0], channels, bottom - top, right - left))
        read = windows[0].reads(top, bottom), windows[1].reads(left, right)
        return compute(_bordered(tiles, *read, outside, device))

    grid = range(SIDE)
    return Tiles(tuple(tuple(part(i, j) for j in grid) for i in grid), rows, columns)


def _output_cuts(cuts: tuple[int, ...], window: Window) -> tuple[int, ...]:
    """Where the output is cut: near the input's cuts, so that few rows are borrowed."""
    length = window.length(cuts[-1])
    if length < 1:
        raise RequestError(f"An image side of {cuts[-1]} is too small for its layers.", "Give larger images.")
    return (0, *(min(length, cut // window.stride) for cut in cuts[1:-1]), length)


def _bordered(
    tiles: Tiles, rows: tuple[int, int], columns: tuple[int, int], outside: float, device: torch.device
) -> Tensor:
    inside_rows = max(0, rows[0]), min(tiles.height, rows[1])
    inside_columns = max(0, columns[0]), min(tiles.width, columns[1])
    inside = tiles.window(inside_rows, inside_columns, device)
    border = (
        inside_columns[0] - columns[0],
        columns[1] - inside_columns[1],
        inside_rows[0] - rows[0],
        rows[1] - inside_rows[1],
    )
    return F.pad(inside, border, value=outside) if any(border) else inside


def _normalise(layer: nn.BatchNorm2d, tiles: Tiles) -> Tiles:
    """Batch normalisation with the whole image's statistics: sums cross the devices, pixels don't."""
    parts = [part for row in tiles.parts for part in row]
    home = layer.weight.device
    if not layer.training:
        mean, variance = layer.running_mean, layer.running_var
    else:
        count = sum(part.shape[0] * part.shape[2] * part.shape[3] for part in parts)
        mean = _total(parts, home) / count
        variance = _total([(part - _as_channels(mean, part)).square() for part in parts], home) / count
        _remember(layer, mean.detach(), variance.detach(), count)
    assert mean is not None, "the layer tracks its statistics"
    assert variance is not None, "the layer tracks its statistics"
    scale = layer.weight * torch.rsqrt(variance + layer.eps)

    def apply(part: Tensor) -> Tensor:
        return (part - _as_channels(mean, part)) * _as_channels(scale, part) + _as_channels(layer.bias, part)

    return Tiles(tuple(tuple(apply(part) for part in row) for row in tiles.parts), tiles.rows, tiles.columns)


def _total(parts: Sequence[Tensor], home: torch.device) -> Tensor:
    """The sum over samples and pixels for each channel, of all tiles, at home."""
    return torch.stack([part.sum(dim=(0, 2, 3)).to(home, non_blocking=True) for part in parts]).sum(dim=0)


def _as_channels(values: Tensor, part: Tensor) -> Tensor:
    return values.to(part.device, non_blocking=True)[None, :, None, None]


def _remember(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Move the running statistics as BatchNorm2d does: with the unbiased variance."""
    if layer.running_mean is None or layer.running_var is None or layer.momentum is None:
        return
    layer.running_mean.lerp_(mean, layer.momentum)
    layer.running_var.lerp_(variance * count / max(1, count - 1), layer.momentum)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
