"""Training loops as users write them, which learn what one process learns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import TensorDataset

from evener.torch import Split
from tests.support.torch_program_parts import (
    CLASSES,
    WIDTH,
    exact,
    network,
    own_ddp,
    sgd,
    split_by,
    split_in_passes,
    train,
    update,
    weights,
)


@exact
def plain(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model, loader = split.wrap(network()), split.loader(rows)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, loader, optimizer)
    return weights(model)


@exact
def gan(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """The generator's noise is a function of the rows, as one process and several can't draw the
    same.
    """
    split = split_by(shares)
    generator, critic = split.wrap(network(WIDTH)), split.wrap(network(1))
    first, second = sgd(generator), sgd(critic)
    for real, _ in split.loader(rows):
        fake = generator(real.sin())
        update(second, F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean())
        update(first, F.softplus(-critic(fake)).mean())
    return weights(generator, critic)


def play_in_passes(
    shares: tuple[int, ...], rows: TensorDataset, detached: bool
) -> list[torch.Tensor]:
    """The same by parts; the critic's turn has the generator compute without gradients, or only
    cuts them off.
    """
    split = split_in_passes(shares)
    generator, critic = split.wrap(network(WIDTH)), split.wrap(network(1))
    first, second = sgd(generator), sgd(critic)
    for batch in split.loader(rows):
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
def gan_in_passes(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return play_in_passes(shares, rows, detached=False)


@exact
def gan_in_passes_whose_gradients_are_only_cut_off(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    return play_in_passes(shares, rows, detached=True)


def search(
    shares: tuple[int, ...], rows: TensorDataset, mean: bool, **options: Any
) -> list[torch.Tensor]:
    """By LBFGS, whose closure returns the whole batch's loss, or the rank's own."""
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2, **options)
    for inputs, labels in split.loader(rows):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return split.mean(loss) if mean else loss

        optimizer.step(closure)
    return weights(model)


@exact
def lbfgs(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return search(shares, rows, mean=True)


@exact
def lbfgs_that_searches_by_a_ranks_own_loss(
    shares: tuple[int, ...], rows: TensorDataset
) -> list[torch.Tensor]:
    return search(shares, rows, mean=False, line_search_fn="strong_wolfe")


def compiled(
    shares: tuple[int, ...], rows: TensorDataset, way: Callable[[Split, nn.Module], Any]
) -> list[torch.Tensor]:
    split = split_by(shares)
    model = way(split, network())
    train(model, split.loader(rows))
    return weights(model)


@exact
def compiled_after_wrap(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return compiled(
        shares, rows, lambda split, net: torch.compile(split.wrap(net), backend="eager")
    )


@exact
def compiled_before_wrap(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return compiled(
        shares, rows, lambda split, net: split.wrap(torch.compile(net, backend="eager"))
    )


@exact
def wrap_of_a_compiled_ddp(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return compiled(
        shares,
        rows,
        lambda split, net: split.wrap(torch.compile(own_ddp(split, net), backend="eager")),
    )


@exact
def wrap_of_a_ddp(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As accelerate's prepare gives it."""
    return compiled(shares, rows, lambda split, net: split.wrap(own_ddp(split, net)))


@exact
def accumulation(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model, loader = split.wrap(network()), split.loader(rows)
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
def ema(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    teacher, optimizer = copy.deepcopy(model), sgd(model)
    for inputs, labels in split.loader(rows):
        with torch.no_grad():
            target = teacher(inputs).softmax(1)
        outputs = model(inputs)
        update(optimizer, F.cross_entropy(outputs, labels) + F.cross_entropy(outputs, target))
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.detach().lerp_(fast.detach(), 0.1)
    return weights(model, teacher)


@exact
def lora(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """A frozen base with two small layers beside it."""
    split = split_by(shares)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = network().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2).double(), nn.Linear(2, CLASSES).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.base(inputs) + self.up(self.down(inputs))

    torch.manual_seed(4)
    model = split.wrap(Adapted())
    train(model, split.loader(rows))
    return weights(model)


@exact
def gradient_penalty(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    critic = split.wrap(network(1))
    optimizer = torch.optim.SGD(critic.parameters(), 0.01)
    for inputs, _ in split.loader(rows):
        points = inputs.clone().requires_grad_()
        outputs = critic(points)
        (slope,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        update(optimizer, outputs.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean())
    return weights(critic)


@exact
def resume_under_other_shares(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model, loader = split.wrap(network()), split.loader(rows)
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(loader):
        update(optimizer, F.cross_entropy(model(inputs), labels))
        if step == 2:
            break
    again = split_by(shares[::-1])
    model = again.wrap(getattr(model, "module", model))
    resumed = again.loader(rows)
    resumed.load_state_dict(loader.state_dict())
    next(iter(split.loader(rows)), None)
    iter(resumed)  # an iterator that is never used takes nothing
    left = [len(resumed)]
    train(model, resumed, optimizer)
    train(model, resumed, optimizer)
    return [*weights(model), torch.tensor(left)]


@exact
def a_schedule_by_the_length(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model, loader = split.wrap(network()), split.loader(rows)
    loader.load_state_dict({**loader.state_dict(), "position": 24})
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    for inputs, labels in loader:
        update(optimizer, F.cross_entropy(model(inputs), labels))
        schedule.step()
    return [*weights(model), torch.tensor(schedule.get_last_lr())]


@exact
def wrapped_again_and_again(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split, net = split_by(shares), network()
    for _ in range(3):
        model = split.wrap(split.wrap(net))
        train(model, split.loader(rows))
    return weights(model)


@exact
def a_batch_that_grows(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """Another Split with another global batch: of the same module, and of what the first one
    wrapped.
    """
    net = network()
    for times in (1, 2):
        split = split_by(shares, times)
        model = split.wrap(net)
        train(model, split.loader(rows))
    split = split_by(shares, 3)
    model = split.wrap(model)
    train(model, split.loader(rows))
    return weights(model)


@exact
def after_the_loop(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """Gradients of the bare model are left alone, on a rank without rows too."""
    split, net = split_by(shares), network()
    model = split.wrap(net)
    train(model, split.loader(rows))
    net.zero_grad()
    net(rows.tensors[0]).sum().backward()
    return [each.grad for each in net.parameters() if each.grad is not None]
