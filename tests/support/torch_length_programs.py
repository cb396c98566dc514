"""Programs that train on rows of unequal length, and must learn the same as a plain loop.

Rows are assigned to ranks by cost or by ratios.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.utils.data import Dataset

from evener.plan.file import make_layout
from evener.shares.curves import Cost
from evener.torch import Split
from tests.support.torch_program_parts import Given, Weights, exact, refused, update, weights
from tests.support.torch_ranks import example_plan

WORDS, EPOCHS = 11, 2
IGNORED = -100


class Texts(Dataset[Any]):
    """Rows of lognormal length; each is its number and its tokens."""

    def __init__(self, rows: int, sigma: float = 1.0) -> None:
        drawn = torch.Generator().manual_seed(rows)
        lengths = (6 * torch.exp(sigma * torch.randn(rows, generator=drawn))).int() + 2
        self.words = [
            torch.randint(0, WORDS, (int(length),), generator=drawn) for length in lengths
        ]
        self.lengths = [len(words) for words in self.words]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, self.words[row]


def collate(rows: list[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest of them; the labels are the next tokens."""
    words = nn.utils.rnn.pad_sequence([words for _, words in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence(
        [words[1:] for _, words in rows], batch_first=True, padding_value=IGNORED
    )
    return {
        "rows": torch.tensor([row for row, _ in rows]),
        "words": words[:, :-1],
        "labels": labels,
    }


class Decoder(nn.Module):
    """Predicts the next token from the mean of those so far, so padding after them has
    no effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.next = (
            nn.Embedding(WORDS, 5),
            nn.Linear(5, 7),
            nn.Linear(7, WORDS),
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words).cumsum(1) / torch.arange(1, words.shape[1] + 1)[:, None]
        scores: torch.Tensor = self.next(torch.tanh(self.hidden(found)))
        return scores


def decoder() -> nn.Module:
    torch.manual_seed(3)
    return Decoder().double()


def cost_split(
    shares: tuple[int, ...], weigh: Any = "gradients", tokens: int = 0, times: int = 2
) -> Split:
    """Return a split for devices with speeds like `shares`, with `times` as many rows."""
    plan, total = example_plan(shares), sum(shares)
    costs = (Cost(20 / share, 1 / share, 0.01 / share) for share in shares)
    devices = tuple(
        msgspec.structs.replace(share, cost=cost, tokens=tokens)
        for share, cost in zip(plan.layout.share, costs, strict=True)
    )
    batches, ratios = (
        tuple(times * share for share in shares),
        tuple(share / total for share in shares),
    )
    layout = make_layout(plan.layout.kind, devices, batches, ratios=ratios)
    return Split(msgspec.structs.replace(plan, layout=layout), weigh=weigh)


def mean_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def count(part: Any) -> torch.Tensor:
    counted: torch.Tensor = (part.batch["labels"] != IGNORED).sum()
    return counted


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def finish(model: Any, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def plain_epoch(model: Any, optimizer: Any, loader: Any, accumulate: int) -> list[float]:
    """Train an epoch in one process that ignores lengths."""
    losses: list[float] = []
    for batch in loader:
        loss = mean_loss(model(batch["words"]), batch["labels"])
        loss.backward()
        losses.append(float(loss.detach()))
        if len(losses) % accumulate == 0:
            finish(model, optimizer)
    return losses


def assigned_epoch(
    split: Split,
    model: Any,
    optimizer: Any,
    loader: Any,
    seen: torch.Tensor,
    steps: int = 99,
    accumulate: int = 1,
) -> list[float]:
    """Train the same epoch by parts; `seen` counts how often each row is computed."""
    losses: list[float] = []
    for batch in loader:
        total = torch.tensor(0.0, dtype=torch.float64)
        last = (len(losses) + 1) % accumulate == 0
        with nullcontext() if last else split.no_sync(model):
            for part in split.parts(batch, count):
                total += part.backward(mean_loss(model(part.batch["words"]), part.batch["labels"]))
                seen[part.batch["rows"][: part.rows]] += 1
        losses.append(split.mean(total))
        if last:
            finish(model, optimizer)
        if len(losses) == steps:
            break
    return losses


def trained(
    split: Split, rows: int, resume: tuple[int, ...] = (), accumulate: int = 1
) -> list[torch.Tensor]:
    """Return weights and losses after some epochs, and how often each row was computed.

    With `resume`, a split with these shares resumes the training in mid-epoch.
    """
    texts, losses, seen = Texts(rows), [], torch.zeros(rows, dtype=torch.int64)
    bare = decoder()
    model, optimizer = split.wrap(bare), optimizer_of(bare)
    if split.world == 1:
        loader = split.loader(texts, collate_fn=collate)
        for _ in range(EPOCHS):
            losses += plain_epoch(model, optimizer, loader, accumulate)
            seen += 1
    else:
        loader = split.loader(texts, lengths=texts.lengths, collate_fn=collate)
        if resume:
            losses += assigned_epoch(split, model, optimizer, loader, seen, steps=1)
            again = cost_split(resume)
            following = again.loader(texts, lengths=torch.tensor(texts.lengths), collate_fn=collate)
            following.load_state_dict(loader.state_dict())
            split, loader, model = again, following, again.wrap(model)
        for _ in range(EPOCHS):
            losses += assigned_epoch(split, model, optimizer, loader, seen, accumulate=accumulate)
    return [*weights(bare), torch.tensor(losses, dtype=torch.float64), split.total(seen)]


@exact
def texts_by_cost(given: Given) -> Weights:
    """The last of 25 rows is a batch of its own, for which the other ranks have no rows."""
    return trained(cost_split(given.shares, times=5), len(given.rows))


@exact
def texts_by_cost_accumulated(given: Given) -> Weights:
    return trained(cost_split(given.shares), len(given.rows), accumulate=3)


@exact
def texts_by_cost_within_memory_and_by_loss(given: Given) -> Weights:
    return trained(cost_split(given.shares, "loss", tokens=150), len(given.rows))


@exact
def texts_resumed_under_other_shares(given: Given) -> Weights:
    return trained(cost_split(given.shares), len(given.rows), resume=given.shares[::-1])


@exact
def texts_by_ratios_without_parts(given: Given) -> Weights:
    """Computes one pass on each rank and a loss over all ranks' tokens; accumulates two batches."""
    split, texts = given.split(), Texts(len(given.rows))
    model = split.wrap(decoder())
    optimizer = optimizer_of(model)
    for step, batch in enumerate(split.loader(texts, lengths=texts.lengths, collate_fn=collate)):
        scores, labels = model(batch["words"]).flatten(0, 1), batch["labels"].flatten()
        total = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
        split.loss(total, (labels != IGNORED).sum()).backward()
        if step % 2:
            finish(model, optimizer)
    return weights(model)


@exact
def rows_of_one_length(given: Given) -> Weights:
    """Batches are the same as without lengths."""
    split = given.split()
    assigned = [inputs for inputs, _ in split.loader(given.rows, lengths=[7] * len(given.rows))]
    plain = [inputs for inputs, _ in split.loader(given.rows)]
    assert all(map(torch.equal, assigned, plain))
    return [torch.tensor([len(assigned)])]


@refused("computes a batch at once")
def texts_by_cost_without_parts(given: Given) -> Weights:
    split, texts = cost_split(given.shares), Texts(len(given.rows))
    model = split.wrap(decoder())
    for batch in split.loader(texts, lengths=texts.lengths, collate_fn=collate):
        update(optimizer_of(model), mean_loss(model(batch["words"]), batch["labels"]))
    return weights(model)


@refused("Row 3 has 999 tokens")
def a_text_that_fits_nowhere(given: Given) -> Weights:
    split, texts = cost_split(given.shares, tokens=500), Texts(len(given.rows))
    split.loader(texts, lengths=[*texts.lengths[:3], 999, *texts.lengths[4:]])
    return []


@refused("different lengths")
def lengths_that_ranks_have_apart(given: Given) -> Weights:
    split, texts = cost_split(given.shares), Texts(len(given.rows))
    loader = split.loader(
        texts, lengths=[length + split.rank for length in texts.lengths], collate_fn=collate
    )
    if split.world == 1:
        return []
    next(iter(loader))
    return []


@refused("SyncBatchNorm exchanges statistics in each pass")
def texts_by_cost_with_statistics_of_all_ranks(given: Given) -> Weights:
    split, texts = cost_split(given.shares, "loss"), Texts(len(given.rows))
    for batch in split.loader(texts, lengths=texts.lengths, collate_fn=collate):
        # a CPU can't wrap it in DistributedDataParallel
        next(split.parts(batch, models=[nn.SyncBatchNorm(WORDS)]))
    return []


@refused("isn't a list of whole numbers")
def lengths_that_are_no_numbers(given: Given) -> Weights:
    cost_split(given.shares).loader(Texts(len(given.rows)), lengths=[0.5] * len(given.rows))
    return []


@refused("Validation rows aren't assigned")
def a_validation_by_length(given: Given) -> Weights:
    cost_split(given.shares).loader(
        Texts(len(given.rows)), lengths=Texts(len(given.rows)).lengths, training=False
    )
    return []
