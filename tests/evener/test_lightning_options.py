"""Lightning's options, losses and logs under a plan are those of one process, or are refused.

The cases are the rows of the tables in docs/training_lightning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "lightning"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

PROGRAMS = "tests.support.lightning_options"
# shares, and rows per pass: the first rank has two passes
GIVEN = (((6, 2), (6, 2)), ((6, 2), (3, 2)))
EXACT = (
    "limited",
    "limited to a part",
    "overfitted",
    "a fast run",
    "accumulated more later",
    "by a data module",
    "by train_dataloader",
    "figures",
    "tokens",
)
AT_ONCE = {  # cases for a plan without passes, and the message under one with passes
    "LBFGS": "LBFGS needs the loss of the whole batch",
    "split.loss": "split.loss can't be called inside split.parts, or training_step",
    "rows of all ranks": "split.gather can't be called inside split.parts, or training_step",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(trainer_ranks: Callable[..., list[Any]]) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return the results of one process, and of ranks without and with passes."""
    (expected,) = trainer_ranks(f"{PROGRAMS}.reference_all")
    whole, passes = (
        trainer_ranks(f"{PROGRAMS}.train_all", *given, world=len(given[0])) for given in GIVEN
    )
    return expected, whole, passes


def assert_same(expected: dict[str, Any], rank: dict[str, Any], bound: float = 1e-12) -> None:
    for mine, its in zip(rank["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=bound)
    assert rank["steps"] == expected["steps"]
    assert rank["ends"] == expected["ends"]  # number of batches: a batch is a global batch
    for kind in ("metrics", "shown"):
        assert rank[kind].get("metric", 0) == pytest.approx(
            expected[kind].get("metric", 0), abs=1e-6
        )  # in float32
        own = {name: value for name, value in rank[kind].items() if name != "metric"}
        assert own == pytest.approx({name: expected[kind][name] for name in own}, abs=bound)


@pytest.mark.parametrize("name", EXACT)
def test_it_ends_as_one_process_does(found: Any, name: str) -> None:
    expected, whole, passes = found
    for rank in (*whole, *passes):
        assert_same(expected[name], rank[name])


def test_the_trial_of_the_loss_leaves_no_trace(found: Any) -> None:
    """The module's counts, state and logs are unchanged; in passes, each pass calls a step."""
    expected, whole, passes = found
    for rank in whole:
        assert rank["figures"]["seen"] == expected["figures"]["seen"]
    for rank in passes:
        assert rank["figures"]["seen"] == [
            step for step in expected["figures"]["seen"] for _ in range(2)
        ]


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_loss_of_the_whole_batch_is_exact_without_passes_and_refused_in_passes(
    found: Any, name: str
) -> None:
    expected, whole, passes = found
    for rank in whole:
        # its division amplifies small differences
        assert_same(expected[name], rank[name], 1e-9 if name == "LBFGS" else 1e-12)
    for rank in passes:
        assert AT_ONCE[name] in rank[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another loader", "don't come from split.loader"),
        ("another strategy", "L.Trainer(strategy=split.strategy()"),
        ("a sum", "it is a sum, not a mean over rows"),
        ("class weights", "it isn't a mean over rows"),
        ("tokens that nothing counts", "say what it is a mean over (split.strategy(count=))"),
        ("rows that are counted as tokens", "isn't a mean over what count= counts"),
        ("parts", "split.parts"),
        ("unchecked", "learned"),
    ],
)
def test_what_would_learn_something_else_is_refused_on_every_rank(
    found: Any, name: str, words: str
) -> None:
    for rank in (*found[1], *found[2]):
        assert words in rank[name]
