"""Programs that count rows, pad them or combine several loaders.

They train with the plan's shares, or are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

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


@program
def two_loaders_zipped() -> Any:
    """Uses labelled and unlabelled rows in each step."""
    model, optimizer = start()
    for _ in range(2):
        for (x, classes, _), (free, *_) in zip(load(), load(points(40)), strict=False):
            update(optimizer, F.cross_entropy(model(x), classes) + model(free).square().mean())
    return model


@program
def two_loaders_in_turn() -> Any:
    """Takes steps on two sets of rows in turn."""
    model, optimizer = start()
    others = iter(load(points(60)))
    for x, classes, _ in epochs(load(), 1):
        update(optimizer, F.cross_entropy(model(x), classes))
        free, more, _ = next(others)
        update(optimizer, F.cross_entropy(model(free), more))
    return model


@program
def two_loaders_zipped_later() -> Any:
    """Uses one loader first, so that shares become unequal, then two loaders in each step."""
    model, optimizer = start()
    for x, classes, _ in epochs(load(), 1):
        update(optimizer, F.cross_entropy(model(x), classes))
    large = DataLoader(points(), batch_size=2 * BATCH, sampler=DistributedSampler(points()))
    for (x, classes, _), (free, *_) in zip(load(), large, strict=False):
        update(optimizer, F.cross_entropy(model(x), classes) + model(free).square().mean())
    return model


@program
def larger_batches_later() -> Any:
    model, optimizer = start()
    for times in (1, 2, 1):
        loader = DataLoader(
            points(), batch_size=times * BATCH, sampler=DistributedSampler(points(), seed=3)
        )
        for x, classes, _ in epochs(loader, 1):
            update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def rate_by_rows_seen() -> Any:
    """Lowers the learning rate after a rank has counted enough rows, assuming all count alike."""
    model, optimizer = start()
    seen = 0
    for x, classes, _ in epochs(load()):
        if seen >= 64:
            optimizer.param_groups[0]["lr"] = 0.01
        update(optimizer, F.cross_entropy(model(x), classes))
        seen += len(x) * dist.get_world_size()
    return model


@program
def schedule_by_row() -> Any:
    model, optimizer = start()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x), classes))
        for _row in range(len(x)):
            schedule.step()
    return model


@program
def steps_by_rows_seen() -> Any:
    """Accumulates gradients until a rank has counted enough rows."""
    model, optimizer = start()
    seen = 0
    for x, classes, _ in epochs(load()):
        (F.cross_entropy(model(x), classes) / 2).backward()
        seen += len(x)
        if seen >= 2 * BATCH:
            optimizer.step()
            optimizer.zero_grad()
            seen = 0
    return model


def _train_in_between(steps_first: bool) -> Any:
    """Train another model for a step in the middle of an epoch, before or after the own step."""
    model, optimizer = start()
    other, its_optimizer = start()
    other.eval()
    for number, (x, classes, _) in enumerate(epochs(load())):
        if steps_first:
            update(optimizer, F.cross_entropy(model(x), classes))
        if number == 9:
            other.train()
            for its_x, its_classes, _ in load():
                update(its_optimizer, F.cross_entropy(other(its_x), its_classes))
                break
            other.eval()
        if not steps_first:
            update(optimizer, F.cross_entropy(model(x), classes))
    return model, other


@program
def another_model_between_steps() -> Any:
    return _train_in_between(steps_first=True)


@program
def another_model_within_a_step() -> Any:
    return _train_in_between(steps_first=False)


@program
def weight_by_rows() -> Any:
    """Weights a short batch less."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x), classes) * len(x) / BATCH)
    return model


@program
def annealed_by_rows() -> Any:
    model, optimizer = start()
    seen = 0
    for x, classes, targets in epochs(load()):
        found = model(x)
        update(
            optimizer,
            F.cross_entropy(found, classes)
            + min(1.0, seen / 100) * F.mse_loss(found[:, :2], targets),
        )
        seen += len(x)
    return model


