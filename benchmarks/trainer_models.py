"""The Llama that benchmarks.trainers trains, its data, and its setup for each trainer.

The `build_` functions are for `--workload benchmarks/trainer_models.py:build_huggingface`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from evener.workloads.datasets import text_lengths

WORDS = 8192
SIZES = {  # width, layers, tokens per row
    "small": (128, 4, 64),
    "middle": (512, 8, 256),
    "large": (768, 12, 512),
    "huge": (2048, 8, 512),
}
ROWS = 1 << 16
IGNORED = -100  # label without a loss
SHARDED = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
Done = Callable[[], bool]  # called after each optimizer step; returns True to stop training

collated_tokens = 0  # tokens of this process so far, without padding


class Texts(Dataset[dict[str, Any]]):
    """Random tokens: rows of one length, or of lognormal lengths around a quarter of it."""

    def __init__(self, size: str, uneven: bool = False) -> None:
        longest = SIZES[size][2]
        self.lengths: list[int] = (
            text_lengths(ROWS, longest / 4, 0.8, longest).tolist() if uneven else [longest] * ROWS
        )
        self.tokens = torch.randint(
            0, WORDS, (ROWS + longest,), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        text = self.tokens[row : row + self.lengths[row]]
        return {"input_ids": text, "labels": text}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest as a batch; only a padded batch has a mask."""
    global collated_tokens
    collated_tokens += sum(len(row["labels"]) for row in rows)
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=IGNORED)
    mask = labels != IGNORED
    return {
        "input_ids": ids,
        "labels": labels,
        **({} if mask.all() else {"attention_mask": mask.long()}),
    }


# options of a loader
COLLATED: dict[str, Any] = {"collate_fn": collate, "pin_memory": torch.cuda.is_available()}


def network(size: str) -> LlamaForCausalLM:
    """Return a Llama of this size, which computes in TF32 where its weights are in float32.

    `middle` has 42 million parameters, `large` about 100 million, `huge` 570 million.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    hidden, layers, length = SIZES[size]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
    }
    config = LlamaConfig(
        vocab_size=WORDS, num_hidden_layers=layers, max_position_embeddings=length, **sizes
    )
    return LlamaForCausalLM(config)


def make_trainer(kind: Any, size: str, bf16: bool, texts: bool, **arguments: Any) -> Any:
    """Return a trainer of this class that writes nothing to disk."""
    common = TrainingArguments(
        tempfile.mkdtemp(),
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **{"logging_strategy": "no", **arguments},
    )
    return kind(
        model=network(size), args=common, train_dataset=Texts(size, texts), data_collator=collate
    )


def build_huggingface(size: str = "small", bf16: bool = False, texts: bool = False) -> Any:
    """Return the Trainer."""
    return make_trainer(Trainer, size, bf16, texts)


def build_torch(size: str = "small") -> Any:
    """Return the model, optimizer, loss and data of a plain loop.

    Batches contain the labels, so the model computes the loss.
    """
    model = network(size)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-5)
    return model, optimizer, lambda outputs, _: outputs.loss, (Texts(size), COLLATED)


build_accelerate = build_torch
