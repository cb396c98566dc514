"""Models and loops whose gradients come late, twice, not at all, or in other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.checkpoint import checkpoint

from tests.support.torch_program_parts import (
    CLASSES,
    WIDTH,
    Given,
    Loop,
    Weights,
    adamw,
    exact,
    network,
    plain,
    refused,
    train,
    update,
    weights,
)


class Block(nn.Module):
    """Uses one layer twice, and may recompute it in the backward pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.way = way
        self.first, self.shared, self.last = (
            nn.Linear(WIDTH, 6),
            nn.Linear(6, 6),
            nn.Linear(6, CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(2):
            hidden = torch.tanh(self._recompute(hidden))
        return self.last(hidden)

    def _recompute(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.way:
            return self.shared(hidden)
        made: torch.Tensor = checkpoint(self.shared, hidden, use_reentrant=self.way == "reentrant")
        return made


@exact
def a_shared_layer(given: Given) -> Weights:
    return given.fit(Block(""), plain, bucket_cap_mb=0.0001)


@exact
def a_shared_layer_in_reentrant_checkpoints(given: Given) -> Weights:
    """A shared layer whose gradient comes in two parts, from nested backward passes."""
    return given.fit(Block("reentrant"), plain, bucket_cap_mb=0.0001)


@exact
def a_shared_layer_in_checkpoints(given: Given) -> Weights:
    return given.fit(Block("new"), plain, bucket_cap_mb=0.0001)


@refused("second gradient in one backward pass")
def a_shared_layer_in_reentrant_checkpoints_later(given: Given) -> Weights:
    """The second part comes when the first is already being exchanged, as buckets are sent early by
    then.
    """
    block, seen = Block(""), []

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        seen.append(inputs)
        block.way = "reentrant" if len(seen) > 2 else ""
        plain(loop, inputs, labels)

    return given.fit(block, step, bucket_cap_mb=0.0001)


class Drifting(nn.Module):
    """Changes its buffers in some steps, differently on each rank; those of the first rank are
    right.
    """

    def __init__(
        self, steps: range, change: Callable[[Any, int], None], first: bool = True
    ) -> None:
        super().__init__()
        self.net, self.steps, self.change, self.step, self.first = (
            network(),
            steps,
            change,
            0,
            first,
        )
        self.held = nn.Module().eval()
        self.held.register_buffer("factor", torch.ones(()))
        self.held.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.held.register_buffer("even", torch.zeros(3, 2, dtype=torch.bool).T)
        self.held.register_buffer("empty", torch.zeros(0, 2), persistent=False)
        self.held.register_buffer("endless", torch.tensor([1.0, -torch.inf]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        held = self.held
        scores: torch.Tensor = (
            self.net(inputs) * held.factor.clone() + held.count * 0.1 + held.even[0]
        )
        scores = scores + sum(each.shift for each in held.children())
        self.step += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.step in self.steps and (rank or self.first):
            self.change(held, rank + 1)
        return scores


def _add(held: Any, by: int) -> None:
    held.factor.add_(0.1 * by)


def _add_unseen(held: Any, by: int) -> None:
    held.factor.data.add_(0.1 * by)


def _replace(held: Any, by: int) -> None:
    held.factor = held.factor + 0.1 * by
    held.register_buffer("late", held.factor.clone())


def _put_other_memory(held: Any, by: int) -> None:
    held.factor.data = held.factor + 0.1 * by


def _add_module(held: Any, by: int) -> None:
    held.part = nn.Module()
    held.part.register_buffer("shift", torch.arange(CLASSES) * 0.1 * by)


def _count_unseen(held: Any, by: int) -> None:
    held.count.data[1] += by


def _turn_unseen(held: Any, by: int) -> None:
    held.even.data[0, by % 3].logical_not_()


@exact
def a_buffer_that_some_steps_change(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 9, 2), _add), plain)


@exact
def a_buffer_that_pytorch_does_not_see_change(given: Given) -> Weights:
    return given.fit(Drifting(range(1, 99), _add_unseen), plain)


@exact
def a_buffer_that_changes_unseen_later(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 4), _add_unseen), plain)


@exact
def a_buffer_that_other_ranks_change_unseen(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 4), _add_unseen, first=False), plain)


@exact
def a_buffer_that_is_replaced(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 9, 2), _replace), plain)


@exact
def a_buffer_in_other_memory(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 4), _put_other_memory), plain)


@exact
def a_module_of_buffers_that_is_added_later(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 4), _add_module), plain)


@exact
def weights_in_other_memory(given: Given) -> Weights:
    """Replaces `weight.data`, also by a tensor with another memory layout."""

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        plain(loop, inputs, labels)
        for each in loop.model.parameters():
            each.data = (each.data * 0.9).T.contiguous().T if each.ndim == 2 else each.data * 0.9

    return given.fit(network(), step)


@exact
def whole_numbers_that_change_unseen(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 4), _count_unseen), plain)


@exact
def truths_that_change_unseen(given: Given) -> Weights:
    return given.fit(Drifting(range(3, 4), _turn_unseen), plain)


@exact
def a_buffer_of_a_graph_that_is_kept(given: Given) -> Weights:
    """A buffer that the kept graph uses must not change between its two backward passes."""

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.optimizer.zero_grad()
        outputs = loop.model(inputs)
        outputs.square().mean().backward(retain_graph=True)
        F.cross_entropy(outputs, labels).backward()
        loop.optimizer.step()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.register_buffer("factor", torch.full((CLASSES,), 1.5))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.net(inputs) * self.factor
            return scores

    return given.fit(Scaled(), step)


