"""Loops with accelerate that one process and several ranks must end with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader

from tests.support.huggingface_programs import SEED, Ordered
from tests.support.lightning_programs import EPOCHS, points

ROWS = 45
WINDOW = 2


def network() -> Any:
    """Two layers in float64."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def plain(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """`accelerator.backward`, clipping."""
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def accumulated(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """`accelerator.accumulate`, with two batches in an optimizer step."""
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def in_passes(accelerator: Any, model: Any, optimizer: Any, loader: Any, split: Any) -> None:
    """`split.parts`: in one process it is the plain loop."""
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
    "prepared": plain,  # the split's loader too: accelerate leaves it as it is
    "accumulated": accumulated,
    "in passes": in_passes,
}


def train(name: str, split: Any = None) -> dict[str, Any]:
    """By a split, or in one process without."""
    window = WINDOW if name == "accumulated" else 1
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
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        LOOPS[name](accelerator, model, optimizer, loader, split)
    accelerator.free_memory()
    return {"weights": [tensor.detach().clone() for tensor in module.state_dict().values()]}


def refuse(split: Any) -> str:
    """The sentence that another loader, put through `prepare`, ends with."""
    accelerator = Accelerator(cpu=True)
    module = network()
    data = DataLoader(points(ROWS), batch_size=4)
    model, optimizer, loader = accelerator.prepare(module, torch.optim.AdamW(module.parameters()), data)
    try:
        plain(accelerator, split.wrap(model), optimizer, loader, split)
    except Exception as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return ""
