"""Training programs as users write them, each run by one process and by several ranks; run as a script, it is one rank.

    RANK=0 WORLD_SIZE=2 ... python torch_programs.py result.pt 6 2

A program returns tensors that must be the same in both, or is refused with a sentence.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from evener.errors import EvenerError
from evener.torch_split import Split

WIDTH, CLASSES = 5, 3
ROWS = (41, 45)
Program = Callable[[tuple[int, ...], TensorDataset], list[torch.Tensor]]
EXACT: dict[str, Program] = {}
REFUSED: dict[str, tuple[str, Program]] = {}


def exact(program: Program) -> Program:
    EXACT[program.__name__] = program
    return program


def refused(words: str) -> Callable[[Program], Program]:
    def note(program: Program) -> Program:
        REFUSED[program.__name__] = (words, program)
        return program

    return note


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (rows,), generator=generator))


def network(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def split_by(shares: tuple[int, ...], times: int = 1, **options: Any) -> Split:
    return Split(ratios=shares, global_batch=times * sum(shares), **options)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.2, momentum=0.9)


def weights(*models: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for model in models for each in model.parameters()]


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(model: Any, batches: Iterable[Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or sgd(model)
    for inputs, labels in batches:
        update(optimizer, F.cross_entropy(model(inputs), labels))


# Exact


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
    """The generator's noise is a function of the rows, as one process and several can't draw the same."""
    split = split_by(shares)
    generator, critic = split.wrap(network(WIDTH)), split.wrap(network(1))
    first, second = sgd(generator), sgd(critic)
    for real, _ in split.loader(rows):
        fake = generator(real.sin())
        update(second, F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean())
        update(first, F.softplus(-critic(fake)).mean())
    return weights(generator, critic)


@exact
def lbfgs(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    for inputs, labels in split.loader(rows):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return split.mean(loss)

        optimizer.step(closure)
    return weights(model)


def compiled(
    shares: tuple[int, ...], rows: TensorDataset, way: Callable[[Split, nn.Module], Any]
) -> list[torch.Tensor]:
    split = split_by(shares)
    model = way(split, network())
    train(model, split.loader(rows))
    return weights(model)


@exact
def compiled_after_wrap(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return compiled(shares, rows, lambda split, net: torch.compile(split.wrap(net), backend="eager"))


@exact
def compiled_before_wrap(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return compiled(shares, rows, lambda split, net: split.wrap(torch.compile(net, backend="eager")))


@exact
def wrap_of_a_compiled_ddp(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    return compiled(shares, rows, lambda split, net: split.wrap(torch.compile(own_ddp(split, net), backend="eager")))


@exact
def wrap_of_a_ddp(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As accelerate's prepare gives it."""
    return compiled(shares, rows, lambda split, net: split.wrap(own_ddp(split, net)))


def own_ddp(split: Split, net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net) if split.world > 1 else net


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
    """Another Split with another global batch: of the same module, and of what the first one wrapped."""
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


@exact
def contrastive(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """In-batch negatives with a learned temperature, as CLIP has them."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = network(4), network(4)
            self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return F.normalize(self.left(inputs)), F.normalize(self.right(inputs.cos())), self.scale.exp()

    split = split_by(shares)
    model = split.wrap(Towers())
    optimizer, losses = sgd(model), []
    for inputs, _ in split.loader(rows):
        left, right, scale = model(inputs)
        scores = scale * split.gather(left) @ split.gather(right).T
        numbers = torch.arange(len(scores), device=scores.device)
        loss = (F.cross_entropy(scores, numbers) + F.cross_entropy(scores.T, numbers)) / 2
        update(optimizer, loss)
        losses.append(split.mean(loss))
    return [*weights(model), torch.tensor(losses, dtype=torch.float64)]


@exact
def contrastive_by_own_rows(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """Each rank compares its own rows with all, beside a mean over its rows; by either way of weighing."""
    ended = []
    for weigh in ("gradients", "loss"):
        split = split_by(shares, weigh=weigh)
        model = split.wrap(network(4))
        optimizer = sgd(model)
        for inputs, _ in split.loader(rows):
            found = F.normalize(model(inputs))
            everyone = split.gather(found)
            numbers = (inputs[:, None] == split.gather(inputs)).all(2).int().argmax(1)
            loss = F.cross_entropy(found @ everyone.T, numbers) + (found**4).mean()
            update(optimizer, split.scale(loss) if weigh == "loss" else loss)
        ended += weights(model)
    return ended


@exact
def triplets(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """The hardest positive and negative of the whole batch for each row."""
    split = split_by(shares)
    model = split.wrap(network(4))
    optimizer = sgd(model)
    for inputs, labels in split.loader(rows):
        found, kinds = split.gather(model(inputs)), split.gather(labels)
        far = torch.cdist(found, found)
        same = kinds[:, None] == kinds
        loss = (far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 9.0).amin(1) + 0.5).relu().mean()
        update(optimizer, loss)
    return weights(model)


@exact
def two_loaders(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As long as each other, in one backward pass."""
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, _) in zip(split.loader(rows), split.loader(rows, seed=1), strict=True):
        update(optimizer, F.cross_entropy(model(inputs), labels) + model(others * 2).square().mean())
    return weights(model)


