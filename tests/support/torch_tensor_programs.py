"""Loops whose optimizers train tensors that no module has.

Ranks learn them as one process does, or refuse them before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset, TensorDataset

from tests.support.torch_program_parts import (
    CLASSES,
    WIDTH,
    Given,
    Weights,
    exact,
    network,
    refused,
    update,
    weights,
)

EPOCHS = 2


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64, requires_grad=True)


def two_tasks(made: torch.Tensor, rows: Any, log_var: torch.Tensor) -> torch.Tensor:
    """Kendall's loss for a class and a number, each weighted by its own variance."""
    inputs, labels = rows
    kinds = F.cross_entropy(made[:, :CLASSES], labels)
    sizes = F.mse_loss(made[:, CLASSES], inputs.sum(1))
    precision = torch.exp(-log_var)
    return precision[0] * kinds + precision[1] * sizes + log_var.sum()


def ended(model: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [*weights(model), *(each.detach().clone() for each in tensors)]


def learn(split: Any, rows: TensorDataset, log_var: torch.Tensor, **clip: float) -> Any:
    model, loader = split.wrap(network(CLASSES + 1)), split.loader(rows)
    optimizer = torch.optim.Adam([*model.parameters(), log_var], 0.05)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            two_tasks(model(batch[0]), batch, log_var).backward()
            if clip:
                clip_grad_norm_([*model.parameters(), log_var], **clip)
            optimizer.step()
    return ended(model, log_var)


@exact
def log_variances_of_two_tasks_by_rows(given: Given) -> Weights:
    return learn(given.split(), given.rows, tensor(2))


@exact
def log_variances_that_are_bare_parameters(given: Given) -> Weights:
    return learn(given.split(), given.rows, nn.Parameter(tensor(2).detach()))


@exact
def log_variances_that_are_clipped(given: Given) -> Weights:
    return learn(given.split(), given.rows, tensor(2), max_norm=0.3)


@exact
def log_variances_by_scaled_losses(given: Given) -> Weights:
    split, log_var = given.split(weigh="loss"), tensor(2)
    model, loader = split.wrap(network(CLASSES + 1)), split.loader(given.rows)
    optimizer = torch.optim.Adam([*model.parameters(), log_var], 0.05)
    for batch in loader:
        update(optimizer, split.scale(two_tasks(model(batch[0]), batch, log_var)))
    return ended(model, log_var)


@exact
def log_variances_in_passes(given: Given) -> Weights:
    split, log_var = given.split_in_passes(), tensor(2)
    model, loader = split.wrap(network(CLASSES + 1)), split.loader(given.rows)
    optimizer = torch.optim.Adam([*model.parameters(), log_var], 0.05)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            split.step(batch, lambda part: two_tasks(model(part.batch[0]), part.batch, log_var))
            optimizer.step()
    return ended(model, log_var)


@exact
def log_variances_accumulated(given: Given) -> Weights:
    """Accumulates two batches per step; the last one of an epoch may be alone."""
    split, log_var = given.split(), tensor(2)
    model, loader = split.wrap(network(CLASSES + 1)), split.loader(given.rows)
    optimizer = torch.optim.Adam([*model.parameters(), log_var], 0.05)
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            if number % 2 or number == len(loader) - 1:
                (two_tasks(model(batch[0]), batch, log_var) / 2).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=bool(number % 3))
            else:
                with split.no_sync(model):
                    (two_tasks(model(batch[0]), batch, log_var) / 2).backward()
    return ended(model, log_var)


@exact
def a_temperature_of_its_own_by_rows(given: Given) -> Weights:
    """The temperature of SAC as in CleanRL: its loss uses no model, and it has its own
    optimizer.
    """
    split, log_alpha = given.split(), tensor(1)
    model, loader = split.wrap(network()), split.loader(given.rows)
    actor = torch.optim.Adam(model.parameters(), 0.05)
    temperature = torch.optim.Adam([log_alpha], 0.05)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            alpha = log_alpha.exp().item()
            log_policy = F.log_softmax(model(inputs), 1)
            chosen = log_policy.gather(1, labels[:, None])
            entropy = -(log_policy.exp() * log_policy).sum(1)
            update(actor, -(chosen.mean() + alpha * entropy.mean()))
            update(temperature, (-log_alpha.exp() * (chosen + 1.5).detach()).mean())
    return ended(model, log_alpha)


