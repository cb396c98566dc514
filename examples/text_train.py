"""Train a small decoder in PyTorch on texts of unequal length.

Texts are assigned to devices by their predicted cost, and each pass has texts of similar length.

  evener balance --framework torch --workload examples/text_train.py:build --export plan.toml
  evener launch plan.toml examples/text_train.py
  python examples/text_train.py --global-batch 64          # one device, without a plan
"""

from __future__ import annotations

import argparse
import math
import random
import time
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from evener.torch import Split

WORDS = 200
LONGEST = 256
WIDTH = 64
ROWS = 4_096
IGNORED = -100  # target of padding tokens


class Texts(Dataset):
    """Generated texts in which each word depends on the two before it.

    `lengths` has the number of words of each text; it is lognormal.
    """

    def __init__(self, rows: int, seed: int) -> None:
        draws = random.Random(seed)
        self.texts = [self._write(draws) for _ in range(rows)]
        self.lengths = [len(text) - 1 for text in self.texts]

    def _write(self, draws: random.Random) -> torch.Tensor:
        words = [draws.randrange(WORDS), draws.randrange(WORDS)]
        for _ in range(min(LONGEST, round(24 * math.exp(draws.gauss(0, 0.9))))):
            words.append((3 * words[-1] + words[-2]) % WORDS)
        return torch.tensor(words)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.texts[row]


def collate(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and the words that follow them, as (rows, longest text) tensors."""
    words = pad_sequence([text[:-1] for text in texts], batch_first=True)
    return words, pad_sequence(
        [text[1:] for text in texts], batch_first=True, padding_value=IGNORED
    )


class Decoder(nn.Module):
    """Maps words (rows, length) to scores (rows, length, WORDS) of the next words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST + 1, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores.

        A word attends only to earlier words, so padding at the end has no effect.
        """
        length = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        states = self.words(words) + self.places.weight[:length]
        scores: torch.Tensor = self.scores(self.layers(states, mask=mask, is_causal=True))
        return scores


def mean_loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the words that aren't padding."""
    return nn.functional.cross_entropy(
        scores.flatten(0, 1), following.flatten(), ignore_index=IGNORED
    )


def count(part: Any) -> torch.Tensor:
    """Return the number of words over which a pass's loss is a mean."""
    counted: torch.Tensor = (part.batch[1] != IGNORED).sum()
    return counted


def build(rows: int = ROWS) -> tuple[Any, ...]:
    """Return what `--workload examples/text_train.py:build` measures.

    The parts are the model, its optimizer and loss, the texts with their lengths, and the loader's
    options.
    """
    model = Decoder()
    data = (Texts(rows, seed=1), {"collate_fn": collate})
    return model, torch.optim.AdamW(model.parameters(), 1e-3), mean_loss, data


def train_epoch(split: Split, model: Any, loader: Any, optimizer: torch.optim.Optimizer) -> float:
    """Train for one epoch; return the mean loss of the last global batch."""
    loss: Any = 0.0
    for batch in loader:
        loss = 0.0
        for part in split.parts(batch, count):
            words, following = (tensor.to(split.device) for tensor in part.batch)
            loss += part.backward(mean_loss(model(words), following))
        optimizer.step()
        optimizer.zero_grad()
    return split.mean(loss)


def main() -> None:
    """Train, and print a line per epoch on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", help="a file written by evener balance --export; evener launch has said it"
    )
    parser.add_argument("--global-batch", type=int, help="texts per step, if not the plan's")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS)
    options = parser.parse_args()

    split = Split(options.plan, global_batch=options.global_batch)
    texts = Texts(options.rows, seed=1)
    loader = split.loader(texts, seed=0, lengths=texts.lengths, collate_fn=collate)
    torch.manual_seed(0)
    model = split.wrap(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(1, options.epochs + 1):
        began = time.monotonic()
        loss = train_epoch(split, model, loader, optimizer)
        rate = sum(texts.lengths) / (time.monotonic() - began)
        if split.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {rate:,.0f} tokens/s", flush=True)
    split.close()


if __name__ == "__main__":
    main()
