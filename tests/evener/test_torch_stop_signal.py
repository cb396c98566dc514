"""A notice that the machine will be taken away (SIGTERM) ends training at one step of all ranks.

No rows are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.frameworks import skip_without
from tests.support.torch_stop_signal_programs import BATCH, NOTICES, ROWS

PROGRAMS = "tests.support.torch_stop_signal_programs"


def test_each_row_comes_once_over_ten_notices(trainer_ranks: Callable[..., list[Any]]) -> None:
    """Each notice reaches only one rank, for which the other one would wait.

    Shares change each time.
    """
    (first, steps), (second, its_steps) = trainer_ranks(f"{PROGRAMS}.train_on", world=2)
    assert len(steps) == NOTICES
    assert steps == its_steps
    assert min(steps) >= 2  # not before the notice was sent
    assert sorted(first + second) == list(map(float, range(ROWS)))


def test_one_process_ends_at_the_end_of_the_step(trainer_ranks: Callable[..., list[Any]]) -> None:
    """A single process needs no agreement."""
    ((rows, steps),) = trainer_ranks(f"{PROGRAMS}.train_on_alone")
    assert steps == [2] * NOTICES
    assert sorted(rows) == list(map(float, range(ROWS)))


def test_a_trainer_saves_and_ends_at_one_step(trainer_ranks: Callable[..., list[Any]]) -> None:
    """With `enable_jit_checkpoint`, the next run trains the rest; SIGTERM's handler is restored."""
    skip_without("transformers", "accelerate")
    pytest.importorskip("transformers.trainer_jit_checkpoint")  # new in transformers 5
    own, its = trainer_ranks(f"{PROGRAMS}.end_trainer", world=2, imports="transformers")
    assert own == its
    (ended, end), checkpoints, given_back = own
    assert 2 < ended < ROWS // BATCH
    assert f"checkpoint-{ended}" in checkpoints
    assert end == ROWS // BATCH
    assert given_back
