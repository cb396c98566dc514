"""A Keras group retries passes that run out of memory.

Training is in float64, with errors raised in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without
from tests.support.keras_start import Answers

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def found(
    keras_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], list[Any]]:
    """Return the results of each of two processes."""
    folder = str(tmp_path_factory.mktemp("oom"))
    prove = "tests.support.keras_oom_programs.prove"
    answers = Answers(lambda _: keras_ranks(prove, folder, roles=("worker", "worker")))
    return lambda: answers("group")


def test_nothing_is_lost_or_taken_twice(found: Any) -> None:
    """Results are those of one device.

    Errors occur forward and backward, in the first, last and other passes, on both processes, and
    in short batches.
    """
    first, second = (each["two heads"] for each in found())
    assert first["weights"] <= 1e-12
    assert first["logs"] <= 1e-12
    assert first["learned"] == second["learned"]
    assert first["left"] == second["left"] == 0
    assert first["rows"][:2] == [[6, 6], [6, 3, 3, 3, 3]]
    assert second["rows"][0] == [3, 1, 1, 1, 1, 1, 1]


def test_what_depends_on_draws_and_states_is_as_with_the_same_passes_from_the_start(
    found: Any,
) -> None:
    """The results are those of the smaller passes from the start.

    This includes dropout, BatchNormalization, losses with a state, loss scaling, sample weights and
    XLA.
    """
    first, second = (each["everything"] for each in found())
    for own in (first, second):
        assert own["left"] == 0
        assert max(own["weights"], own["states"], own["logs"]) <= 1e-12
    assert first["learned"] == second["learned"]


def test_a_retreat_is_said(found: Any) -> None:
    """The process itself prints the same line as in PyTorch."""
    first, second = (each["everything"] for each in found())
    (one,), (other,) = first["said"], second["said"]
    assert "CPU:0 (a slice) ran out of memory at step 1: passes of 6 -> 3 rows" in one
    assert "CPU:1 (a slice) ran out of memory at step 3: passes of 3 -> 2 rows" in other


def test_smaller_passes_are_kept_and_larger_ones_tried_again(found: Any) -> None:
    """Larger passes are tried again after two successful steps here.

    A row that never fits ends training without a step, naming rank and rows.
    """
    grown, second = (each["grown"] for each in found())
    assert grown["rows"] == [[6, *[3] * 4], [3] * 4, [3] * 4, [6, *[3] * 4], [2, 3], [3] * 4]
    assert second["rows"][0] == [3, 3]
    for rank, own in enumerate((grown, second)):
        assert (
            f"Rank {rank} ran out of memory 20 times in a row with a pass of 1 rows" in own["never"]
        )
        assert own["steps"] == 0


def test_what_cannot_be_computed_again_ends_in_an_error(found: Any) -> None:
    """An optimizer without memory, which may have changed weights, ends training with a message.

    So does a share that can't be computed in passes.
    """
    for rank, each in enumerate(found()):
        assert f"Rank {rank} ran out of memory when it updated the weights" in each["update"]
        assert f"Rank {rank} ran out of memory with {(12, 6)[rank]} rows at once" in each["at once"]
        assert "set its micro in the plan" in each["at once"]


def test_towers_end_with_tensorflows_error(keras_ranks: Callable[..., Any]) -> None:
    """As docs/training.md says, fit can be called again."""
    (seen,) = keras_ranks("tests.support.keras_oom_programs.towers")
    assert seen == {"said": "ResourceExhaustedError", "trained": 10}
