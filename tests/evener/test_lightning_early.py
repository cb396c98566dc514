"""A LightningModule may ask its trainer before the first step, and train other tensors.

Most schedules by steps do the former; the tensors aren't parameters. Training ends as in one
process.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "lightning"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

PROGRAMS = "tests.support.lightning_early"
EARLY = (
    "one cycle",
    "one cycle, accumulated",
    "one cycle, limited",
    "one cycle, by steps",
    "warm-up",
    "in setup",
    "in configure_model",
    "its own loader",
    "statistics of the data",
    "collectives",
    "tensors of its own",
)
AT_ONCE = ("tensors of its own by hand", "the tuner", "the callback")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(trainer_ranks: Callable[..., list[Any]]) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return the results of one process, and of ranks without and with passes."""
    (expected,) = trainer_ranks(f"{PROGRAMS}.reference_all")
    whole = trainer_ranks(f"{PROGRAMS}.train_all", (6, 2), (6, 2), world=2)
    passes = trainer_ranks(f"{PROGRAMS}.train_all", (6, 2), (3, 2), world=2)
    return expected, whole, passes


def assert_same(expected: Any, rank: Any) -> None:
    assert not isinstance(rank, str), rank
    assert rank["steps"] == expected["steps"]
    for mine, its in zip(rank["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
    assert rank["told"].keys() == expected["told"].keys()
    for question, told in rank["told"].items():
        numbers = isinstance(told, list | float)
        its = expected["told"][question]
        assert told == (pytest.approx(its, abs=1e-12) if numbers else its), question


@pytest.mark.parametrize("name", EARLY)
def test_what_it_reads_before_training_is_what_one_process_reads(found: Any, name: str) -> None:
    expected, whole, passes = found
    for rank in (*whole, *passes):
        assert_same(expected[name], rank[name])


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_needs_a_whole_batch_is_exact_without_passes_and_refused_in_passes(
    found: Any, name: str
) -> None:
    """The cases are the learning rate finder, which uses the loss, and manual optimization."""
    expected, whole, passes = found
    for rank in whole:
        assert_same(expected[name], rank[name])
    for rank in passes:
        assert "a plan without passes" in rank[name]
