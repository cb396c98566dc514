"""Programs whose losses, optimizers and models don't depend on shares.

`evener run` has to train all of them with the plan's shares.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.optim import lr_scheduler as schedules
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, DistributedSampler

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


def step_by(make: Any, schedule: Any = None, model: Any = None, each_epoch: bool = False) -> Any:
    """Return a program with this optimizer and learning rate schedule."""
    chosen = ddp(model)
    optimizer = make(chosen.parameters())
    steps = schedule and schedule(optimizer)
    loader = load()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, classes, targets in loader:
            loss = mean(chosen, x, classes, targets)
            update(optimizer, loss)
            if steps and not each_epoch:
                steps.step()
        if steps and each_epoch:
            steps.step()
    return chosen


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}
SCHEDULES: dict[str, Any] = {
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "warm-up": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 10)], [4]
    ),
}
PROGRAMS |= {name: partial(step_by, make) for name, make in OPTIMIZERS.items()}
PROGRAMS |= {name: partial(step_by, OPTIMIZERS["SGD"], make) for name, make in SCHEDULES.items()}
PROGRAMS["a step an epoch"] = lambda: step_by(
    OPTIMIZERS["SGD"], lambda o: schedules.StepLR(o, 1, 0.5), each_epoch=True
)


def learn_by(loss: Any) -> Any:
    """Return a program with this loss."""
    return fit(ddp(), loss)


def learn_wrapped(options: dict[str, Any]) -> Any:
    """Return a program with these options of DistributedDataParallel."""
    return fit(ddp(**options), mean)


def log(loss: Tensor) -> Tensor:
    """Return the loss after its value has been printed or stored."""
    loss.item()
    return loss


LOSSES: dict[str, Any] = {
    "label smoothing": lambda m, x, y, _: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "rows, then their mean": lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="none").mean(),
    "a sum by size": lambda m, x, y, _: F.cross_entropy(m(x), y, reduction="sum") / x.size(0),
    "a sum by shape": lambda m, x, y, _: (
        F.nll_loss(m(x).log_softmax(-1), y, reduction="sum") / y.shape[0]
    ),
    "two losses": lambda m, x, y, t: (
        F.cross_entropy(found := m(x), y) + 0.3 * F.huber_loss(found[:, :2], t)
    ),
    "several labels": lambda m, x, _, t: F.binary_cross_entropy_with_logits(
        m(x)[:, :2], (t > 0).double()
    ),
    "times the ranks": lambda m, x, y, _: F.cross_entropy(m(x), y) * dist.get_world_size() / 2,
    "Kullback-Leibler": lambda m, x, _, t: F.kl_div(
        m(x)[:, :2].log_softmax(1), t.softmax(1), reduction="batchmean"
    ),
    "a penalty on weights": lambda m, x, y, _: (
        F.cross_entropy(m(x), y) + 1e-2 * sum(each.square().sum() for each in m.parameters())
    ),
    "pairs in a row": lambda m, x, y, _: F.cosine_embedding_loss(
        m(x), m(x.flip(1)), 2.0 * (y > 0) - 1
    ),
    "a loss logged": lambda m, x, y, _: log(F.cross_entropy(m(x), y)),
}
PROGRAMS |= {name: partial(learn_by, loss) for name, loss in LOSSES.items()}
WRAPPED: dict[str, dict[str, Any]] = {
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "a static graph": {"static_graph": True},
}
PROGRAMS |= {name: partial(learn_wrapped, options) for name, options in WRAPPED.items()}


class Tied(nn.Module):
    """A language model whose input and output layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.out = (
            nn.Embedding(9, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 9, bias=False),
        )
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(self.words(tokens))))


class Tokens(Dataset[Any]):
    """Rows of eight tokens as a dict, with a mask that counts only the first of them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(row)
        tokens = torch.randint(0, 9, (8,), generator=drawn)
        return {"tokens": tokens, "mask": torch.arange(8) < 3 + row % 5}


@program
def tied_weights() -> Any:
    model = ddp(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in epochs(load(Tokens())):
        found = model(batch["tokens"][:, :-1])
        update(optimizer, F.cross_entropy(found.reshape(-1, 9), batch["tokens"][:, 1:].reshape(-1)))
    return model


@program
def masks_normalized_by_row() -> Any:
    model, optimizer = start(ddp(Tied()))
    for batch in epochs(load(Tokens())):
        each = F.cross_entropy(
            model(batch["tokens"]).transpose(1, 2), batch["tokens"].flip(1), reduction="none"
        )
        weights = batch["mask"].double()
        update(optimizer, ((each * weights).sum(1) / weights.sum(1)).mean())
    return model


class Recurrent(nn.Module):
    """An LSTM or a GRU over tokens."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words, self.inner, self.out = (
            nn.Embedding(9, 8),
            kind(8, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        found, _ = self.inner(self.words(tokens))
        return self.out(found[:, -1])


class Attention(nn.Module):
    """A transformer encoder that masks padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.inner(self.words(tokens), src_key_padding_mask=~mask)[:, 0])


def learn_sums(model: Any, masked: bool = False) -> Any:
    """Return a program over tokens whose class is their sum."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in epochs(load(Tokens())):
        tokens = batch["tokens"]
        found = model(tokens, batch["mask"]) if masked else model(tokens)
        update(optimizer, F.cross_entropy(found, tokens.sum(1) % 3))
    return model


PROGRAMS["an LSTM"] = lambda: learn_sums(ddp(Recurrent(nn.LSTM)))
PROGRAMS["a GRU"] = lambda: learn_sums(ddp(Recurrent(nn.GRU)))
PROGRAMS["attention over a mask"] = lambda: learn_sums(ddp(Attention()), masked=True)


class Checkpointed(nn.Module):
    """A network that recomputes its inner layers in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.first(x))
        return self.out(
            checkpoint(lambda given: torch.tanh(self.inner(given)), found, use_reentrant=False)
        )


class Optional(nn.Module):
    """A network with a layer that no row uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = net(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Convolutions(nn.Module):
    """Convolutions that normalize each row on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten()
        )
        self.out = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x.unsqueeze(1)))


PROGRAMS["activations computed again"] = lambda: fit(ddp(Checkpointed()), mean)
PROGRAMS["unused parameters"] = lambda: fit(ddp(Optional(), find_unused_parameters=True), mean)
PROGRAMS["convolutions"] = lambda: fit(ddp(Convolutions()), mean)
PROGRAMS["normed weights"] = lambda: fit(
    ddp(
        nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)
        )
    ),
    mean,
)
PROGRAMS["workers that stay"] = lambda: fit(ddp(), mean, num_workers=1, persistent_workers=True)
PROGRAMS["no short batch"] = lambda: fit(ddp(), mean, drop_last=True)
PROGRAMS["fewer rows for all"] = lambda: fit(
    ddp(), mean, sampler=DistributedSampler(points(), drop_last=True)
)
PROGRAMS["in the data's order"] = lambda: fit(
    ddp(), mean, sampler=DistributedSampler(points(), shuffle=False)
)
PROGRAMS["gradients halved by a hook"] = lambda: fit(halve(ddp()), mean)


def halve(model: Any) -> Any:
    """Return the model with a hook that halves each gradient."""
    for each in model.parameters():
        each.register_hook(lambda gradient: gradient * 0.5)
    return model


@program
def bfloat16() -> Any:
    """Return an autocast context over float64 weights."""
    return fit(ddp(), lambda m, x, y, _: F.cross_entropy(autocast(m, x).double(), y))


def autocast(model: Any, x: Tensor) -> Tensor:
    """Run a forward pass in 16 bits."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)
