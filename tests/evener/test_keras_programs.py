"""Programs of Keras' users are learned as by one device, or refused in a sentence before the first step.

A sample of what `python -m benchmarks.keras_programs` tries, in float64, with a last batch of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

EXACT = "exact"
SAMPLES = {
    ("towers", "passes"): {
        "sum": (EXACT, EXACT),
        "rmse": (EXACT, "it isn't a mean over rows"),
        "add_loss: balance": ("neither a mean nor a sum",) * 2,
        "state: steps": (EXACT, EXACT),
        "pooler, AdamW": (EXACT, EXACT),
        "looks across rows": ("depends on the other rows",) * 2,
        "outputs: similarities": ("has the shape (8, 8) for 8 rows, but (3, 3)",) * 2,
        "nothing has a gradient": ("No gradients",) * 2,
    },
    ("multiworker", "multiworker in passes"): {
        "ignore_class": (EXACT, "a mean over labels that aren't ignored"),
        "own class weights, one class a batch": ("it isn't a mean over rows",) * 2,
        "pooler, Ftrl": (EXACT, EXACT),
        "regularized, state: rows": (EXACT, EXACT),
        "state: codebook": ("assigns sequential",) * 2,
    },
}
CASES = [
    (engine, name, kinds[i])
    for names, sample in SAMPLES.items()
    for name, kinds in sample.items()
    for i, engine in enumerate(names)
]


@pytest.fixture(scope="module")
def answers(keras_ranks: Callable[..., list[Any]]) -> Answers:
    """What became of the programs of each pair of engines."""

    def ask(name: str) -> list[Any]:
        engines = next(engines for engines in SAMPLES if name in engines)
        roles = ("worker",) * 2 if "multiworker" in name else ()
        given = list(engines), list(SAMPLES[engines]), "one row", False
        return keras_ranks("tests.support.keras_programs.run_all", *given, roles=roles)

    return Answers(ask)


@pytest.mark.parametrize(("engine", "program", "expected"), CASES)
def test_a_users_program_is_exact_or_refused(answers: Answers, engine: str, program: str, expected: str) -> None:
    """Weights and figures within 1e-9 of plain Keras, or what is said before the first step.

    Every process refuses by itself; one that was slower may say that another has ended.
    """
    first = next(engines[0] for engines in SAMPLES if engine in engines)
    every = [process[engine][program] for process in answers(first)]
    if expected == EXACT:
        for found in every:
            assert found["verdict"] == "trained", found["said"]
        assert every[0]["gap"] <= 1e-9
    else:
        assert not any(found["verdict"] == "trained" for found in every)
        assert any(expected in found["said"] for found in every)
        assert all(expected in found["said"] or "Unavailable" in found["said"] for found in every)


@pytest.fixture(scope="module")
def beside(keras_ranks: Callable[..., list[Any]]) -> dict[str, Any]:
    """What the check does beside its verdict."""
    (found,) = keras_ranks("tests.support.keras_programs.check_beside")
    return dict(found)


def test_the_check_leaves_no_trace(beside: dict[str, Any]) -> None:
    """Weights, states, TensorFlow's own variables, and the next number of every generator."""
    assert beside["after"] == beside["before"]


def test_the_check_needs_no_seed(beside: dict[str, Any]) -> None:
    """A training whose script sets none is checked too: of a root of a mean, no parts make the whole."""
    assert beside["unseeded"] == ""


def test_common_layers_are_no_surprise(beside: dict[str, Any]) -> None:
    """Random layers and normalization, in float32 and with labels of one class: a mean over rows, and nothing else."""
    found = beside["common"]
    assert found["loss"] == "rows"
    assert found["fault"] == ""
    assert set(found["states"].values()) == {"rows"}  # the moving averages, as they are weighted


def test_a_loop_of_the_users_own_is_warned_of(beside: dict[str, Any]) -> None:
    """Once it calls the model; fit doesn't."""
    assert beside["own loop"] == [0, 1]
