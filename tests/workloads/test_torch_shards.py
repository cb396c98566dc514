"""Probes of sharded workloads: a single rank measures the model; a group is planned and trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.balancer.events import Finished, Observed
from evener.balancer.jobs import make_job
from evener.balancer.probes.child_prober import make_prober
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.types import Layout, Observation, OutOfMemory, Probe, Stage, Timed
from evener.errors import RequestError
from evener.plan.file import Plan
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend.batches import Data
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload
from tests.support import shard_workload
from tests.support.cores import two_cores

PART = 1 / 64
ALONE = WorkerSetup(("cpu:0",), threads=1, state=(PART,))


def make(
    monkeypatch: pytest.MonkeyPatch, optimizer: type[torch.optim.Optimizer], **options: float
) -> TorchWorkload:
    monkeypatch.setattr(shard_workload, "BLOCKS", 3)
    monkeypatch.setattr(shard_workload, "WIDTH", 64)

    def recipe() -> Recipe:
        model = shard_workload.Big()
        return Recipe(
            model,
            optimizer(model.parameters(), **options),
            torch.nn.MSELoss(),
            Data(shard_workload.data()),
        )

    return TorchWorkload(ALONE, recipe)


@pytest.mark.parametrize(
    ("optimizer", "options", "figures"),
    [
        (torch.optim.AdamW, {}, 4),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 3),
        (torch.optim.SGD, {"lr": 0.1}, 2),
    ],
)
def test_it_steps_on_its_part_and_knows_the_state_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, float],
    figures: int,
) -> None:
    workload = make(monkeypatch, optimizer, **options)
    elements = 3 * (8 * 64 * 64 + 5 * 64)
    facts = map(int, workload.facts()["state"].split())
    state, gathered, _, parameters, trained, gradients, beside = facts
    assert beside == 0, "on a CPU"
    assert gradients == pytest.approx(4 * elements, rel=0.02)
    assert parameters == trained == int(workload.facts()["parameters"]) == elements
    assert state == pytest.approx(4 * figures * elements, rel=0.02)
    assert gathered == 2 * 2 * 4 * elements // 3, "two blocks, with their gradients"
    assert workload._shards is not None
    ledger = workload._shards.sharded.ledger
    before_loss: list[int] = []
    workload.recipe.module.register_forward_hook(
        lambda *_: before_loss.append(ledger.now["gradients"])
    )
    for shares, micro in (((8,), ()), ((8,), (3,))):
        workload.prepare(shares, micro)
        for _ in range(2):
            workload.step()
        workload.synchronize()
        assert workload.loss_is_finite()
    of_part = ledger.most["gradients"]
    in_one_pass, in_three = [0, 0], [0, of_part, of_part]
    assert before_loss == [*in_one_pass, *in_three, *in_three]
    assert ledger.now["gathered"] == 0
    assert ledger.now["shards"] == pytest.approx(4 * elements * PART, rel=0.02)
    assert ledger.most["gathered"] <= gathered


def test_an_optimizer_that_looks_at_whole_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RequestError, match="Adafactor looks at whole parameters"):
        make(monkeypatch, torch.optim.Adafactor)
    with pytest.raises(RequestError, match="Adagrad has state before its first step"):
        make(monkeypatch, torch.optim.Adagrad)


@pytest.fixture
def planned(
    own_folder: Path, quick_probes: None, shared_servers: None
) -> tuple[Plan, list[Observation]]:
    """Return the plan after a whole step in shards, and all measurements.

    The slices have 30 and 10 MiB by evener's own count.
    """
    workload = f"{shard_workload.__file__}:build"
    slices = "cpu/2:0@30MiB,cpu/2:1@10MiB"
    request = Request(
        devices=slices,
        workload=workload,
        framework="torch",
        max_global_batch=8,
        budget_seconds=90.0,
    )
    session, seen, plan = Session(open_run(request)), list[Observation](), None
    for event in session.events():
        if isinstance(event, Observed):
            seen.append(event.seen)
            if isinstance(event.seen, Timed) and event.seen.probe.layout.kind == "shard":
                session.stop()
        elif isinstance(event, Finished):
            plan = event.plan
    session.close()
    assert plan is not None
    plan.save("plan.toml")
    return plan, seen


@two_cores
@pytest.mark.slow
def test_what_no_slice_holds_is_planned_in_shards_and_trains_with_the_memory_that_the_plan_says(
    planned: tuple[Plan, list[Observation]],
    own_folder: Path,
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """A model too large for each slice is planned in shards, and trains within the plan's memory.

    Equal shards would need 17 MB each.
    """
    plan, seen = planned
    alone = [one for one in seen if one.probe.layout.kind == "solo"]
    assert {type(one) for one in alone} == {OutOfMemory}
    assert plan.layout.kind == "shard"
    assert plan.layout.share[0].state == pytest.approx(0.78, abs=0.02), "by memory"
    for rank in trainer_ranks(
        "tests.support.shard_workload.train", str(own_folder / "plan.toml"), world=2
    ):
        assert rank["held"] == pytest.approx(rank["planned"], rel=0.03)
        assert rank["held"] == pytest.approx(rank["measured"], rel=0.03)
        assert rank["moved"]


def test_unequal_memory_holds_more_than_equal_shards_and_nearly_all_that_it_could(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    found, same = trainer_ranks(
        "tests.support.shard_workload.sweep", (3_000_000, 1_000_000), world=2
    )
    assert found == same
    assert found["planned"] >= 1.6 * found["equal"]
    assert found["planned"] >= 0.9 * found["room"]


@two_cores
def test_a_device_without_rows_holds_its_part_while_the_other_steps(
    shared_servers: None,
) -> None:
    """In one pass and in passes; its child computes one row at first, then none."""
    workload = f"{shard_workload.__file__}:build"
    request = Request(devices="cpu/2:0,cpu/2:1", workload=workload, framework="torch")
    prober = make_prober(make_job(request))
    found = list[Observation]()
    try:
        for turn, micro in enumerate(((), (2, 0))):
            layout = Layout("shard", (8, 0), micro=micro, state=(0.25, 0.75))
            probe = Probe(layout, Stage.SHARD, 0.5, turn)
            found += prober.measure((probe,), lambda _: None, threading.Event())
    finally:
        prober.close()
    for one in found:
        assert isinstance(one, Timed), one
        computes, holds = one.memory_bytes
        assert computes is not None
        assert holds is not None
        assert holds > 2 * computes
    assert len(found) == 2
