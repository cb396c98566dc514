"""The noise scale that trainings measure, beside that of each row's own gradient; what they learn stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evener.errors import RequestError
from evener.torch_split import Split
from tests.support import torch_noise_programs as programs

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
@pytest.mark.parametrize("trainer", ["huggingface", "lightning"])
def test_trainers_measure_it_too(trainer_ranks: Callable[..., list[Any]], trainer: str) -> None:
    """With a batch at a time, and accumulated by two."""
    pytest.importorskip("transformers" if trainer == "huggingface" else "lightning")
    truth = programs.true_noise_scale(programs.network(), programs.data())
    for found in trainer_ranks(f"tests.support.trainer_noise_programs.{trainer}", world=2)[0]:
        assert found["rows"] == pytest.approx(truth, rel=0.15)
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
        assert second.startswith("Two models exchange gradients")


def test_one_process_is_refused() -> None:
    with pytest.raises(RequestError, match="one process trains"):
        Split(ratios=(1,), global_batch=8, noise=True)
