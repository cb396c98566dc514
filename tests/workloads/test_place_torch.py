"""Depth and tile placements in PyTorch give the outputs and gradients of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from evener.errors import RequestError  # noqa: E402
from evener.workloads import registry  # noqa: E402
from evener.workloads.datasets import stripes  # noqa: E402
from evener.workloads.protocol import WorkerSetup  # noqa: E402
from evener.workloads.torch_backend import batches as torch_batches  # noqa: E402
from evener.workloads.torch_backend.models import (  # noqa: E402
    DepthNet,
    as_tensors,
    cross_entropy,
)
from evener.workloads.torch_backend.tiling import TilesNet  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CPU = torch.device("cpu")
TWO = WorkerSetup(("CPU:0", "CPU:1"), threads=1)


def gradients(make: Callable[[], nn.Module], images: Any, labels: Any) -> list[Any]:
    """Return the logits and all parameter gradients of one step."""
    torch.manual_seed(3)
    module = make()
    logits = module(images)
    cross_entropy(logits, labels).backward()
    return [logits.detach(), *(parameter.grad for parameter in module.parameters())]


def largest_difference(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    return max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_halves_and_micro_batches_have_the_whole_stacks_gradients(micro_batches: int) -> None:
    """Gradients are equal in float32, also if the micro-batches don't divide the batch."""
    images, labels = as_tensors(stripes(10, 32, 10))
    whole = gradients(DepthNet, images, labels)
    halves = gradients(lambda: DepthNet().place([CPU, CPU], micro_batches), images, labels)
    assert largest_difference(halves, whole) <= 1e-5


@pytest.mark.parametrize("side", [33, 64, 21])
def test_tiles_have_the_whole_images_gradients(side: int) -> None:
    images, labels = as_tensors(stripes(6, side, 10))
    whole = gradients(TilesNet, images, labels)
    for count in (2, 3, 4):
        tiles = gradients(lambda count=count: TilesNet().place([CPU] * count), images, labels)  # type: ignore[misc]
        assert largest_difference(tiles, whole) <= 1e-5


def test_batch_normalisation_in_micro_batches_is_another_model_and_refused() -> None:
    with pytest.raises(RequestError, match="micro-batch"):
        DepthNet(norm="batch").place([CPU, CPU], 2)
    DepthNet(norm="batch").place([CPU, CPU])


@pytest.mark.parametrize(
    ("name", "placement"),
    [("torch_depth", "halves"), ("torch_depth", "halves-micro"), ("torch_tiles", "tiles")],
)
def test_a_placed_workload_trains_as_one_device_does(
    monkeypatch: pytest.MonkeyPatch, name: str, placement: str
) -> None:
    """After three steps on the same rows, the weights are those of one device.

    The test replaces Adam, which would divide rounding errors by each other.
    """
    # the same number of rows, also on a busy machine
    monkeypatch.setattr(torch_batches, "SLOW_ROW_SECONDS", math.inf)
    monkeypatch.setattr(torch_batches, "POOL_ROWS", 64)
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, _: torch.optim.SGD(parameters, 0.1))
    weights = []
    settings = {"side": 32}
    for setup in (
        WorkerSetup(("CPU:0",), threads=1),
        WorkerSetup(("CPU:0", "CPU:1"), threads=1, placement=placement),
    ):
        workload: Any = registry.build(name, setup, settings)
        workload.prepare([8] if len(setup.devices) == 1 else [4, 4])
        for _ in range(3):
            workload.step()
        workload.synchronize()
        assert len(workload.max_memory_bytes()) == len(setup.devices)
        weights.append(
            [parameter.detach().clone() for parameter in workload.recipe.module.parameters()]
        )
    assert largest_difference(weights[1], weights[0]) <= 1e-5


@pytest.mark.parametrize(
    ("name", "settings", "placement", "words"),
    [
        ("torch_depth", {}, "sideways", "halves"),
        ("torch_depth", {"side": 16}, "halves", "side=16"),
        ("torch_depth", {"norm": "layer"}, "halves", "layer"),
        ("torch_depth", {"micro_batches": 1}, "halves-micro", "micro_batches=1"),
        ("torch_tiles", {"side": 3}, "tiles", "side=3"),
    ],
)
def test_what_can_not_be_laid_is_refused(
    name: str, settings: dict[str, Any], placement: str, words: str
) -> None:
    setup = WorkerSetup(TWO.devices, threads=1, placement=placement)
    with pytest.raises(RequestError) as refusal:
        registry.build(name, setup, settings)
    assert words in str(refusal.value)


def test_one_device_is_too_few_for_a_placement() -> None:
    with pytest.raises(RequestError, match="needs 2 devices"):
        registry.build("torch_depth", WorkerSetup(("CPU:0",), threads=1, placement="halves"), {})
