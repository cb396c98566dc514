"""Programs with unusual samplers, gradient exchanges or steps.

They are refused, or train as with their own launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
)

from tests.support.run_parts import (
    BATCH,
    ROWS,
    Programs,
    ddp,
    epochs,
    fit,
    load,
    mean,
    naming,
    net,
    points,
    start,
    update,
)

PROGRAMS: Programs = {}
program = naming(PROGRAMS)


class Stream(IterableDataset[Any]):
    """The rows of this rank, one after another."""

    def __iter__(self) -> Iterator[Any]:
        data = points()
        return (data[row] for row in range(dist.get_rank(), ROWS, dist.get_world_size()))


class OwnSampler(Sampler[int]):
    """Samples the rows of a rank; its attributes have unusual names."""

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts = part, parts

    def __len__(self) -> int:
        return ROWS // self.parts

    def __iter__(self) -> Iterator[int]:
        return iter(
            torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[
                self.part :: self.parts
            ].tolist()
        )


class OwnBatches(Sampler[list[int]]):
    """Samples batches of changing sizes; its attributes have the usual names."""

    def __init__(self) -> None:
        self.rank, self.num_replicas = dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        own, first = list(range(self.rank, ROWS, self.num_replicas)), 0
        for step in range(6):
            yield own[first : first + 2 + step % 3]
            first += 2 + step % 3


class Counted(Dataset[Any]):
    """Rows that depend on how many have been fetched before."""

    fetched = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        self.fetched += 1
        x, classes, targets = points()[row]
        return x + 0.01 * self.fetched, classes, targets


@program
def variances_of_two_tasks() -> Any:
    """Trains tensors that no model contains, so each rank learns its own."""
    model, log_var = ddp(), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), log_var], lr=0.1)
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        made = model(x)
        losses = torch.stack([F.cross_entropy(made, classes), made.square().mean()])
        ((-log_var).exp() * losses + log_var).sum().backward()
        optimizer.step()
    return model


PROGRAMS |= {
    "a stream": lambda: fit(ddp(), mean, DataLoader(Stream(), batch_size=BATCH)),
    "own sampler": lambda: fit(
        ddp(), mean, load(sampler=OwnSampler(dist.get_rank(), dist.get_world_size()))
    ),
    "own batches": lambda: fit(ddp(), mean, DataLoader(points(), batch_sampler=OwnBatches())),
    "own sharding": lambda: fit(
        ddp(),
        mean,
        DataLoader(
            Subset(points(), range(dist.get_rank(), ROWS, 2)), batch_size=BATCH, shuffle=False
        ),
    ),
    "all rows on each rank": lambda: fit(
        ddp(), mean, DataLoader(points(), batch_size=BATCH, shuffle=True)
    ),
    "ranks shuffle differently": lambda: fit(
        ddp(), mean, load(sampler=DistributedSampler(points(), seed=dist.get_rank()))
    ),
    "a batch sampler around": lambda: fit(
        ddp(),
        mean,
        DataLoader(points(), batch_sampler=BatchSampler(DistributedSampler(points()), BATCH, True)),
    ),
    "no batches": lambda: fit(
        ddp(), mean, DataLoader(Singles(), batch_size=None, sampler=DistributedSampler(points()))
    ),
    "batches fetched early": lambda: fit(ddp(), mean, Early(load())),
    "a communication hook": lambda: fit(hooked(ddp()), mean, load()),
    "rows that count fetches": lambda: fit(ddp(), mean, load(Counted())),
}


class Early:
    """A loader that fetches each batch while the one before is trained on."""

    def __init__(self, loader: Any) -> None:
        self.sampler, self._loader = loader.sampler, loader

    def __iter__(self) -> Iterator[Any]:
        batch = None
        for fetched in self._loader:
            if batch is not None:
                yield batch
            batch = [each.clone() for each in fetched]
        yield batch


class Singles(Dataset[Any]):
    """A dataset whose items are already batches of three rows."""

    def __len__(self) -> int:
        return ROWS // 2

    def __getitem__(self, row: int) -> Any:
        return points()[row : row + 3]


def hooked(model: Any) -> Any:
    """Return the model with a hook that sends gradients in 16 bits."""
    model.register_comm_hook(None, fp16_compress_hook)
    return model


@program
def gradients_by_hand() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        optimizer.step()
    return model


@program
def steps_by_hand() -> Any:
    """Updates weights without an optimizer and takes rows without a DataLoader, like fastai."""
    model = ddp()
    for x, classes, _ in [*epochs(load())]:
        F.cross_entropy(model(x), classes).backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad
                each.grad = None
    return model


@program
def local_steps() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        with model.no_sync():
            F.cross_entropy(model(x), classes).backward()
        optimizer.step()
    for each in model.parameters():
        dist.all_reduce(each.data)
        each.data /= dist.get_world_size()
    return model


@program
def passes_by_data() -> Any:
    """Does as many passes as the loss requires, the same number on each rank."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        for _again in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), classes)
            loss.backward()
            optimizer.step()
            seen = loss.detach().clone()
            dist.all_reduce(seen)
            if seen < 2.1:
                break
    return model


