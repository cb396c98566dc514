"""Tiles with exchanged borders are the whole image: outputs, gradients and running statistics, for any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from evener.errors import RequestError  # noqa: E402
from evener.workloads.torch_backend.tiling import Tiles, cut, run_tiled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CPU = [torch.device("cpu")] * 4


def stitch(tiles: Tiles) -> Any:
    """The whole image."""
    return tiles.gather((0, tiles.size[0]), (0, tiles.size[1]), CPU[0])


def seed_layers() -> nn.Sequential:
    """The slides' layers, twice; a bias that the normalisation takes away again would have a gradient of 0."""
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


def odd_layers() -> nn.Sequential:
    """Strides, dilation, unequal kernels and overlapping pools."""
    return nn.Sequential(
        nn.Conv2d(3, 8, (5, 3), stride=(2, 1), padding=(2, 0), bias=False),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, dilation=2, padding=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(8, 4, 2),
    )


def relative(found: Any, expected: Any) -> float:
    """The largest difference, as a part of the largest value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-30))


def whole_and_tiled(
    make: Callable[[], nn.Sequential], height: int, width: int, dtype: Any, seed: int
) -> list[tuple[Any, Any]]:
    """(tiled, whole) of the output, the input's gradient, each parameter's gradient and each running statistic."""
    results = []
    for tiled in (True, False):
        torch.manual_seed(seed)
        layers = make().to(dtype)
        images = torch.randn(3, 3, height, width, dtype=dtype, requires_grad=True)
        output = stitch(run_tiled(layers, cut(images, CPU), CPU)) if tiled else layers(images)
        weights = torch.randn(output.shape, dtype=dtype)
        (output * weights).sum().backward()
        buffers = [buffer.to(dtype) for buffer in layers.buffers()]
        results.append([output, images.grad, *(p.grad for p in layers.parameters()), *buffers])
    return list(zip(*results, strict=True))


@settings(max_examples=25, deadline=None)
@given(height=st.integers(4, 37), width=st.integers(4, 37), seed=st.integers(0, 99))
def test_any_size_gives_the_whole_images_output_and_gradients(height: int, width: int, seed: int) -> None:
    """In double precision the two are equal to rounding, whatever the sides are."""
    for found, expected in whole_and_tiled(seed_layers, height, width, torch.float64, seed):
        assert relative(found, expected) < 1e-11


@settings(max_examples=15, deadline=None)
@given(height=st.integers(13, 40), width=st.integers(16, 40), seed=st.integers(0, 99))
def test_strides_dilation_and_overlapping_pools_are_exact_too(height: int, width: int, seed: int) -> None:
    for found, expected in whole_and_tiled(odd_layers, height, width, torch.float64, seed):
        assert relative(found, expected) < 1e-11


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 31), (7, 50), (4, 4)])
def test_in_single_precision_they_differ_by_rounding_alone(height: int, width: int) -> None:
    def conv_pool() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2)
        )

    for found, expected in whole_and_tiled(conv_pool, height, width, torch.float32, 1):
        assert relative(found, expected) <= 1e-5


def test_trained_statistics_serve_evaluation() -> None:
    """In evaluation the tiles use the running statistics, as the whole image does."""
    torch.manual_seed(0)
    layers, images = seed_layers().double(), torch.randn(2, 3, 11, 14, dtype=torch.float64)
    layers(images)
    layers.eval()
    assert relative(stitch(run_tiled(layers, cut(images, CPU), CPU)), layers(images)) < 1e-12


def test_the_borders_are_really_exchanged() -> None:
    """Without neighbours' rows the middle of the image would come out otherwise: the test can fail."""
    torch.manual_seed(0)
    layers, images = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)), torch.randn(1, 1, 8, 8)
    tiles = cut(images, CPU)
    alone = torch.cat([torch.cat([layers(part) for part in row], dim=3) for row in tiles.parts], dim=2)
    assert relative(alone, layers(images)) > 1e-2
    assert relative(stitch(run_tiled(layers, tiles, CPU)), layers(images)) <= 1e-5


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.AvgPool2d(2), "AvgPool2d"),
        (nn.Conv2d(3, 3, 3, padding="same"), "number of zeros"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.Conv2d(3, 3, 1, padding=1), "padding is smaller"),
        (nn.Conv2d(3, 3, 9), "too small"),
    ],
)
def test_a_layer_that_cannot_be_cut_is_refused(layer: nn.Module, words: str) -> None:
    tiles = cut(torch.zeros(1, 3, 6, 6), CPU)
    with pytest.raises(RequestError, match=words):
        run_tiled(nn.Sequential(layer), tiles, CPU)
