"""Shares that change during training don't change the result; rows are used once per epoch."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from tests.support import lockstep_ranks
from tests.support import torch_rebalance_programs as programs

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def trained(trainer_ranks: Callable[..., list[Any]]) -> list[Any]:
    """Return the results of two ranks by case, and how their shares changed."""
    return trainer_ranks("tests.support.torch_rebalance_programs.rebalanced", world=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.CASES)
def test_the_weights_are_those_of_one_process(trained: list[Any], name: str) -> None:
    expected = programs.reference(programs.CASES[name])
    for rank in trained:
        for mine, tensor in zip(rank[name]["weights"], expected, strict=True):
            torch.testing.assert_close(mine, tensor, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_weights_are_the_same_on_two_gpus(gpu_ranks: Callable[..., list[Any]]) -> None:
    for rank in gpu_ranks("tests.support.torch_rebalance_programs.rebalanced"):
        for name, case in programs.CASES.items():
            assert len(rank[name]["changes"]) > (case.steps // 30 if case.slow is None else 2)
            for mine, tensor in zip(rank[name]["weights"], programs.reference(case), strict=True):
                torch.testing.assert_close(mine, tensor, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.CASES)
def test_each_row_comes_once_an_epoch(trained: list[Any], name: str) -> None:
    epochs = zip(*(rank[name]["rows"] for rank in trained), strict=True)
    *whole, _ = (sorted(chain.from_iterable(rows)) for rows in epochs)
    assert len(whole) > 15
    assert all(rows == list(range(programs.CASES[name].rows)) for rows in whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.CASES)
def test_all_ranks_change_to_the_same_shares_at_the_same_step(
    trained: list[Any], name: str
) -> None:
    first, second = (rank[name]["changes"] for rank in trained)
    assert first == second
    if programs.CASES[name].slow is None:
        assert len(first) > programs.CASES[name].steps // 30


@pytest.mark.slow
def test_a_rank_that_gets_slower_gets_fewer_rows_and_more_again(trained: list[Any]) -> None:
    """Rank 1 takes four times as long per row from step 130 to 269.

    A change adds at most half of a share's rows.
    """
    changes = trained[0]["by the rule"]["changes"]
    assert [shares for shares, _ in changes] == [
        (10, 6),
        (8, 8),
        (12, 4),
        (13, 3),
        (12, 4),
        (10, 6),
        (8, 8),
    ]
    assert 130 < changes[2][1] <= 150
    assert 270 < changes[4][1] <= 290


@pytest.mark.slow
def test_noise_stalls_evaluations_checkpoints_and_logging_move_no_shares(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """The ranks are real. A 40 % slowdown of a rank shows that shares could change."""
    found, other = trainer_ranks("tests.support.torch_steady_programs.steady", world=2)
    assert found == other
    (step, shares), *_ = found.pop("slower by 40 %")
    assert 100 < step <= 120
    assert shares == pytest.approx((54, 26), abs=2)
    assert {name: changes for name, changes in found.items() if changes} == {}


def test_steps_after_memory_ran_out_move_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the allocator refills, some steps take longer than later ones in small passes."""
    meets = 60

    def own(step: int, rank: int, rows: int) -> float:
        if rank == 0 or step < meets:
            return 2e-4 * rows
        slow = 3.0 if step < meets + 8 else 1.0
        return slow * 3e-4 * rows

    seen = lockstep_ranks.train(monkeypatch, (128, 128), 200, own, {meets: 1})
    shares = [rows for _, rows in dict.fromkeys(seen)]
    assert shares[0] == 128
    assert seen[-1][1] == pytest.approx(102, abs=8)
    assert all(rows == pytest.approx(102, abs=8) for rows in shares[1:]), "it never got too few"


@pytest.mark.parametrize(
    ("a_pass", "a_row", "slow", "best"),
    [
        (7.7e-3, 0.135e-3, 1.0, (185, 71)),
        (7.7e-3, 0.135e-3, 2.5, (185, 71)),
        (20e-3, 0.02e-3, 1.0, (224, 32)),
    ],
)
def test_passes_that_cost_the_host_the_same_however_few_rows_take_no_more_rows_than_pay(
    monkeypatch: pytest.MonkeyPatch, a_pass: float, a_row: float, slow: float, best: tuple[int, int]
) -> None:
    """A neighbour leaves one rank memory for 32 rows at once, and slows its host at first.

    Passes have full size again when it has gone.
    """
    comes, noise = 60, random.Random(0)

    def limit(step: int, rank: int) -> int | None:
        return None if rank == 0 or step < comes else 32 if step < 300 else 256

    def own(step: int, rank: int, rows: int) -> float:
        passes = -(-rows // (limit(step, rank) or 256))
        host = slow if comes <= step < comes + 80 else 1.0
        return (passes * a_pass * host + rows * a_row) * noise.gauss(1.0, 0.01)

    seen = lockstep_ranks.train(monkeypatch, (128, 128), 500, own, {comes: 1}, limit)
    shares = list(dict.fromkeys(seen))
    assert seen[299] == pytest.approx(best, abs=8)
    assert max(rows for rows, _ in shares) <= best[0] + 8, "it never got too many"
    assert max(own(499, rank, rows) for rank, rows in enumerate(seen[-1])) < 1.15 * own(0, 0, 128)
    assert len(shares) <= 8
