"""A workload that learns for a while: its steps are those of the whole batch, and its parts show
the noise scale.
"""

from __future__ import annotations

from typing import Any

import pytest

from evener.errors import RequestError
from evener.training.noise_scale import NoiseWindow
from evener.workloads.protocol import Place
from tests.support.frameworks import skip_without

skip_without("torch")


def build(rate: float, batch_free: bool = False) -> Any:
    """A linear model on noisy targets, with its data or only with rows that are made."""
    import torch

    from evener.workloads.torch_backend.batches import Data
    from evener.workloads.torch_backend.workload import Recipe, TorchWorkload

    torch.manual_seed(1)
    inputs = torch.randn(512, 20, dtype=torch.float64)
    targets = inputs @ torch.randn(20, 1, dtype=torch.float64) + 2 * torch.randn(
        512, 1, dtype=torch.float64
    )
    module = torch.nn.Linear(20, 1).double()
    optimizer = torch.optim.SGD(module.parameters(), rate)
    data = None if batch_free else Data(torch.utils.data.TensorDataset(inputs, targets))
    recipe = Recipe(module, optimizer, torch.nn.MSELoss(), data, 32)
    return TorchWorkload(Place(("cpu:0",), threads=1), lambda: recipe), inputs, targets


def test_its_noise_scale_is_that_of_single_rows() -> None:
    import torch

    from evener.torch_split.noise import PassNoise

    workload, inputs, targets = build(0.0)
    workload.prepare((16,))
    noise = PassNoise(NoiseWindow(kept=1), every=1)
    for _ in range(600):
        workload.learn(2, noise)
    module, found = workload.recipe.module, noise.scale()
    error = (module(inputs) - targets).detach()
    rows = torch.cat([2 * error * inputs, 2 * error], 1)
    center = rows.mean(0)
    truth = float((rows - center).square().sum(1).mean() / center.square().sum())
    assert found is not None
    assert found.rows == pytest.approx(truth, rel=0.2)
    assert found.low < found.rows < found.high


def test_it_steps_as_the_whole_batch_does() -> None:
    import torch

    from evener.torch_split.noise import PassNoise

    parts, whole, noise = build(0.05)[0], build(0.05)[0], PassNoise()
    parts.prepare((16,))
    whole.prepare((32,))
    for step in (lambda: parts.learn(2, noise), whole.step):
        torch.manual_seed(3)
        for _ in range(8):
            step()
    pairs = zip(parts.recipe.module.parameters(), whole.recipe.module.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in pairs)


def test_rows_that_are_made_are_refused() -> None:
    with pytest.raises(RequestError, match="say nothing about learning"):
        _ = build(0.0, batch_free=True)[0].own_batch
