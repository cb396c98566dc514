"""The noise scale that training measures, compared with each row's own gradient.

Measuring it doesn't change the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import torch_noise_programs as programs
from tests.support.frameworks import skip_without

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def measured(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    return trainer_ranks("tests.support.torch_noise_programs.measured", world=2)


@pytest.fixture(scope="module")
def exact(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    return trainer_ranks("tests.support.torch_noise_programs.exact", world=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.CASES)
def test_it_is_that_of_the_rows_own_gradients(measured: list[Any], name: str) -> None:
    truth = programs.true_noise_scale(programs.network(), programs.data())
    found, said = measured[0][name]
    assert found["rows"] == pytest.approx(truth, rel=0.15)
    assert found["low"] < truth < found["high"]
    assert said.startswith("noise scale ")
    assert "of the samples' worth" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "library"), [("huggingface", "transformers.trainer"), ("lightning", "lightning")]
)
def test_trainers_measure_it_too(
    trainer_ranks: Callable[..., list[Any]], trainer: str, library: str
) -> None:
    """Trainers measure the noise scale batch by batch, and when two batches are accumulated.

    Weights are bitwise equal to those without it, also with accelerate.
    """
    skip_without(library.partition(".")[0])
    truth = programs.true_noise_scale(programs.network(), programs.data())
    measured, same = trainer_ranks(
        f"tests.support.trainer_noise_programs.{trainer}", world=2, imports=library
    )[0]
    assert same
    assert all(same)
    for found in measured:
        assert found["rows"] == pytest.approx(truth, rel=0.25)
        assert found["low"] < truth < found["high"]


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.CASES)
def test_all_ranks_find_the_same(measured: list[Any], name: str) -> None:
    assert measured[0][name][0] == measured[1][name][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.CASES)
def test_weights_are_bit_for_bit_those_of_a_training_without(exact: list[Any], name: str) -> None:
    for rank in exact:
        without, with_noise = rank["weights"][name]
        assert all(map(torch.equal, without, with_noise))


@pytest.mark.slow
def test_what_sums_gradients_itself_and_a_second_model_are_refused(exact: list[Any]) -> None:
    for sharded, second in (rank["refused"] for rank in exact):
        assert sharded.startswith("FSDP sums the gradients itself")
        assert second.startswith("Two models are trained")


def test_one_process_has_no_noise_scale_and_trains_on() -> None:
    with pytest.warns(UserWarning, match="this training has one: no noise"):
        with_noise = programs.learn({"shares": (8,)}, noise=True)
    assert all(map(torch.equal, programs.learn({"shares": (8,)}, noise=False), with_noise))