class Experts(nn.Module):
    """Has a layer for each kind of row; ranks use different layers, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kinds = (inputs[:, 0] > 1).long() + (inputs[:, 0] > 0).long()
        outputs = inputs[:, :CLASSES] * 0
        for kind in kinds.unique().tolist():
            chosen = (kinds == kind).nonzero()[:, 0]
            outputs = outputs.index_add(0, chosen, self.layers[kind](inputs[chosen]))
        return outputs


@exact
def experts_that_not_every_rank_uses(given: Given) -> Weights:
    return given.fit(Experts(), plain, bucket_cap_mb=0.0001)


@exact
def experts_in_one_bucket(given: Given) -> Weights:
    return given.fit(Experts(), plain)


@exact
def two_models_of_experts_in_one_loss(given: Given) -> Weights:
    split = given.split()
    models = [split.wrap(Experts().double(), bucket_cap_mb=0.0001) for _ in range(2)]
    optimizer = torch.optim.AdamW([each for model in models for each in model.parameters()], 0.05)
    for inputs, labels in split.loader(given.rows):
        update(optimizer, F.cross_entropy(models[1](inputs) + models[0](inputs.cos()), labels))
    return weights(*models)


@exact
def zero_grad_between_forward_and_backward(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.cross_entropy(loop.model(inputs), labels)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def gradients_set_to_zero(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(loop.model(inputs), labels).backward()
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def gradients_that_are_never_dropped(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(loop.model(inputs), labels).backward()
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def gradients_of_ones_own(given: Given) -> Weights:
    """Sets gradients to new tensors before the backward pass, as some optimizers do."""

    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        for each in loop.model.parameters():
            each.grad = torch.zeros_like(each)
        F.cross_entropy(loop.model(inputs), labels).backward()
        loop.optimizer.step()

    return given.fit(network(), step)


@exact
def a_window_that_is_dropped(given: Given) -> Weights:
    """Discards the gradients of a first pass before they are exchanged."""
    split = given.split()
    model = split.wrap(network())
    optimizer = adamw(model)
    for number, (inputs, labels) in enumerate(split.loader(given.rows)):
        if number % 2 == 0:
            with split.no_sync(model):
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.zero_grad()
        else:
            update(optimizer, F.cross_entropy(model(inputs), labels))
    return weights(model)


@exact
def two_backward_passes_of_one_forward_pass(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.optimizer.zero_grad()
        outputs = loop.model(inputs)
        F.cross_entropy(outputs, labels).backward(retain_graph=True)
        outputs.square().mean().backward()
        loop.optimizer.step()

    return given.fit(network(), step)


class Answer:
    """An object that hides its tensors from PyTorch."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: torch.Tensor) -> Answer:
        return Answer(self.net(inputs))


@exact
def outputs_that_hide_their_tensors(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.update(F.cross_entropy(loop.model(inputs).scores, labels))

    return given.fit(Hiding(), step)


class Mixed(nn.Module):
    """Layers of two dtypes, one of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.frozen = (
            nn.Linear(WIDTH, 6).double(),
            nn.Linear(6, 6).double().requires_grad_(False),
        )
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.complex128))
        self.last = nn.Linear(6, CLASSES).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.first(inputs)))
        made: torch.Tensor = self.last((hidden * self.scale).abs())
        return made


@exact
def parameters_of_two_types(given: Given) -> Weights:
    split = given.split()
    model = split.wrap(Mixed())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.05)
    train(model, split.loader(given.rows), optimizer)
    return [torch.view_as_real(each) if each.is_complex() else each for each in weights(model)]


@exact
def images_whose_channels_come_last(given: Given) -> Weights:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
            self.last = nn.Linear(4, CLASSES)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            images = inputs[:, :4].reshape(-1, 1, 2, 2).expand(-1, 2, -1, -1)
            made: torch.Tensor = self.last(self.conv(images).flatten(1))
            return made

    return given.fit(Images(), plain)


@exact
def a_group_of_the_users_own(given: Given) -> Weights:
    group = dist.new_group() if dist.is_initialized() else None
    return given.fit(network(), plain, process_group=group)


@exact
def the_model_itself_is_not_exchanged_between_steps(given: Given) -> Weights:
    """A backward pass through the bare model isn't exchanged, even in the middle of a training."""
    split, net = given.split(), network()
    model = split.wrap(net)
    optimizer = adamw(model)
    for inputs, labels in split.loader(given.rows):
        update(optimizer, F.cross_entropy(model(inputs), labels))
        optimizer.zero_grad()
        net(given.rows.tensors[0][:4]).square().mean().backward()
        optimizer.step()
    return weights(model)


@exact
def hooks_of_a_model_in_the_users_own_wrapper(given: Given) -> Weights:
    """Hooks that the loop registered on the model itself see its outputs."""
    split, net = given.split(), network().double()
    net.register_forward_hook(lambda _module, _inputs, output: 3 * output)
    model = split.wrap(nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net)
    optimizer = adamw(model)
    train(model, split.loader(given.rows), optimizer)
    return weights(model)


@refused("a gradient is sparse".capitalize())
def sparse_gradients(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loop.model(labels).square().mean().backward()

    return given.fit(nn.Embedding(CLASSES, 2, sparse=True), step)


@refused("create_graph=True")
def gradients_that_are_differentiated_again(given: Given) -> Weights:
    def step(loop: Loop, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(loop.model(inputs), labels).backward(create_graph=True)

    return given.fit(network(), step)