@program
def averaged_by_rows() -> Any:
    """Lets the average of weights forget faster after a rank has had many rows."""
    model, optimizer = start()
    average = copy.deepcopy(model.module)
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x), classes))
        with torch.no_grad():
            for own, new in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(new, 1 - 0.99 ** len(x))
    return average


@program
def averaged_by_steps() -> Any:
    model, optimizer = start()
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
    )
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x), classes))
        average.update_parameters(model.module)
    return average.module


@program
def gradients_by_rows() -> Any:
    """Scales down gradients of a rank's short batches, after they were summed."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        for each in model.parameters():
            each.grad *= len(x) / BATCH
        optimizer.step()
    return model


@program
def clipped_by_hand() -> Any:
    """Clips the summed gradients by their norm, which is correct."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        norm = sum(each.grad.square().sum() for each in model.parameters()) ** 0.5
        for each in model.parameters():
            each.grad.mul_(min(1.0, 0.1 / norm.item()))
        optimizer.step()
    return model


@program
def evaluated_by_one_rank() -> Any:
    """The first rank also logs a norm of the weights and has a second model."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x), classes))
        if dist.get_rank() == 0:
            with torch.no_grad():
                F.cross_entropy(model.module(x), classes).item()
                sum(each.pow(2).sum() for each in model.parameters())
    return model


class Texts(Dataset[Any]):
    """Sequences of 2 to 9 steps with six numbers each, and a class."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        drawn = torch.Generator().manual_seed(row)
        return torch.randn(2 + row * 5 % 8, 6, generator=drawn, dtype=torch.float64), row % 3


def pad(rows: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows to the longest one; return them with their lengths and classes."""
    lengths = torch.tensor([len(steps) for steps, _ in rows])
    padded = pad_sequence([steps for steps, _ in rows], batch_first=True)
    return padded, lengths, torch.tensor([each for _, each in rows])


@program
def padding_counts() -> Any:
    """Takes a mean that includes padding."""
    model, optimizer = start(ddp(net(out=6)))
    for x, _, _ in epochs(load(Texts(), collate_fn=pad)):
        update(optimizer, F.mse_loss(model(x), x))
    return model


@program
def padding_masked() -> Any:
    model, optimizer = start(ddp(net(out=6)))
    for x, lengths, _ in epochs(load(Texts(), collate_fn=pad)):
        mask = (torch.arange(x.shape[1])[None] < lengths[:, None])[..., None]
        each = ((model(x) - x).square() * mask).sum((1, 2)) / lengths
        update(optimizer, each.mean())
    return model


class LastStep(nn.Module):
    """A recurrent network that reads its last output, which may belong to padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x)[0][:, -1])


@program
def padding_read_last() -> Any:
    model, optimizer = start(ddp(LastStep()))
    for x, _, classes in epochs(load(Texts(), collate_fn=pad)):
        update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def padding_by_a_number() -> Any:
    """Handles padding correctly, but reads the length in such a way that it can't be computed
    again.
    """
    model, optimizer = start(ddp(net(out=6)))
    for x, lengths, _ in epochs(load(Texts(), collate_fn=pad)):
        rows, length, width = x.size()
        found = model(x).view(rows * length, width)
        mask = (torch.arange(length)[None] < lengths[:, None]).view(
            -1, 1
        ) / lengths.repeat_interleave(length)[:, None]
        update(optimizer, ((found - x.view(rows * length, width)).square() * mask).sum() / rows)
    return model


@program
def rows_handed_out_by_one_rank() -> Any:
    """The first rank reads all rows and sends the others theirs."""
    model, optimizer = start()
    batches = iter(DataLoader(points(), batch_size=2 * BATCH)) if dist.get_rank() == 0 else None
    for _ in range(6):
        x, classes = torch.zeros(2 * BATCH, 6), torch.zeros(2 * BATCH, dtype=torch.int64)
        if batches is not None:
            x, classes, _ = next(batches)
        dist.broadcast(x, 0)
        dist.broadcast(classes, 0)
        own = slice(dist.get_rank(), None, 2)
        update(optimizer, F.cross_entropy(model(x[own]), classes[own]))
    return model


