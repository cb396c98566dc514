"""A probe of a transformers Trainer or a LightningModule steps like the trainer itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

if not all(map(find_spec, ("torch", "transformers", "lightning", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

from evener.errors import RequestError
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend.user_model import find_recipe
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload
from tests.support.frameworks import LazyModule

programs: Any = LazyModule("tests.support.huggingface_programs")
lightning_programs: Any = LazyModule("tests.support.lightning_programs")
pytestmark = pytest.mark.slow
CPU = WorkerSetup(devices=("CPU:0",))


def a_trainer() -> Any:
    program = programs.Program(
        rows=32, arguments={"max_grad_norm": 0.01, "learning_rate": 1.0, "optim": "sgd"}
    )
    return programs.Trainer(
        args=programs.make_arguments(program, tempfile.mkdtemp()), **programs.make_parts(program)
    )


def a_module() -> Any:
    return lightning_programs.Module(manual=False), lightning_programs.points(32)


def probe(built: Any) -> tuple[int, float]:
    """Return the number of rows and how far two steps moved the weights; run on a rank."""
    recipe = find_recipe("train.py:build", built)
    assert recipe is not None
    assert recipe.data is not None
    before = [tensor.detach().clone() for tensor in recipe.module.parameters()]
    workload = TorchWorkload(CPU, lambda: recipe)
    for shares, micro in (((6,), ()), ((8,), (3,))):
        workload.prepare(shares, micro)
        workload.step()
        workload.synchronize()
        assert workload.loss_is_finite()
    after = [tensor.detach() for tensor in recipe.module.parameters()]
    moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
    return recipe.data.rows, float(torch.linalg.vector_norm(moved))


def step_probe(trainer: Any) -> None:
    """Run a probe's step in three passes.

    After an evaluation, each step begins with train(), whose time counts.
    """
    workload = TorchWorkload(CPU, lambda: cast(Recipe, find_recipe("train.py:build", trainer)))
    workload.prepare((8,), (3,))
    trainer.model.eval()
    workload.step()
    assert trainer.model.training


def list_turns(make: Callable[[], Any], run: Callable[[Any], Any]) -> list[str]:
    """Return the sequence of a Trainer's actions in a run.

    They are forward passes, reads of a loss, and work on all parameters.
    """
    turns: list[str] = []

    def note(turn: str, original: Any) -> Any:
        def noted(*given: Any, **more: Any) -> Any:
            turns.append(turn)
            return original(*given, **more)

        return noted

    with ExitStack() as stack:
        for owner, name in ((torch, "isinf"), (programs.Trainer, "floating_point_ops")):
            stack.enter_context(mock.patch.object(owner, name, note(name, getattr(owner, name))))
        trainer = make()
        trainer.model.forward = note("forward", trainer.model.forward)
        trainer.model.zero_grad = note("zero_grad", trainer.model.zero_grad)
        trainer.accelerator.clip_grad_norm_ = note("clip", trainer.accelerator.clip_grad_norm_)
        run(trainer)
    return turns


def a_planned_trainer() -> Any:
    """Return a Trainer for two steps of 8 rows, in passes of 3."""
    program = programs.Program(rows=32, arguments={"max_grad_norm": 0.01, "max_steps": 2})
    kind = programs.with_plan(programs.Trainer, programs.make_plan((8,), (3,)))
    return kind(
        args=programs.make_arguments(program, tempfile.mkdtemp()), **programs.make_parts(program)
    )


def count_forward_passes(checkpoints: bool) -> int:
    """Return how often a layer computes forward in a probe's step of one pass."""
    program = programs.Program(rows=32, arguments={"gradient_checkpointing": checkpoints})
    trainer = programs.Trainer(
        args=programs.make_arguments(program, tempfile.mkdtemp()), **programs.make_parts(program)
    )
    calls: list[Any] = []
    layer = trainer.model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: calls.append(None))
    workload = TorchWorkload(CPU, lambda: cast(Recipe, find_recipe("train.py:build", trainer)))
    workload.prepare((8,), ())
    calls.clear()
    workload.step()
    return len(calls)


def list_prefetches() -> list[int | None]:
    """Return how many batches are prefetched with and without loader processes."""
    busy = a_trainer()
    busy.args.dataloader_num_workers = 1
    recipes = [find_recipe("train.py:build", each) for each in (a_trainer(), a_module(), busy)]
    return [recipe.data.prefetch for recipe in recipes if recipe and recipe.data]


def count_lengths() -> int:
    """Return the number of lengths of a LightningModule's data set."""
    module, data = a_module()
    data.lengths = list(range(1, 33))
    recipe = find_recipe("train.py:build", (module, data))
    assert recipe is not None
    assert recipe.data is not None
    return 0 if recipe.data.lengths is None else len(recipe.data.lengths.tokens)


def refuse(built: Any) -> str:
    try:
        return str(find_recipe("train.py:build", built))
    except RequestError as error:
        return str(error)


def probe_all(folder: Path, rank: int) -> None:
    """Probe both kinds of models, and something else."""
    torch.set_num_threads(1)
    found = {
        "trainer": probe(a_trainer()),
        "module": probe(a_module()),
        "turns": list_turns(a_trainer, step_probe),
        "trained turns": list_turns(a_planned_trainer, lambda trainer: trainer.train()),
        "forward passes": [count_forward_passes(each) for each in (False, True)],
        "prefetches": list_prefetches(),
        "lengths": count_lengths(),
        "no data": refuse(lightning_programs.Module(manual=False)),
        "by hand": refuse((lightning_programs.Module(manual=True), lightning_programs.points(8))),
        "neither": refuse((torch.nn.Linear(1, 1), Path())),
    }
    torch.save(found, folder / f"{rank}.pt")


def test_its_own_steps_are_measured_or_it_is_refused(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    (found,) = trainer_ranks("tests.workloads.test_trainer_models.probe_all")
    rows, moved = found["trainer"]
    assert rows == 32
    assert 0 < moved <= 2 * 0.01 * (1 + 1e-6)  # two steps of length 1.0 times the clipped gradient
    rows, moved = found["module"]
    assert rows == 32
    assert moved > 0
    assert found["turns"].count("forward") == 3
    assert found["turns"] == found["trained turns"][-len(found["turns"]) :], (
        "as a training by a plan"
    )
    assert found["forward passes"] == [1, 2], "with activation checkpointing, twice"
    assert found["prefetches"] == [0, 0, None], (
        "rows that a trainer fetches between steps are fetched there"
    )
    assert found["lengths"] == 32
    assert "without data" in found["no data"]
    assert "optimizes by hand" in found["by hand"]
    assert found["neither"] == "None"
