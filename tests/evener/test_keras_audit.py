"""Audits of Keras training with shares.

If the gradient isn't that of one device, training ends with a message in the step in which that
shows; an exact program may be audited in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

# by engine: the steps before the audit that finds the difference, and a part of the message
HIDDEN = {
    "towers": {
        "a global": (0, "kernel"),
        "rows mixed later": (3, "In step 4"),
        "a decision": (0, "decides by a value"),
        "a decision of a functional model": (0, "decides by a value"),
    },
    "passes": {
        "a late term": (0, "as later in a training"),
    },
    "multiworker": {
        "a decision": (0, "decides by a value"),
        "labels of -1 later": (0, "labels of -1"),
        "a figure carried on": (3, "the variable"),
        "a threshold that falls": (8, "In step 9"),
    },
}
EXACT = {
    "towers": [
        "Dropout, GaussianNoise, a state",
        "loss of attributes: containers",
        "own decision of a loss",
        "own metric of two results",
        "own weights of pictures",
    ],
    "passes": ["activity and weight regularizers", "state: rows", "loss of a second call"],
    "multiworker": ["ignore_class", "BatchNormalization", "pooler, AdamW"],
}
RANDOM = ("Dropout, GaussianNoise, a state", "BatchNormalization")  # different by design


@pytest.fixture(scope="module")
def answers(keras_ranks: Callable[..., list[Any]]) -> Answers:
    """Return the results of an engine's programs."""

    def ask(engine: str) -> list[Any]:
        roles = ("worker",) * 2 if engine == "multiworker" else ()
        given = engine, list(HIDDEN[engine]), EXACT[engine]
        return keras_ranks("tests.support.keras_audits.find", *given, roles=roles)

    return Answers(ask)


@pytest.mark.parametrize(
    ("engine", "program"), [(engine, name) for engine, names in HIDDEN.items() for name in names]
)
def test_a_training_ends_before_it_learns_what_it_should_not(
    answers: Answers, engine: str, program: str
) -> None:
    """The message is the same in all processes."""
    steps, words = HIDDEN[engine][program]
    for found in answers(engine):
        assert words in found[program]["said"]
        assert found[program]["steps"] == steps


def test_an_audit_changes_nothing_for_other_models_and_threads(
    keras_ranks: Callable[..., list[Any]],
) -> None:
    """An audit affects only its own thread's random numbers and its own model's averages.

    A user's own function may be called clone_model.
    """
    (found,) = keras_ranks("tests.support.keras_audits.look_beside")
    assert found["audit"] == [True, True, False]
    assert found["thread"][::2] == [False, False]
    assert found["after"] == [False, False, False]
    assert (found["own clone"], found["clone"]) == (0, 1)


@pytest.mark.parametrize(
    ("engine", "program"), [(engine, name) for engine, names in EXACT.items() for name in names]
)
def test_audits_of_exact_programs_find_nothing_and_leave_nothing(
    answers: Answers, engine: str, program: str
) -> None:
    """After six audits, the training run ends with plain Keras' weights."""
    first, *others = answers(engine)
    for found in (first, *others):
        assert found[program]["verdict"] == "trained", found[program]["said"]
    assert "audited" not in first[program]["said"]
    if program not in RANDOM:
        assert first[program]["gap"] <= 1e-9