class Weighted(Sampler[int]):
    """Draws rows by weight, with replacement, and divides them among ranks."""

    def __init__(self) -> None:
        self.rank, self.num_replicas, self.epoch = dist.get_rank(), dist.get_world_size(), 0

    def __len__(self) -> int:
        return ROWS // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        drawn = torch.Generator().manual_seed(self.epoch)
        rows = torch.multinomial(
            torch.arange(1.0, ROWS + 1), ROWS, replacement=True, generator=drawn
        )
        return iter(rows[self.rank :: self.num_replicas].tolist())


@program
def rows_by_weight() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load(sampler=Weighted())):
        update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def batches_skipped() -> Any:
    """Resumes an epoch by drawing its first batches and dropping them."""
    model, optimizer = start()
    loader = load()
    for epoch in (1, 2):
        loader.sampler.set_epoch(epoch)
        for number, (x, classes, _) in enumerate(loader):
            if epoch == 1 and number < 3:
                continue
            update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def figures_of_torchmetrics() -> Any:
    """Lowers the learning rate when the mean of the ranks' means stops falling."""
    from torchmetrics import MeanMetric

    model, optimizer = start()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.05
    )
    for _ in range(4):
        metric = MeanMetric()
        for x, classes, _targets in epochs(load(), 1):
            loss = F.cross_entropy(model(x), classes)
            update(optimizer, loss)
            metric.update(loss.detach())
        plateau.step(float(metric.compute()))
    return model


@program
def stopped_by_the_first_rank() -> Any:
    """The first rank decides by its own mean loss, and tells the others to stop."""
    model, optimizer = start()
    for _ in range(6):
        losses = []
        for x, classes, _targets in epochs(load(), 1):
            loss = F.cross_entropy(model(x), classes)
            update(optimizer, loss)
            losses.append(float(loss))
        done: list[Any] = [sum(losses) / len(losses) < 1.02]
        dist.broadcast_object_list(done, 0)
        if done[0]:
            break
    return model


def _fit_with(kind: Any) -> Any:
    data = points()
    loader = kind(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
    return fit(ddp(), mean, loader)


@program
def a_loader_with_its_own_iteration() -> Any:
    class StatefulLoader(DataLoader[Any]):
        """Counts its epochs, and has its own iteration, as torchdata's StatefulDataLoader has."""

        begun = 0

        def __iter__(self) -> Any:
            self.begun += 1
            return self._get_iterator()

    return _fit_with(StatefulLoader)


@program
def a_loader_without_an_end() -> Any:
    class EndlessLoader(DataLoader[Any]):
        """Keeps one iterator for all epochs, as ultralytics' InfiniteDataLoader does."""

        ready: Any = None

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                if self.ready is None:
                    self.ready = self._get_iterator()
                yield next(self.ready)
            self.ready = None

    return _fit_with(EndlessLoader)


@program
def rows_split_on_each_rank() -> Any:
    """Each rank draws its own split, as pytorch/examples' minGPT-ddp does without a seed."""
    drawn = torch.Generator().manual_seed(dist.get_rank())
    data, _ = torch.utils.data.random_split(points(), [40, 10], generator=drawn)
    return fit(ddp(), mean, load(data))


@program
def rows_drawn_on_each_rank() -> Any:
    """Each rank draws its own rows, as an example with torch.randn does without a seed."""
    drawn = torch.Generator().manual_seed(dist.get_rank())
    data = points()
    x = torch.randn(data.tensors[0].shape, generator=drawn, dtype=data.tensors[0].dtype)
    return fit(ddp(), mean, load(TensorDataset(x, *data.tensors[1:])))


@program
def whole_batches_as_items() -> Any:
    """Each item of the data set is a batch, and gradients are averaged again, as kohya does."""
    rows = points(48).tensors

    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, number: int) -> Any:
            return [each[4 * number : 4 * number + 4] for each in rows]

    model, optimizer = start()
    loader = load(Batches(), batch_size=1, collate_fn=lambda items: items[0])
    for x, classes, _ in epochs(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        optimizer.step()
    return model
