"""Trainings by transformers' and TRL's trainers under a plan end with the weights of the bare trainer in one process.

The rows of the table in docs/training_huggingface.md.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "transformers", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

from evener.errors import EvenerError
from evener.torch_split.pass_sampler import PassSampler
from evener.torch_split.sampler import UnevenBatchSampler
from tests.support.frameworks import LazyModule, skip_without
from tests.support.torch_start import run_ranks

programs: Any = LazyModule("tests.support.huggingface_programs")
NAMES = (
    "tokens",
    "tokens, 45 rows, cosine",
    "tokens, accumulated",
    "tokens by length",
    "rows",
    "rows, accumulated, drop last",
    "rows by a compute_loss",
    "resumed",
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread"), pytest.mark.filterwarnings("ignore")]

Ended = list[dict[str, dict[str, Any]]]


def run(script: str, given: tuple[str, ...], folder: Path) -> Ended:
    """What every program ended with, on each rank."""
    path = Path(__file__).parents[1] / "support" / script
    run_ranks(path, len(given), lambda rank: [str(folder / f"rank{rank}.pt"), *given], folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(len(given))]


@pytest.fixture(scope="module", params=[("6:2", "2:2"), ("5:3", "2:2", "1:1")], ids=str)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Shares in passes: 3 against 1, and 2 against 1 and 1."""
    return run("huggingface_programs.py", request.param, tmp_path_factory.mktemp("huggingface"))


@cache
def one_process(name: str) -> dict[str, Any]:
    return programs.reference(programs.PROGRAMS[name])


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_what_one_process_learns(ended: Ended, name: str) -> None:
    assert set(programs.PROGRAMS) == set(NAMES)
    expected, resumed = one_process(name), programs.PROGRAMS[name].resume_after
    for rank in ended:
        for mine, its in zip(rank[name]["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
        assert rank[name]["losses"][-1] == pytest.approx(expected["losses"][-1], abs=2e-6)
        if not resumed:  # the trainer itself logs the mean since it was resumed
            assert rank[name]["losses"] == pytest.approx(expected["losses"], abs=2e-6)
            assert rank[name]["samples"] == pytest.approx(expected["samples"], rel=0.02)  # its rate has three digits
        for figure in ("steps", "tokens", "total"):
            assert rank[name][figure] == expected[figure]


def test_trl_learns_what_one_process_learns(tmp_path: Path) -> None:
    """Its losses are float32 inside, and so is the bound."""
    skip_without("trl", "peft", "datasets")
    trl_programs: Any = LazyModule("tests.support.trl_programs")
    for rank in run("trl_programs.py", ("6:2", "2:2"), tmp_path):
        for kind in trl_programs.KINDS:
            expected = trl_programs.reference(kind)
            assert rank[kind]["steps"] == expected["steps"]
            assert rank[kind]["losses"] == pytest.approx(expected["losses"], abs=2e-6)
            for mine, its in zip(rank[kind]["weights"], expected["weights"], strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- in this process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """One rank of one; the folder of its trainer."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EVENER_LIVE_DIR", str(tmp_path / "live"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("evener.huggingface.trainer.settle", lambda *_: None)
    return str(tmp_path / "trainer")


def planned(*shares: Any, **options: Any) -> Any:
    """A Trainer by a plan of these batches, and rows of a pass."""
    return programs.with_plan(programs.Trainer, programs.make_plan(*shares), **options)


def refused(folder: str, kind: Any = None, **arguments: Any) -> str:
    """The sentence that ends a training before its first step."""
    chosen = programs.Program(rows=12)
    parts = {"args": programs.make_arguments(chosen, folder, **arguments), **programs.make_parts(chosen)}
    start = [tensor.clone() for tensor in parts["model"].parameters()]
    with pytest.raises(EvenerError) as caught:
        programs.with_plan(kind or programs.Trainer, programs.make_plan((8,)))(**parts).train()
    assert all(map(torch.equal, start, parts["model"].parameters()))
    return str(caught.value)


def test_what_would_not_be_exact_is_refused(alone: str) -> None:
    assert "auto_find_batch_size" in refused(alone, auto_find_batch_size=True)
    assert "average_tokens_across_devices" in refused(alone, average_tokens_across_devices=False)
    assert "batch_rebalance" in refused(alone, train_sampling_strategy="batch_rebalance")
    assert "OwnLoss.compute_loss may be" in refused(
        alone, type("Unmarked", (programs.OwnLoss,), {"loss_is_scaled_for_ga": None})
    )
    assert "generates the rows" in refused(
        alone, type("Generates", (programs.Trainer,), {"_generate_and_score_completions": None})
    )
    assert "no Trainer class" in refused(alone, object)


def test_a_checkpoint_of_another_global_batch_is_refused(alone: str) -> None:
    program = programs.Program(rows=16)
    arguments = programs.make_arguments(program, alone, save_strategy="epoch", num_train_epochs=1)
    programs.with_plan(programs.Trainer, programs.make_plan((8,)))(
        args=arguments, **programs.make_parts(program)
    ).train()
    checkpoint = Path(alone) / "checkpoint-2"
    assert json.loads((checkpoint / "evener.json").read_text()) == {"rows": 16, "step_rows": 8}
    again = programs.make_arguments(program, alone)
    smaller = planned((4,))(args=again, **programs.make_parts(program))
    with pytest.raises(EvenerError, match="8 of 16 rows in each optimizer step"):
        smaller.train(resume_from_checkpoint=str(checkpoint))
    same = programs.with_plan(programs.Trainer, programs.make_plan((4,)), global_batch=8)(
        args=again, **programs.make_parts(program)
    )
    assert same.train(resume_from_checkpoint=str(checkpoint)).global_step == 6


def test_the_users_arguments_stay_as_they_are(alone: str) -> None:
    program = programs.Program(rows=12)
    arguments = programs.make_arguments(program, alone)
    trainer = programs.with_plan(programs.Trainer, programs.make_plan((8,), (3,)))(
        args=arguments, **programs.make_parts(program)
    )
    assert (arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size) == (1, 8)
    assert (trainer.args.gradient_accumulation_steps, trainer.args.per_device_train_batch_size) == (3, 3)


def test_every_row_is_in_one_pass_of_one_rank() -> None:
    """Also in a last batch with fewer rows than passes, where a row that doesn't count keeps step."""
    for rows in range(9, 34):
        seen = []
        for rank, passes in enumerate((3, 1)):
            sampler = PassSampler(UnevenBatchSampler(rows, (6, 2), rank), passes)
            batches = list(sampler)
            assert len(batches) == len(sampler) == -(-rows // 8) * passes
            sizes = [size for step in range(len(batches) // passes) for size in sampler.pass_sizes(step)]
            seen += [row for batch, size in zip(batches, sizes, strict=True) for row in batch[:size]]
        assert sorted(seen) == list(range(rows))
