"""A fit's report names the limit of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without

skip_without("tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("part", ["input", "between", "validation"])
def test_the_slow_part_of_a_fit_is_named_first(
    keras_ranks: Callable[..., list[Any]], part: str
) -> None:
    """The part takes 20 ms of each step, and everything else a few ms."""
    (found,) = keras_ranks("tests.support.keras_limits.train", part)
    assert found["limits"][:1] == [part], found


def test_a_group_tells_each_process_own_work(keras_ranks: Callable[..., list[Any]]) -> None:
    """The first process reports for all, including each process's waiting."""
    first, _ = keras_ranks("tests.support.keras_limits.train", "between", roles=("worker",) * 2)
    assert first["limits"][0] == "between"
    assert len(first["devices"]) == 2
    for own_work_s, waiting_s in first["devices"]:
        assert own_work_s >= 0
        assert waiting_s > 0
