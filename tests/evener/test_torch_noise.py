"""The noise scale that trainings measure, beside that of each row's own gradient; what they learn
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

from evener.errors import RequestError
from evener.torch_split.exchange import Exchange
from evener.torch_split.noise import PassNoise
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
    """With a batch at a time, and accumulated by two. Weights are bit for bit those without, also
    with accelerate.
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


@pytest.mark.parametrize("name", programs.ALONE)
def test_one_process_compares_the_passes_of_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is that of the passes' own gradients, and the weights are bit for bit those
    without noise.
    """
    case, opened = programs.ALONE[name], Exchange.open
    if name == "rows that depend on draws":
        monkeypatch.setattr(Exchange, "open", lambda self, _, rows: opened(self, True, rows))
    samples = programs.compare_samples(case)
    assert len(samples) == 4
    for found, expected in samples:
        assert found == pytest.approx(expected, rel=1e-4)
    without, with_noise = (programs.learn(case, noise) for noise in (False, True))
    assert all(map(torch.equal, without, with_noise))


@pytest.mark.slow
def test_a_trainer_in_one_process_compares_what_it_accumulates(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    skip_without("transformers")
    (found,) = trainer_ranks(
        "tests.support.trainer_noise_programs.one_process", imports="transformers.trainer"
    )
    assert found["samples"] > 60
    assert (
        found["low"]
        < programs.true_noise_scale(programs.network(), programs.data())
        < found["high"]
    )


def test_steps_of_one_pass_are_refused() -> None:
    with pytest.raises(RequestError, match="one process takes each step in one pass"):
        programs.learn({"shares": (8,)}, noise=True)


def test_memory_that_runs_out_in_a_pass_leaves_its_step_out() -> None:
    split = programs.make_split((64,), (16,), noise=True)
    model, noise = split.wrap(programs.network()), split.noise
    assert isinstance(noise, PassNoise)
    noise.every, passes = 1, 0

    def fail_once(*_: object) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()  # else the loss is checked
        if passes == 7:  # the third of the second step
            raise torch.OutOfMemoryError("CUDA out of memory")

    model[0].register_forward_hook(fail_once)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for batch in islice(split.loader(programs.data()), 6):
        programs.train(split, model, batch)
        optimizer.step()
        optimizer.zero_grad()
    noise.scale()
    assert (noise.steps, noise.window._samples) == (5, 4)
