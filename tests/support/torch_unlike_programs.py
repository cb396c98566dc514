"""Loops that handle gradients in unusual ways.

They learn exactly the same, or are refused if ranks would learn something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.torch_exchange_programs import Answer, Hiding
from tests.support.torch_program_parts import (
    CLASSES,
    WIDTH,
    Given,
    Loop,
    Step,
    Weights,
    adamw,
    early,
    exact,
    network,
    own_ddp,
    plain,
    refused,
    sgd,
    train,
    update,
    weights,
)


def accumulate(given: Given, net: nn.Module, loss: Any, window: int = 2) -> Weights:
    """Train with accumulated batches; a step also uses those left over at the end of an epoch."""
    split = given.split()
    model, loader = split.wrap(net.double()), split.loader(given.rows)
    optimizer = adamw(model)
    for _ in range(2):
        for number, (inputs, labels) in enumerate(loader, 1):
            ends = number % window == 0 or number == len(loader)
            with nullcontext() if ends else split.no_sync(model):
                (loss(model(inputs), labels) / window).backward()
            if ends:
                optimizer.step()
                optimizer.zero_grad()
    return [torch.view_as_real(each) if each.is_complex() else each for each in weights(model)]


class Scaled(nn.Module):
    """Returns a parameter beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = network(), nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.net(inputs), "scale": self.scale}


@exact
def a_parameter_among_the_outputs(given: Given) -> Weights:
    return accumulate(
        given,
        Scaled(),
        lambda made, labels: F.cross_entropy(made["scores"] * made["scale"], labels),
    )


@exact
def hidden_outputs_in_windows_of_unequal_batches(given: Given) -> Weights:
    return accumulate(given, Hiding(), lambda made, labels: F.cross_entropy(made.scores, labels))


@exact
def complex_weights_in_windows(given: Given) -> Weights:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Linear(WIDTH, 6, dtype=torch.complex128)
            self.last = nn.Linear(6, CLASSES)

        def double(self) -> Any:
            self.last.double()
            return self

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.last(
                torch.tanh(self.first(inputs.to(torch.complex128))).abs()
            )
            return made

    return accumulate(given, Waves(), F.cross_entropy, window=4)


@exact
def a_layer_that_trains_for_a_while(given: Given) -> Weights:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra, self.step = network(), nn.Linear(WIDTH, CLASSES).double(), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.step += 1
            made: torch.Tensor = self.net(inputs) + (
                self.extra(inputs) if 4 <= self.step < 8 else 0
            )
            return made

    torch.manual_seed(4)
    return given.fit(Late(), plain, bucket_cap_mb=0.0001)


