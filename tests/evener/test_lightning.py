"""Lightning and accelerate loops under a plan end with the weights of one process.

The programs are the rows of the tables in docs/training_lightning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "lightning", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

from evener.errors import RequestError
from evener.torch.rows.loader import StepLoader, StepSampler
from evener.torch.rows.sampler import UnevenBatchSampler

LIGHTNING, ACCELERATE = "tests.support.lightning_programs", "tests.support.accelerate_programs"
GIVEN = (((6, 2), (6, 2)), ((5, 2, 1), (3, 2, 1)))  # shares, and rows of a pass
IN_LIGHTNING = ("plain", "accumulated", "validated", "resumed", "manual", "rebalanced")
WITH_ACCELERATE = (
    "plain",
    "prepared",
    "accumulated",
    "scheduled",
    "in passes",
    "resumed",
    "rebalanced",
    "sharded in passes",
)
pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
# (result of one process, result of a rank) for each program
Pairs = dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]


def pair_all(trainer_ranks: Run, module: str, *names: str) -> tuple[Pairs, list[dict[str, Any]]]:
    """Return all programs' results for one process and a rank, and each rank's other results."""
    (expected,) = trainer_ranks(f"{module}.reference_all")
    ranks = [
        rank
        for given in GIVEN
        for rank in trainer_ranks(f"{module}.train_all", *given, world=len(given[0]))
    ]
    return {
        name: [(expected[name], rank.pop(name)) for rank in ranks if name in rank] for name in names
    }, ranks


@pytest.fixture(scope="module")
def in_lightning(trainer_ranks: Run) -> tuple[Pairs, list[dict[str, Any]]]:
    return pair_all(trainer_ranks, LIGHTNING, *IN_LIGHTNING)


@pytest.fixture(scope="module")
def with_accelerate(trainer_ranks: Run) -> tuple[Pairs, list[dict[str, Any]]]:
    return pair_all(trainer_ranks, ACCELERATE, *WITH_ACCELERATE)


def assert_same_weights(pairs: list[tuple[dict[str, Any], dict[str, Any]]], ranks: int) -> None:
    assert len(pairs) == ranks
    for expected, rank in pairs:
        for mine, its in zip(rank["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", IN_LIGHTNING)
def test_lightning_learns_what_one_process_learns(in_lightning: Any, name: str) -> None:
    pairs = in_lightning[0][name]
    assert_same_weights(pairs, 2 if name == "manual" else 5)
    for expected, rank in pairs:
        assert rank["steps"] == expected["steps"]
        assert name != "rebalanced" or rank["changes"] > 0
        if name != "resumed":  # Lightning itself logs another mean for it
            assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-12)


def test_a_signal_within_a_step_ends_all_ranks_after_it_and_only_then_lightning_asks(
    in_lightning: Any,
) -> None:
    for rank in in_lightning[1][:2]:
        assert rank["stopped"] == (3, 1, True)


def test_lightning_on_two_gpus_learns_what_one_process_learns(
    trainer_ranks: Run, gpu_ranks: Run
) -> None:
    (expected,) = trainer_ranks(f"{LIGHTNING}.reference_all")
    for rank in gpu_ranks(f"{LIGHTNING}.train_all", (6, 2), (2, 2)):
        for name in set(IN_LIGHTNING) - {"manual"}:
            for mine, its in zip(rank[name]["weights"], expected[name]["weights"], strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WITH_ACCELERATE)
def test_a_loop_learns_what_one_process_learns(with_accelerate: Any, name: str) -> None:
    pairs = with_accelerate[0][name]
    assert_same_weights(pairs, 5 if name == "in passes" else 2)
    for expected, rank in pairs:
        if "predicted" in expected:  # each row occurs once
            torch.testing.assert_close(rank["predicted"], expected["predicted"], rtol=0, atol=1e-12)
            assert rank["taken over"]  # by evener's exchange, whose sums are weighted


def test_what_a_loop_may_not_do_is_refused_on_every_rank(with_accelerate: Any) -> None:
    ranks = with_accelerate[1]
    for rank in ranks:
        assert "uses tensor parallelism" in rank["parallel"]
    for rank in ranks[:2]:
        assert "there is no current batch of split.loader" in rank["refused"]
        assert "different numbers of passes in this batch" in rank["a short batch"]


def test_what_lightning_may_not_do_is_refused(trainer_ranks: Run) -> None:
    (found,) = trainer_ranks(f"{LIGHTNING}.refuse_all")
    assert "manual optimization doesn't know of" in found["manual"]
    assert "don't come from split.loader" in found["another loader"]
    assert "use_distributed_sampler=False" in found["shared out again"]
    assert "training_step(dataloader_iter) takes batches itself" in found["batches of its own"]
    assert "sees one pass of 4 rows" in found["normalized"]
    assert "not supported with distributed strategies" in found["finder"]
    # global batches, and steps: a second training run is over at once
    assert found["accumulated"] == [(2, 2), (2, 2)]


def test_a_trainers_loader_goes_on_in_mid_epoch() -> None:
    def make(shares: tuple[int, int] = (6, 2)) -> StepLoader:
        return StepLoader(
            range(21), StepSampler(UnevenBatchSampler(21, shares, 0, seed=4)), collate_fn=list
        )

    first = make()
    first.set_epoch(1)
    whole = list(first)
    first.done = 2
    state = first.state_dict()
    for other in (make(), make((5, 3))):
        other.load_state_dict(state)
        other.set_epoch(1)
        rest = list(other)
        assert len(rest) == len(whole) - 2
        assert other.done == 2
    again = make()
    again.load_state_dict(state)
    again.set_epoch(1)
    assert list(again) == whole[2:]
    with pytest.raises(RequestError, match="a global batch of 8 rows, this training has 9"):
        make((6, 3)).load_state_dict(state)
