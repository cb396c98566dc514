"""Real ranks, on gloo and where there are GPUs on NCCL, end with the weights of one process, to float64's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import torch_ranks as RANKS  # noqa: N812 - its cases are constants
from tests.support.torch_start import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

SCRIPT = Path(RANKS.__file__)


def run(batches: tuple[int, ...], folder: Path, gpus: bool = False) -> list[Any]:
    """Train every case under a plan with these shares, a rank for each device."""
    RANKS.example_plan(batches).save(folder / "plan.json")
    world = sum(1 for batch in batches if batch)
    run_ranks(SCRIPT, world, lambda rank: [str(folder / "plan.json"), str(folder / f"rank{rank}.pt")], folder, gpus)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def check(ended: list[dict[str, Any]], name: str, case: Any, global_batch: int) -> None:
    """Every rank has the weights and the losses of the plain loop."""
    weights, losses = RANKS.reference(case, case.global_batch(global_batch))
    for rank in ended:
        for mine, expected in zip(rank[name][0], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
        assert rank[name][1] == pytest.approx(losses, abs=1e-12)


@pytest.fixture(scope="module", params=[(6, 2), (5, 2, 1), (5, 0, 1)], ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The global batch, and every case trained under one plan, rank by rank: 3:1, 5:2:1, and the middle left out."""
    return sum(request.param), run(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RANKS.CASES)
def test_the_weights_are_those_of_one_process(trained: Any, name: str) -> None:
    global_batch, ended = trained
    check(ended, name, RANKS.CASES[name], global_batch)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus_too(tmp_path: Path) -> None:
    """NCCL, and batch normalization over the global batch."""
    ended = run((6, 2), tmp_path, gpus=True)
    for name, case in {**RANKS.CASES, **RANKS.GPU_CASES}.items():
        check(ended, name, case, 8)


def test_the_trainings_moved_the_weights() -> None:
    """What is compared is not the start: every case moves some weight by more than a thousandth."""
    for case in {**RANKS.CASES, **RANKS.GPU_CASES}.values():
        start = [weights.detach() for weights in RANKS.model(case).parameters()]
        weights, _ = RANKS.reference(case, case.global_batch(8))
        assert max(float((now - then).abs().max()) for now, then in zip(weights, start, strict=True)) > 1e-3