@exact
def two_loaders_a_backward_pass_each(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """One is longer than the other."""
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    half = Subset(rows, range(27))
    for (inputs, labels), (others, _) in zip(split.loader(rows), split.loader(half), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        model(others).square().mean().backward()
        optimizer.step()
    return weights(model)


def early(batches: Iterable[Any], change: Callable[[Any], Any] = lambda each: each) -> Iterator[Any]:
    """Each batch once the next one is there."""
    source = iter(batches)
    ready = change(next(source))
    for following in source:
        changed = change(following)
        del following
        yield ready
        ready = changed
    yield ready


@exact
def the_next_batch_early(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model, loader = split.wrap(network()), split.loader(rows)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, early(loader), optimizer)
    return weights(model)


@exact
def a_list_of_batches(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model, list(split.loader(rows)) * 2)
    return weights(model)


@exact
def one_batch_for_long(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    inputs, labels = next(iter(split.loader(rows)))
    inputs = inputs * 2
    for _ in range(5):
        update(optimizer, F.cross_entropy(model(inputs), labels))
    return weights(model)


@exact
def batches_skipped(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """The first ones, and the rows of the others are changed before the model gets them."""
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    for step, (inputs, labels) in enumerate(split.loader(rows)):
        if step < 3:
            continue
        update(optimizer, F.cross_entropy(model(inputs / 2), labels))
    return weights(model)


@exact
def validation_within_steps(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """One that goes on from step to step, and forgets no_grad."""
    split = split_by(shares)
    model = split.wrap(network())
    held_out = split.loader(Subset(rows, range(13)), training=False)
    optimizer, validation, losses = sgd(model), iter(held_out), []
    for inputs, labels in split.loader(rows):
        other = next(validation, None)
        if other is not None:
            model.eval()
            losses.append(split.mean(F.cross_entropy(model(other[0] + 0.0), other[1])))
            model.train()
        update(optimizer, F.cross_entropy(model(inputs * 1.0), labels))
    return [*weights(model), torch.tensor(losses, dtype=torch.float64)]


@exact
def predictions_after_the_loop(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """Of all rows, by a loop that forgets no_grad, and over the training loader."""
    split = split_by(shares)
    model, loader = split.wrap(network()), split.loader(rows)
    train(model, loader)
    model.eval()
    right = sum(int((model(inputs).argmax(1) == labels)[: split.rows].sum()) for inputs, labels in loader)
    return [model(rows.tensors[0]).detach(), torch.tensor(split.total(right))]


@exact
def metrics(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """Rows are counted once, without a cut in validation, by gather in training; a confusion matrix by total."""
    split = split_by(shares)
    model = split.wrap(network())
    matrix, counted = torch.zeros(CLASSES, CLASSES, dtype=torch.int64), 0
    with torch.no_grad():
        for inputs, labels in split.loader(rows, training=False):
            found = model(inputs).argmax(1)
            matrix.index_put_((labels, found), torch.tensor(1), accumulate=True)
            counted += len(found)
        seen = torch.cat([split.gather(labels) for _, labels in split.loader(rows)])
        flags = torch.cat([split.gather(labels == 1) for _, labels in split.loader(rows, seed=1)])
    assert split.total(counted) == len(rows)
    return [split.total(matrix), seen, flags]


@exact
def an_order_by_a_sampler(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    drawn = torch.utils.data.WeightedRandomSampler(1.0 + torch.arange(len(rows)), len(rows))
    model, loader = split.wrap(network()), split.loader(rows, order=drawn)
    torch.manual_seed(split.rank)  # ranks whose random numbers differ draw the same rows
    optimizer = sgd(model)
    for _ in range(2):
        train(model, loader, optimizer)
    again = split.loader(rows, order=drawn)
    state = loader.state_dict()
    again.load_state_dict({**state, "position": 16})
    train(model, again, optimizer)
    return weights(model)


@exact
def an_order_by_the_epoch(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """Buckets: neighbours in one column are neighbours in the order."""
    split = split_by(shares)

    def order(epoch: int) -> list[int]:
        numbers: list[int] = rows.tensors[0][:, epoch].argsort().tolist()
        return numbers

    model, loader = split.wrap(network()), split.loader(rows, order=order)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, loader, optimizer)
    return weights(model)


@exact
def a_subset_that_was_drawn(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    drawn = torch.randint(0, len(rows), (33,), generator=torch.Generator().manual_seed(6)).tolist()
    model = split.wrap(network())
    train(model, split.loader(Subset(rows, drawn)))
    return weights(model)


@exact
def weighed_by_the_loss(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    model = split.wrap(network())
    optimizer = sgd(model)
    for inputs, labels in early(split.loader(rows)):
        update(optimizer, split.scale(F.cross_entropy(model(inputs), labels)))
    return weights(model)


@exact
def sharded_parameters(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """FSDP2, wrapped and not."""
    split = split_by(shares, weigh="loss")
    ended = []
    for wrap in (True, False):
        model = shard(split, network())
        optimizer = sgd(split.wrap(model) if wrap else model)
        for inputs, labels in split.loader(rows):
            update(optimizer, split.scale(F.cross_entropy(model(inputs), labels)))
        ended += [each.full_tensor() if split.world > 1 else each for each in weights(model)]
    return ended


def shard(split: Split, net: nn.Module) -> nn.Module:
    if split.world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (split.world,)))
    return net


@exact
def a_mean_over_tokens(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """The remedy for a loss that the model would compute itself: split.loss outside of it."""
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    for inputs, labels in split.loader(rows):
        total = F.cross_entropy(model(inputs), labels, ignore_index=1, reduction="sum")
        update(optimizer, split.loss(total, (labels != 1).sum()))
    return weights(model)


def mean_inside(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """What can't be noticed."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.net(inputs), labels, ignore_index=1)

    split = split_by(shares)
    model = split.wrap(Own())
    optimizer = sgd(model)
    for inputs, labels in split.loader(rows):
        update(optimizer, model(inputs, labels))
    return weights(model)


# Refused


@refused("split.wrap(accelerator.prepare(model))")
def a_ddp_that_nothing_weighs(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """accelerator.prepare(model, optimizer, loader): the loader is left as it is."""
    split = split_by(shares)
    model = DistributedDataParallel(network())
    train(model, split.loader(rows))
    return weights(model)


@refused("split.begin")
def a_loader_that_was_sharded_again(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """accelerator.prepare of a DataLoader made from the loader's parts."""
    split = split_by(shares)
    loader = split.loader(rows)
    model = split.wrap(network())
    train(model, DataLoader(rows, batch_sampler=list(loader.batch_sampler)[split.rank :: split.world]))
    return weights(model)


@refused("no batch of split.loader")
def another_loader_in_eval_mode(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As for a model whose normalization is frozen."""
    split = split_by(shares)
    model = split.wrap(network()).eval()
    train(model, DataLoader(rows, 4, sampler=DistributedSampler(rows)))
    return weights(model)


@refused("split.loader")
def no_loader_of_the_split(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model, DataLoader(rows, 4, sampler=DistributedSampler(rows)))
    return weights(model)


@refused("split.wrap")
def never_wrapped(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = network()
    split.wrap(model)  # and the result is dropped
    train(model, split.loader(rows))
    return weights(model)


@refused("another DistributedDataParallel")
def a_ddp_around_the_wrapped_model(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """accelerator.prepare(split.wrap(model))."""
    split = split_by(shares)
    model = DistributedDataParallel(split.wrap(network()))
    train(model, split.loader(rows))
    return weights(model)


@refused("exchanged twice")
def a_ddp_within_the_wrapped_model(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(nn.Sequential(DistributedDataParallel(network()), nn.Linear(CLASSES, CLASSES).double()))
    return weights(model)


@refused("gradients aren't weighted")
def a_trainer_with_closures(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    """As Lightning calls optimizers, without split.wrap."""
    split = split_by(shares)
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    for inputs, labels in split.loader(rows):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure=closure)
    return weights(model)


@refused("weigh='loss'")
def sharded_parameters_that_nothing_weighs(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = shard(split, network())
    train(model, split.loader(rows))
    return weights(model)


@refused("FSDP")
def sharded_parameters_weighed_by_gradients(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    return weights(split.wrap(shard(split, network())))


@refused("split.scale(loss)")
def scale_forgotten(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    model = split.wrap(network())
    train(model, split.loader(rows))
    return weights(model)


@refused("split.scale(loss)")
def scale_forgotten_for_one_of_two_models(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    first, second = split.wrap(network()), split.wrap(network())
    for inputs, labels in split.loader(rows):
        split.scale(F.cross_entropy(first(inputs), labels)).backward()
        F.cross_entropy(second(inputs), labels).backward()
    return weights(first, second)


@refused("split.scale(loss)")
def scale_forgotten_with_sharded_parameters(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares, weigh="loss")
    model = split.wrap(shard(split, network()))
    train(model, split.loader(rows))
    return weights(model)


@refused("copy.deepcopy(model.module)")
def a_copy_of_a_wrapped_model(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = copy.deepcopy(split.wrap(network()))
    train(model, split.loader(rows))
    return weights(model)


@refused("frozen when split.wrap was called")
def layers_unfrozen(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    net = network()
    net[0].requires_grad_(False)
    model, loader = split.wrap(net), split.loader(rows)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, loader, optimizer)
    net[0].requires_grad_(True)
    train(model, loader, optimizer)
    return weights(model)


@refused("weren't in the model when split.wrap")
def layers_added(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    net = network()
    model, loader = split.wrap(net), split.loader(rows)
    optimizer = sgd(model)
    train(model, loader, optimizer)
    net.append(nn.Linear(CLASSES, CLASSES).double().to(split.device))
    optimizer.add_param_group({"params": list(net[-1].parameters())})
    train(model, loader, optimizer)
    return weights(model)


@refused("not model.module")
def the_model_inside(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model.module, split.loader(rows))
    return weights(model)


@refused("One backward pass mixes two batches")
def two_loaders_of_other_lengths(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    optimizer = sgd(model)
    for (inputs, labels), (others, _) in zip(split.loader(rows), split.loader(Subset(rows, range(27))), strict=False):
        update(optimizer, F.cross_entropy(model(inputs), labels) + model(others).square().mean())
    return weights(model)


@refused("One backward pass mixes two batches")
def losses_summed_over_batches(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    update(sgd(model), sum(F.cross_entropy(model(inputs), labels) for inputs, labels in split.loader(rows)))
    return weights(model)


@refused("isn't clear which")
def the_next_batch_early_and_changed(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    train(model, early(split.loader(rows), lambda batch: (batch[0] * 2, batch[1] + 0)))
    return weights(model)


@refused("isn't clear which")
def two_loaders_changed(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    model = split.wrap(network())
    half = split.loader(Subset(rows, range(27)))
    for (inputs, _), _others in zip(split.loader(rows), half, strict=False):
        model(inputs * 2).square().mean().backward()
    return weights(model)


@refused("No batch is in hand")
def rows_after_the_pass(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    for _ in split.loader(rows):
        pass
    return [rows.tensors[0][: split.rows]]


@refused("one row for each row")
def gather_of_other_rows(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    for inputs, _ in split.loader(rows):
        split.gather(torch.cat([inputs, inputs]))
    return []


@refused("differ in type or shape")
def gather_of_other_shapes(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    for inputs, _ in split.loader(rows):
        split.gather(inputs[:, split.rank :])
    return []


@refused("different orders")
def an_order_that_ranks_draw_apart(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split = split_by(shares)
    next(iter(split.loader(rows, order=DistributedSampler(rows))))
    return []


@refused("stream")
def a_stream_with_a_length(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    split_by(shares).loader(Stream())
    return []


@refused("order=")
def a_sampler(shares: tuple[int, ...], rows: TensorDataset) -> list[torch.Tensor]:
    split_by(shares).loader(rows, sampler=torch.utils.data.SequentialSampler(rows))
    return []


def run(program: Program, shares: tuple[int, ...], rows: int) -> list[torch.Tensor] | str:
    """What it returns, or the sentence that refuses it."""
    try:
        return program(shares, data(rows))
    except EvenerError as error:
        return str(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    shares = tuple(int(share) for share in sys.argv[2:])
    wanted = {**EXACT, **{name: program for name, (_, program) in REFUSED.items()}}
    wanted["mean_inside"] = mean_inside
    torch.save({(name, rows): run(wanted[name], shares, rows) for name in wanted for rows in ROWS}, sys.argv[1])
    dist.destroy_process_group()