@exact
def a_gan_in_one_module_whose_halves_are_frozen_in_turn(given: Given) -> Weights:
    """Like Lightning's toggle_optimizer, starting before the first exchange."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = network(WIDTH), network(1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.critic(self.generator(inputs.sin()))
            return made

    def train_half(
        frozen: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, sign: float
    ) -> None:
        frozen.requires_grad_(False)
        update(optimizer, F.softplus(sign * model(inputs)).mean())
        frozen.requires_grad_(True)

    split, net = given.split(), Gan()
    model, halves = split.wrap(net), [sgd(net.generator), sgd(net.critic)]
    for inputs, _ in split.loader(given.rows):
        train_half(net.generator, halves[1], inputs, 1.0)
        train_half(net.critic, halves[0], inputs, -1.0)
    return weights(model)


@exact
def parametrized_layers(given: Given) -> Weights:
    net = network()
    parametrizations.weight_norm(net[0])
    parametrizations.orthogonal(net[2])
    return given.fit(net, plain)


@exact
def averages_of_a_model_that_was_taken_over(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(own_ddp(split, network()))
    optimizer, teacher = sgd(model), copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for inputs, _ in split.loader(given.rows):
        with torch.no_grad():
            target = teacher(inputs).softmax(1)
        update(optimizer, F.cross_entropy(model(inputs), target))
        average.update_parameters(model)
    return weights(model, average)


@exact
def sharpness_aware(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.optimizer.zero_grad()
        F.cross_entropy(loop.model(inputs), labels).backward()
        parameters = list(loop.model.parameters())
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        moves = [each.grad * (0.1 / norm) for each in parameters]
        torch._foreach_add_([each.data for each in parameters], moves)
        loop.optimizer.zero_grad()
        F.cross_entropy(loop.model(inputs), labels).backward()
        torch._foreach_sub_([each.data for each in parameters], moves)
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def penalties_with_backward_passes_of_their_own(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.optimizer.zero_grad()
        (0.1 * sum(each.square().sum() for each in loop.model.parameters())).backward()
        F.cross_entropy(loop.model(inputs).mul_(2), labels).backward()
        (0.1 * sum(each.abs().sum() for each in loop.model.parameters())).backward()
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def called_as_a_function_of_its_weights(given: Given) -> Weights:
    """Also calls the model a second time with gradients, only for logging."""

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        outputs = torch.func.functional_call(
            loop.model, dict(loop.model.named_parameters()), (inputs,)
        )
        loop.optimizer.zero_grad()
        F.cross_entropy(outputs, labels).backward()
        loop.model(inputs).argmax(1)
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def one_optimizer_of_two_models_in_turn(given: Given) -> Weights:
    split = given.split()
    first, second = split.wrap(network(WIDTH)), split.wrap(network())
    optimizer = adamw(nn.ModuleList([first, second]))
    for number, (inputs, labels) in enumerate(split.loader(given.rows)):
        optimizer.zero_grad(set_to_none=False)
        hidden = first(inputs)
        loss = (
            F.cross_entropy(second(hidden.detach()), labels)
            if number % 2
            else (hidden - inputs).square().mean()
        )
        loss.backward()
        optimizer.step()
    return weights(first, second)


def by_split_step(given: Given, compute: Callable[[Any, Any], torch.Tensor]) -> Weights:
    """Train with split.step and a GradScaler whose scale overflows once.

    Each step has two batches, of which only the second exchanges gradients.
    """
    split = given.split_in_passes()
    model = split.wrap(network())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(factor: float, part: Any) -> Any:
        return scaler.scale(compute(model, part)) * factor

    for number, batch in enumerate(split.loader(given.rows)):
        with nullcontext() if number % 2 else split.no_sync(model):
            factor = float("inf") if number == 2 else 0.5
            split.step(batch, partial(scaled, factor))
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [*weights(model), torch.tensor(scaler.get_scale())]


@exact
def split_step_in_windows_with_a_gradient_penalty(given: Given) -> Weights:
    def compute(model: Any, part: Any) -> torch.Tensor:
        points = part.batch[0].clone().requires_grad_()
        outputs = model(points)
        (slope,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
        made: torch.Tensor = (
            F.cross_entropy(outputs, part.batch[1]) + ((slope.norm(dim=1) - 1) ** 2).mean()
        )
        return made

    return by_split_step(given, compute)


@exact
def a_gan_by_split_step(given: Given) -> Weights:
    split = given.split_in_passes()
    generator, critic = split.wrap(network(WIDTH)), split.wrap(network(1))
    first, second = sgd(generator), sgd(critic)

    def judge(part: Any) -> torch.Tensor:
        fake = generator(part.batch[0].sin()).detach()
        made: torch.Tensor = (
            F.softplus(-critic(part.batch[0])).mean() + F.softplus(critic(fake)).mean()
        )
        return made

    for batch in split.loader(given.rows):
        second.zero_grad()
        split.step(batch, judge)
        second.step()
        first.zero_grad()
        split.step(batch, lambda part: F.softplus(-critic(generator(part.batch[0].sin()))).mean())
        first.step()
    return weights(generator, critic)


@refused("weren't summed over the ranks: their backward pass was under no_sync")
def what_an_epoch_leaves_over_without_a_sum(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    for number, (inputs, labels) in enumerate(split.loader(given.rows), 1):
        with nullcontext() if number % 3 == 0 else split.no_sync(model):
            F.cross_entropy(model(inputs), labels).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return weights(model)


@refused("different batches: one has left a batch out")
def a_batch_that_one_rank_leaves_out(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    for number, (inputs, labels) in enumerate(split.loader(given.rows)):
        loss = F.cross_entropy(model(inputs), labels)
        if not (loss * (float("nan") if number == 1 and split.rank == 1 else 1.0)).isfinite():
            continue
        update(optimizer, loss)
    return weights(model)


@exact
def a_target_that_follows_in_the_forward_pass(given: Given) -> Weights:
    """A momentum encoder that updates itself in each forward pass, also while the loss
    is checked.
    """

    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = network(), network()
            self.target.requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for mine, its in zip(
                    self.target.parameters(), self.online.parameters(), strict=True
                ):
                    mine.lerp_(its, 0.2)
            made: torch.Tensor = F.mse_loss(self.online(inputs), self.target(inputs.sin()))
            return made

    split = given.split()
    model = split.wrap(Follows())
    optimizer = sgd(model)
    for batch in split.loader(given.rows):
        optimizer.zero_grad()
        split.step(batch, lambda part: model(part.batch[0]))
        optimizer.step()
    return weights(model)


@refused("The ranks' weights aren't the same")
def a_rate_by_a_ranks_own_loss(given: Given) -> Weights:
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(4):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            update(optimizer, loss)
            schedule.step(loss.item())
    return weights(model)


@refused("The ranks' weights aren't the same")
def a_rate_that_is_a_rounding_apart(given: Given) -> Weights:
    """The learning rates differ so little that it takes thousands of steps to see the effect."""
    split = given.split()
    model = split.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.2 * (1 + 1e-8 * split.rank))
    for _ in range(4):
        train(model, split.loader(given.rows), optimizer)
    return weights(model)


@refused("The ranks' weights aren't the same")
def a_layer_that_ranks_draw_apart(given: Given) -> Weights:
    """Resets a layer in each epoch, after ranks drew different numbers of dropout masks."""
    split, last = given.split(), nn.Linear(6, CLASSES).double()
    model, loader = (
        split.wrap(nn.Sequential(network(6), nn.Dropout(0.1), last)),
        split.loader(given.rows),
    )
    optimizer = sgd(model)
    for _ in range(4):
        last.reset_parameters()
        train(model, loader, optimizer)
    return weights(model)


class OwnLoss(nn.Module):
    """Returns a mean weighted by values of its rows, as models of transformers do by labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = inputs[:, 0].exp()
        return (
            F.cross_entropy(self.net(inputs), labels, reduction="none") * weights
        ).sum() / weights.sum()