@program
def skipped_steps() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        worst = loss.detach().clone()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if worst < 1.2:
            optimizer.step()
    return model


@program
def rate_by_rows() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * len(x)
        update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def clipped_in_accumulation() -> Any:
    model, optimizer = start()
    for number, (x, classes, _) in enumerate(epochs(load(drop_last=True))):
        if number % 2:
            F.cross_entropy(model(x), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                F.cross_entropy(model(x), classes).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return model


@program
def sharpness() -> Any:
    """Computes each batch twice: at the weights, and one step uphill (SAM)."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        moves = [0.05 * each.grad / (each.grad.norm() + 1e-12) for each in model.parameters()]
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves, strict=True):
                each.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves, strict=True):
                each.sub_(move)
        optimizer.step()
    return model


@program
def adversaries() -> Any:
    """A generator and a discriminator, each with its own loss and optimizer."""
    maker, judge = ddp(net(out=2)), ddp(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    first, second = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, judge))
    for x, _, targets in epochs(load()):
        made = maker(x)
        true, false = judge(targets), judge(made.detach())
        update(second, F.softplus(-true).mean() + F.softplus(false).mean())
        update(first, F.softplus(-judge(made)).mean())
    return maker, judge


@program
def a_closure() -> Any:
    model = ddp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for x, classes, _ in epochs(load()):

        def again(x: Tensor = x, classes: Tensor = classes) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), classes)
            loss.backward()
            return loss

        optimizer.step(again)
    return model


class Centred(nn.Module):
    """A network that subtracts a running mean of batches from its outputs."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(x)
        if self.training:
            with torch.no_grad():
                self.centre = 0.9 * self.centre + 0.1 * found.mean(0)
        return found - self.centre


PROGRAMS["a running centre"] = lambda: fit(ddp(Centred()), mean)


@program
def labels_ignored_later() -> Any:
    """Counts all labels of the first batch, but ignores some in later ones."""
    model, optimizer = start()
    for step, (x, classes, _) in enumerate(epochs(load())):
        wanted = classes.masked_fill((classes == 1) & (step > 2), -100)
        update(optimizer, F.cross_entropy(model(x), wanted))
    return model


@program
def batches_left_out() -> Any:
    """Ranks skip batches that they have learned well already."""
    model, optimizer = start()
    for step, (x, classes, _) in enumerate(epochs(load())):
        loss = F.cross_entropy(model(x), classes)
        update(optimizer, loss * 0.0 if step % 4 == 3 and x[0, 0] > 0 else loss)
    return model


@program
def gradients_taken() -> Any:
    """Calls torch.autograd.grad, not backward, and exchanges gradients itself, with a DDP model."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        found = torch.autograd.grad(
            F.cross_entropy(model.module(x), classes), list(model.parameters())
        )
        for each, gradient in zip(model.parameters(), found, strict=True):
            dist.all_reduce(gradient)
            each.grad = gradient / dist.get_world_size()
        optimizer.step()
    return model


@program
def means_of_ranks() -> Any:
    """Sets the learning rate by the mean of the ranks' mean losses."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        seen = loss.detach().clone()
        dist.all_reduce(seen)
        optimizer.param_groups[0]["lr"] = 0.05 * float(seen / dist.get_world_size())
        optimizer.step()
    return model
