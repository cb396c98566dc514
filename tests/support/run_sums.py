"""Losses that are sums over rows, and sums that ranks exchange, such as counts of labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from .run_exchanges import accelerate
from .run_parts import Programs, ddp, epochs, fit, load, naming, start, update

IGNORED = 2  # a class that counts as no label
PROGRAMS: Programs = {}
name = naming(PROGRAMS)


def add_labels(out: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(out, classes, ignore_index=IGNORED, reduction="sum")


def count_labels(classes: Tensor) -> Tensor:
    return (classes != IGNORED).sum()


def scale_gradients(model: Any, factor: Any) -> None:
    for each in model.parameters():
        each.grad *= factor


@name
def a_sum() -> Any:
    return fit(ddp(), lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum") * 0.1)


@name
def a_sum_with_a_short_last_batch() -> Any:
    return fit(ddp(), lambda m, x, y, _: add_labels(m(x), y) * 0.1, drop_last=False)


@name
def a_mean_times_its_rows() -> Any:
    return fit(ddp(), lambda m, x, y, _: F.cross_entropy(m(x), y) * x.size(0) * 0.1)


@name
def labels_of_all_ranks_counted_before() -> Any:
    """Divide the loss by the mean number of labels of a rank, as trainers of language models do."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        labels = count_labels(classes)
        dist.all_reduce(labels)
        update(optimizer, add_labels(model(x), classes) * dist.get_world_size() / labels)
    return model


@name
def labels_of_all_ranks_counted_after() -> Any:
    """Scale the gradients by the number of labels, as torchtune's recipes do, and log the loss."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        labels = count_labels(classes)
        loss = add_labels(model(x), classes)
        loss.backward()
        dist.all_reduce(labels)
        total = loss.detach()
        dist.all_reduce(total)
        scale_gradients(model, dist.get_world_size() / labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert (total / labels).item() > 0
    return model


@name
def labels_gathered_by_accelerate() -> Any:
    """Divide the loss by the sum of what all ranks have gathered, as accelerate's example does."""
    labels: list[Tensor] = []

    def lose(out: Tensor, classes: Tensor) -> Tensor:
        return add_labels(out, classes) * 2 / labels[-1]

    return accelerate(
        lambda *_: None,
        lose,
        before=lambda classes, own: labels.append(own.gather(count_labels(classes)).sum()),
    )


@name
def a_center_of_all_rows() -> Any:
    """Subtract a mean of all ranks' rows of which both sum and count were exchanged."""
    model, optimizer = start()
    center = torch.zeros(3)
    for x, _, _ in epochs(load()):
        out = model(x)
        loss = (out - center).square().mean()
        own, rows = out.detach().sum(0), torch.ones_like(x[:, 0]).sum()
        dist.all_reduce(own)
        dist.all_reduce(rows)
        center = own / rows
        update(optimizer, loss)
    return model


# ---------------------------------------------------------------------- what shares would change


@name
def a_mean_beside_prepared_rows() -> Any:
    """Append a column to the labels that was made for a rank's even rows, as torchtune does."""
    model, optimizer = start()
    ignored = torch.full((4, 1), IGNORED)
    for x, classes, targets in epochs(load(drop_last=True)):
        labels = torch.hstack((classes[:, None], ignored[: classes.shape[0]]))
        out = model(x)[:, :2] - targets * labels
        update(optimizer, out.square().mean())
    return model


@name
def a_sum_divided_by_own_labels_after() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        add_labels(model(x), classes).backward()
        scale_gradients(model, 1 / count_labels(classes))
        optimizer.step()
        optimizer.zero_grad()
    return model


@name
def a_sum_divided_by_len_after() -> Any:
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        F.cross_entropy(model(x), classes, reduction="sum").backward()
        scale_gradients(model, 1 / len(x))
        optimizer.step()
        optimizer.zero_grad()
    return model


@name
def a_sum_divided_by_len() -> Any:
    return fit(ddp(), lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum") / len(x))


@name
def a_center_by_own_rows() -> Any:
    """Divide a sum over all ranks by the number of this rank's labels."""
    model, optimizer = start()
    center = torch.zeros(3)
    for x, classes, _ in epochs(load()):
        out = model(x)
        loss = (out - center).square().mean()
        own = out.detach().sum(0)
        dist.all_reduce(own)
        center = (own / (1 + count_labels(classes))).tanh()
        update(optimizer, loss)
    return model


@name
def labels_counted_as_a_number() -> Any:
    """Divide the loss by a number of labels that was read, which can't be followed."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        labels = count_labels(classes)
        dist.all_reduce(labels)
        update(optimizer, add_labels(model(x), classes) * (2 / labels.item()))
    return model


@name
def means_weighted_by_own_labels() -> Any:
    """Divide a rank's mean by the labels of all ranks, so that its own labels weigh it twice."""
    model, optimizer = start()
    for x, _, targets in epochs(load()):
        labels = (targets > 0).sum()
        own = labels.clamp(min=1)
        dist.all_reduce(labels)
        wanted = (targets > 0).double()
        total = F.binary_cross_entropy_with_logits(model(x)[:, :2], wanted, reduction="sum")
        update(optimizer, total / own * 8 / labels)
    return model


@name
def a_sum_over_rows_that_len_divides_twice() -> Any:
    """Divide an exchanged sum by len() of the rank's rows, as DINO does with its centre."""
    model, optimizer = start()
    center = torch.zeros(3)
    for x, _, _ in epochs(load()):
        out = model(x)
        loss = (out - center).square().mean()
        own = out.detach().sum(0)
        dist.all_reduce(own)
        center = own / len(x) / dist.get_world_size()
        update(optimizer, loss)
    return model


@name
def a_number_of_rows_that_equals_the_ranks() -> Any:
    """Train on two rows on each of two ranks, so a 2 may be the rows' number or the ranks'."""
    model, optimizer = start()
    center = torch.zeros(3)
    for x, _, _ in epochs(load(batch_size=2)):
        out = model(x)
        loss = (out - center).square().mean()
        own = out.detach().sum(0)
        dist.all_reduce(own)
        center = own / len(x) / 2
        update(optimizer, loss)
    return model


@name
def a_sum_of_one_rank() -> Any:
    """Divide the loss by the first rank's labels, one of those that were gathered."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        own = count_labels(classes)
        every = [torch.zeros_like(own) for _ in range(2)]
        dist.all_gather(every, own)
        update(optimizer, add_labels(model(x), classes) / (1 + every[0]))
    return model
