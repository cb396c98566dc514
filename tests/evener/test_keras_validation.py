"""Validation of a plan in passes has plain Keras' values, in the memory of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = (
    "a sum over the batch",
    "a layer's own loss and metric",
    "attributes",
    "single outputs",
    "a mask",
)
ENGINES = {"towers": (), "multiworker": ("worker", "worker")}


@pytest.fixture(scope="module")
def proofs(keras_ranks: Callable[..., list[Any]]) -> Answers:
    """Return the results of each process of an engine."""
    prove = "tests.support.keras_validations.prove"
    return Answers(lambda engine: keras_ranks(prove, engine, roles=ENGINES[engine]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_values_that_depend_on_batches_are_those_of_plain_keras(
    proofs: Any, engine: str, case: str
) -> None:
    """They are within 1e-12, with the batch size of `fit`, and the same in all processes."""
    found = [process[case] for process in proofs(engine)]
    assert found[0]["apart"] <= 1e-12
    assert all(each["values"] == found[0]["values"] for each in found)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_computes_no_more_rows_at_once_than_a_pass(proofs: Any, engine: str) -> None:
    for process in proofs(engine):
        assert process["a layer's own loss and metric"]["most rows"] <= 2


def test_a_test_step_of_the_users_takes_batches_that_are_one_pass_on_each_device(
    proofs: Any,
) -> None:
    """A single device computes them: 2 of 8 rows, as the larger share has passes of two rows."""
    assert proofs("towers")[0]["own steps"] == 4
