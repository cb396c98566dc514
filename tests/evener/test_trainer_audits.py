"""Audits in transformers' Trainer and Lightning find late changes.

An exact program learns bitwise the same with audits as without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.frameworks import skip_without

torch = pytest.importorskip("torch")
skip_without("transformers", "lightning")

PROGRAMS = "tests.support.trainer_audit_programs"
Ended = list[dict[str, Any]]


@pytest.fixture(scope="module")
def trainers(trainer_ranks: Callable[..., Any]) -> Ended:
    """Return the results of the programs of transformers on each rank."""
    return trainer_ranks(f"{PROGRAMS}.train_huggingface", world=2)


@pytest.fixture(scope="module")
def modules(trainer_ranks: Callable[..., Any]) -> Ended:
    """Return the results of Lightning's programs on each rank."""
    return trainer_ranks(f"{PROGRAMS}.train_lightning", world=2)


def assert_untouched(audited: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that audits left no trace and printed nothing."""
    assert audited["said"] == ""
    assert audited["warned"] == []
    for name in audited.keys() - {"weights", "warned", "audited"}:
        assert audited[name] == other[name], name
    for mine, its in zip(audited["weights"], other["weights"], strict=True):
        assert torch.equal(mine, its)


def test_an_exact_trainer_learns_the_same_with_audits(trainers: Ended) -> None:
    for rank in trainers:
        assert_untouched(rank["exact"], rank["unaudited"])
        assert rank["exact"]["own"] == 18  # once per step
        assert rank["exact"]["audited"] == [1, 4, 16]


def test_ranks_may_round_unlike_each_other(trainers: Ended) -> None:
    for rank in trainers:
        assert rank["unlike ranks"]["said"] == ""
        assert rank["unlike ranks"]["warned"] == []


def test_an_exact_module_learns_the_same_with_audits(modules: Ended) -> None:
    for rank in modules:
        assert_untouched(rank["exact"], rank["exact, unaudited"])
        assert_untouched(rank["exact, manual"], rank["exact, manual, unaudited"])
        assert rank["exact"]["audited"] == [1, 4, 16]


def test_a_random_mask_is_right_if_the_loss_is_a_mean_over_rows(
    trainers: Ended, modules: Ended
) -> None:
    for rank in (*trainers, *modules):
        assert rank["expected count"]["said"] == ""
        assert rank["expected count"]["warned"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("late moments", "In step 4"),
        ("own baseline", "Ranks compute different gradients of the same rows"),
        ("mixed rows", "The batch function (collate_fn)"),
        ("rows split on each rank", "The data sets of the ranks differ"),
        ("random count", "a count that depends on random numbers"),
    ],
)
def test_a_trainer_that_differs_later_is_refused(trainers: Ended, name: str, words: str) -> None:
    for rank in trainers:
        assert words in rank[name]["said"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("late deviation", "In step 7"),
        ("relative, manual", "In step 1"),
        ("rows split on each rank", "The data sets of the ranks differ"),
        ("random count", "a count that depends on random numbers"),
        ("random count, manual", "a count that depends on random numbers"),
    ],
)
def test_a_module_that_differs_is_refused(modules: Ended, name: str, words: str) -> None:
    for rank in modules:
        assert words in rank[name]["said"]


def test_losses_alone_are_compared_where_checkpoints_are_reentrant() -> None:
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    from evener.torch.audit.computations import AuditChange, Computations
    from evener.torch.audit.compute import GradientSketcher, Piece
    from evener.torch.audit.sketch import name_tensors
    from evener.torch.audit.step import audit

    model = torch.nn.Linear(3, 3).double()
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)

    def compute(own: Any, spread: bool) -> Any:
        made = checkpoint(model, own, use_reentrant=True)
        return made.std() if spread else made.square().mean()

    for spread in (False, True):
        loss = partial(partial, compute, spread=spread)
        whole = [Piece(loss(rows))]
        parts = [Piece(loss(rows[:3]), 3 / 8), Piece(loss(rows[3:]), 5 / 8)]
        computations = Computations(whole, parts, {"sum": AuditChange(parts)}, (3, 5))
        found = audit(GradientSketcher([model], name_tensors([model])), computations)
        assert (found.difference is None) is not spread
