"""Trainings by Lightning and loops with accelerate under a plan end with the weights of one process.

The rows of the tables in docs/training_lightning.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "lightning", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

from evener.errors import RequestError
from evener.torch_split import Split
from evener.torch_split.pass_loader import PassLoader
from evener.torch_split.pass_sampler import PassSampler
from evener.torch_split.sampler import UnevenBatchSampler
from tests.support.frameworks import LazyModule
from tests.support.torch_start import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread"), pytest.mark.filterwarnings("ignore")]
accelerate_programs: Any = LazyModule("tests.support.accelerate_programs")
lightning_programs: Any = LazyModule("tests.support.lightning_programs")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

GIVEN = {"shares": ("6", "2"), "passes": ("5:3", "2:2", "1:1")}
CASES = [
    *((kind, name) for kind in GIVEN for name in ("plain", "accumulated", "validated", "resumed")),
    ("shares", "manual"),
    *(("shares", f"accelerate, {name}") for name in ("plain", "prepared", "accumulated", "in passes")),
    ("passes", "accelerate, in passes"),
]


@cache
def ended(kind: str, folder: Path) -> list[dict[str, Any]]:
    """What every program ended with, on each rank."""
    script, given = Path(__file__).parents[1] / "support" / "lightning_programs.py", GIVEN[kind]
    run_ranks(script, len(given), lambda rank: [str(folder / f"rank{rank}.pt"), *given], folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(len(given))]


@cache
def one_process(name: str) -> dict[str, Any]:
    framework, _, loop = name.partition(", ")
    if framework == "accelerate":
        return accelerate_programs.train(loop)
    return lightning_programs.reference(lightning_programs.PROGRAMS[name])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tmp_path_factory.mktemp(kind) for kind in GIVEN}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_learns_what_one_process_learns(folders: dict[str, Path], kind: str, name: str) -> None:
    expected = one_process(name)
    for rank in ended(kind, folders[kind]):
        for mine, its in zip(rank[name]["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
        if name in lightning_programs.PROGRAMS:
            assert rank[name]["steps"] == expected["steps"]
            if name != "resumed":  # Lightning itself logs another mean there
                assert rank[name]["metrics"] == pytest.approx(expected["metrics"], abs=1e-12)


def test_another_loader_is_refused(folders: dict[str, Path]) -> None:
    for rank in ended("shares", folders["shares"]):
        assert "no batch of split.loader is in hand" in rank["accelerate, refused"]


# ---------------------------------------------------------------------- in this process


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Split]:
    """One rank of one, whose share takes two passes. The group that its strategy opens is closed at the end."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EVENER_LIVE_DIR", str(tmp_path / "live"))
    monkeypatch.setattr("evener.torch_split.split.settle", lambda *_: None)
    yield Split(lightning_programs.make_plan((8,), (4,)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fit(split: Split, folder: Path, manual: bool = False, with_loader: bool = True, **options: Any) -> Any:
    trainer = lightning_programs.make_trainer(
        lightning_programs.Program(), str(folder), strategy=split.strategy(), devices=1, **options
    )
    data = lightning_programs.points(16)
    loader = split.loader(data) if with_loader else torch.utils.data.DataLoader(data, batch_size=8)
    return trainer.fit(lightning_programs.Module(manual), loader)


def test_a_second_training_accumulates_as_the_first(split: Split, tmp_path: Path) -> None:
    trainer = lightning_programs.make_trainer(
        lightning_programs.Program(), str(tmp_path), strategy=split.strategy(), devices=1, accumulate_grad_batches=2
    )
    for _ in range(2):
        trainer.fit(lightning_programs.Module(False), split.loader(lightning_programs.points(16)))
        assert trainer.accumulate_grad_batches == 4


def test_what_would_not_be_exact_is_refused(split: Split, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="manual optimization doesn't know of"):
        fit(split, tmp_path, manual=True)
    with pytest.raises(RequestError, match=r"don't come from split\.loader"):
        fit(split, tmp_path, with_loader=False)
    trainer = lightning_programs.pl.Trainer(
        accelerator="cpu", devices=1, strategy=split.strategy(), logger=False, enable_checkpointing=False
    )
    with pytest.raises(RequestError, match="use_distributed_sampler=False"):
        trainer.fit(lightning_programs.Module(False), split.loader(lightning_programs.points(16)))


def test_a_pass_loader_goes_on_in_mid_epoch() -> None:
    def make(shares: tuple[int, int] = (6, 2), passes: int = 2) -> PassLoader:
        return PassLoader(range(21), PassSampler(UnevenBatchSampler(21, shares, 0, seed=4), passes), collate_fn=list)

    first = make()
    first.set_epoch(1)
    whole = list(first)
    first.done = 4  # two steps of two passes
    state = first.state_dict()
    for other in (make(), make((5, 3))):
        other.load_state_dict(state)
        other.set_epoch(1)
        rest = list(other)
        assert len(rest) == len(whole) - 4
        assert other.done == 4
    again = make()
    again.load_state_dict(state)
    again.set_epoch(1)
    assert list(again) == whole[4:]
    with pytest.raises(RequestError, match="passes 2, this training has 3"):
        make(passes=3).load_state_dict(state)
