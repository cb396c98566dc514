"""Programs that exchange tensors themselves, but work with any shares.

They print the results, sum over rows, or gather rows once shares are unequal.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from .run_parts import Programs, ddp, epochs, load, mean, naming, net, points, start, update

PROGRAMS: Programs = {}
name = naming(PROGRAMS)


def train(model: Any, note: Any, early: bool = False, count: int = 2) -> Any:
    """Train with SGD; call `note(x, classes, out, loss)` before the backward pass or after the
    step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, classes, _ in epochs(load(), count):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, classes)
        if early:
            note(x, classes, out, loss)
        loss.backward()
        optimizer.step()
        if not early:
            note(x, classes, out, loss)
    return model


def figures(*values: float) -> nn.Module:
    """Return a module with these numbers as weights, so that they are compared like weights."""
    return nn.ParameterList([nn.Parameter(torch.tensor(values, dtype=torch.float64))])


@name
def a_mean_of_losses_that_is_logged() -> Any:
    def note(_x: Tensor, _y: Tensor, _out: Tensor, loss: Tensor) -> None:
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        assert (whole / 2).item() > 0

    return train(ddp(), note, early=True)


@name
def the_loss_itself_exchanged_for_the_log() -> Any:
    def note(_x: Tensor, _y: Tensor, _out: Tensor, loss: Tensor) -> None:
        dist.all_reduce(loss.data)

    return train(ddp(), note, early=True)


@name
def a_mean_on_the_first_rank() -> Any:
    def note(_x: Tensor, _y: Tensor, _out: Tensor, loss: Tensor) -> None:
        whole = loss.detach().clone()
        dist.reduce(whole, 0)

    return train(ddp(), note)


@name
def four_sums_over_rows() -> Any:
    """Sums four numbers, as many as a rank has rows."""
    seen = torch.zeros(4)

    def note(x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor) -> None:
        good = (out.argmax(1) == classes).sum().double()
        own = torch.stack([good, torch.tensor(float(len(x))), x.sum(), classes.sum().double()])
        dist.all_reduce(own)
        seen.add_(own)

    return train(ddp(), note), figures(*seen.tolist())


@name
def sums_of_features() -> Any:
    seen = torch.zeros(16)

    def note(x: Tensor, _y: Tensor, _out: Tensor, _loss: Tensor) -> None:
        own = (x @ torch.ones(6, 16)).sum(0)
        dist.all_reduce(own)
        seen.add_(own)

    return train(ddp(), note), figures(*seen.tolist())


@name
def an_epochs_outputs_gathered() -> Any:
    kept: list[Tensor] = []

    def note(_x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor) -> None:
        kept.append(out.detach().argmax(1) == classes)

    model = train(ddp(), note)
    own = torch.cat(kept).long()
    every = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    found = torch.cat(every)
    return model, figures(found.sum(), len(found))


@name
def an_epochs_outputs_gathered_into_one() -> Any:
    kept: list[Tensor] = []

    def note(_x: Tensor, classes: Tensor, _out: Tensor, _loss: Tensor) -> None:
        kept.append(classes[:, None].repeat(1, 2))

    model = train(ddp(), note)
    own = torch.cat(kept)
    every = own.new_zeros(2 * len(own), 2)
    dist.all_gather_into_tensor(every, own)
    return model, figures(every.sum(), len(every))


@name
def an_epochs_outputs_on_the_first_rank() -> Any:
    kept: list[Tensor] = []

    def note(_x: Tensor, classes: Tensor, _out: Tensor, _loss: Tensor) -> None:
        kept.append(classes)

    model = train(ddp(), note)
    own = torch.cat(kept)
    first = dist.get_rank() == 0
    every = [torch.zeros_like(own) for _ in range(2)] if first else None
    dist.gather(own, every, dst=0)
    return model, figures(torch.cat(every).sum() if every else 0.0)


@name
def rows_gathered_as_objects() -> Any:
    good: list[float] = []

    def note(_x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor) -> None:
        own = (out.argmax(1) == classes).tolist()
        every: list[Any] = [None, None]
        dist.all_gather_object(every, own)
        good.extend(map(sum, every))

    return train(ddp(), note), figures(sum(good))


