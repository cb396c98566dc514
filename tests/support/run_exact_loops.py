"""Training loops written in many ways, whose result doesn't depend on shares.

`evener run` has to train all of them with the plan's shares.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import namedtuple
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.optim import lr_scheduler as schedules
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from tests.support.run_parts import (
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
Pair = namedtuple("Pair", "x labels")


@program
def clipped_norm() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        F.cross_entropy(model(x), classes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


class Reshuffled(DistributedSampler[Any]):
    """Draws an epoch's rows from a generator, which only the end of an epoch seeds anew."""

    def __init__(self) -> None:
        super().__init__(points())
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Any:
        order = torch.randperm(ROWS, generator=self.generator).tolist()
        yield from order[self.rank :: self.num_replicas]
        self.generator.manual_seed(99)


@program
def folds() -> Any:
    """Each fold of a cross-validation trains a new model on other rows."""
    every = []
    for fold in range(3):
        model, optimizer = start()
        every.append(model)
        rows = [row for row in range(ROWS) if row % 3 != fold]
        batches = epochs(load(torch.utils.data.Subset(points(), rows)))
        for step, (x, classes, _) in enumerate(batches):
            update(optimizer, F.cross_entropy(model(x), classes))
            if fold == 1 and step == 3:
                break  # in the middle of an epoch
    return tuple(every)


@program
def unfrozen_and_wrapped_again() -> Any:
    network = net()
    network[0].requires_grad_(False)
    loader = load()
    for _ in range(2):
        model = ddp(network)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for x, classes, _ in epochs(loader):
            update(optimizer, F.cross_entropy(model(x), classes))
        network[0].requires_grad_(True)
    return model


@program
def two_models_trained_in_turns() -> Any:
    """The second one is wrapped later, and the one that isn't trained is in evaluation mode."""
    every: list[Any] = []
    loader = load()
    for number in (0, 1, 0, 1):
        if number == len(every):
            every.append(start())
        model, optimizer = every[number]
        model.train()
        for x, classes, _ in loader:
            update(optimizer, F.cross_entropy(model(x), classes))
        model.eval()
    return tuple(model for model, _ in every)


@program
def a_model_wrapped_within_an_epoch() -> Any:
    """It is trained from then on, in place of the first one, and by equal shares."""
    first, optimizer = start()
    second = None
    batches = epochs(load(), 3)
    for number, (x, classes, _) in enumerate(batches):
        if number == 9:
            second, optimizer = start()
        update(optimizer, F.cross_entropy((second or first)(x), classes))
    return first, second


@program
def left_in_evaluation_mode() -> Any:
    """After an epoch of one step, the model stays in evaluation mode, as its training goes on."""
    model, optimizer = start()
    loader = load(batch_size=ROWS // dist.get_world_size())
    for _ in range(5):
        for x, classes, _ in loader:
            update(optimizer, F.cross_entropy(model(x), classes))
        model.eval()
        for x, _, _ in load():
            with torch.no_grad():
                model(x)
    return model


@program
def epochs_left_early() -> Any:
    """Rows of an epoch depend on whether the epoch before it was read to its end."""
    model, optimizer = start()
    loader = load(sampler=Reshuffled())
    for _ in range(6):
        for number, (x, classes, _) in enumerate(loader):
            update(optimizer, F.cross_entropy(model(x), classes))
            if number == 3:
                break
    return model


@program
def cut_into_passes() -> Any:
    """Trains in passes of a fixed number of rows, weighted by rows, like composer's Trainer."""
    model, optimizer = start()
    for x, classes, _ in epochs(load(drop_last=True)):
        optimizer.zero_grad()
        parts = list(zip(x.split(4), classes.split(4), strict=True))
        for number, (rows, labels) in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else model.no_sync():
                loss = F.cross_entropy(model(rows), labels) * (len(rows) / len(x))
                loss.backward()
        optimizer.step()
    return model


@program
def cut_into_passes_in_a_closure() -> Any:
    """Runs the passes in a closure that the optimizer calls."""
    model, optimizer = start()
    for x, classes, _ in epochs(load(drop_last=True)):

        def compute(x: Tensor = x, classes: Tensor = classes) -> Tensor:
            optimizer.zero_grad()
            parts = list(zip(x.split(4), classes.split(4), strict=True))
            total = torch.zeros(())
            for number, (rows, labels) in enumerate(parts, 1):
                with nullcontext() if number == len(parts) else model.no_sync():
                    loss = torch.zeros(1)
                    loss.add_(F.cross_entropy(model(rows), labels).mean())
                    loss.mul_(len(rows) / len(x))
                    loss.backward()
                    total = total + loss.detach()
            return total

        optimizer.step(compute)
    return model


@program
def clipped_values() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), classes).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return model


