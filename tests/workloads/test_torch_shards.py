"""A rank of a sharded workload that is measured by itself steps as in a group, and says what the model needs."""

from __future__ import annotations

import pytest
import torch

from evener.errors import RequestError
from evener.workloads.protocol import Place
from evener.workloads.torch_backend.batches import Data
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload
from tests.support import shard_workload

PART = 1 / 64
ALONE = Place(("cpu:0",), threads=1, state=(PART,))


def make(monkeypatch: pytest.MonkeyPatch, optimizer: type[torch.optim.Optimizer], **options: float) -> TorchWorkload:
    monkeypatch.setattr(shard_workload, "BLOCKS", 3)
    monkeypatch.setattr(shard_workload, "WIDTH", 64)

    def recipe() -> Recipe:
        model = shard_workload.Big()
        return Recipe(model, optimizer(model.parameters(), **options), torch.nn.MSELoss(), Data(shard_workload.data()))

    return TorchWorkload(ALONE, recipe)


@pytest.mark.parametrize(
    ("optimizer", "options", "figures"),
    [(torch.optim.AdamW, {}, 4), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 3), (torch.optim.SGD, {"lr": 0.1}, 2)],
)
def test_it_steps_on_its_part_and_knows_the_state_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, optimizer: type[torch.optim.Optimizer], options: dict[str, float], figures: int
) -> None:
    workload = make(monkeypatch, optimizer, **options)
    elements = 3 * (8 * 64 * 64 + 5 * 64)
    state, gathered, _ = map(int, workload.facts()["state"].split())
    assert int(workload.facts()["parameters"]) == elements
    assert state == pytest.approx(4 * figures * elements, rel=0.02)
    assert gathered == 2 * 2 * 4 * elements // 3, "two blocks, with their gradients"
    for shares, micro in (((8,), ()), ((8,), (3,))):
        workload.prepare(shares, micro)
        for _ in range(2):
            workload.step()
        workload.synchronize()
        assert workload.loss_is_finite()
    held = workload._shards.sharded.held if workload._shards else None
    assert held is not None
    assert held.now["gathered"] == 0
    assert held.now["shards"] == pytest.approx(4 * elements * PART, rel=0.02)
    assert held.most["gathered"] <= gathered


def test_an_optimizer_that_looks_at_whole_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="Adafactor looks at whole parameters"):
        make(monkeypatch, torch.optim.Adafactor)
    with pytest.raises(RequestError, match="Adagrad has state before its first step"):
        make(monkeypatch, torch.optim.Adagrad)
