"""A short training before a search measures the noise scale, in a child of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from evener.balancer.intake import take_in
from evener.balancer.learn import learn
from evener.balancer.request import Request
from evener.errors import NoLayoutError, RequestError
from tests.support.frameworks import skip_without

skip_without("torch")

SCRIPT = """
import torch


def build(data=True):
    torch.manual_seed(1)
    inputs, module = torch.randn(2048, 20), torch.nn.Linear(20, 1)
    targets = inputs @ torch.randn(20, 1) + 2 * torch.randn(2048, 1)
    last = torch.utils.data.TensorDataset(inputs, targets) if data else (lambda rows: (inputs[:rows], targets[:rows]))
    return module, torch.optim.SGD(module.parameters(), 0.0), torch.nn.MSELoss(), last
"""


@pytest.mark.slow
def test_a_child_trains_at_the_own_batch_and_measures(own_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At weights that stay, (noise / signal) of 2 * error * inputs: 20 * 4 * (|w|^2 + 4) / (4 * |w|^2), about 25."""
    (own_folder / "train.py").write_text(SCRIPT)
    asked = Request(devices="cpu/1", workload="train.py:build", framework="torch", own_batch=64)
    learned = learn(take_in(asked), 3.0)
    assert learned.own_batch == 64
    assert learned.noise_scale is not None
    assert 15 < learned.noise_scale.rows < 40
    with pytest.raises(NoLayoutError, match="--learn: the training failed"):
        learn(take_in(msgspec.structs.replace(asked, settings={"data": False})), 3.0)
    assert "say nothing about learning" in capfd.readouterr().err


def test_what_cannot_learn_is_refused_before_anything_starts() -> None:
    with pytest.raises(RequestError, match="keras_maxer isn't one"):
        learn(take_in(Request(devices="sim:gtx1080")), 3.0)
