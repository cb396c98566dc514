"""torch_text: a small decoder-only language model, on texts of unequal length made in code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ...datasets import text_lengths
from ...protocol import Place, Workload
from ..batches import Data
from ..workload import Recipe, TorchWorkload

PADDING = 0  # the token that is none
IGNORED = -100  # the target that cross-entropy leaves out
EXPANSION = 4  # of the width, in a block's dense layer


def build(place: Place, settings: Mapping[str, Any]) -> Workload:
    """The workload at its place; settings: the sizes of `Decoder` and `Texts`, and `learning_rate`."""
    model = {key: settings[key] for key in ("vocabulary", "longest", "width", "layers", "heads")}
    texts = {key: settings[key] for key in ("rows", "median", "sigma", "longest", "vocabulary", "seed")}
    return TorchWorkload(place, lambda: make_recipe(model, texts, settings["learning_rate"]))


def make_recipe(model: Mapping[str, int], texts: Mapping[str, Any], learning_rate: float) -> Recipe:
    """The model, AdamW, cross-entropy and its texts."""
    decoder = Decoder(**model)
    data = Data(Texts(**texts), {"collate_fn": pad_texts})
    return Recipe(decoder, torch.optim.AdamW(decoder.parameters(), learning_rate), mean_over_tokens, data)


class Texts(Dataset):  # type: ignore[misc]  # torch is not followed
    """Random texts whose `lengths`, in tokens, are lognormal around `median`, at most `longest`."""

    def __init__(self, rows: int, median: float, sigma: float, longest: int, vocabulary: int, seed: int) -> None:
        self.lengths: list[int] = text_lengths(rows, median, sigma, longest, seed).tolist()
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(1, vocabulary, (longest + 1 + rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """A token more than its length: each is predicted from those before it."""
        return self._tokens[row : row + self.lengths[row] + 1]


def pad_texts(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (rows, longest of them), padded at the end."""
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=PADDING)
    return inputs, pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)


def mean_over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over the tokens that aren't padding."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Decoder(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Tokens (rows, length) to the logits (rows, length, vocabulary) of the tokens that follow."""

    def __init__(self, vocabulary: int, longest: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Padding comes last, so no token sees it."""
        states = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.head(self.norm(states))
        return logits


class DecoderBlock(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Attention to the tokens before, then a dense layer, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, EXPANSION * width), nn.GELU(), nn.Linear(EXPANSION * width, width))

    def forward(self, states: Tensor) -> Tensor:
        """States (rows, length, width) to the same shape."""
        parts = self.attend(self.before(states)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.join(seen.transpose(1, 2).flatten(2))
        added: Tensor = states + self.dense(self.between(states))
        return added
