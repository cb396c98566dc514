"""Loops with accelerate that must end with the same weights in one process and in several ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from evener.errors import EvenerError
from evener.torch import Split
from tests.support.huggingface_programs import SEED, Ordered, make_plan
from tests.support.lightning_programs import EPOCHS, points
from tests.support.scripted_shares import rotate_shares

ROWS = 29
WINDOW = 2


def network() -> Any:
    """Return two layers in float64."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    ).double()


def plain(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """Train with `accelerator.backward` and clipping."""
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def accumulated(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """Train with `accelerator.accumulate`, two batches per optimizer step."""
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def scheduled(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """Train with a prepared learning rate schedule, which steps once for each process.

    Each epoch has a new schedule.
    """
    schedule = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6))
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def in_passes(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """Train with `split.parts`, which is the plain loop in one process."""
    for batch in loader:
        if split is None:
            accelerator.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
        else:
            for part in split.parts(batch):
                inputs, targets = part.batch
                part.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Callable[..., None]] = {
    "plain": plain,
    "prepared": plain,  # the split's loader too: accelerate leaves it unchanged
    "accumulated": accumulated,
    "scheduled": scheduled,
    "in passes": in_passes,
    "resumed": plain,
    "rebalanced": accumulated,
}


def train(name: str, split: Any = None, folder: str = "") -> dict[str, Any]:
    """Train by a split, or in one process without one.

    "resumed" trains in two halves, the second from a saved state.
    """
    window = WINDOW if LOOPS[name] is accumulated else 1
    options = GradientAccumulationPlugin(num_steps=window, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=options)
    module = network()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), 1e-2))
    sampler = Ordered(ROWS)
    loader: Any = DataLoader(points(ROWS), batch_sampler=sampler)
    if split is not None:
        model, loader = split.wrap(model), split.loader(points(ROWS), seed=SEED)
    if name == "prepared":
        loader = accelerator.prepare(loader)
    if name == "resumed" and split is not None:
        halve(accelerator, model, optimizer, loader, split, folder)
    for epoch in range(
        1 if name == "resumed" and split is not None else 0, EPOCHS + 3 * (name == "rebalanced")
    ):
        sampler.set_epoch(epoch)
        LOOPS[name](accelerator, model, optimizer, loader, split)
    found: dict[str, Any] = {
        "weights": [tensor.detach().clone() for tensor in module.state_dict().values()]
    }
    found["predicted"] = predict(accelerator, model)
    found["taken over"] = split is None or model.reducer is None
    if name == "rebalanced" and split is not None:
        assert split.reporter.changes
    accelerator.free_memory()
    return found


def halve(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any, folder: str
) -> None:
    """Train an epoch whose second half is computed twice; the first result is discarded."""
    accelerator.register_for_checkpointing(loader)
    plain(accelerator, model, optimizer, islice(loader, 3), split)
    accelerator.save_state(folder)
    plain(accelerator, model, optimizer, loader, split)
    accelerator.load_state(folder)
    plain(accelerator, model, optimizer, loader, split)


def predict(accelerator: Any, model: Any) -> torch.Tensor:
    """Return predictions with a loader that accelerate shards.

    The rows don't divide evenly into batches or ranks.
    """
    loader = accelerator.prepare(DataLoader(points(21), batch_size=4))
    model.eval()
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(model(inputs)) for inputs, _ in loader])


def refuse(split: Any) -> str:
    """Return the error for another loader that is passed to `prepare`."""
    accelerator = Accelerator(cpu=True)
    module = network()
    data = DataLoader(points(ROWS), batch_size=4)
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters()), data
    )
    found = sentence(lambda: plain(accelerator, split.wrap(model), optimizer, loader, split))
    accelerator.free_memory()
    return found


def train_sharded(split: Any = None, drop_last: bool = True) -> dict[str, Any]:
    """Train with FSDP2, AdamW and clipping, in passes."""
    model: Any = network()
    if split is not None:
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (split.world,)))
        model = split.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader: Any = DataLoader(points(ROWS), batch_sampler=Ordered(ROWS, drop_last=drop_last))
    loader = loader if split is None else split.loader(points(ROWS), seed=SEED, drop_last=drop_last)
    for _ in range(EPOCHS):
        for batch in loader:
            for part in [None] if split is None else split.parts(batch):
                inputs, targets = batch if part is None else part.batch
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward() if part is None else part.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        loader.batch_sampler.set_epoch(loader.batch_sampler.epoch + 1) if split is None else None
    weights = [tensor.detach().clone() for tensor in model.state_dict().values()]
    return {"weights": [each.full_tensor() if split is not None else each for each in weights]}


def refuse_parallel(split: Any) -> str:
    """Return the error for a model in tensor parallelism."""
    model = parallelize_module(
        network(), init_device_mesh("cpu", (split.world,)), {"0": ColwiseParallel()}
    )
    return sentence(lambda: split.wrap(model))


def sentence(called: Callable[[], Any]) -> str:
    """Return the error that the call raises; empty if it raises none."""
    try:
        called()
    except EvenerError as error:
        return str(error)
    return ""


def make_split(name: str, plan: Any) -> Split:
    """Return the split for one of the loops."""
    split = Split(plan, rebalance=name == "rebalanced")
    if name == "rebalanced":
        rotate_shares(split.rebalancing)
    return split


def train_all(folder: Path, rank: int, shares: list[int], micros: list[int]) -> None:
    """Train every loop as one rank. With passes in the plan, train the loops that support them."""
    torch.set_num_threads(1)
    plan = make_plan(shares, micros)
    names = list(LOOPS) if shares == micros else ["in passes"]
    found: dict[str, Any] = {
        name: train(name, make_split(name, plan), str(folder / "state")) for name in names
    }
    found["parallel"] = refuse_parallel(Split(plan))
    if shares == micros:
        found["refused"] = refuse(Split(plan))
        sharded = make_plan(shares, [-(-share // 2) for share in shares])
        found["sharded in passes"] = train_sharded(Split(sharded, weigh="loss"))
        found["a short batch"] = sentence(
            lambda: train_sharded(Split(sharded, weigh="loss"), drop_last=False)
        )
    torch.save(found, folder / f"{rank}.pt")


def reference_all(folder: Path, rank: int) -> None:
    """Train every loop in one process."""
    torch.set_num_threads(1)
    found = {name: train(name) for name in LOOPS}
    torch.save({**found, "sharded in passes": train_sharded()}, folder / f"{rank}.pt")
