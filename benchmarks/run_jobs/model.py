"""A model and random tokens for the programs in this folder; the environment sets their sizes."""

import os

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, LAYERS, LENGTH, ROWS, STEPS = (
    int(os.environ.get(name, default))
    for name, default in (
        ("WIDTH", 256),
        ("LAYERS", 4),
        ("LENGTH", 64),
        ("ROWS", 16),
        ("COUNT", 100),
    )
)


def make_model() -> LlamaForCausalLM:
    """Return a decoder without dropout."""
    torch.manual_seed(0)
    heads = max(2, WIDTH // 64)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, num_attention_heads=heads, num_key_value_heads=heads, **sizes)
    )


def make_rows() -> torch.Tensor:
    """Return tokens (rows, length) for all steps of two ranks."""
    return torch.randint(
        0, 1024, (2 * ROWS * STEPS, LENGTH), generator=torch.Generator().manual_seed(1)
    )


def make_data() -> TensorDataset:
    """Return a data set of rows of tokens."""
    return TensorDataset(make_rows())
