"""Losses that aren't means over rows: refused, or trained as with the program's own launcher."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tests.support.run_parts import BATCH, Programs, ddp, epochs, fit, load, start

PROGRAMS: Programs = {}


def nce(model: Any, x: Tensor, *_: Any) -> Tensor:
    """A contrastive loss in which every other row of the batch is a negative."""
    one, other = F.normalize(model(x)), F.normalize(model(x.flip(1)))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


def negatives(model: Any, x: Tensor, *_: Any) -> Tensor:
    """Return the loss of in-batch negatives, with the positives taken from a diagonal."""
    scores = model(x) @ model(x.flip(1)).T
    return (scores.logsumexp(1) - scores.diagonal()).mean()


def covariance(model: Any, x: Tensor, *_: Any) -> Tensor:
    found = model(x)
    centred = found - found.mean(0)
    return (
        centred.T @ centred / max(1, len(x) - 1) - torch.eye(3)
    ).square().sum() + found.square().mean()


def dice(model: Any, x: Tensor, _: Tensor, targets: Tensor) -> Tensor:
    found, wanted = model(x)[:, :2].sigmoid(), (targets > 0).double()
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def hardest(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
    return (
        F.cross_entropy(model(x), classes, reduction="none").topk(max(1, len(x) // 2)).values.mean()
    )


def slope_of_batch(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
    given = x.detach().clone().requires_grad_()
    found = model(given)
    (slope,) = torch.autograd.grad(found.sum(), given, create_graph=True)
    return F.cross_entropy(found, classes) + slope.norm()


def mixed(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
    """Mixes each row with the next one of the batch."""
    wanted = F.one_hot(classes, 3).double()
    return F.cross_entropy(
        model(0.7 * x + 0.3 * x.roll(1, 0)), 0.7 * wanted + 0.3 * wanted.roll(1, 0)
    )


def gathered(model: Any, x: Tensor, *_: Any) -> Tensor:
    """A contrastive loss with negatives from all ranks."""
    found = F.normalize(model(x))
    every = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found.detach())
    every[dist.get_rank()] = found
    return F.cross_entropy(
        found @ torch.cat(every).T, torch.arange(len(x)) + dist.get_rank() * len(x)
    )


def ranks_weighted(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes) * (1 + dist.get_rank())


def fit_new(loss: Any) -> Any:
    """Return a program with this loss."""
    return fit(ddp(), loss)


def mixed_at_random(model: Any, x: Tensor, classes: Tensor, _: Tensor) -> Tensor:
    """Mixup, by an order of len(x) rows."""
    other = torch.randperm(len(x))
    out = model(0.7 * x + 0.3 * x[other])
    return 0.7 * F.cross_entropy(out, classes) + 0.3 * F.cross_entropy(out, classes[other])


def masked(model: Any, x: Tensor, *_: Any) -> Tensor:
    """Averages over the values that a random mask has left, as SimMIM does."""
    found = model(x)
    mask = (torch.rand_like(found) < 0.8).to(x.dtype)
    return (found.square() * mask).sum() / mask.sum()


def cut_by_the_program() -> Any:
    """The loop computes parts of its batch, and their number goes by the rank's rows."""
    model, optimizer = start()
    for x, classes, _ in epochs(load()):
        optimizer.zero_grad()
        for part, own in zip(x.split(2), classes.split(2), strict=True):
            (F.cross_entropy(model(part), own, reduction="sum") / len(x)).backward()
        optimizer.step()
    return model


LOSSES: dict[str, Any] = {
    "a sum by the batch size": lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum") / BATCH,
    "class weights": lambda m, x, y, _: F.cross_entropy(
        m(x), y, weight=torch.tensor([1.0, 3.0, 9.0])
    ),
    "ignored labels": lambda m, x, y, _: F.cross_entropy(m(x), y, ignore_index=1),
    "by positives": lambda m, x, _, t: (
        F.binary_cross_entropy_with_logits(m(x)[:, :2], (t > 0).double(), reduction="sum")
        / (t > 0).sum().clamp(min=1)
    ),
    "divided by len": lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum") / len(x),
    "a root of squares": lambda m, x, _, t: F.mse_loss(m(x)[:, :2], t).sqrt(),
    "spread of rows": lambda m, x, y, _: (
        F.cross_entropy(m(x), y) - 0.1 * m(x).std(0, correction=0).mean()
    ),
    "the largest row": lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="none").max(),
    "inputs normed by batch": lambda m, x, y, _: F.cross_entropy(
        m((x - x.mean(0)) / (x.std(0, correction=0) + 1)), y
    ),
    "contrastive": nce,
    "negatives in the batch": negatives,
    "covariance": covariance,
    "dice": dice,
    "the hardest rows": hardest,
    "a batch's slope": slope_of_batch,
    "rows mixed": mixed,
    "rows mixed at random": mixed_at_random,
    "negatives of all ranks": gathered,
    "masked by a random count": masked,
    "ranks weighted": ranks_weighted,
}
PROGRAMS |= {name: partial(fit_new, loss) for name, loss in LOSSES.items()}
PROGRAMS["cut by the program"] = cut_by_the_program
