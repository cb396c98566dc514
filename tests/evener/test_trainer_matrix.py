"""Models, losses and trainers under a plan end like the plain trainer, or are refused.

Weights and logged values are compared. The cases are a sample of `python -m
benchmarks.trainer_matrix`, and programs that the check of losses may not refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "transformers", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

MATRIX, PROGRAMS = "tests.support.matrix_trainings", "tests.support.exact_programs"
pytestmark = pytest.mark.slow

EXACT = (
    "encoder | compute_loss_func, a mean | transformers | passes | tail | 2",
    "encoder by token | focal | transformers | passes | tail | 1",
    "encoder by token | own | transformers | at once | tail | 2",
    "encoder-decoder | own | transformers | passes | tail | 2",
    "encoder-decoder | compute_loss_func by items | transformers | at once | tail | 1",
    "vision | own | transformers | passes | tail | 2",
    "vision | cross entropy that smooths | transformers | passes | tail | 1",
    "speech | own | transformers | at once | even | 2",
    "experts | own | transformers | passes | tail | 1",
    "encoder | focal | PyTorch | passes | tail | 2",
    "decoder | own | PyTorch | passes | tail | 1",
    "decoder | own | accelerate | passes | tail | 2",
    "vision | own | Lightning | passes | tail | 2",
)
REFUSED = {
    "CLIP | own | transformers | at once | even | 2": "it isn't a mean over rows",
    "encoder | class weights | transformers | passes | tail | 1": ("it isn't a mean over rows"),
    "decoder | sum | transformers | passes | tail | 1": "it is a sum, not a mean",
    "experts' auxiliary loss | own | transformers | passes | tail | 1": "auxiliary loss",
    "CLIP | own | PyTorch | passes | tail | 1": "it isn't a mean over rows",
    "vision | sum | accelerate | passes | tail | 1": "it is a sum, not a mean",
}
SUMMED = ("loss", "train_loss", "eval_loss")  # summed by transformers in float32

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def trained(trainer_ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank for every case."""
    path = tmp_path_factory.mktemp("matrix") / "bare.pt"
    lightning = "lightning.pytorch" if find_spec("lightning") else ""
    (bare,) = trainer_ranks(f"{MATRIX}.reference_all", [*EXACT, *REFUSED], imports=lightning)
    torch.save(bare, path)
    return trainer_ranks(
        f"{MATRIX}.train_all", [*EXACT, *REFUSED], str(path), world=2, imports=lightning
    )


@pytest.mark.parametrize("name", EXACT)
def test_weights_and_figures_are_those_of_one_process(
    trained: list[dict[str, Any]], name: str
) -> None:
    for rank in trained:
        found = dict(rank[name])
        assert found.pop("change") > 1e-3  # it learned something
        assert found.pop("weights") <= 1e-12
        assert {
            figure: far
            for figure, far in found.items()
            if far > (1e-6 if figure in SUMMED else 1e-9)
        } == {}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_no_mean_is_refused(trained: list[dict[str, Any]], name: str) -> None:
    for rank in trained:
        assert REFUSED[name] in rank[name]["refused"]


def test_no_program_that_is_exact_is_refused(trainer_ranks: Run, tmp_path: Path) -> None:
    (bare,) = trainer_ranks(f"{PROGRAMS}.reference_all", imports="peft")
    torch.save(bare, tmp_path / "bare.pt")
    for rank in trainer_ranks(
        f"{PROGRAMS}.train_all", str(tmp_path / "bare.pt"), world=2, imports="peft"
    ):
        assert len(rank) >= 40
        assert {
            name: seen for name, seen in rank.items() if isinstance(seen, str) or seen > 1e-12
        } == {}
