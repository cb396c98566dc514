"""Passes that run out of memory, at any layer, forward or backward, on any rank: nothing is lost or taken twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tests.support import torch_oom_programs as programs

SHARES, SEEDS = (24, 12, 8), (0, 1, 2)


@pytest.fixture(scope="module")
def trained(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    """What each of three ranks learned in each case."""
    return trainer_ranks("tests.support.torch_oom_programs.train_all", SHARES, SEEDS, world=3)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", programs.CASES)
def test_it_learns_what_one_process_learns_that_takes_the_same_passes(trained: list[Any], name: str, seed: int) -> None:
    ranks = [rank[name, seed] for rank in trained]
    case = msgspec.structs.replace(programs.CASES[name], seed=seed)
    assert sum(rank["burst"] for rank in ranks) >= 5
    for rank, share in zip(ranks, SHARES, strict=True):
        assert [sum(sizes) for sizes in rank["kept"]] == [share] * case.steps, "each row once"
    expected = programs.reference(case, SHARES, [rank["kept"] for rank in ranks])
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        for mine, its in zip(rank["state"], expected["state"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", ["plain", "plain in passes", "by parts, counted", "accumulated"])
def test_rows_that_depend_on_nothing_are_learned_as_if_nothing_had_happened(trained: list[Any], name: str) -> None:
    case = programs.CASES[name]
    undisturbed = [[[share]] * case.steps for share in SHARES]
    expected = programs.reference(msgspec.structs.replace(case), SHARES, undisturbed)
    for mine, its in zip(trained[0][name, 0]["state"], expected["state"], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
