"""Tiles with exchanged borders give the whole image's results for any size.

Outputs, gradients and running statistics are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from evener.workloads.torch_backend.tiling import Tiles, cut, run_tiled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CPU = [torch.device("cpu")] * 4


def stitch(tiles: Tiles) -> Any:
    """Return the whole image from its tiles."""
    return tiles.gather((0, tiles.rows[-1]), (0, tiles.columns[-1]), CPU[0])


def seed_layers() -> nn.Sequential:
    """Return the layers of the original network twice, without biases before normalization.

    The gradient of such a bias would be 0.
    """
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def relative(found: Any, expected: Any) -> float:
    """Return the largest difference as a fraction of the largest value."""
    return float(
        (found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-30)
    )


def whole_and_tiled(
    make: Callable[[], nn.Sequential], height: int, width: int, dtype: Any, seed: int
) -> list[tuple[Any, Any]]:
    """Return (tiled, whole) pairs of the results.

    They are the output, the input's gradient, each parameter's gradient and each running statistic.
    """
    results = []
    for tiled in (True, False):
        torch.manual_seed(seed)
        layers = make().to(dtype)
        images = torch.randn(3, 3, height, width, dtype=dtype, requires_grad=True)
        output = stitch(run_tiled(layers, cut(images, CPU))) if tiled else layers(images)
        weights = torch.randn(output.shape, dtype=dtype)
        (output * weights).sum().backward()
        buffers = [buffer.to(dtype) for buffer in layers.buffers()]
        results.append([output, images.grad, *(p.grad for p in layers.parameters()), *buffers])
    return list(zip(*results, strict=True))


@settings(max_examples=25, deadline=None)
@given(height=st.integers(8, 37), width=st.integers(8, 37), seed=st.integers(0, 99))
def test_any_size_gives_the_whole_images_output_and_gradients(
    height: int, width: int, seed: int
) -> None:
    """Tiled and whole results are equal up to float64 rounding for any height and width."""
    for found, expected in whole_and_tiled(seed_layers, height, width, torch.float64, seed):
        assert relative(found, expected) < 1e-11


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 31), (9, 50), (8, 8)])
def test_in_single_precision_they_differ_by_rounding_alone(height: int, width: int) -> None:
    for found, expected in whole_and_tiled(seed_layers, height, width, torch.float32, 1):
        assert relative(found, expected) <= 1e-5


def test_trained_statistics_serve_evaluation() -> None:
    """In evaluation, tiles use the running statistics, like the whole image."""
    torch.manual_seed(0)
    layers, images = seed_layers().double(), torch.randn(2, 3, 11, 14, dtype=torch.float64)
    layers(images)
    layers.eval()
    assert relative(stitch(run_tiled(layers, cut(images, CPU))), layers(images)) < 1e-12


def test_the_borders_are_really_exchanged() -> None:
    """Without the neighbours' rows, the middle of the image differs, so the test can fail."""
    torch.manual_seed(0)
    layers, images = (
        nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, bias=False)),
        torch.randn(1, 1, 8, 8),
    )
    tiles = cut(images, CPU)
    alone = torch.cat(
        [torch.cat([layers(part) for part in row], dim=3) for row in tiles.parts], dim=2
    )
    assert relative(alone, layers(images)) > 1e-2
    assert relative(stitch(run_tiled(layers, tiles)), layers(images)) <= 1e-5
