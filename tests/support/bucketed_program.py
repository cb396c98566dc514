"""A Trainer whose own sampler makes batches of rows of equal length, as is usual for texts.

It has no code of evener.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("out")
given = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Buckets:
    """Batches of rows of equal length, the longest first."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self.lengths, self.batch_size, self.drop_last = lengths, batch_size, True

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        for length in sorted(set(self.lengths), reverse=True):
            rows = [row for row, own in enumerate(self.lengths) if own == length]
            for start in range(0, len(rows) - self.batch_size + 1, self.batch_size):
                yield rows[start : start + self.batch_size]


class WithLoss(nn.Module):
    """A model for texts that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 2)
        self.rows: list[int] = []

    def forward(self, tokens: Any, labels: Any) -> Any:
        """Return the loss of a batch, and its logits."""
        if torch.is_grad_enabled():
            self.rows.append(len(tokens))
        logits = self.head(self.embed(tokens).mean(1).tanh())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Bucketed(Trainer):
    """A trainer with its own batches."""

    def get_train_dataloader(self) -> Any:
        """Return the loader of its buckets, sharded over the ranks."""
        lengths = [len(row["tokens"]) for row in self.train_dataset]
        sampler = Buckets(lengths, self.args.per_device_train_batch_size)
        loader = DataLoader(
            self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


drawn = torch.Generator().manual_seed(5)
data = [
    {
        "tokens": torch.randint(0, 30, (3 + row // 24,), generator=drawn),
        "labels": torch.randint(0, 2, (), generator=drawn),
    }
    for row in range(72)
]
model = WithLoss()
arguments = TrainingArguments(
    given.out + "kept",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=0.01,
    max_grad_norm=0.5,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Bucketed(model=model, args=arguments, train_dataset=data)
trainer.train()
weights = {name: value.tolist() for name, value in model.state_dict().items()}
found = {"weights": weights, "rows": model.rows}
torch.save(found, f"{given.out}{arguments.process_index}.pt")
