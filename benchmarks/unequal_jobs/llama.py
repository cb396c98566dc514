"""The Llama and the rows of tokens that the programs of the libraries in this folder train."""

from __future__ import annotations

import os

# a module in this folder; imported first, because it limits the GPU
from place import CUDA, SIZES, slow_down  # type: ignore[import-not-found]  # isort: skip
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

KEPT = 4096


class Rows(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Random tokens."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        size = (KEPT, SIZES["LENGTH"])
        self.tokens = torch.randint(0, SIZES["WORDS"], size, generator=drawn)

    def __len__(self) -> int:
        return int(SIZES["COUNT"] * SIZES["ROWS"]) * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[row % KEPT]
        return {"input_ids": tokens, "labels": tokens}


class SlowLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that takes longer on a CPU with a smaller part."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **named: object,
    ) -> object:
        """Slow down, then return the Llama's output."""
        slow_down(len(input_ids))
        return super().forward(input_ids, attention_mask, labels=labels, **named)


def make_model() -> LlamaForCausalLM:
    """Return a Llama of this program's sizes."""
    torch.manual_seed(0)
    width = SIZES["WIDTH"]
    heads = max(1, width // 64)
    config = LlamaConfig(
        vocab_size=SIZES["WORDS"],
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=SIZES["LAYERS"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return LlamaForCausalLM(config) if CUDA else SlowLlama(config)
