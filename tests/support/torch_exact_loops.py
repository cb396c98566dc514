"""Training loops as users write them, which ranks must learn exactly as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.torch import Split
from tests.support.torch_program_parts import (
    CLASSES,
    WIDTH,
    Given,
    Weights,
    exact,
    network,
    own_ddp,
    sgd,
    train,
    update,
    weights,
)


@exact
def plain(given: Given) -> Weights:
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, loader, optimizer)
    return weights(model)


@exact
def gan(given: Given) -> Weights:
    """A GAN whose noise is computed from the rows, as ranks can't draw one process's random
    numbers.
    """
    split = given.split()
    generator, critic = split.wrap(network(WIDTH)), split.wrap(network(1))
    first, second = sgd(generator), sgd(critic)
    for real, _ in split.loader(given.rows):
        fake = generator(real.sin())
        update(second, F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean())
        update(first, F.softplus(-critic(fake)).mean())
    return weights(generator, critic)


def play_in_passes(given: Given, detached: bool) -> Weights:
    """Train the same GAN in passes.

    For the critic, the generator computes without gradients or, with `detached`, its output is
    detached.
    """
    split = given.split_in_passes()
    generator, critic = split.wrap(network(WIDTH)), split.wrap(network(1))
    first, second = sgd(generator), sgd(critic)
    for batch in split.loader(given.rows):
        for part in split.parts(batch):
            with nullcontext() if detached else torch.no_grad():
                fake = generator(part.batch[0].sin()).detach()
            part.backward(
                F.softplus(-critic(part.batch[0])).mean() + F.softplus(critic(fake)).mean()
            )
        second.step()
        first.zero_grad()
        for part in split.parts(batch):
            part.backward(F.softplus(-critic(generator(part.batch[0].sin()))).mean())
        first.step()
        second.zero_grad()
    return weights(generator, critic)


@exact
def gan_in_passes(given: Given) -> Weights:
    return play_in_passes(given, detached=False)


@exact
def gan_in_passes_whose_gradients_are_only_cut_off(given: Given) -> Weights:
    return play_in_passes(given, detached=True)


def search(given: Given, mean: bool, **options: Any) -> Weights:
    """Train with L-BFGS, whose closure returns the loss of the whole batch or of the
    rank's rows.
    """
    split = given.split()
    model = split.wrap(network())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2, **options)
    for inputs, labels in split.loader(given.rows):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return split.mean(loss) if mean else loss

        optimizer.step(closure)
    return weights(model)


@exact
def lbfgs(given: Given) -> Weights:
    return search(given, mean=True)


@exact
def lbfgs_that_searches_by_a_ranks_own_loss(given: Given) -> Weights:
    return search(given, mean=False, line_search_fn="strong_wolfe")


def compiled(given: Given, way: Callable[[Split, nn.Module], Any]) -> Weights:
    split = given.split()
    model = way(split, network())
    train(model, split.loader(given.rows))
    return weights(model)


@exact
def compiled_after_wrap(given: Given) -> Weights:
    return compiled(given, lambda split, net: torch.compile(split.wrap(net), backend="eager"))


@exact
def compiled_before_wrap(given: Given) -> Weights:
    return compiled(given, lambda split, net: split.wrap(torch.compile(net, backend="eager")))


@exact
def wrap_of_a_compiled_ddp(given: Given) -> Weights:
    return compiled(
        given,
        lambda split, net: split.wrap(torch.compile(own_ddp(split, net), backend="eager")),
    )


@exact
def wrap_of_a_ddp(given: Given) -> Weights:
    """Wraps a DDP model, like the one that accelerate's prepare returns."""
    return compiled(given, lambda split, net: split.wrap(own_ddp(split, net)))


@exact
def accumulation(given: Given) -> Weights:
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate([*loader, *loader]):
        last = step % 4 == 3
        with split.no_sync(model) if not last else torch.enable_grad():
            (F.cross_entropy(model(inputs), labels) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@exact
def ema(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    teacher, optimizer = copy.deepcopy(model), sgd(model)
    for inputs, labels in split.loader(given.rows):
        with torch.no_grad():
            target = teacher(inputs).softmax(1)
        outputs = model(inputs)
        update(optimizer, F.cross_entropy(outputs, labels) + F.cross_entropy(outputs, target))
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.detach().lerp_(fast.detach(), 0.1)
    return weights(model, teacher)


@exact
def lora(given: Given) -> Weights:
    """A frozen base with a low-rank adapter of two layers."""
    split = given.split()

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = network().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2).double(), nn.Linear(2, CLASSES).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.base(inputs) + self.up(self.down(inputs))

    torch.manual_seed(4)
    model = split.wrap(Adapted())
    train(model, split.loader(given.rows))
    return weights(model)


@exact
def gradient_penalty(given: Given) -> Weights:
    split = given.split()
    critic = split.wrap(network(1))
    optimizer = torch.optim.SGD(critic.parameters(), 0.01)
    for inputs, _ in split.loader(given.rows):
        points = inputs.clone().requires_grad_()
        outputs = critic(points)
        (slope,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        update(optimizer, outputs.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean())
    return weights(critic)


@exact
def resume_under_other_shares(given: Given) -> Weights:
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(loader):
        update(optimizer, F.cross_entropy(model(inputs), labels))
        if step == 2:
            break
    again = given.turned().split()
    model = again.wrap(getattr(model, "module", model))
    resumed = again.loader(given.rows)
    resumed.load_state_dict(loader.state_dict())
    next(iter(split.loader(given.rows)), None)
    iter(resumed)  # an iterator that is never used takes no batch
    left = [len(resumed)]
    train(model, resumed, optimizer)
    train(model, resumed, optimizer)
    return [*weights(model), torch.tensor(left)]


@exact
def a_schedule_by_the_length(given: Given) -> Weights:
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    loader.load_state_dict({**loader.state_dict(), "position": 24})
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    for inputs, labels in loader:
        update(optimizer, F.cross_entropy(model(inputs), labels))
        schedule.step()
    return [*weights(model), torch.tensor(schedule.get_last_lr())]


@exact
def wrapped_again_and_again(given: Given) -> Weights:
    split, net = given.split(), network()
    for _ in range(3):
        model = split.wrap(split.wrap(net))
        train(model, split.loader(given.rows))
    return weights(model)


@exact
def a_batch_that_grows(given: Given) -> Weights:
    """Wraps the model again with a Split of a larger global batch, bare and already wrapped."""
    net = network()
    for times in (1, 2):
        split = given.split(times)
        model = split.wrap(net)
        train(model, split.loader(given.rows))
    split = given.split(3)
    model = split.wrap(model)
    train(model, split.loader(given.rows))
    return weights(model)


@exact
def after_the_loop(given: Given) -> Weights:
    """Later gradients of the bare model aren't changed, even on a rank without rows."""
    split, net = given.split(), network()
    model = split.wrap(net)
    train(model, split.loader(given.rows))
    net.zero_grad()
    net(given.rows.tensors[0]).sum().backward()
    return [each.grad for each in net.parameters() if each.grad is not None]
