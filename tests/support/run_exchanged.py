"""Programs that exchange tensors themselves, in ways that unequal shares would break or change."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from .run_exchanges import accelerate, train
from .run_parts import Programs, ddp, epochs, load, naming, start, update

PROGRAMS: Programs = {}
name = naming(PROGRAMS)


@name
def rows_gathered() -> Any:
    def note(_x: Tensor, _y: Tensor, out: Tensor, _loss: Tensor) -> None:
        own = out.detach().argmax(1)
        every = [torch.zeros_like(own) for _ in range(2)]
        dist.all_gather(every, own)
        assert len(torch.cat(every)) == 2 * len(own)

    return train(ddp(), note)


@name
def rows_gathered_before_the_backward_pass() -> Any:
    def note(_x: Tensor, classes: Tensor, _out: Tensor, _loss: Tensor) -> None:
        every = classes.new_zeros(2 * len(classes))
        dist.all_gather_into_tensor(every, classes)

    return train(ddp(), note, early=True)


@name
def rows_gathered_on_the_first_rank() -> Any:
    def note(_x: Tensor, _y: Tensor, out: Tensor, _loss: Tensor) -> None:
        own = out.detach().softmax(1)
        every = [torch.zeros_like(own) for _ in range(2)] if dist.get_rank() == 0 else None
        dist.gather(own, every)

    return train(ddp(), note)


@name
def tokens_gathered() -> Any:
    """Gathers several values of each row in one dimension."""

    def note(_x: Tensor, _y: Tensor, out: Tensor, _loss: Tensor) -> None:
        own = out.detach().flatten()
        every = [torch.zeros_like(own) for _ in range(2)]
        dist.all_gather(every, own)

    return train(ddp(), note)


@name
def rows_gathered_by_a_function() -> Any:
    def note(_x: Tensor, _y: Tensor, out: Tensor, _loss: Tensor) -> None:
        every = functional.all_gather_tensor(out.detach(), 0, dist.group.WORLD)
        assert len(every) == 2 * len(out)

    return train(ddp(), note)


@name
def losses_of_rows_added_up() -> Any:
    def note(_x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor) -> None:
        losses = F.cross_entropy(out.detach(), classes, reduction="none")
        dist.all_reduce(losses)

    return train(ddp(), note)


@name
def a_center() -> Any:
    model, optimizer = start()
    center = torch.zeros(1, 3)
    for x, _, _ in epochs(load()):
        out = model(x)
        loss = (out - center).square().mean()
        with torch.no_grad():
            own = out.sum(0, keepdim=True)
            dist.all_reduce(own)
            center = center * 0.9 + own / (len(out) * 2) * 0.1
        update(optimizer, loss)
    return model


@name
def a_center_in_place_after_the_step() -> Any:
    center = torch.zeros(3)
    model, optimizer = start()
    for x, _, _ in epochs(load()):
        out = model(x)
        update(optimizer, (out - center.sigmoid()).square().mean())
        own = out.detach().mean(0)
        dist.all_reduce(own)
        center.mul_(0.9).add_(own, alpha=0.05)
    return model


@name
def a_center_as_a_number() -> Any:
    model, optimizer = start()
    center = 0.0
    for x, _, _ in epochs(load()):
        out = model(x)
        update(optimizer, (out - center).square().mean())
        own = out.detach().mean()
        dist.all_reduce(own)
        center = 0.9 * center + 0.1 * own.item() / 2
    return model


@name
def a_center_from_the_first_rank() -> Any:
    model, optimizer = start()
    center = torch.zeros(3)
    for x, _, _ in epochs(load()):
        out = model(x)
        loss = (out - center).square().mean()
        center = out.detach().mean(0)
        dist.broadcast(center, 0)
        update(optimizer, loss)
    return model


@name
def rows_counted_over_ranks() -> Any:
    """Each rank weights its loss by its own number of rows, like composer's Trainer."""
    model, optimizer = start()
    for x, classes, _ in epochs(load(drop_last=True)):
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        mean = rows.item() / dist.get_world_size()
        update(optimizer, F.cross_entropy(model(x), classes) * (len(x) / mean))
    return model


@name
def means_as_objects_in_the_loss() -> Any:
    model, optimizer = start()
    middle = 1.0
    for x, classes, _ in epochs(load()):
        loss = F.cross_entropy(model(x), classes)
        update(optimizer, loss / middle)
        every: list[Any] = [None, None]
        dist.all_gather_object(every, loss.item())
        middle = sum(every) / 2
    return model


@name
def a_rate_by_exchanged_losses() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        optimizer.param_groups[0]["lr"] = 0.05 * whole.item()
        optimizer.step()
    return model


@name
def gradients_by_exchanged_losses() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        for each in model.parameters():
            each.grad.mul_(1 / (1 + whole))
        optimizer.step()
    return model


class Codebook(nn.Module):
    """A layer that moves to the mean of all ranks' rows in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("middle", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.inner(inputs)
        if self.training:
            with torch.no_grad():
                own = made.mean(0)
                dist.all_reduce(own)
                self.middle.mul_(0.9).add_(own, alpha=0.05)
        return made - self.middle


@name
def a_codebook_in_the_model() -> Any:
    return train(ddp(Codebook(), broadcast_buffers=False), lambda *_: None)


@name
def negatives_of_all_ranks_by_a_function() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        out = F.normalize(model(x))
        every = torch.cat(torch.distributed.nn.all_gather(out))
        update(optimizer, F.cross_entropy(out @ every.T, classes) / 0.1)
    return model


@name
def rows_added_up_later() -> Any:
    """Sums rows of ranks only once shares are unequal, so it must end with an error message."""
    steps = [0]

    def note(_x: Tensor, classes: Tensor, out: Tensor, _loss: Tensor) -> None:
        steps[0] += 1
        if steps[0] > 3:
            losses = F.cross_entropy(out.detach(), classes, reduction="none")
            dist.all_reduce(losses)

    return train(ddp(), note)


@name
def rows_gathered_into_parts_later() -> Any:
    """Gathers into parts of one tensor, whose size can't change; only the first rank knows that."""
    steps = [0]

    def note(_x: Tensor, classes: Tensor, _out: Tensor, _loss: Tensor) -> None:
        steps[0] += 1
        if steps[0] > 3:
            whole = torch.zeros(2 * len(classes), dtype=classes.dtype)
            dist.gather(classes, list(whole.chunk(2)) if dist.get_rank() == 0 else None)

    return train(ddp(), note)


@name
def rows_gathered_by_a_function_of_accelerate() -> Any:
    from accelerate.utils import gather

    def note(_x: Tensor, _y: Tensor, out: Tensor, _loss: Tensor, _accelerator: Any) -> None:
        gather(out.detach())

    return accelerate(note)


@name
def a_center_by_accelerate() -> Any:
    center = torch.zeros(3)

    def note(_x: Tensor, _y: Tensor, out: Tensor, _loss: Tensor, accelerator: Any) -> None:
        whole = accelerator.gather(out.detach().mean(0, keepdim=True)).mean(0)
        center.add_(whole, alpha=0.1)

    return accelerate(note, lambda out, _: (out - center.tanh()).square().mean())
