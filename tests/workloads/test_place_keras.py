"""Towers on two devices: outputs, gradients and trained weights are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.workloads import registry
from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers, start

skip_without("tensorflow")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("keras_placed_proof.py")


@pytest.fixture(scope="module")
def proof() -> Any:
    """What the proof printed, in a process of its own, as logical devices are made before any operation."""
    answers = Answers({"proof": [start(SCRIPT)]}, 240)
    try:
        return answers("proof")[0]
    finally:
        answers.close()


@pytest.mark.parametrize("placement", ["towers", "alternate"])
def test_a_placement_has_one_devices_outputs_and_gradients(proof: Any, placement: str) -> None:
    """In single precision, on two logical devices, against one tape over the whole model."""
    assert proof[placement]["gradients"] <= 1e-5
    assert proof[placement]["weights"] <= 1e-5


def test_a_word_that_comes_often_moves_its_row_as_adam_has_it(proof: Any) -> None:
    """What a group of processes learns from the summed gradient, and Keras' sparse step does not."""
    assert proof["dense"] <= 1e-3


def test_towers_lie_one_on_each_device(proof: Any) -> None:
    where = proof["towers"]["devices"]
    assert where["user_conv_1"] == where["user_dense_1"] == ["CPU:0"]
    assert where["item_conv_1"] == where["item_pool_1"] == where["item_dense_1"] == ["CPU:1"]


def test_alternate_moves_at_each_operation(proof: Any) -> None:
    """Convolution, pool and dense of each tower; the gradient of an operation is where it was."""
    where = proof["alternate"]["devices"]
    assert [where[f"user_{kind}_1"] for kind in ("conv", "pool", "dense")] == [["CPU:1"], ["CPU:0"], ["CPU:0"]]
    assert [where[f"item_{kind}_1"] for kind in ("conv", "pool", "dense")] == [["CPU:0"], ["CPU:1"], ["CPU:1"]]
    assert where["MaxPoolGrad"] == ["CPU:0", "CPU:1"]


def test_the_profiler_sees_that_alternating_sends_more_often(proof: Any) -> None:
    """The weights' own arithmetic stays with them, so what is sent is activations and their gradients."""
    assert 0 < proof["towers"]["sent"] < proof["alternate"]["sent"]


def test_resnet50_has_its_published_size(proof: Any) -> None:
    """25,636,712 parameters with ImageNet's 1000 classes: 23,587,712 and 2048 x 10 + 10 with ten."""
    assert proof["resnet50"] == 23_587_712 + 2048 * 10 + 10


def test_the_registry_names_the_placements() -> None:
    assert registry.find("keras_towers").placements == ("single", "towers", "alternate")
    assert registry.find("keras_resnet50").placements == ()
