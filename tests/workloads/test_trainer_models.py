"""A probe of a transformers Trainer or a LightningModule steps as they do."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("torch", "transformers", "lightning", "accelerate"))):
    pytest.skip("a trainer isn't installed", allow_module_level=True)

import torch

from evener.costs import Cost
from evener.errors import RequestError
from evener.workloads.protocol import Place
from evener.workloads.torch_backend import user_model
from evener.workloads.torch_backend.trainer_model import find_recipe
from tests.support.frameworks import LazyModule

programs: Any = LazyModule("tests.support.huggingface_programs")
lightning_programs: Any = LazyModule("tests.support.lightning_programs")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread"), pytest.mark.filterwarnings("ignore")]
CPU = Place(devices=("CPU:0",))


def a_trainer() -> Any:
    program = programs.Program(rows=32, arguments={"max_grad_norm": 0.01, "learning_rate": 1.0, "optim": "sgd"})
    return programs.Trainer(args=programs.make_arguments(program, tempfile.mkdtemp()), **programs.make_parts(program))


def a_module() -> Any:
    return lightning_programs.Module(manual=False), lightning_programs.points(32)


@pytest.mark.parametrize("build", [a_trainer, a_module])
def test_its_own_steps_are_measured(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = find_recipe("train.py:build", build())
    assert recipe is not None
    assert recipe.data is not None
    assert recipe.data.rows == 32
    before = [tensor.detach().clone() for tensor in recipe.module.parameters()]
    monkeypatch.setattr(user_model.UserRecipe, "build_recipe", lambda _: recipe)
    workload: Any = user_model.build("train.py:build", CPU, {})
    for shares, micro in (((6,), ()), ((8,), (3,))):
        if recipe.data.lengths is not None and micro:
            workload.prepare_dealt(shares, (Cost(1e-6, 1.0, 0.0),), (0,))
        else:
            workload.prepare(shares, micro)
        workload.step()
        workload.synchronize()
        assert workload.loss_is_finite()
    assert (workload.work() is not None) == (build is a_trainer)
    after = [tensor.detach() for tensor in recipe.module.parameters()]
    moved = torch.linalg.vector_norm(torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]))
    assert moved > 0
    if build is a_trainer:
        assert moved <= 2 * 0.01 * (1 + 1e-6)  # two steps of length 1.0 times the clipped gradient


def test_what_no_probe_can_step_is_refused() -> None:
    with pytest.raises(RequestError, match="without data"):
        find_recipe("train.py:build", lightning_programs.Module(manual=False))
    with pytest.raises(RequestError, match="optimizes by hand"):
        find_recipe("train.py:build", (lightning_programs.Module(manual=True), lightning_programs.points(8)))
    assert find_recipe("train.py:build", (torch.nn.Linear(1, 1), Path())) is None
