"""Two processes treat a user's callbacks, metrics and data like one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
# one wait for all processes, on a machine that may be busy
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

CASES = [
    "metrics of batches, maxima, x and a layer",
    "losses of single outputs, confusion matrices, weights of small kinds",
    (
        "evaluate alone, stops, figures of batches, asked again, steps_per_epoch, pandas, "
        "checkpoints, no number"
    ),
    *("large outputs", "evaluate alone, without weights", "ragged rows"),
    *("ragged rows of a model that waits for them", "single batches, in passes"),
]


@pytest.fixture(scope="module")
def proofs(
    keras_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """Return the results of each of two processes."""
    folder = str(tmp_path_factory.mktemp("group"))
    prove = "tests.support.keras_group_programs.prove"
    return Answers(lambda _: keras_ranks(prove, folder, roles=("worker", "worker")))


@pytest.mark.parametrize("case", CASES)
def test_a_group_does_what_one_process_does(proofs: Any, case: str) -> None:
    """Weights and all values that a program reads are within 1e-12.

    Both processes have bitwise the same.
    """
    first, second = (found[case] for found in proofs("group"))
    assert first["weights"] <= 1e-12
    assert first["logs"] <= 1e-12
    assert first["learned"] == second["learned"]


def test_no_code_that_tensorflow_writes_is_left(proofs: Any) -> None:
    """AutoGraph leaves no files of evener's functions in /tmp, as a killed process would."""
    assert [found["left"] for found in proofs("group")] == [[], []]


def test_processes_with_unequal_data_are_refused(proofs: Any) -> None:
    """All processes raise the error.

    Arrays are compared before the first step, datasets after the first batch or epoch with other
    labels.
    """
    for found in proofs("group"):
        refused = found["refused"]
        assert refused.pop("nothing") == ""
        assert len(refused) == 8
        assert all("Rank 1 has other rows" in said for said in refused.values())


def test_another_engine_than_the_measured_one_is_said(proofs: Any) -> None:
    """The first process reports it."""
    said = (
        "The plan was measured with engine='towers', this is 'multiworker': expect other samples/s."
    )
    first, second = (found["measured"] for found in proofs("group"))
    assert first == [[said], []]
    assert second == [[], []]


def test_the_loss_scale_falls_and_grows_as_on_one_device(proofs: Any) -> None:
    """The loss scale falls exactly when the whole batch's gradient overflows float16."""
    first, second = (found["half"] for found in proofs("group"))
    many, one = first["scales"]
    assert first["apart"] < 0.02
    assert many == one == second["scales"][0]
    assert len(set(one)) > 3


def test_a_training_that_was_killed_between_two_files_of_a_backup_goes_on_as_if_it_was_not(
    keras_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Three epochs remain if the kill came between the second epoch's note and its weights.

    The files are complete.
    """
    program = "tests.support.keras_group_programs.killed", str(tmp_path)
    with pytest.raises(AssertionError):
        keras_ranks(*program, 11, roles=("worker", "worker"))
    assert {path.name for path in tmp_path.rglob("*.*")} >= {
        "latest.weights.h5",
        "training_metadata.json",
    }
    first, second = keras_ranks(*program, 0, roles=("worker", "worker"))
    assert first["apart"] <= 1e-12
    assert first["learned"] == second["learned"]
    assert first["epochs"] == second["epochs"] == 3
    assert first["whole"]
    assert "model.keras" in first["files"]
    assert "backup" not in first["files"]


def test_a_process_that_fails_ends_the_others(keras_ranks: Callable[..., list[Any]]) -> None:
    """A failed process ends the others, which would otherwise wait for its sums forever."""
    program = "tests.support.keras_group_programs.fail_in_one"
    first, second = keras_ranks(program, roles=("worker", "worker"))
    assert second["kind"] == "ValueError"
    assert first["kind"] == "DeviceError"
    assert "Rank 1 has failed" in first["said"]
    assert "a file is missing here" in first["said"]
