"""A fast device with little memory gets more rows than it holds at once, in passes that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cores import two_cores
from tests.support.frameworks import skip_without

skip_without("torch", "transformers", "lightning")

import torch  # noqa: E402

AT_ONCE = 20


@pytest.mark.slow
@two_cores
@pytest.mark.parametrize("trainer", ["transformers", "lightning", "loop"])
def test_shares_grow_beyond_what_a_pass_holds_and_nothing_runs_out_of_memory(
    trainer_ranks: Callable[..., list[Any]], trainer: str
) -> None:
    """Both trainings run in one process, so the second one's group has to find its own ranks."""
    ranks = trainer_ranks("tests.support.memory_caps.train", trainer, world=2)
    (even, moved), (_, other) = ranks
    assert even["shares"] == (12, 12)
    assert moved["shares"][0] > AT_ONCE
    assert max(moved["passes"]) <= AT_ONCE
    assert moved["retreats"] == other["retreats"] == 0
    for mine, its in zip(moved["weights"], even["weights"], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