@refused("it isn't a mean over rows")
def a_weighted_mean_inside_the_model(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(OwnLoss())
    optimizer = sgd(model)
    for inputs, labels in split.loader(given.rows):
        update(optimizer, model(inputs, labels))
    return weights(model)


@refused("it isn't a mean over rows")
def advantages_centred_over_the_batch(given: Given) -> Weights:
    """Centres advantages as in PPO; the first batch is fetched before the loop to look at its
    shape.
    """
    split = given.split()
    model, loader = split.wrap(network()), split.loader(given.rows)
    optimizer = sgd(model)
    next(iter(loader))
    for inputs, labels in loader:
        gain = inputs[:, 0] - inputs[:, 0].mean()
        chances = model(inputs).log_softmax(1).gather(1, labels[:, None])[:, 0]
        update(optimizer, -(gain * chances).mean())
    return weights(model)


@refused("it isn't a mean over rows")
def weights_of_rows_in_a_loop_that_fetches_ahead(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(OwnLoss())
    optimizer = sgd(model)
    for inputs, labels in early(split.loader(given.rows)):
        update(optimizer, model(inputs, labels))
    return weights(model)


@refused("it is a sum, not a mean over rows")
def a_sum_in_a_later_batch(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network())
    optimizer = sgd(model)
    loader = split.loader(given.rows)
    for number, (inputs, labels) in enumerate(chain(loader, loader), 1):
        update(
            optimizer,
            F.cross_entropy(model(inputs), labels, reduction="sum" if number > 4 else "mean"),
        )
    return weights(model)


@exact
def sums_that_python_divides_by_the_batch_s_length(given: Given) -> Weights:
    def loss(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = F.cross_entropy(made, labels, reduction="sum") / len(labels)
        return total + 0.1 * made.square().sum() * (1 / len(made)) / CLASSES

    return accumulate(given, network(), loss)


@exact
def a_loop_over_the_rows_of_a_batch(given: Given) -> Weights:
    def loss(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = [
            F.cross_entropy(made[row : row + 1], labels[row : row + 1])
            for row in range(len(labels))
        ]
        return torch.stack(each).mean()

    return accumulate(given, network(), loss)


@exact
def a_target_that_moves_before_its_batch(given: Given) -> Weights:
    """Updates a moving average in place before each batch; the loss uses it.

    It would move twice if the batch were computed again.
    """
    split, target = given.split(), network()
    model = split.wrap(network())
    optimizer = sgd(model)
    for inputs, labels in split.loader(given.rows):
        with torch.no_grad():
            for own, its in zip(target.parameters(), weights(model), strict=True):
                own.lerp_(its, 0.3)
        made = model(inputs)
        update(
            optimizer,
            F.cross_entropy(made, labels) + (made - target(inputs).detach()).square().mean(),
        )
    return weights(model, target)


@refused("it isn't a mean over rows")
def a_mean_over_some_labels_by_split_step(given: Given) -> Weights:
    split = given.split_in_passes()
    model = split.wrap(network())
    optimizer = sgd(model)
    for batch in split.loader(given.rows):
        optimizer.zero_grad()
        split.step(
            batch, lambda part: F.cross_entropy(model(part.batch[0]), part.batch[1], ignore_index=1)
        )
        optimizer.step()
    return weights(model)


@refused("part of its gradients were on their way")
def errors_that_the_loop_goes_on_after(given: Given) -> Weights:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last, self.step = network(6), nn.Linear(6, CLASSES).double(), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.step += 1
            hidden = self.net(inputs)
            if self.step == 2 and hidden.requires_grad:
                hidden.register_hook(fail)
            made: torch.Tensor = self.last(hidden)
            return made

    def fail(_: torch.Tensor) -> None:
        raise ValueError("an error of the program's own")

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        try:
            plain(loop, inputs, labels)
        except ValueError:
            loop.optimizer.zero_grad()

    return given.fit(Net(), step, bucket_cap_mb=0.0001)


def in_turns(given: Given, other: Step, net: nn.Module | None = None) -> Weights:
    """Do two usual steps, then another kind."""
    steps = iter([plain, plain])
    return given.fit(net or network(), lambda *batch: next(steps, other)(*batch))


@refused("torch.autograd.grad")
def gradients_that_are_not_accumulated(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        parameters = list(loop.model.parameters())
        made = torch.autograd.grad(F.cross_entropy(loop.model(inputs), labels), parameters)
        for each, gradient in zip(parameters, made, strict=True):
            each.grad = gradient
        loop.optimizer.step()

    return in_turns(given, step)


@refused("torch.func")
def gradients_by_a_function_transform(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        def loss(parameters: Any) -> torch.Tensor:
            return F.cross_entropy(
                torch.func.functional_call(loop.model, parameters, (inputs,)), labels
            )

        made = torch.func.grad(loss)(dict(loop.model.named_parameters()))
        for name, each in loop.model.named_parameters():
            each.grad = made[name].detach()
        loop.optimizer.step()

    return in_turns(given, step)


@refused("return auxiliary losses with it")
def a_loss_that_the_model_keeps(given: Given) -> Weights:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.loss: Any = None

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.loss = self.net[0](inputs).square().mean()
            made: torch.Tensor = self.net(inputs)
            return made

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.model(inputs)
        loop.update(loop.model.module.loss)

    return in_turns(given, step, Kept())


@refused("hides its tensors")
def hidden_outputs_of_a_reentrant_checkpoint(given: Given) -> Weights:
    class Recomputed(Hiding):
        def forward(self, inputs: torch.Tensor) -> Answer:
            return Answer(checkpoint(self.net[1:], self.net[0](inputs), use_reentrant=True))

    return given.fit(
        Recomputed(),
        lambda loop, x, y: loop.update(F.cross_entropy(loop.model(x).scores, y)),
    )


@refused("changed its type since it was wrapped")
def another_type_after_wrap(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(network().float()).double()
    train(model, split.loader(given.rows))
    return weights(model)
