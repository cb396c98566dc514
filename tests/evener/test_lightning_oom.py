"""Lightning runs whose passes run out of memory end like undisturbed ones, or with a message."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "lightning"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import msgspec
import torch

from tests.support import torch_oom_programs as bombed

# imports Lightning, so only the ranks' server imports it, not pytest's workers
PROGRAMS = "tests.support.lightning_oom_programs"
NAMES = (
    "figures",
    "columns",
    "tokens",
    "validated",
    "compiled",
    "skipped",
    "resumed",
    "bf16",
    "fp16",
)
WITHIN = {"bf16": 0.05, "fp16": 0.05}  # all others are in float64
SAME_PASSES = ("normalized", "dropout in passes, accumulated")
GIVEN = (((8,), (8,)), ((6, 2), (6, 2)), ((6, 2), (3, 1)))  # shares, and rows of a pass
pytestmark = pytest.mark.slow
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def expected(trainer_ranks: Run) -> dict[str, Any]:
    """Return the results of plain Lightning by case."""
    (found,) = trainer_ranks(f"{PROGRAMS}.reference_all")
    assert set(found) == set(NAMES)
    return dict(found)


@pytest.fixture(scope="module")
def trained(trainer_ranks: Run) -> list[list[Any]]:
    """Return the results of each plan's ranks."""
    return [trainer_ranks(f"{PROGRAMS}.train_all", *given, world=len(given[0])) for given in GIVEN]


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_what_a_training_learns_whose_memory_suffices(
    expected: Any, trained: Any, name: str
) -> None:
    wanted, within = expected[name], WITHIN.get(name, 1e-12)
    ranks = [rank[name] for plan in trained for rank in plan if name in rank]
    assert sum(rank["burst"] for rank in ranks) >= 5
    for rank in ranks:
        for mine, its in zip(rank["weights"], wanted["weights"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=within)
        assert rank["steps"] == wanted["steps"]
        assert rank["unpaired"] == [], "the callbacks of a batch run once"
        # logged on each rank; Lightning itself logs another mean
        if name not in ("columns", "resumed"):
            for kind in ("metrics", "shown"):
                own = {figure: value for figure, value in rank[kind].items() if figure != "metric"}
                assert own == pytest.approx(
                    {figure: wanted[kind][figure] for figure in own}, abs=within
                )
                assert rank[kind].get("metric", 0) == pytest.approx(
                    wanted[kind].get("metric", 0), abs=1e-6
                )


def test_a_figure_that_one_device_logs_of_a_step_is_of_all_its_rows(
    expected: Any, trained: Any
) -> None:
    ((rank,), *_) = trained
    assert rank["columns"]["shown"] == pytest.approx(expected["columns"]["shown"], abs=1e-12)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", SAME_PASSES)
def test_rows_that_depend_on_draws_are_learned_as_by_one_process_that_takes_the_same_passes(
    trained: Any, name: str
) -> None:
    case = msgspec.structs.replace(bombed.CASES[name], steps=8)
    for (given, _), plan in zip(GIVEN[:2], trained, strict=False):
        shares, ranks = [4 * share for share in given], [rank["same passes"][name] for rank in plan]
        assert sum(rank["burst"] for rank in ranks) >= 5
        for rank, share in zip(ranks, shares, strict=True):
            assert [sum(sizes) for sizes in rank["kept"]] == [share] * case.steps, "each row once"
        wanted = bombed.reference(case, shares, [rank["kept"] for rank in ranks])
        for rank in ranks:
            assert rank["loss"] == pytest.approx(sum(wanted["losses"]) / case.steps, abs=1e-12)
            for mine, its in zip(rank["state"], wanted["state"], strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("manual", "training_step takes the steps of its optimizers itself"),
        ("LBFGS", "LBFGS needs the loss of the whole batch"),
        ("a sum", "it is a sum, not a mean over rows"),
        ("no room", "There is no room for the 0.0 GiB of AdamW's state"),
        ("gathered", "the loop communicates with other ranks in a pass"),
    ],
)
def test_what_cannot_be_computed_again_ends_in_an_error(
    trainer_ranks: Run, name: str, words: str
) -> None:
    waited, said = trainer_ranks(f"{PROGRAMS}.end", name, [4, 4], world=2)
    assert said.startswith("DeviceError")
    assert words in said
    assert name == "no room" or waited.splitlines()[-1].startswith(
        "evener: rank 1 ended, and this rank can't go on without it: DeviceError"
    )


def test_what_a_failed_pass_computed_is_released_before_smaller_ones_begin(
    trainer_ranks: Run,
) -> None:
    (seen,) = trainer_ranks(f"{PROGRAMS}.look_at_memory")
    assert len(seen) >= 10
    assert all(seen)
