"""A fit's report names the limit of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_slow_part_of_a_fit_is_named_first(keras_ranks: Callable[..., list[Any]]) -> None:
    """The part takes 20 ms of each step, and everything else a few ms."""
    parts = "input", "between", "validation"
    (found,) = keras_ranks("tests.support.keras_limits.train_each", *parts)
    for part in parts:
        assert found[part]["limits"][:1] == [part], found[part]


def test_a_group_tells_each_process_own_work(keras_ranks: Callable[..., list[Any]]) -> None:
    """The first process reports for all, including each process's waiting."""
    run = "tests.support.keras_limits.train_each"
    first, _ = (found["between"] for found in keras_ranks(run, "between", roles=("worker",) * 2))
    assert first["limits"][0] == "between"
    assert len(first["devices"]) == 2
    for own_work_s, waiting_s in first["devices"]:
        assert own_work_s >= 0
        assert waiting_s > 0