@name
def barriers() -> Any:
    return train(ddp(), lambda *_: dist.barrier())


@name
def a_drawn_number_from_the_first_rank() -> Any:
    model, optimizer = start()
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for x, classes, _ in epochs(load()):
        part = torch.rand(1, generator=drawn)
        dist.broadcast(part, 0)
        update(optimizer, F.cross_entropy(model(x), classes) * part[0])
    return model


@name
def settings_from_the_first_rank() -> Any:
    rate = [0.1 if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(rate)
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate[0] or 0.0)
    for x, classes, targets in epochs(load()):
        update(optimizer, mean(model, x, classes, targets))
    return model


@name
def an_epochs_loss_averaged() -> Any:
    losses: list[float] = []

    def note(_x: Tensor, _y: Tensor, _out: Tensor, loss: Tensor) -> None:
        losses.append(loss.item())

    model = train(ddp(), note)
    whole = torch.tensor([sum(losses), len(losses)])
    dist.all_reduce(whole)
    return model


@name
def torchmetrics_of_an_epoch() -> Any:
    from torchmetrics import CatMetric, MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    accuracy, kept, middle = MulticlassAccuracy(3, average="micro"), CatMetric(), MeanMetric()

    def note(_x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor) -> None:
        accuracy.update(out.detach(), classes)
        kept.update(classes.double())
        middle.update(classes.double())

    model = train(ddp(), note)
    return model, figures(accuracy.compute(), kept.compute().sum(), middle.compute())


def accelerate(note: Any, lose: Any = F.cross_entropy, before: Any = None) -> Any:
    """Train with accelerate; `note` gets the accelerator as its last argument.

    `before(classes, accelerator)` is called with each batch before the forward pass.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader

    os.environ["ACCELERATE_USE_CPU"] = "1"
    AcceleratorState._reset_state(True)
    accelerator = Accelerator()
    made = net()
    loader = DataLoader(points(), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(made, optimizer, loader)
    for _ in range(2):
        for x, classes, _targets in loader:
            if before is not None:
                before(classes, accelerator)
            out = model(x)
            loss = lose(out, classes)
            note(x, classes, out, loss, accelerator)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


@name
def losses_repeated_and_gathered() -> Any:
    """Logs losses as the examples of diffusers do."""
    losses: list[float] = []

    def note(_x: Tensor, _y: Tensor, _out: Tensor, loss: Tensor, accelerator: Any) -> None:
        whole = accelerator.gather(loss.repeat(4)).mean()
        losses.append(whole.item() / 2)

    return accelerate(note)


@name
def rows_gathered_for_metrics() -> Any:
    seen = torch.zeros(2)

    def note(_x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor, accelerator: Any) -> None:
        made, known = accelerator.gather_for_metrics((out.argmax(1), classes))
        seen.add_(torch.tensor([float((made == known).sum()), float(len(known))]))

    return accelerate(note), figures(*seen.tolist())


@name
def an_epochs_rows_gathered_by_accelerate() -> Any:
    kept: list[Tensor] = []
    accelerators: list[Any] = []

    def note(_x: Tensor, classes: Tensor, _out: Tensor, _loss: Tensor, accelerator: Any) -> None:
        kept.append(classes)
        accelerators.append(accelerator)

    model = accelerate(note)
    every = accelerators[0].gather(torch.cat(kept))
    return model, figures(every.sum(), len(every))


@name
def losses_reduced_by_accelerate() -> Any:
    def note(_x: Tensor, _y: Tensor, _out: Tensor, loss: Tensor, accelerator: Any) -> None:
        assert accelerator.reduce(loss.detach(), "mean").item() > 0

    return accelerate(note)


@name
def a_schedule_within_steps() -> Any:
    """Rates are set for each step after its batch came, and the mean of losses is only logged."""
    model, optimizer = start()
    for number, (x, classes, _) in enumerate(epochs(load())):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        loss = F.cross_entropy(model(x), classes)
        update(optimizer, loss)
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        assert whole.item() > 0
    return model