@program
def accumulated_by_no_sync() -> Any:
    model, optimizer = start()
    for number, (x, classes, _) in enumerate(epochs(load(drop_last=True))):
        if number % 2:
            (F.cross_entropy(model(x), classes) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                (F.cross_entropy(model(x), classes) / 2).backward()
    return model


@program
def accumulated() -> Any:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (x, classes, _) in enumerate(epochs(load()), 1):
        (F.cross_entropy(model(x), classes) / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@program
def frozen_part() -> Any:
    model = net()
    model[0].requires_grad_(False)
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(
        (each for each in wrapped.parameters() if each.requires_grad), lr=0.1
    )
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(wrapped(x), classes))
    return wrapped


@program
def two_models() -> Any:
    encoder, head = ddp(net(out=5)), ddp(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(
        [{"params": encoder.parameters()}, {"params": head.parameters(), "lr": 0.2}], lr=0.1
    )
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(head(encoder(x)), classes))
    return encoder, head


@program
def two_optimizers() -> Any:
    model, scale = ddp(), ddp(nn.Linear(3, 3))
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    second = torch.optim.SGD(scale.parameters(), lr=0.1)
    for x, classes, _ in epochs(load()):
        for each in (first, second):
            each.zero_grad()
        F.cross_entropy(scale(model(x)), classes).backward()
        for each in (first, second):
            each.step()
    return model, scale


@program
def named_tuples() -> Any:
    model, optimizer = start()
    rows = [Pair(x, int(y)) for x, y, _ in points()]
    for batch in epochs(load(rows)):
        update(optimizer, F.cross_entropy(model(batch.x), batch.labels))
    return model


@program
def own_collate() -> Any:
    rows = list(points())

    def collate(some: list[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.stack(each) for each in zip(*some, strict=True))

    return fit(ddp(), mean, data=rows, collate_fn=collate)


@program
def set_epoch_missing() -> Any:
    model, optimizer = start()
    loader = load()
    for _ in range(2):
        for x, classes, _targets in loader:
            update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def steps_counted() -> Any:
    """Loops over steps, calls next() on the loader's iterator, and pickles the loader."""
    model, optimizer = start()
    loader = load()
    batches = iter(loader)
    for _ in range(17):
        try:
            x, classes, _targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, classes, _targets = next(batches)
        update(optimizer, F.cross_entropy(model(x), classes))
        assert type(pickle.loads(pickle.dumps(loader)).batch_sampler) is BatchSampler
    return model


@program
def epochs_cut_short() -> Any:
    model, optimizer = start()
    loader = load()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, classes, _ in itertools.islice(loader, 4):
            update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def resumed() -> Any:
    """Starts in the second epoch, with a saved state of the optimizer."""
    model, loader = ddp(), load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(made[0])
    model.load_state_dict(made[1])
    for epoch in range(1, 3):
        loader.sampler.set_epoch(epoch)
        for x, classes, _ in loader:
            update(optimizer, F.cross_entropy(model(x), classes))
    return model


@program
def averaged_weights() -> Any:
    model = ddp()
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    slow = torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, classes, _ in epochs(load()):
        update(optimizer, F.cross_entropy(model(x), classes))
        slow.update_parameters(model.module)
    return model, slow


@program
def taught() -> Any:
    teacher = net().eval().requires_grad_(False)

    def loss(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        found = model(x)
        return F.cross_entropy(found, classes) + F.kl_div(
            found.log_softmax(-1), soft, reduction="batchmean"
        )

    return fit(ddp(), loss)


@program
def penalty_by_row() -> Any:
    def loss(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
        given = x.detach().clone().requires_grad_()
        found = model(given)
        (slope,) = torch.autograd.grad(found.sum(), given, create_graph=True)
        return F.cross_entropy(found, classes) + 0.1 * slope.square().sum(1).mean()

    return fit(ddp(), loss)


@program
def evaluated_between() -> Any:
    model, loader = ddp(), load()
    held = DataLoader(
        points(20), batch_size=5, sampler=DistributedSampler(points(20), shuffle=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = schedules.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, classes, _ in loader:
            update(optimizer, F.cross_entropy(model(x), classes))
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for x, classes, _ in held:
                total += F.cross_entropy(model(x), classes, reduction="sum")
        dist.all_reduce(total)
        plateau.step(float(total))
    return model


@program
def two_loaders() -> Any:
    """Trains on one set of rows for some epochs, then on another."""
    model, optimizer = start()
    for data in (points(), points(30)):
        for x, classes, _ in epochs(load(data), 1):
            update(optimizer, F.cross_entropy(model(x), classes))
    return model


class Later(Dataset[Any]):
    """Rows that are different in each epoch."""

    epoch = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        x, classes, _ = points()[row]
        return x * (1 + self.epoch), classes


@program
def rows_by_epoch() -> Any:
    data = Later()
    model, optimizer = start()
    loader = load(data)
    for epoch in range(2):
        data.epoch = epoch
        loader.sampler.set_epoch(epoch)
        for x, classes in loader:
            update(optimizer, F.cross_entropy(model(x), classes))
    return model
