"""Keras users' programs learn the same as on one device, or are refused before the first step.

A sample of the programs of `python -m benchmarks.keras_programs`, in float64, with a last batch of
one row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

EXACT = "exact"  # like plain Keras
NO_MEAN, ACROSS = "isn't the mean of its parts' losses", "the other rows"
GRAPH = "rows can't be computed alone"
FIGURE = "The metric 'errors' of the same rows"
METRIC_OF_CALL = "compute_metrics reads a tensor that call has left"
OTHER_STATE = "differs between all rows at once"
SAMPLES = {
    "towers": {
        "loss of attributes: means and sums": EXACT,
        "add_loss: annealed sum": EXACT,
        "own assertion": EXACT,
        "own counter: calls": EXACT,
        "own counter: rows": OTHER_STATE,
        "own metric in compute_loss": EXACT,
        "own state of a loss": EXACT,
        "own scale of rows": EXACT,
        "own saturated outputs": EXACT,
        "own train_step": EXACT,
        "own train_step: signs": "calls super().train_step never",
        "own graph": GRAPH,
        "add_loss: balance": ACROSS,
        "looks across rows": ACROSS,
        "outputs: similarities": ACROSS,
        "nothing has a gradient": "No gradients",
    },
    "passes": {
        "sum": EXACT,
        "a value per row, weighted": EXACT,
        "a value per row, two heads": EXACT,
        "mse, class_weight of divided labels": EXACT,
        "rmse": NO_MEAN,
        "state: steps": EXACT,
        "loss of attributes: means and sums": NO_MEAN,
        "loss of a slope": EXACT,
        "own table: bags, Adam": EXACT,
        "own metric of an attribute": METRIC_OF_CALL,
        "own weights of pictures": GRAPH,
    },
    "multiworker": {
        "ignore_class": EXACT,
        "regularized, state: rows": EXACT,
        "add_loss: sum over later rows": EXACT,
        "own table: take, clipped": EXACT,
        "own metric in compute_loss, weighed": EXACT,
        "own state of a loss": NO_MEAN,
        "own weights of pictures": "6 of 8 rows can't be computed alone",
        "own graph": GRAPH,
        "own class weights, one class a batch": NO_MEAN,
        "state: codebook": OTHER_STATE,
    },
    "multiworker in passes": {
        "a value per row, weighted": EXACT,
        "ignore_class": "a mean over labels that aren't ignored",
        "own table: bags, Adam": EXACT,
        "own train_step": EXACT,
        "crossentropy, two steps a call": EXACT,
    },
}
# their audits, which take half of the time, are those of towers except for passes and exchanged
# rows, which test_keras_audit.py tests
UNAUDITED = {
    engine: [name for name, expected in SAMPLES[engine].items() if expected == EXACT]
    for engine in ("passes", "multiworker", "multiworker in passes")
}
WARNED = {  # trained, with this warning
    "towers": {
        "own table: bags twice, Adam": "several calls of tf.nn.embedding_lookup_sparse",
    },
    "passes": {
        "own metric in compute_loss": FIGURE,
    },
    "multiworker": {
        "own metric in compute_loss": FIGURE,
    },
}
CASES = [
    (engine, name, expected)
    for engine, sample in SAMPLES.items()
    for name, expected in sample.items()
]


@pytest.fixture(scope="module")
def answers(keras_ranks: Callable[..., list[Any]]) -> Answers:
    """Return the results of the programs for the engines of one process and of a group."""

    def ask(name: str) -> list[Any]:
        in_group = name == "group"
        chosen = {
            engine: [*sample, *WARNED.get(engine, {})]
            for engine, sample in SAMPLES.items()
            if ("multiworker" in engine) == in_group
        }
        if in_group:
            given = chosen, "one row", ["ignore_class"], UNAUDITED
            return keras_ranks(
                "tests.support.keras_programs.run_all", *given, roles=("worker",) * 2
            )
        run = "tests.support.keras_programs.run_towers"
        return keras_ranks(run, chosen, "one row", UNAUDITED)

    return Answers(ask)


@pytest.mark.parametrize(("engine", "program", "expected"), CASES)
def test_a_users_program_is_exact_or_refused(
    answers: Answers, engine: str, program: str, expected: str
) -> None:
    """Weights and logs are within 1e-9 of plain Keras, or a message comes before the first step.

    Each process refuses by itself; a slower one may report that another has exited.
    """
    processes = answers("group" if "multiworker" in engine else "one process")
    every = [process[engine][program] for process in processes]
    if expected == EXACT:
        for found in every:
            assert found["verdict"] == "trained", found["said"]
        assert every[0]["gap"] <= 1e-9
    else:
        assert not any(found["verdict"] == "trained" for found in every)
        assert any(expected in found["said"] for found in every)
        assert all(expected in found["said"] or "Unavailable" in found["said"] for found in every)


@pytest.mark.parametrize(
    ("engine", "program", "words"),
    [(engine, name, words) for engine, said in WARNED.items() for name, words in said.items()],
)
def test_what_a_group_or_passes_learn_otherwise_is_said(
    answers: Answers, engine: str, program: str, words: str
) -> None:
    """The check looks at what the loss updates, not at a list of layers."""
    found = answers("group" if engine == "multiworker" else "one process")[0][engine][program]
    assert found["verdict"] == "trained", found["said"]
    assert words in found["said"]


def test_a_loss_that_calls_the_model_is_no_loop_of_the_users(answers: Answers) -> None:
    said = answers("one process")[0]["towers"]["own metric in compute_loss"]["said"]
    assert "outside fit" not in said


@pytest.fixture(scope="module")
def beside(answers: Answers) -> dict[str, Any]:
    """Return the side effects of the check."""
    return dict(answers("one process")[0]["beside"])


def test_the_check_leaves_no_trace(beside: dict[str, Any]) -> None:
    """Weights, states, TensorFlow variables and the random generators are unchanged."""
    assert beside["after"] == beside["before"]


def test_the_check_needs_no_seed(beside: dict[str, Any]) -> None:
    """Training without a seed is checked, too: parts of the root of a mean don't add up."""
    assert beside["unseeded"] == ""


def test_common_layers_are_no_surprise(beside: dict[str, Any]) -> None:
    """Random layers and normalization count as means over rows, in float32 and with one class."""
    found = beside["common"]
    assert found["loss"] == "rows"
    assert set(found["states"].values()) == {
        "rows"
    }  # the moving averages, because they are weighted


def test_a_loop_of_the_users_own_is_warned_of(beside: dict[str, Any]) -> None:
    """A loop that calls the model gives one warning; fit gives none."""
    assert beside["own loop"] == [0, 1]