class Numbered(Dataset[Any]):
    """Rows with their numbers."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return row, self.rows[row][0]


@exact
def a_code_for_each_of_the_rows(given: Given) -> Weights:
    """An auto-decoder with a table of codes, of which each rank's rows use different entries."""
    split = given.split()
    codes = torch.randn(
        (len(given.rows), WIDTH), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).requires_grad_()
    model, loader = split.wrap(network(WIDTH)), split.loader(Numbered(given.rows))
    optimizer = torch.optim.Adam([*model.parameters(), codes], 0.05)
    for _ in range(EPOCHS):
        for numbers, inputs in loader:
            own = codes[numbers]
            loss = F.mse_loss(model(own), inputs) + 0.1 * own.square().mean()
            update(optimizer, loss)
    return ended(model, codes)


@exact
def a_prompt_of_a_frozen_model(given: Given) -> Weights:
    """Trains only the tensor."""
    split, prompt = given.split(), tensor(WIDTH)
    net = network().requires_grad_(False)
    optimizer = torch.optim.Adam([prompt], 0.05)
    for _ in range(EPOCHS):
        for inputs, labels in split.loader(given.rows):
            update(optimizer, F.cross_entropy(net(inputs + prompt), labels))
    return ended(net, prompt)


@exact
def two_tensors_by_turns(given: Given) -> Weights:
    """One optimizer for two tensors, each of which is used only in some steps."""
    split, shift, scale = given.split(), tensor(1), tensor(1)
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = torch.optim.SGD([*model.parameters(), shift, scale], 0.1)
    for _ in range(EPOCHS):
        for number, (inputs, labels) in enumerate(loader):
            made = model(inputs)
            made = made * scale.exp() if number % 2 else made + shift * inputs[:, :1]
            update(optimizer, F.cross_entropy(made, labels))
    return ended(model, shift, scale)


@exact
def copies_of_weights_that_the_loop_steps(given: Given) -> Weights:
    """Copies their gradients from the wrapped model, where they are already summed."""
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    copies = [each.detach().clone().requires_grad_() for each in model.parameters()]
    optimizer = torch.optim.Adam(copies, 0.05)
    for inputs, labels in loader:
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for copied, own in zip(copies, model.parameters(), strict=True):
            copied.grad = own.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for copied, own in zip(copies, model.parameters(), strict=True):
                own.copy_(copied)
    return weights(model)


@refused("tensors that no module has, with gradients of this rank's rows alone")
def a_tensor_whose_gradient_is_assigned(given: Given) -> Weights:
    split, log_var = given.split(), tensor(2)
    model = split.wrap(network(CLASSES + 1))
    optimizer = torch.optim.Adam([*model.parameters(), log_var], 0.05)
    for batch in split.loader(given.rows):
        loss = two_tasks(model(batch[0]), batch, log_var)
        (gradient,) = torch.autograd.grad(loss, [log_var], retain_graph=True)
        loss.backward(inputs=list(model.parameters()))
        log_var.grad = gradient
        optimizer.step()
    return ended(model, log_var)


@refused("Make it before the loop over split.loader begins")
def a_tensor_of_an_optimizer_that_is_made_late(given: Given) -> Weights:
    split, log_var = given.split(), tensor(2)
    model, optimizer = split.wrap(network(CLASSES + 1)), None
    for batch in split.loader(given.rows):
        optimizer = optimizer or torch.optim.Adam([*model.parameters(), log_var], 0.05)
        update(optimizer, two_tasks(model(batch[0]), batch, log_var))
    return ended(model, log_var)


@refused("begins with different values on different ranks")
def a_tensor_that_each_rank_draws(given: Given) -> Weights:
    split = given.split()
    drawn = torch.randn(2, generator=torch.Generator().manual_seed(split.rank)).double()
    return learn(split, given.rows, drawn.requires_grad_())


@refused("wrap that too: head = split.wrap(head)")
def a_head_that_the_loss_has(given: Given) -> Weights:
    """The loss is a module with its own trained weights, as in ArcFace or proxy losses."""
    split, head = given.split(), nn.Linear(CLASSES, CLASSES).double()
    model = split.wrap(network())
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.05)
    for inputs, labels in split.loader(given.rows):
        update(optimizer, F.cross_entropy(head(model(inputs)), labels))
    return weights(model, head)


@exact
def a_head_that_is_wrapped_too(given: Given) -> Weights:
    split = given.split()
    torch.manual_seed(5)
    model, head = split.wrap(network()), split.wrap(nn.Linear(CLASSES, CLASSES).double())
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.05)
    for _ in range(EPOCHS):
        for inputs, labels in split.loader(given.rows):
            update(optimizer, F.cross_entropy(head(model(inputs)), labels))
    return weights(model, head)
